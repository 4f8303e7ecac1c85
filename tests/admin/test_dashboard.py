"""The figures on the admin's index: right, linked, bounded, for who may see them, and never in the way."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from decimal import Decimal
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
from agentruns.journal import masking
from agentruns.journal.outbox import MAX_ATTEMPTS
from agentruns.models import Approval, Control, Notification, Run
from agentruns.tools.card import MASK
from agentruns.utils.ids import uuid7
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.admin.world import World, secretive
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
        "1 waiting for you", "1 in doubt", "1 stalled", "1 paused",
        "1 failed in the last 24 hours", "1 notifications given up",
        "Waiting longest refund(cents=5000)", "silent worker", "No worker was ever seen.",
        "Queued runs wait until one runs. Start it:", "manage.py resume_runs --watch",
    ):  # fmt: skip
        assert shown in text(page), shown
    assert "waiting for a decision" not in text(page), "they are those that wait for you"
    assert "1 waiting for a decision" in text(index("viewer")), "who may decide none of them sees the other"
    lists = [link for link in page.links if "agentruns/" in link and ("status=" in link or "mine=" in link)]
    lists = [link for link in lists if "tool=" not in link and "started_from" not in link]
    assert len(lists) == 5
    for link in lists:
        listing = read(client.get(unescape(link)))
        found = {one.split("?")[0] for one in listing.links if "/change/" in one and "calls" not in one}
        assert len(found) == 1, link


def test_the_worker_is_red_when_silent(world: World) -> None:
    Control.objects.create(name="resume_runs", seen_at=timezone.now() - timedelta(seconds=20))
    page = index()
    assert re.search(r"ok worker, seen [2-9]\d s", text(page))  # a slow page makes it more
    assert "--watch" not in page.text
    Control.objects.update(seen_at=timezone.now() - timedelta(minutes=6))
    assert "The last worker was seen 6 minutes ago. Queued runs wait until one runs. Start it:" in text(
        index()
    )


def test_many_switches_hide_no_worker(world: World) -> None:
    Control.objects.create(name="resume_runs", seen_at=timezone.now() - timedelta(seconds=20))
    Control.objects.bulk_create(
        Control(name=f"off:tool:t{number}", seen_at=timezone.now())
        for number in range(dashboard.CONTROLS + 99)
    )
    page = index()
    assert "100+ agents and tools switched off" in text(page)
    assert re.search(r"ok worker, seen [2-9]\d s", text(page))


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
    assert index().cells("ar-decisions ar-tools") == [["refund", "4", "75 %", "18\xa0min"]]
    Approval.objects.exclude(pk=old.pk).update(requested_at=F("decided_at") - timedelta(seconds=3.222006))
    assert index().cells("ar-decisions ar-tools")[0][3] == "3.2\xa0s"
    assert "/admin/agentruns/approval/?status=all&tool=refund" in index().links
    monkeypatch.setattr(dashboard, "MOST", 2)
    assert [row[1] for row in index().cells("ar-decisions ar-tools")] == ["2"]


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
        (
            "viewer",
            ["waiting for a decision", "stalled", "worker", "ar-tools", "ar-agents"],
            ["waiting for you"],
        ),
        ("decider", ["waiting for you", "Waiting longest"], ["stalled", "paused", "worker", "ar-agents"]),
        ("operator", ["stalled", "paused"], ["waiting for", "refund", "ar-tools"]),
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
    assert (cost(), empty) == (few, 11)
    assert few == 13  # what is masked of the oldest cards, and of the failures


def test_titles_and_causes_are_masked_where_sessions_are_too_long_to_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.waiting()
    failed(world, "a", "ValueError: card 5000")
    assert "Waiting longest refund(cents=5000)" in text(index())
    monkeypatch.setattr(masking, "MOST_ROWS", 1)
    shown = text(index())
    assert f"Waiting longest {MASK}" in shown
    assert "5000" not in shown
    assert index().cells("ar-decisions ar-causes")[0][0].startswith(MASK)


def failed(world: World, session: str, error: str, **columns: Any) -> Run:
    """A run that failed."""
    run = world.completed(session)
    Run.objects.filter(pk=run.pk).update(status="failed", error=error, **columns)
    return run


def test_failures_are_grouped_by_their_cause_and_lead_to_it(world: World) -> None:
    one = failed(world, "a", "ToolError: order 4117 of 2026-01-02T10:00 has no stock\nTraceback")
    two = failed(world, "b", f"ToolError: order 99 of 2026-11-12T08:30 has no stock\n{uuid7()}")
    other = failed(world, "c", f"ToolError: no run {uuid7()}")
    failed(world, "d", "long ago", updated_at=timezone.now() - timedelta(days=8))
    page = index()
    causes = [(row[0], row[1]) for row in page.cells("ar-decisions ar-causes")]
    assert [count for _cause, count in causes] == ["2", "1"]
    assert "has no stock" in causes[0][0]
    assert "4117" not in causes[0][0]
    assert "no run … (ToolError)" in causes[1][0]
    links = [link for link in page.links if "cause=" in link]
    assert len(links) == 2
    client = browser("superuser")
    for link, runs in zip(links, ([one, two], [other]), strict=True):
        listing = read(client.get(unescape(link)))
        found = {each.split("?")[0] for each in listing.links if "/change/" in each}
        assert found == {url(run) for run in runs}
    assert "/change/" not in "".join(read(client.get("/admin/agentruns/run/?cause=nonsense")).links)


def test_no_cause_tells_what_is_masked(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    for words in ("DE02-secret", "other"):
        Run.objects.filter(pk=approval.run_id).update(status="failed", error=f"ValueError: {words}")
        [cause] = index().cells("ar-decisions ar-causes")
        assert ("secret" in cause[0], "other" in cause[0]) == (False, words == "other")


def test_the_week_by_day_and_by_agent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        run = world.completed(f"s{number}")
        Run.objects.filter(pk=run.pk).update(
            agent="helper",
            tokens=1500,
            cost=Decimal("0.25"),
            updated_at=F("created_at") + timedelta(seconds=10),
        )
    bad = failed(world, "bad", "ValueError: no", agent="helper")
    Run.objects.filter(pk=bad.pk).update(updated_at=F("created_at") + timedelta(minutes=2))
    Run.objects.filter(pk=world.completed("old").pk).update(created_at=timezone.now() - timedelta(days=8))
    page = index()
    assert page.cells("ar-decisions ar-agents") == [["helper", "4", "1", "10\xa0s", "4.5k", "0.7500"]]
    days = page.cells("ar-decisions ar-bars")
    assert (len(days), days[0][1:3], days[1][1:3]) == (7, ["4", "1"], ["0", "0"])
    assert "Cost of these 7 days: 0.7500" in text(page)
    today, client = timezone.localdate(), browser("superuser")
    costs = f"/admin/agentruns/run/costs/?by=agent&first={today - timedelta(days=6)}&last={today}"
    assert "0.7500" in read(client.get(next(link for link in page.links if link == costs))).text
    for link, count in (
        (f"/admin/agentruns/run/?started_from={today}&started_to={today}", 4),
        (f"/admin/agentruns/run/?status=failed&started_from={today}&started_to={today}", 1),
        (f"/admin/agentruns/run/?agent=helper&started_from={today - timedelta(days=6)}", 4),
        (f"/admin/agentruns/run/?status=failed&agent=helper&started_from={today - timedelta(days=6)}", 1),
    ):
        assert link in page.links, link
        listing = read(client.get(link))
        assert len({each.split("?")[0] for each in listing.links if "/change/" in each}) == count, link
    monkeypatch.setattr(dashboard, "RUNS", 2)
    assert "Of the newest 2+ runs." in text(index())


def test_an_open_page_asks_for_the_figures_alone(world: World) -> None:
    busy(world)
    where = "/admin/agentruns/run/figures/"
    assert f'data-poll="{where}"' in browser("viewer").get(INDEX).content.decode()
    for role, status in {"viewer": 200, "decider": 200, "staff": 403, "anonymous": 302}.items():
        response = browser(role).get(where)
        assert response.status_code == status, role
    page = read(browser("viewer").get(where))
    assert "1 in doubt" in text(page)
    assert "html" not in page.tags
    assert "1 in doubt" not in text(read(browser("decider").get(where)))


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
    assert "The figures cannot be read now." in text(page)
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
