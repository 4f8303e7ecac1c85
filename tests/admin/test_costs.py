"""The costs: summed rightly, by what is asked for, of visible runs alone, and harmless in a spreadsheet."""

from __future__ import annotations

import csv
from datetime import timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agentruns import Policy
from agentruns.admin import costs
from agentruns.admin.costs import safe_cell
from agentruns.models import Run
from tests.admin.pages import Page, read
from tests.admin.people import browser, user
from tests.admin.world import World

pytestmark = pytest.mark.django_db
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
    [day] = lines(by="day")
    assert day[1:] == ["3", "8.5k", "2.75"]
    named = day[0]
    assert lines(by="day-agent") == [
        [f"{named}, helper", "2", "1.5k", "2.75"],
        [f"{named}, =cmd|x", "1", "7.0k", "-"],
    ]
    assert "3 runs, 8.5k tokens, cost 2.75" in " ".join(shown().text.split())
    before = (timezone.localdate() - timedelta(days=60)).isoformat()
    assert ["old", "1", "1", "9.00"] in lines(first=before)
    client = browser("superuser")
    for by, counts in {
        "agent": [2, 1],
        "requester": [1],
        "day": [3],
        "day-agent": [2, 1],
        "scope": [],
    }.items():
        links = [link for link in shown(by=by).links if "started_from=" in link]
        found = [
            len({each.split("?")[0] for each in read(client.get(link)).links if "/change/" in each})
            for link in links
        ]
        assert found == counts, by
    [week] = {link for link in read(client.get("/admin/")).links if link.startswith(COSTS)}
    days = parse_qs(urlsplit(week).query)
    assert days == {
        "by": ["agent"],
        "first": [str(timezone.localdate() - timedelta(days=6))],
        "last": [str(timezone.localdate())],
    }
    assert "3 runs, 8.5k tokens, cost 2.75" in " ".join(read(client.get(week)).text.split())


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
    assert sorted(row[:6] for row in rows) == sorted([
        [today, "helper", "Ann", "", "1", "1000"],
        [today, "helper", "the program", "north", "1", "500"],
        [today, "'=cmd|x", "the program", "", "1", "7000"],
    ])  # fmt: skip
    assert sorted(row[6:] for row in rows) == [[""], ["0.5"], ["2.25"]]
    settings.AGENTRUNS_CURRENCY = "EUR"
    head, *rows = csv.reader(browser("superuser").get(CSV).content.decode().splitlines())
    assert head[6:] == ["cost", "currency"]
    assert sorted(row[6:] for row in rows) == [["", "EUR"], ["0.5", "EUR"], ["2.25", "EUR"]]


def test_no_cell_is_a_formula() -> None:
    for text in ("=1", "+1", "-1", "@x", "\tx", "  =1", "\n=1"):
        assert safe_cell(text).startswith("'"), repr(text)
    assert [safe_cell(text) for text in ("a=1", "", 7, "\r=1")] == ["a=1", "", "7", "[U+000D]=1"]
    parts = {"a;=1": "a;'=1", "a\t+1": "a\t'+1", "a;b; @x": "a;b;' @x", "\uff1d1": "'\uff1d1"}
    assert {text: safe_cell(text) for text in parts} == parts


class Anns(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Let everybody see what was started for Ann."""
        return runs.filter(owner_name="Ann")


def test_only_visible_runs_count_and_only_for_who_may_see_runs(world: World, settings: Any) -> None:
    shop(world)
    for where in (COSTS, CSV):
        for role, status in {"viewer": 200, "decider": 403, "staff": 403, "anonymous": 302}.items():
            assert browser(role).get(where).status_code == status, (where, role)
    settings.AGENTRUNS_POLICY = f"{__name__}.Anns"
    assert lines() == [["helper", "1", "1.0k", "0.5000"]]
    assert browser("superuser").get(CSV).content.decode().count("\n") == 2


def test_costs_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shop(world)
    client = browser("superuser")
    with CaptureQueriesContext(connection) as queries:
        client.get(COSTS)
    ours = [each["sql"] for each in queries if '"agentruns_' in each["sql"]]
    assert len(ours) == 2
    assert all("LIMIT" in sql for sql in ours)
    monkeypatch.setattr(costs, "RUNS", 2)
    assert lines() == [["=cmd|x", "1", "7.0k", "-"], ["helper", "1", "500", "2.25"]][::-1]
    assert "Choose fewer days." in shown().text
