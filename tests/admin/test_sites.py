"""Somebody else's project: their own sites, database, middleware, language and format, or no console."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen
from wsgiref.simple_server import make_server

import pytest
from django.conf import settings as project
from django.contrib import admin
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import include, path, reverse

from agentruns.admin import RunAdmin, register
from agentruns.models import ApiToken, Approval, Run
from agentruns.services.api_tokens import create_token
from tests.admin.pages import Page, listed, look, read, url
from tests.admin.people import browser, user
from tests.admin.world import World

backoffice, own = admin.AdminSite(name="backoffice"), admin.AdminSite(name="own")
own.index_template = "admin/index.html"
for site in (backoffice, own):
    register(site)
runs_only = admin.AdminSite(name="lookout")
runs_only.register(Run, RunAdmin)

urlpatterns = [
    path("admin/", admin.site.urls),
    path("tools/backoffice/", backoffice.urls),
    path("tools/own/", own.urls),
    path("lookout/", runs_only.urls),
]
nested = [path("deep/", include(__name__))]


def shown(where: str) -> Page:
    return read(browser("superuser").get(where))


@pytest.mark.urls(__name__)
def test_a_custom_site_stays_on_itself(world: World) -> None:
    approval, there = world.waiting(), "/tools/backoffice/agentruns"
    card, run = f"{there}/approval/{approval.pk}/", f"{there}/run/{approval.run_id}/change/"
    assert any(link.startswith(f"{card}change/") for link in shown(f"{there}/approval/").links)
    assert run in shown(f"{card}change/").links
    for page in (shown(f"{card}change/"), shown(run), shown("/tools/backoffice/")):
        assert not [link for link in [*page.links, *page.forms] if link.startswith("/admin/")]
    assert f"{card}change/" in page.links, "from the figures on the index"
    response = browser("superuser").post(f"{card}approve/", {"digest": approval.digest})
    assert response.url == f"{there}/approval/"
    assert "at a glance" in shown(f"{there}/").text
    assert "at a glance" not in shown("/tools/own/").text, "an index of their own stays"
    assert own.index_template == "admin/index.html"
    other = world.waiting("other")
    assert url(other) in shown("/admin/agentruns/").links
    page = shown(f"/lookout/agentruns/run/{other.run_id}/change/")
    assert f"Waits for approval: {other.title}" in page.text
    assert not [link for link in page.links if "approval/" in link], "nothing that this site lacks"


@pytest.mark.django_db(databases=["default", "other"])
def test_the_journal_in_a_database_of_its_own(settings: Any) -> None:
    settings.AGENTRUNS_DATABASE = "other"
    approval = World().waiting("elsewhere")
    assert not Run.objects.using("default").exists()
    for name in ("run", "approval"):
        text = listed(name).text
        assert "refund(cents=5000)" in text and "elsewhere" in text
    look(approval.run)
    assert browser("superuser").post(url(approval, "approve"), {"digest": approval.digest}).status_code == 302
    assert Approval.objects.using("other").get(pk=approval.pk).status == "approved"
    token, _text = create_token(user("decider"), ["runs:read"])
    assert "decider" in listed("apitoken").text
    revoke = reverse("admin:agentruns_apitoken_revoke", args=[token.pk])
    assert browser("superuser").post(revoke).status_code == 302
    assert ApiToken.objects.using("other").get().revoked_at is not None


def test_a_project_that_wants_no_console_has_none() -> None:
    code = (
        "import django; from django.conf import settings; from tests import settings as base\n"
        "names = {name: getattr(base, name) for name in dir(base) if name.isupper()}\n"
        "settings.configure(**{**names, 'AGENTRUNS_ADMIN': False, 'DATABASES': {}}); django.setup()\n"
        "from django.contrib import admin; from agentruns.models import Run\n"
        "admin.autodiscover(); assert not admin.site.is_registered(Run)\n"
        "assert admin.site.index_template is None\n"
        "from django.template import engines; from django.test import RequestFactory\n"
        "template = engines['django'].from_string('{% load agentruns %}[{% agentruns_dashboard %}]')\n"
        "assert template.render({}, RequestFactory().get('/')).split() == ['[', ']']\n"
        "assert template.render().split() == ['[', ']']\n"
        "from agentruns.admin import register\n"
        "site = admin.AdminSite(); register(site); assert site.is_registered(Run)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_in_forms_and_links_are_not_formatted(world: World) -> None:
    run = world.paused()
    late = run.messages.order_by("seq").last()
    late.pk, late.seq, late.kind, late.hash = None, 12_345, "late_result", "f" * 64
    late.save(force_insert=True)
    type(run.session).objects.filter(pk=run.session_id).update(next_seq=12_346, head=late.hash)
    with override_settings(USE_THOUSAND_SEPARATOR=True, LANGUAGE_CODE="de"):
        target = url(run, "resume")
        assert browser("superuser").post(target, look(run).forms[target]).status_code == 302


def careless(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[..., HttpResponse]:
    """Middleware of a project whose own pages may be framed by anybody."""

    def respond(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["X-Frame-Options"] = "ALLOWALL"
        response["content-security-policy"] = FRAMED
        return response

    return respond


FRAMED = "frame-ancestors *; img-src 'self'"


def headers_of(page: str, cookie: str) -> Any:
    """Read the headers that a browser gets, from a server that answers in this thread."""

    def ask() -> Any:
        request = Request(f"http://127.0.0.1:{server.server_port}{page}", headers={"Cookie": cookie})
        with urlopen(request) as response:
            assert b"<form" in response.read()
            return response.headers

    with make_server("127.0.0.1", 0, WSGIHandler()) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask)
        server.handle_request()
        return answer.result()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("middleware", "own"), [(f"{__name__}.careless", [FRAMED]), ("", [])])
def test_pages_that_act_are_framed_by_nobody(middleware: str, own: list[str], settings: Any) -> None:
    clickjacking = "django.middleware.clickjacking.XFrameOptionsMiddleware"
    kept = [name for name in project.MIDDLEWARE if name != clickjacking]
    settings.MIDDLEWARE = [*filter(None, [middleware]), *kept]
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    approval = World().waiting()
    token = create_token(user("superuser"), ["runs:read"])[0]
    cookie = browser("superuser").cookies[settings.SESSION_COOKIE_NAME]
    pages = (url(approval), url(approval.run), reverse("admin:agentruns_apitoken_change", args=[token.pk]))
    for page in pages:
        headers = headers_of(page, f"{cookie.key}={cookie.value}")
        assert headers.get_all("X-Frame-Options") == ["DENY"]
        sent = ", ".join(headers.get_all("Content-Security-Policy")).split(", ")
        assert sent == [*own, "frame-ancestors 'none'"]
