"""The figures on the admin's index, and the costs: right, linked, bounded, and for who may see them."""

from __future__ import annotations

import csv
import logging
import re
from datetime import timedelta
from decimal import Decimal
from functools import partial
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.db import DatabaseError, connection
from django.db.models import F
from django.utils import timezone

from agentruns import Policy, approve, deny
from agentruns.admin import dashboard
from agentruns.admin.dashboard import safe_cell
from agentruns.engine.leases import claim
from agentruns.journal import masking
from agentruns.journal.outbox import MAX_ATTEMPTS
from agentruns.models import Approval, Control, Notification, Run
from agentruns.tools.card import MASK
from agentruns.utils.ids import uuid7
from tests.admin.pages import Page, leads_to, listed, queries, read, says, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, secretive
from tests.db.helpers import kill

pytestmark = pytest.mark.django_db
INDEX = "/admin/"


def index(role: str = "superuser", where: str = INDEX) -> Page:
    return says(browser(role).get(where))


def busy(world: World, session: str = "") -> None:
    """One run of each kind that a figure counts."""
    world.waiting(f"waiting{session}")
    world.orphaned(f"orphaned{session}")
    world.paused(f"paused{session}")
    stalled, failed = world.queued(f"stalled{session}"), world.completed(f"failed{session}")
    assert claim("default", stalled.pk)
    kill(stalled)
    Run.objects.filter(pk=failed.pk).update(status="failed")
    world.blocked(f"blocked{session}")
    decided = world.waiting(f"denied{session}", 7000)
    deny(decided.pk, user("superuser"), "no")
    Notification.objects.create(
        event="run.paused", run=failed, notifier="x", created_at=timezone.now(), attempts=MAX_ATTEMPTS
    )


def test_each_figure_is_right_and_leads_to_the_list_of_exactly_these(world: World) -> None:
    busy(world)
    client, page = browser("superuser"), index()
    for shown in (
        "1 waiting for you", "1 in doubt", "1 stalled", "1 paused", "1 blocked by a deploy",
        "1 failed in the last 24 hours", "1 notifications given up",
        "Waiting longest refund(cents=5000)", "silent worker", "No worker was ever seen.",
        "Queued runs wait until one runs. Start it:", "manage.py resume_runs --watch",
    ):  # fmt: skip
        assert shown in words(page), shown
    assert "waiting for a decision" not in words(page), "they are those that wait for you"
    assert "1 waiting for a decision" in words(index("viewer")), "who may decide none of them sees the other"
    lists = [link for link in page.links if "agentruns/" in link and ("status=" in link or "mine=" in link)]
    lists = [link for link in lists if "tool=" not in link and "started_from" not in link]
    assert len(lists) == 6
    for link in lists:
        assert len(leads_to(read(client.get(unescape(link))))) == 1, link


def test_the_worker_is_red_when_silent_and_hidden_by_no_switches(world: World) -> None:
    Control.objects.create(name="resume_runs", seen_at=timezone.now() - timedelta(seconds=20))
    seen = re.compile(r"ok worker, seen [2-9]\d s")  # a slow page makes it more
    page = index()
    assert seen.search(words(page))
    assert "--watch" not in page.text
    numbers = range(dashboard.CONTROLS + 99)
    switches = (Control(name=f"off:tool:t{number}", seen_at=timezone.now()) for number in numbers)
    Control.objects.bulk_create(switches)
    text = words(index())
    assert "100+ agents and tools switched off" in text
    assert seen.search(text)
    Control.objects.filter(name="resume_runs").update(seen_at=timezone.now() - timedelta(minutes=6))
    told = "The last worker was seen 6 minutes ago. Queued runs wait until one runs. Start it:"
    assert told in words(index())


