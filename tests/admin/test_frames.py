"""No page of another site shows a page with buttons of ours in a frame: a click there is the person's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen
from wsgiref.simple_server import make_server

import pytest
from django.conf import settings as project
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from agentruns import run_agent
from agentruns.services.api_tokens import create_token
from tests.admin.people import browser, user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def careless(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[..., HttpResponse]:
    """Middleware of a project whose own pages may be framed by anybody."""

    def respond(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["X-Frame-Options"] = "ALLOWALL"
        response["content-security-policy"] = "frame-ancestors *; img-src 'self'"
        return response

    return respond


def none(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[..., HttpResponse]:
    return get_response


def headers_of(page: str, cookie: str) -> Any:
    """Return the headers that a browser gets, from a server that answers in this thread."""

    def ask() -> Any:
        request = Request(f"http://127.0.0.1:{server.server_port}{page}", headers={"Cookie": cookie})
        with urlopen(request) as response:
            assert b"<form" in response.read()
            return response.headers

    with make_server("127.0.0.1", 0, WSGIHandler()) as server, ThreadPoolExecutor() as browser:
        answer = browser.submit(ask)
        server.handle_request()
        return answer.result()


@pytest.mark.parametrize("middleware", ["careless", "none"])
def test_pages_that_act_are_framed_by_nobody(middleware: str, settings: Any) -> None:
    clickjacking = "django.middleware.clickjacking.XFrameOptionsMiddleware"
    others = [name for name in project.MIDDLEWARE if name != clickjacking]
    settings.MIDDLEWARE = [f"{__name__}.{middleware}", *others]
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    agent = shop_agent("framed", {"tools": [call("refund", cents=5000)]})
    result = run_agent(agent, "refund it", "s1")
    token = create_token(user("superuser"), ["runs:read"])[0]
    cookie = browser("superuser").cookies[settings.SESSION_COOKIE_NAME]
    for page in (
        reverse("admin:agentruns_approval_change", args=[result.pending[0].pk]),
        reverse("admin:agentruns_run_change", args=[result.run_id]),
        reverse("admin:agentruns_apitoken_change", args=[token.pk]),
    ):
        headers = headers_of(page, f"{cookie.key}={cookie.value}")
        assert headers.get_all("X-Frame-Options") == ["DENY"]
        sent = ", ".join(headers.get_all("Content-Security-Policy")).split(", ")
        assert sent[-1] == "frame-ancestors 'none'"
        assert sent[:-1] == (["frame-ancestors *; img-src 'self'"] if middleware == "careless" else [])
