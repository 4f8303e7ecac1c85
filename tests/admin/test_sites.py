"""Somebody else's project: their own site, their own database, no console, another language and format."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from django.contrib import admin
from django.test import override_settings
from django.urls import include, path, reverse
from django.utils.module_loading import import_string

from agentruns import run_agent
from agentruns.admin import ApprovalAdmin, RunAdmin, TokenAdmin, register
from agentruns.models import Approval, Run
from tests.admin.pages import read
from tests.admin.people import browser
from tests.admin.world import World
from tests.shop.agents import call, shop_agent

everything = admin.AdminSite(name="backoffice")
register(everything)
runs_only = admin.AdminSite(name="lookout")
runs_only.register(Run, RunAdmin)

urlpatterns = [
    path("admin/", admin.site.urls),
    path("tools/backoffice/", everything.urls),
    path("lookout/", runs_only.urls),
]
nested = [path("deep/", include("tests.admin.test_sites"))]


def test_each_view_names_a_function() -> None:
    named = {view.function for one in (ApprovalAdmin, RunAdmin, TokenAdmin) for view in one.views}
    assert all(callable(import_string(f"agentruns.admin.{name}")) for name in named)


@pytest.mark.urls("tests.admin.test_sites")
def test_a_custom_site_stays_on_itself(world: World) -> None:
    approval, client = world.waiting(), browser("superuser")
    listing = read(client.get("/tools/backoffice/agentruns/approval/"))
    card = f"/tools/backoffice/agentruns/approval/{approval.pk}/"
    assert any(link.startswith(f"{card}change/") for link in listing.links)
    page = read(client.get(f"{card}change/"))
    assert f"/tools/backoffice/agentruns/run/{approval.run_id}/change/" in page.links
    assert not [link for link in page.links if link.startswith("/admin/")]
    response = client.post(f"{card}approve/", {"digest": approval.digest})
    assert response.url == "/tools/backoffice/agentruns/approval/"
    page = read(client.get(f"/tools/backoffice/agentruns/run/{approval.run_id}/change/"))
    assert not [link for link in page.links if link.startswith("/admin/")]
    assert not [form for form in page.forms if form.startswith("/admin/")]


@pytest.mark.urls("tests.admin.test_sites")
def test_a_site_with_only_one_of_the_two_links_to_nothing_it_lacks(world: World) -> None:
    approval = world.waiting()
    page = read(browser("superuser").get(f"/lookout/agentruns/run/{approval.run_id}/change/"))
    assert f"Waits for approval: {approval.title}" in page.text
    assert not [link for link in page.links if "approval/" in link]


@pytest.mark.django_db(databases=["default", "other"])
def test_the_journal_in_a_database_of_its_own(settings: Any) -> None:
    settings.AGENTRUNS_DATABASE = "other"
    agent = shop_agent("elsewhere", {"tools": [call("refund", cents=5000)]})
    approval = run_agent(agent, "refund", "elsewhere").pending[0]
    assert not Run.objects.using("default").exists()
    client = browser("superuser")
    for name in ("run", "approval"):
        page = read(client.get(reverse(f"admin:agentruns_{name}_changelist")))
        assert "refund(cents=5000)" in page.text
        assert "elsewhere" in page.text
    assert client.get(reverse("admin:agentruns_run_change", args=[approval.run_id])).status_code == 200
    target = reverse("admin:agentruns_approval_approve", args=[approval.pk])
    assert client.post(target, {"digest": approval.digest}).status_code == 302
    assert Approval.objects.using("other").get(pk=approval.pk).status == "approved"


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
        client = browser("superuser")
        target = reverse("admin:agentruns_run_resume", args=[run.pk])
        page = read(client.get(reverse("admin:agentruns_run_change", args=[run.pk])))
        assert client.post(target, page.forms[target]).status_code == 302