def test_how_the_calls_of_each_tool_were_decided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, verb in enumerate((approve, approve, approve, partial(deny, reason="no"))):
        approval = world.waiting(f"s{number}", 5000 + number)
        verb(approval.pk, user("superuser"))
        Approval.objects.filter(pk=approval.pk).update(
            requested_at=F("decided_at") - timedelta(minutes=3 + 10 * number)
        )
    old = world.waiting("old", 9000)
    deny(old.pk, user("superuser"), "no")
    Approval.objects.filter(pk=old.pk).update(decided_at=timezone.now() - timedelta(days=31))
    expired = Approval.objects.filter(pk=world.waiting("program", 9001).pk)
    expired.update(status="expired", decided_at=timezone.now())
    assert index().cells("ar-decisions ar-tools") == [["refund", "4", "75 %", "18\xa0min"]]
    Approval.objects.exclude(pk=old.pk).update(requested_at=F("decided_at") - timedelta(seconds=3.222006))
    assert index().cells("ar-decisions ar-tools")[0][3] == "3.2\xa0s"
    assert "/admin/agentruns/approval/?status=all&tool=refund" in index().links
    for number in range(3):
        world.waiting(f"w{number}", 6000 + number)
        world.paused(f"p{number}")
    monkeypatch.setattr(dashboard, "MOST", 2)
    page = index()
    assert [row[1] for row in page.cells("ar-decisions ar-tools")] == ["2"]
    for figure in ("2+ waiting for you", "2+ waiting for a decision", "2+ paused"):
        assert figure in words(page), "many are not counted to the last"


SHOWN_TO: dict[str, tuple[list[str], list[str]]] = {
    "viewer": (["waiting for a decision", "stalled", "worker", "ar-tools", "ar-agents"], ["waiting for you"]),
    "decider": (["waiting for you", "Waiting longest"], ["stalled", "paused", "worker", "ar-agents"]),
    "operator": (["stalled", "paused"], ["waiting for", "refund", "ar-tools"]),
}


def test_only_what_a_user_may_see_also_of_the_figures_that_an_open_page_asks_for(world: World) -> None:
    busy(world)
    for role, (seen, hidden) in SHOWN_TO.items():
        html = index(role).html
        section = html[html.index("ar-dashboard") : html.index("</section>")]
        assert [word for word in seen if word not in section] == []
        assert [word for word in hidden if word in section] == []
    client = browser("staff")  # who may see nothing
    assert not [sql for sql in queries(lambda: client.get(INDEX)) if "agentruns_" in sql]
    assert "at a glance" not in index("staff").text
    where = "/admin/agentruns/run/figures/"
    assert f'data-poll="{where}"' in index("viewer").html
    page = index("viewer", where)
    assert "1 in doubt" in words(page)
    assert "html" not in page.tags
    assert "1 in doubt" not in words(index("decider", where))


def test_more_runs_cost_no_more_queries(world: World) -> None:
    client = browser("superuser")

    def cost() -> int:
        ours = [sql for sql in queries(lambda: client.get(INDEX)) if '"agentruns_' in sql]
        assert all("LIMIT" in sql for sql in ours), ours
        return len(ours)

    empty = cost()
    busy(world)
    few = cost()
    for number in range(4):
        busy(world, str(number))
    assert (cost(), empty) == (few, 13)
    assert few == 15  # what is masked of the oldest cards, and of the failures


def test_no_title_and_no_cause_tells_what_is_masked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = world.waiting(tools=[secretive])
    for said in ("DE02-secret", "other"):
        Run.objects.filter(pk=secret.run_id).update(status="failed", error=f"ValueError: {said}")
        [cause] = index().cells("ar-decisions ar-causes")
        assert ("secret" in cause[0], "other" in cause[0]) == (False, said == "other")
    Approval.objects.filter(pk=secret.pk).update(status="cancelled")
    Run.objects.filter(pk=secret.run_id).update(status="cancelled")
    world.waiting("other")
    failed(world, "a", "ValueError: card 5000")
    assert "Waiting longest refund(cents=5000)" in words(index())
    monkeypatch.setattr(masking, "MOST_ROWS", 1)
    shown = words(index())
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
        assert {*leads_to(read(client.get(unescape(link))))} == {url(run) for run in runs}
    assert leads_to(listed("run", cause="nonsense")) == []


