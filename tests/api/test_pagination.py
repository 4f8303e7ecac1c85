from __future__ import annotations

import base64
import json
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agentruns import cancel_run, start_run
from agentruns.agents.agent import Agent
from agentruns.models import Approval, Run
from tests.api.http import Api, make_user

pytestmark = pytest.mark.django_db(transaction=True)


ID = "01a20062-a3cc-73dc-8419-c54ab3a43655"


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.api.pagination.PAGE", 3)


@pytest.fixture
def root() -> Api:
    return Api(make_user("root", is_superuser=True))


def walk(api: Api, path: str, **query: Any) -> list[str]:
    """Follow `next` to the end, and list the ids."""
    pages = list(api.pages(path, **query))
    assert all(len(page) <= 3 for page in pages)
    return [item["id"] for page in pages for item in page]


def start(shop: Agent, count: int) -> list[Run]:
    return apart([start_run(shop, "hi", f"s{number}") for number in range(count)], "updated_at")


def apart(rows: list[Any], column: str) -> list[Any]:
    """Date rows a minute apart: a process may find that its time of the database was some ms ahead."""
    for number, row in enumerate(rows):
        setattr(row, column, getattr(row, column) + timedelta(minutes=number - len(rows)))
        row.save(update_fields=[column])
    return rows


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9, 10])
def test_every_run_comes_once_newest_first(root: Api, shop: Agent, count: int) -> None:
    runs = start(shop, count)
    assert walk(root, "/runs") == [str(run.pk) for run in reversed(runs)]


def test_runs_of_one_instant_come_in_the_order_of_their_ids(root: Api, shop: Agent) -> None:
    runs = start(shop, 8)
    Run.objects.update(updated_at=timezone.now())
    assert walk(root, "/runs") == sorted((str(run.pk) for run in runs), reverse=True)


@pytest.mark.parametrize("microsecond", [0, 120_000, 123_456])
def test_times_of_any_precision(root: Api, shop: Agent, microsecond: int) -> None:
    """SQLite keeps times as text of different lengths, depending on who wrote them."""
    runs = start(shop, 7)
    Run.objects.update(updated_at=timezone.now().replace(microsecond=microsecond))
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE agentruns_run SET updated_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f', updated_at)"
                " WHERE id > %s",
                [runs[3].pk.hex],
            )
    assert sorted(walk(root, "/runs")) == sorted(str(run.pk) for run in runs)


def test_changing_runs_are_never_seen_twice_and_unchanged_ones_always(root: Api, shop: Agent) -> None:
    runs, seen = start(shop, 12), []
    changing = iter([runs[0], runs[11], runs[1], start_run(shop, "hi", "new")])
    for page in root.pages("/runs"):
        seen += [item["id"] for item in page]
        for run in islice(changing, 1):
            cancel_run(run.pk)
    assert len(seen) == len(set(seen)) > 9
    assert {str(run.pk) for run in runs[2:]} <= set(seen)


def test_filters_hold_on_every_page(root: Api, shop: Agent) -> None:
    runs = start(shop, 8)
    for run in runs[::2]:
        cancel_run(run.pk)
    assert walk(root, "/runs", status="queued") == [str(run.pk) for run in reversed(runs[1::2])]


def test_approvals_come_in_pages_too(root: Api, pending: Any) -> None:
    approvals = apart([pending(f"s{number}") for number in range(7)], "requested_at")
    assert walk(root, "/approvals") == [str(approval.pk) for approval in reversed(approvals)]
    Approval.objects.update(requested_at=timezone.now())
    assert len(set(walk(root, "/approvals", status="pending"))) == 7


def test_a_cursor_shows_no_more_than_one_may_see(root: Api, shop: Agent) -> None:
    start(shop, 4)
    cursor = root.get("/runs")[1]["next"]
    assert Api(make_user("stranger")).get("/runs", cursor=cursor)[1] == {"items": [], "next": None}


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "", "x", "?", "\x00", "\u00e9", "[" * 3000, "AAAA", encoded(None), encoded(7), encoded([]),
        encoded("ab"), encoded(["0001-01-01 00:00:00+23:59", ID]), encoded(["9999-12-31 23:59:59-23:59", ID]),
        encoded(["2026-01-01", "no uuid"]), encoded(["no time", ID]), encoded(["2026-13-01 00:00:00", ID]),
        encoded([1, 2]), encoded(["2026-01-01 00:00:00", ID, 3]), encoded(["2026-01-01 00:00:00", [ID]]),
        encoded(["2026-01-01 00:00:00\x00", ID]), encoded(["\ud800", ID]),
    ],
)  # fmt: skip
def test_a_bad_cursor_is_refused(root: Api, cursor: str) -> None:
    for path in ("/runs", "/approvals"):
        status, problem = root.get(path, cursor=cursor)
        assert (status, problem["type"]) == (400, "urn:agentruns:bad-cursor")


def test_a_made_up_cursor_is_refused(root: Api, shop: Agent) -> None:
    start(shop, 4)
    cursor = root.get("/runs")[1]["next"]
    assert root.get("/runs", cursor=cursor)[0] == 200
    body, _, signature = cursor.rpartition(":")
    for made_up in (body, f"{body}:{signature[:-1]}", f"x{cursor}", encoded(["2026-01-01 00:00:00", ID])):
        assert root.get("/runs", cursor=made_up)[0] == 400


def test_the_number_of_queries_does_not_grow(pending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.api.pagination.PAGE", 50)
    user = make_user("staff", "view_run", "decide_approval")
    for number in range(3):
        approval, asked = pending(f"s{number}"), []
        run = f"/runs/{approval.run_id}"
        for path in ("/runs", run, f"{run}/messages", "/approvals", f"/approvals/{approval.pk}"):
            api = Api(user)
            with CaptureQueriesContext(connection) as queries:
                assert api.get(path)[0] == 200
            asked.append(len(queries))
        # The session, the user, their own and their groups' permissions; then what is asked for, and the
        # definitions that its session has named, by which it is masked. Those of agents here are known. Of
        # cards also the messages that came since, of all of them at once.
        assert asked == [6, 6, 7, 7, 7]
