"""The figures on the admin's index: right, linked, bounded, for who may see them, and never in the way."""

from __future__ import annotations

import logging
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib import admin
from django.db import DatabaseError, connection, connections
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

from agentruns import approve, deny
from agentruns.admin import dashboard, register
from agentruns.engine.leases import claim
from agentruns.journal.outbox import MAX_ATTEMPTS
from agentruns.models import Approval, Control, Notification, Run
from agentruns.tools.card import MASK
from agentruns.utils.ids import uuid7
from tests.admin.conftest import World
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.db.helpers import kill

pytestmark = pytest.mark.django_db
INDEX = "/admin/"

backoffice = admin.AdminSite(name="backoffice")
register(backoffice)
own = admin.AdminSite(name="own")
own.index_template = "admin/index.html"
register(own)
urlpatterns = [
    path("admin/", admin.site.urls),
    path("tools/backoffice/", backoffice.urls),
    path("tools/own/", own.urls),
]


def index(role: str = "superuser", where: str = INDEX) -> Page:
    response = browser(role).get(where)
    assert response.status_code == 200
    return read(response)


def text(page: Page) -> str:
    return " ".join(page.text.split())


def busy(world: World, session: str = "") -> None:
    """One run of each kind that a figure counts."""
    world.waiting(f"waiting{session}")
    world.orphaned(f"orphaned{session}")
    world.paused(f"paused{session}")
    stalled, failed = world.queued(f"stalled{session}"), world.completed(f"failed{session}")
    assert claim("default", stalled.pk)
    kill(stalled)
    Run.objects.filter(pk=failed.pk).update(status="failed")
    decided = world.waiting(f"denied{session}", 7000)
    deny(decided.pk, user("superuser"), "no")
    Notification.objects.create(
        event="run.paused", run=failed, notifier="x", created_at=timezone.now(), attempts=MAX_ATTEMPTS
    )


def test_each_figure_is_right_and_leads_to_the_list_of_exactly_these(world: World) -> None:
    busy(world)
    client, page = browser("superuser"), index()
    for shown in (
        "1 waiting for you", "1 waiting for a decision", "1 in doubt (orphaned)", "1 stalled", "1 paused",
        "1 failed in the last 24 hours", "1 notifications given up",
        "Longest waiting: refund(cents=5000)", "Sweeper last seen: never.", "manage.py resume_runs --watch",
    ):  # fmt: skip
        assert shown in text(page), shown
    lists = [link for link in page.links if "agentruns/" in link and ("status=" in link or "mine=" in link)]
    lists = [link for link in lists if "tool=" not in link]
    assert len(lists) == 5
    for link in lists:
        listing = read(client.get(unescape(link)))
        found = {one.split("?")[0] for one in listing.links if "/change/" in one and "calls" not in one}
        assert len(found) == 1, link


def test_the_sweeper_is_red_when_silent(world: World) -> None:
    Control.objects.create(name="resume_runs", seen_at=timezone.now() - timedelta(seconds=20))
    page = index()
    assert "Sweeper last seen: 20" in text(page)
    assert "--watch" not in page.text
    Control.objects.update(seen_at=timezone.now() - timedelta(minutes=6))
    assert "Sweeper last seen: 6 minutes. Nothing queued goes on until a worker sweeps again." in text(
        index()
    )


def test_how_the_calls_of_each_tool_were_decided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, verb in enumerate(["approve", "approve", "approve", "deny"]):
        approval = world.waiting(f"s{number}", 5000 + number)
        if verb == "approve":
            approve(approval.pk, user("superuser"))
        else:
            deny(approval.pk, user("superuser"), "no")
        Approval.objects.filter(pk=approval.pk).update(
            requested_at=F("decided_at") - timedelta(minutes=3 + 10 * number)
        )
    old = world.waiting("old", 9000)
    deny(old.pk, user("superuser"), "no")
    Approval.objects.filter(pk=old.pk).update(decided_at=timezone.now() - timedelta(days=31))
    Approval.objects.filter(pk=world.waiting("program", 9001).pk).update(
        status="expired", decided_at=timezone.now()
    )
    assert index().cells("ar-decisions") == [["refund", "4", "75 %", "18\xa0minutes"]]
    Approval.objects.exclude(pk=old.pk).update(requested_at=F("decided_at") - timedelta(seconds=3.222006))
    assert index().cells("ar-decisions")[0][3] == "3\xa0s"
    assert "/admin/agentruns/approval/?status=all&tool=refund" in index().links
    monkeypatch.setattr(dashboard, "MOST", 2)
    assert [row[1] for row in index().cells("ar-decisions")] == ["2"]