def test_the_week_by_day_and_by_agent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        figures = {"agent": "helper", "tokens": 1500, "cost": Decimal("0.25")}
        ended = F("created_at") + timedelta(seconds=10)
        Run.objects.filter(pk=world.completed(f"s{number}").pk).update(**figures, updated_at=ended)
    bad = failed(world, "bad", "ValueError: no", agent="helper")
    Run.objects.filter(pk=bad.pk).update(updated_at=F("created_at") + timedelta(minutes=2))
    Run.objects.filter(pk=world.completed("old").pk).update(created_at=timezone.now() - timedelta(days=8))
    page = index()
    assert page.cells("ar-decisions ar-agents") == [["helper", "4", "1", "10\xa0s", "4.5k", "0.7500"]]
    days = page.cells("ar-decisions ar-bars")
    assert (len(days), days[0][1:3], days[1][1:3]) == (7, ["4", "1"], ["0", "0"])
    assert "Cost of these 7 days: 0.7500" in words(page)
    today, client, runs = timezone.localdate(), browser("superuser"), "/admin/agentruns/run/"
    first = today - timedelta(days=6)
    costs = f"{runs}costs/?by=agent&first={first}&last={today}"
    assert "0.7500" in read(client.get(costs)).text
    for link, count in (
        (costs, 0),
        (f"{runs}?started_from={today}&started_to={today}", 4),
        (f"{runs}?status=failed&started_from={today}&started_to={today}", 1),
        (f"{runs}?agent=helper&started_from={first}", 4),
        (f"{runs}?status=failed&agent=helper&started_from={first}", 1),
    ):
        assert link in page.links, link
        assert len(leads_to(read(client.get(link)))) == count, link
    monkeypatch.setattr(dashboard, "RUNS", 2)
    assert "Of the newest 2+ runs." in words(index())


@pytest.mark.django_db(transaction=True)
def test_a_database_that_fails_does_not_take_the_index_down(
    world: World, requests_commit: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = browser("superuser")

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "agentruns_control" in sql:
            return execute("SELECT no_such_column FROM agentruns_control", (), False, context)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), caplog.at_level(logging.ERROR, logger="agentruns.admin.dashboard"):
        page = read(client.get(INDEX))
    assert "The figures cannot be read now." in words(page)
    assert "Recent actions" in page.text
    assert caplog.records[0].exc_info is not None
    assert isinstance(caplog.records[0].exc_info[1], DatabaseError)


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


COSTS, CSV = "/admin/agentruns/run/costs/", "/admin/agentruns/run/costs.csv"


def spent(world: World, session: str, agent: str, cost: str | None, tokens: int, **columns: Any) -> Run:
    run = world.completed(session)
    columns |= {"agent": agent, "cost": cost and Decimal(cost), "tokens": tokens}
    Run.objects.filter(pk=run.pk).update(**columns)
    return run


def shop(world: World) -> None:
    spent(world, "a", "helper", "0.5", 1000, owner_name="Ann", owner_id=user("viewer").pk)
    spent(world, "b", "helper", "2.25", 500, scope="north")
    spent(world, "c", "=cmd|x", None, 7000)
    spent(world, "d", "old", "9", 1, created_at=timezone.now() - timedelta(days=40))


def shown(**query: str) -> Page:
    return read(browser("superuser").get(COSTS, query))


def lines(**query: str) -> list[list[str]]:
    return [row[:4] for row in shown(**query).cells("ar-costs")]


def test_each_grouping_is_summed_and_leads_to_its_runs(world: World) -> None:
    shop(world)
    assert lines() == [["helper", "2", "1.5k", "2.75"], ["=cmd|x", "1", "7.0k", "-"]]
    assert lines(by="requester") == [["the program", "2", "7.5k", "2.25"], ["Ann", "1", "1.0k", "0.5000"]]
    assert lines(by="scope") == [["north", "1", "500", "2.25"], ["-", "2", "8.0k", "0.5000"]]
    [(day, *figures)] = lines(by="day")
    assert figures == ["3", "8.5k", "2.75"]
    assert lines(by="day-agent") == [
        [f"{day}, helper", "2", "1.5k", "2.75"], [f"{day}, =cmd|x", "1", "7.0k", "-"],
    ]  # fmt: skip
    assert "3 runs, 8.5k tokens, cost 2.75" in words(shown())
    before = (timezone.localdate() - timedelta(days=60)).isoformat()
    assert ["old", "1", "1", "9.00"] in lines(first=before)
    client = browser("superuser")
    for by, counts in {
        "agent": [2, 1], "requester": [1], "day": [3], "day-agent": [2, 1], "scope": [],
    }.items():  # fmt: skip
        links = [link for link in shown(by=by).links if "started_from=" in link]
        assert [len(leads_to(read(client.get(link)))) for link in links] == counts, by
    [week] = {link for link in read(client.get("/admin/")).links if link.startswith(COSTS)}
    today = timezone.localdate()
    days = {"by": ["agent"], "first": [str(today - timedelta(days=6))], "last": [str(today)]}
    assert parse_qs(urlsplit(week).query) == days
    assert "3 runs, 8.5k tokens, cost 2.75" in words(read(client.get(week)))


