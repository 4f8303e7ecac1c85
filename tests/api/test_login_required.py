"""A project whose every page needs a login: the API asks for itself, and no call is sent to a login page."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from django.http import HttpResponseRedirect
from django.test import Client
from django.urls import include, path

from agentruns import Agent
from agentruns.api import build_api
from agentruns.models import Approval
from agentruns.services.api_tokens import create_token
from tests.api.hosting import host
from tests.api.http import make_user

pytestmark = pytest.mark.django_db(transaction=True)


def stronghold(get_response: Any) -> Any:
    """What django-stronghold asks of a view."""

    def middleware(request: Any) -> Any:
        return get_response(request)

    def process_view(request: Any, view: Any, *about: Any) -> Any:
        is_public = request.user.is_authenticated or getattr(view, "STRONGHOLD_IS_PUBLIC", False)
        return None if is_public else HttpResponseRedirect("/login")

    middleware.process_view = process_view  # type: ignore[attr-defined]
    return middleware


DOCUMENTED = ("/api/docs", "/api/openapi.json")
MIDDLEWARES = ["django.contrib.auth.middleware.LoginRequiredMiddleware", f"{__name__}.stronghold"]


@pytest.mark.parametrize("middleware", MIDDLEWARES)
def test_no_request_to_the_api_is_redirected(
    middleware: str, pending: Callable[..., Approval], owner: Any, shop: Agent, urlconf: Any, settings: Any
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, middleware]
    settings.LOGIN_URL = "/login"
    urlconf(path("api/", include("agentruns.urls")), path("theirs/", host().urls))
    approval = pending()
    paths = build_api().get_openapi_schema(path_prefix="")["paths"]
    client = Client()
    for place, operations in paths.items():
        address = re.sub(r"\{\w+\}", str(approval.run_id), place)
        for method, root in product(operations, ("/api", "/theirs/agents")):
            answer = client.generic(method.upper(), root + address, "{}", content_type="application/json")
            assert answer.status_code == (200 if address == "/health" else 401), (method, root, address)
    assert len(paths) > 15
    _, text = create_token(owner, ["runs:read"])
    by_token = client.get("/api/runs", headers={"Authorization": f"Bearer {text}"})
    assert (by_token.status_code, len(by_token.json()["items"])) == (200, 1)
    stream = client.get(f"/api/runs/{approval.run_id}/events", headers={"Authorization": f"Bearer {text}"})
    assert stream["Content-Type"].startswith("text/event-stream")
    stream.close()
    for address in (*DOCUMENTED, "/theirs/theirs?raises=http"):
        assert client.get(address).status_code == 302, "what asks for nothing needs the login"
    client.force_login(make_user("somebody"))
    assert {client.get(address).status_code for address in ("/api/runs", *DOCUMENTED)} == {200}
