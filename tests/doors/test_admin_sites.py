"""What the admin site asks of a session, the API asks of it, too: there is no way round a second factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.contrib import admin
from django.urls import include, path
from django.utils.functional import SimpleLazyObject

import agentruns.admin
from agentruns.models import Approval, Message, Run
from agentruns.services.api_tokens import create_token
from tests.api.http import Api, Program, make_user, refused

pytestmark = pytest.mark.django_db(transaction=True)

KEY = "otp_device_id"  # in the session of who gave a second factor


def otp(get_response: Any) -> Any:
    """The form of django-otp's middleware: a function on the lazy user says what the session proved."""

    def verified(request: Any, user: Any) -> Any:
        user.is_verified = partial(
            lambda user: bool(user.is_authenticated and request.session.get(KEY)), user
        )
        return user

    def middleware(request: Any) -> Any:
        request.user = SimpleLazyObject(partial(verified, request, request.user))
        return get_response(request)

    return middleware


class Verified(admin.AdminSite):
    """As OTPAdminSite and AdminSiteOTPRequired."""

    def has_permission(self, request: Any) -> bool:
        return super().has_permission(request) and request.user.is_verified()


class Inside(admin.AdminSite):
    """Only for some addresses."""

    def has_permission(self, request: Any) -> bool:
        return super().has_permission(request) and bool(
            request.session.get(KEY) or request.META["REMOTE_ADDR"] == "::1"
        )


class Failing(admin.AdminSite):
    def has_permission(self, request: Any) -> bool:
        return bool(request.session[KEY]) and super().has_permission(request)


@pytest.fixture
def staff(db: None) -> Any:
    return make_user("staff", "decide_approval", "view_run", "start_run", "cancel_run", is_staff=True)


@pytest.fixture(params=["of its own", "of the same name", "in a namespace", "the default"])
def site(request: Any, urlconf: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An admin site of the project that asks more than a password, at the console's address."""

    def serve(kind: type[admin.AdminSite]) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.otp"]
        if request.param == "the default":
            monkeypatch.setattr(admin.site, "__class__", kind)
            made: Any = admin.site
        else:
            made = kind("admin" if request.param == "of the same name" else "guarded")
            agentruns.admin.register(made)
            request.addfinalizer(lambda: made._registry.clear())
        pages = path("admin/", made.urls)
        nested = path("in/", include(([pages], "nested"), "nested"))
        urlconf(
            nested if request.param == "in a namespace" else pages, path("api/", include("agentruns.urls"))
        )

    return serve


def decisions(api: Api, approval: Approval) -> list[tuple[int, Any]]:
    """All that a session would do, or learn."""
    return [
        api.get("/runs"),
        api.get(f"/approvals/{approval.pk}"),
        api.post("/runs", {"agent": "shop", "input": "hi"}),
        api.post(f"/runs/{approval.run_id}/cancel", {}),
        api.get(f"/runs/{approval.run_id}/events"),
        api.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest}),
    ]


@pytest.mark.parametrize("kind", [Verified, Inside, Failing])
def test_a_session_that_the_admin_refuses_does_nothing_by_the_api(
    kind: type[admin.AdminSite], site: Any, staff: Any, pending: Callable[..., Approval]
) -> None:
    site(kind)
    approval, api = pending(), Api(staff)
    for answer in decisions(api, approval):
        assert "second factor" in refused(answer, 403, "permission-denied")["detail"]
    assert api.get("/health")[1] == {"status": "ok"}, "as for everybody"
    assert not Message.objects.filter(kind="approval_decided").exists()
    session = api.client.session
    session[KEY] = "device"
    session.save()
    assert api.get("/runs")[0] == 200 and "sweeper" in api.get("/health")[1]
    answer = api.client.get(f"/api/runs/{approval.run_id}/events")
    assert answer.status_code == 200
    answer.close()
    assert api.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200


def test_tokens_and_customers_are_asked_for_no_second_factor(
    site: Any, staff: Any, owner: Any, pending: Callable[..., Approval]
) -> None:
    site(Verified)
    approval = pending()
    status, page = Api(owner).get("/runs")
    assert (status, [run["id"] for run in page["items"]]) == (200, [str(approval.run_id)])
    assert Api(owner).post("/runs", {"agent": "shop", "input": "hi"})[0] == 201
    _, text = create_token(staff, ["runs:read"])
    assert Program(text).get("/runs")[0] == 200
    _, text = create_token(staff, ["approvals:decide"])
    assert Program(text).post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200


def test_a_stream_goes_on_while_the_session_is_verified(
    site: Any, staff: Any, pending: Callable[..., Approval], settings: Any
) -> None:
    """The session is read anew: what the middleware noted on its user still holds."""
    settings.AGENTRUNS_API_PING_SECONDS = 0.01
    site(Verified)
    approval, api = pending(), Api(staff)
    session = api.client.session
    session[KEY] = "device"
    session.save()
    answer = api.client.get(f"/api/runs/{approval.run_id}/events")
    body = iter(answer)
    for _ in range(20):
        assert "end" not in next(body).decode().split("\n")[0]
    assert Run.objects.get().status == "awaiting-approval"
    answer.close()