def test_days_that_make_no_sense_are_refused(world: World) -> None:
    shop(world)
    today = timezone.localdate()
    for query in (
        {"first": "x"}, {"last": "2026-99-01"}, {"by": "input"}, {"first": "2020-01-01"},
        {"first": f"{today}", "last": f"{today - timedelta(days=1)}"}, {"first": "0001-01-01"},
        {"first": "9999-12-31", "last": "9999-12-31"}, {"first": "9999-12-29", "last": "9999-12-30"},
        {"first": "0001-01-01", "last": "0001-01-02"}, {"first": "1969-12-31", "last": "1970-01-02"},
    ):  # fmt: skip
        for where in (COSTS, CSV):
            response = browser("superuser").get(where, query)
            assert response.status_code == 400, (where, query)
            assert b"helper" not in response.content
            assert where == CSV or b"__all__" not in response.content
    assert "\u202e" not in browser("superuser").get(CSV, {"by": "\u202e"}).content.decode()


def test_the_file_has_all_four_and_no_formula(world: World, settings: Any) -> None:
    shop(world)
    response = browser("superuser").get(CSV)
    assert response["Content-Type"] == "text/csv; charset=utf-8"
    assert response["Content-Disposition"].startswith("attachment;")
    head, *rows = csv.reader(response.content.decode().splitlines())
    assert head == ["day", "agent", "requester", "scope", "runs", "tokens", "cost"]
    today = f"{timezone.localdate()}"
    assert sorted(rows) == sorted([
        [today, "helper", "Ann", "", "1", "1000", "0.5"],
        [today, "helper", "the program", "north", "1", "500", "2.25"],
        [today, "'=cmd|x", "the program", "", "1", "7000", ""],
    ])  # fmt: skip
    settings.AGENTRUNS_CURRENCY = "EUR"
    head, *rows = csv.reader(browser("superuser").get(CSV).content.decode().splitlines())
    assert head[6:] == ["cost", "currency"]
    assert sorted(row[6:] for row in rows) == [["", "EUR"], ["0.5", "EUR"], ["2.25", "EUR"]]
    for text in ("=1", "+1", "-1", "@x", "\tx", "  =1", "\n=1"):
        assert safe_cell(text).startswith("'"), repr(text)
    assert [safe_cell(text) for text in ("a=1", "", 7, "\r=1")] == ["a=1", "", "7", "[U+000D]=1"]
    parts = {"a;=1": "a;'=1", "a\t+1": "a\t'+1", "a;b; @x": "a;b;' @x", "\uff1d1": "'\uff1d1"}
    assert {text: safe_cell(text) for text in parts} == parts


class Anns(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Let everybody see what was started for Ann."""
        return runs.filter(owner_name="Ann")


def test_visible_runs_count_to_a_bound(world: World, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shop(world)
    client = browser("superuser")
    ours = [sql for sql in queries(lambda: client.get(COSTS)) if '"agentruns_' in sql]
    assert len(ours) == 2
    assert all("LIMIT" in sql for sql in ours)
    with monkeypatch.context() as patch:
        patch.setattr(dashboard, "COST_RUNS", 2)
        assert lines() == [["helper", "1", "500", "2.25"], ["=cmd|x", "1", "7.0k", "-"]]
        assert "Choose fewer days." in shown().text
    settings.AGENTRUNS_POLICY = f"{__name__}.Anns"
    assert lines() == [["helper", "1", "1.0k", "0.5000"]]
    assert client.get(CSV).content.decode().count("\n") == 2
