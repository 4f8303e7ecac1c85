"""Refusals: no credentials, no CSRF token, not yours, not allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import Group
from django.utils.crypto import get_random_string

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.models import Approval, Run
from agentruns.services.runs import run_agent
from tests.api.http import Api, endpoints, make_user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

Pending = Callable[..., Approval]


def ask(api: Api, method: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    return api.get(path) if method == "GET" else api.post(path, body, **headers)


@pytest.mark.parametrize("csrf", [False, True])
def test_without_credentials_everything_is_401(pending: Pending, csrf: bool) -> None:
    approval = pending()
    nobody = Api(csrf=csrf)
    for method, path, body in endpoints(approval.run_id, approval.pk):
        status, problem = ask(nobody, method, path, body)
        assert (status, problem["type"]) == (401, "urn:agentruns:not-authenticated"), path
    nobody.client.cookies[django_settings.SESSION_COOKIE_NAME] = "made-up"
    assert nobody.get("/runs")[0] == 401
    # Strangers learn nothing about errors in a request.
    assert nobody.post("/runs", "{")[0] == 401
    assert Run.objects.count() == 1


def test_an_inactive_user_is_nobody(owner: Any, settings: Any, pending: Pending) -> None:
    settings.AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.AllowAllUsersModelBackend"]
    api = Api(owner)
    assert api.get("/runs")[0] == 200
    owner.is_active = False
    owner.save()
    assert api.get("/runs")[0] == 401


def test_a_session_without_a_csrf_token_is_403_and_changes_nothing(pending: Pending) -> None:
    approval = pending()
    root = Api(make_user("root", is_superuser=True), csrf=True)
    for method, path, body in endpoints(approval.run_id, approval.pk):
        status, problem = ask(root, method, path, body)
        if method == "GET":
            assert status == 200
        else:
            assert (status, problem["type"]) == (403, "urn:agentruns:csrf"), path
    assert Run.objects.count() == 1
    assert Approval.objects.get().status == "pending"


def test_a_csrf_token_opens_the_door(pending: Pending) -> None:
    approval = pending()
    root = Api(make_user("root", is_superuser=True), csrf=True)
    root.client.cookies["csrftoken"] = token = get_random_string(32)
    body = {"digest": approval.digest}
    path = f"/approvals/{approval.pk}/approve"
    assert root.post(path, body, **{"X-CSRFToken": "x" * 32})[0] == 403
    assert root.post(path, body, **{"X-CSRFToken": token})[0] == 200


def test_a_form_post_is_no_way_around(pending: Pending) -> None:
    """A cross-site form can send multipart; it is read by the CSRF check and then refused."""
    pending()
    root = Api(make_user("root", is_superuser=True), csrf=True)
    root.client.cookies["csrftoken"] = token = get_random_string(32)
    for data in ({"agent": "shop"}, {"agent": "shop", "csrfmiddlewaretoken": token}):
        response = root.client.post("/api/runs", data)
        assert response.status_code == (400 if "csrfmiddlewaretoken" in data else 403)
        assert response["Content-Type"] == "application/problem+json"
    broken = root.client.post("/api/runs", b"x", content_type="multipart/form-data; boundary=")
    assert (broken.status_code, broken["Content-Type"]) == (400, "application/problem+json")
    assert Run.objects.count() == 1


def test_who_sees_which_runs(owner: Any, shop: Agent) -> None:
    other = make_user("other")
    runs = {
        "own": start_run(shop, "hi", "s1", actor=owner),
        "other's": start_run(shop, "hi", "s2", actor=other),
        "nobody's": start_run(shop, "hi", "s3"),
    }
    sees = {
        owner: {"own"},
        make_user("stranger"): set(),
        make_user("staff", is_staff=True): set(),
        make_user("decides", "decide_approval", "view_approval", "resume_run", "cancel_run"): set(),
        make_user("views", "view_run"): set(runs),
        make_user("root", is_superuser=True): set(runs),
    }
    for user, expected in sees.items():
        api = Api(user)
        assert {item["id"] for item in api.get("/runs")[1]["items"]} == {
            str(runs[name].pk) for name in expected
        }
        for name, run in runs.items():
            paths = [("GET", ""), ("GET", "/messages")]
            paths += [] if name in expected else [("POST", "/resume"), ("POST", "/cancel")]
            for method, path in paths:
                status, body = ask(api, method, f"/runs/{run.pk}{path}", {})
                assert status == (200 if name in expected else 404), (user, name, path)
                if status == 404:
                    there = without_ids(body, run.pk)
                    unknown = uuid4()
                    status, body = ask(api, method, f"/runs/{unknown}{path}", {})
                    assert (status, without_ids(body, unknown)) == (404, there)
    assert set(Run.objects.values_list("status", flat=True)) == {"queued"}


def without_ids(problem: dict[str, Any], pk: Any) -> dict[str, Any]:
    return {name: str(value).replace(str(pk), "ID") for name, value in problem.items()}


def test_who_sees_and_decides_which_approvals(owner: Any, pending: Pending) -> None:
    own, unowned = pending("s1"), pending("s2", None)
    nothing, everything = set(), {own, unowned}
    sees = {
        owner: {own},
        make_user("stranger"): nothing,
        make_user("staff", is_staff=True): nothing,
        make_user("views-runs", "view_run"): everything,
        make_user("views-approvals", "view_approval"): everything,
        make_user("decides", "decide_approval"): everything,
    }
    for user, expected in sees.items():
        api = Api(user)
        shown = {item["id"] for item in api.get("/approvals")[1]["items"]}
        assert shown == {str(approval.pk) for approval in expected}, user
        for approval in (own, unowned):
            status = 200 if approval in expected else 404
            assert api.get(f"/approvals/{approval.pk}")[0] == status
            if user.get_username() == "decides":
                continue
            for verb, more in (("approve", {}), ("deny", {"reason": "no"})):
                refused, problem = api.post(
                    f"/approvals/{approval.pk}/{verb}", {"digest": approval.digest, **more}
                )
                assert refused == (403 if approval in expected else 404), (user, verb)
                if refused == 403:
                    assert problem["type"] == "urn:agentruns:permission-denied"
                    assert "agentruns.decide_approval" in problem["detail"]
    assert {item.status for item in Approval.objects.all()} == {"pending"}


def test_the_rules_of_the_service_hold(owner: Any, decider: Any, settings: Any) -> None:
    from agentruns import ToolContext, tool

    @tool(requires_approval=True, approvers="Treasury")
    def pay(ctx: ToolContext, cents: int) -> str:
        """Pay."""
        return "paid"

    agent = shop_agent("payer", {"tools": [call("pay", cents=1)]}, tools=[pay])
    approval = run_agent(agent, "pay", "s1", actor=decider).pending[0]
    path, body = f"/approvals/{approval.pk}/approve", {"digest": approval.digest}
    status, problem = Api(decider).post(path, body)
    assert (status, "Treasury" in problem["detail"]) == (403, True)
    decider.groups.add(Group.objects.create(name="Treasury"))
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    assert Api(decider).post(path, body)[0] == 403
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = True
    assert Api(decider).post(path, body)[0] == 200


def test_an_owner_may_cancel_what_is_theirs(owner: Any, shop: Agent) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    assert Api(make_user("viewer", "view_run")).post(f"/runs/{run.pk}/cancel")[0] == 403
    assert Api(owner).post(f"/runs/{run.pk}/cancel")[0] == 200


@pytest.mark.parametrize("bad", ["x", "0", "None", "%00", "a%0Ab", "%F0%9F%98%80", "g" * 32, "x" * 5000])
def test_an_id_that_is_none_is_not_found(bad: str) -> None:
    root = Api(make_user("root", is_superuser=True))
    for method, path, body in endpoints(bad, bad):
        if bad in path:
            status, problem = ask(root, method, path, body)
            assert (status, problem["type"]) == (404, "urn:agentruns:not-found"), path


def test_an_id_may_be_written_in_any_form_of_a_uuid(owner: Any, shop: Agent) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    api = Api(owner)
    for form in (str(run.pk).upper(), run.pk.hex, run.pk.urn):
        assert api.get(f"/runs/{form}")[1]["id"] == str(run.pk)