def test_many_are_not_counted_to_the_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        world.waiting(f"w{number}", 5000 + number)
        world.paused(f"p{number}")
    monkeypatch.setattr(dashboard, "MOST", 2)
    shown = text(index())
    for figure in ("2+ waiting for you", "2+ waiting for a decision", "2+ paused"):
        assert figure in shown


@pytest.mark.parametrize(
    ("role", "seen", "hidden"),
    [
        ("viewer", ["waiting for a decision", "stalled", "Sweeper", "ar-decisions"], ["waiting for you"]),
        ("decider", ["waiting for you", "Longest waiting"], ["stalled", "paused", "Sweeper", "given up"]),
        ("operator", ["stalled", "paused"], ["waiting for", "refund", "ar-decisions"]),
    ],
)
def test_only_what_a_user_may_see(world: World, role: str, seen: list[str], hidden: list[str]) -> None:
    busy(world)
    html = browser(role).get(INDEX).content.decode()
    section = html[html.index("ar-dashboard") : html.index("</section>")]
    assert [word for word in seen if word not in section] == []
    assert [word for word in hidden if word in section] == []


def test_who_may_see_nothing_costs_nothing(world: World) -> None:
    busy(world)
    client = browser("staff")
    with CaptureQueriesContext(connection) as queries:
        response = client.get(INDEX)
    assert "at a glance" not in response.content.decode()
    assert not [query for query in queries if "agentruns_" in query["sql"]]


def test_more_runs_cost_no_more_queries(world: World) -> None:
    client = browser("superuser")

    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get(INDEX)
        ours = [query["sql"] for query in queries if '"agentruns_' in query["sql"]]
        assert all("LIMIT" in sql for sql in ours), ours
        return len(ours)

    empty = cost()
    busy(world)
    few = cost()
    for number in range(4):
        busy(world, str(number))
    assert (cost(), empty) == (few, 8)
    assert few == 9  # what is masked of the oldest card


def test_a_title_is_masked_where_a_session_is_too_long_to_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.waiting()
    assert "Longest waiting: refund(cents=5000)" in text(index())
    monkeypatch.setattr(dashboard, "MOST", 1)
    shown = text(index())
    assert f"Longest waiting: {MASK}" in shown
    assert "5000" not in shown


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic", [False, True])
def test_a_database_that_fails_does_not_take_the_index_down(
    world: World, atomic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    client = browser("superuser")

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "agentruns_control" in sql:
            return execute("SELECT no_such_column FROM agentruns_control", (), False, context)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), caplog.at_level(logging.ERROR, logger="agentruns.admin.dashboard"):
        page = read(client.get(INDEX))
    assert "This cannot be read now." in text(page)
    assert "Recent actions" in page.text
    assert caplog.records[0].exc_info is not None
    assert isinstance(caplog.records[0].exc_info[1], DatabaseError)


@pytest.mark.urls("tests.admin.test_dashboard")
def test_other_sites_have_theirs_and_an_index_of_their_own_stays(world: World) -> None:
    approval = world.waiting()
    page = index(where="/tools/backoffice/")
    assert f"/tools/backoffice/agentruns/approval/{approval.pk}/change/" in page.links
    assert not [link for link in page.links if link.startswith("/admin/")]
    assert "at a glance" in index(where="/tools/backoffice/agentruns/").text
    assert "at a glance" not in index(where="/tools/own/").text
    assert own.index_template == "admin/index.html"
    assert url(approval) in index(where="/admin/agentruns/").links


def test_hostile_names_are_only_text(world: World) -> None:
    approval = world.waiting()
    deny(approval.pk, user("superuser"), "no")
    name = "<b>\u202etool"
    Approval.objects.update(tool_name=name)
    copy = {field.attname: getattr(approval, field.attname) for field in Approval._meta.concrete_fields}
    Approval.objects.create(**{**copy, "id": uuid7(), "call_id": "other", "title": "<i>\u202ewhat"})
    page = index()
    assert "<b>[U+202E]tool" in page.text
    assert "<i>U+202Ewhat" in page.text
