"""The lists: what is in them, how they are found, and that more rows cost no more queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import run_agent, start_run
from agentruns.models import Run
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db

RUNS = "admin:agentruns_run_changelist"
APPROVALS = "admin:agentruns_approval_changelist"


def listed(name: str, **query: str) -> Page:
    response = browser("superuser").get(reverse(name), query)
    assert response.status_code == 200
    return read(response)


def found(page: Page, obj: Any) -> bool:
    return any(link.startswith(url(obj)) for link in page.links)


def test_runs_say_where_they_stand_and_what_they_wait_for(world: World) -> None:
    approval = world.waiting(actor=user("viewer"))
    runs = [approval.run, world.orphaned(), world.paused(), world.queued(), world.completed()]
    page = listed(RUNS)
    assert all(found(page, run) for run in runs)
    for shown in (
        "waiting", "in doubt", "paused", "queued", "completed", "viewer",
        f"Waits for approval: {approval.title}", "A call of dies is in doubt", "Paused: the bank is down",
        "gated-waiting", "waiting",
    ):  # fmt: skip
        assert shown in page.text


def test_runs_are_filtered_by_status_and_agent(world: World) -> None:
    approval, completed = world.waiting(), world.completed()
    assert not found(listed(RUNS, status="awaiting-approval"), completed)
    assert found(listed(RUNS, status="awaiting-approval"), approval.run)
    assert found(listed(RUNS, status="person"), approval.run)
    assert not found(listed(RUNS, status="person"), completed)
    assert found(listed(RUNS, agent=completed.agent), completed)
    assert not found(listed(RUNS, agent=completed.agent), approval.run)


def test_runs_are_found_by_id_session_and_requester(world: World) -> None:
    run = world.waiting("ticket-42", actor=user("decider")).run
    other = world.completed("order-7")
    whole = str(run.pk)
    for term in (whole, whole.upper(), whole[:18], whole.replace("-", ""), whole[:-1], "ticket-4", "DECI"):
        page = listed(RUNS, q=term)
        assert found(page, run), term
    for term in ("ticket-42", "decider", whole):
        assert not found(listed(RUNS, q=term), other), term
    assert not found(listed(RUNS, q="abc%' OR 1=1"), run)
    assert not found(listed(RUNS, q="%"), run)


def test_approvals_show_what_is_pending_unless_asked(world: World) -> None:
    pending, ended = world.waiting("one"), world.waiting("two")
    from agentruns import deny

    deny(ended.pk, None, "no")
    page = listed(APPROVALS)
    assert found(page, pending)
    assert not found(page, ended)
    assert found(listed(APPROVALS, status="all"), ended)
    assert found(listed(APPROVALS, status="denied"), ended)
    assert not found(listed(APPROVALS, status="denied"), pending)
    assert not found(listed(APPROVALS, agent=ended.run.agent), pending)
    assert not found(listed(APPROVALS, tool="nothing"), pending)
    assert found(listed(APPROVALS, tool="refund", q="one"), pending)


def test_a_card_says_everything_in_the_list(world: World) -> None:
    approval = world.waiting(actor=user("viewer"))
    page = listed(APPROVALS)
    for shown in (approval.title, "refund", "high", "waiting", "viewer", approval.run.agent):
        assert shown in page.text


def test_who_waits_longest_is_first(world: World) -> None:
    first, second = world.waiting("first"), world.waiting("second")
    links = [link for link in listed(APPROVALS).links if "/change/" in link]
    assert [link.split("?")[0] for link in links if "approval" in link] == [url(first), url(second)]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda world, name: world.waiting(name), id="waiting"),
        pytest.param(lambda world, name: world.orphaned(name), id="orphaned"),
        pytest.param(lambda world, name: world.paused(name), id="paused"),
        pytest.param(lambda world, name: world.completed(name), id="completed"),
    ],
)
@pytest.mark.parametrize("name", [RUNS, APPROVALS])
def test_more_rows_cost_no_more_queries(
    world: World, name: str, make: Callable[[World, str], object]
) -> None:
    client = browser("superuser")

    def count() -> int:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert (
                client.get(reverse(name), {"status": "all"} if name == APPROVALS else {}).status_code == 200
            )
        return len(queries)

    make(world, "0")
    world.waiting("always")
    few = count()
    for number in range(1, 9):
        make(world, str(number))
    assert count() == few
    assert few <= 8


def test_the_pages_cost_no_more_with_more_rows(world: World) -> None:
    client = browser("superuser")

    def cost(run: Run) -> int:
        with CaptureQueriesContext(connection) as queries:
            assert client.get(url(run)).status_code == 200
        return len(queries)

    short = world.completed()
    turns = [{"tools": [call("post", text=str(number))]} for number in range(12)]
    result = run_agent(shop_agent("long", *turns), "go", "long")
    assert cost(Run.objects.get(pk=result.run_id)) == cost(short) == 12  # one for the people to assign it to


def test_large_columns_stay_in_the_database(world: World) -> None:
    start_run(shop_agent("large", {"tools": []}), "LARGE " * 1000, "large")
    with CaptureQueriesContext(connection) as queries:
        browser("superuser").get(reverse(RUNS))
    listing = [query["sql"] for query in queries if '"agentruns_run"."agent"' in query["sql"]]
    assert listing
    assert not [sql for sql in listing if '"agentruns_run"."input"' in sql]


def test_the_list_leads_back_to_its_filters(world: World) -> None:
    world.paused()
    page = listed(RUNS, status="paused")
    assert any("_changelist_filters=status%3Dpaused" in link for link in page.links)


@pytest.mark.parametrize(
    "lookup",
    [
        "run/?input__contains=refund",
        "run/?input__regex=(r+)%2B$",
        "run/?session__key__startswith=w",
        "approval/?status=pending&arguments__contains=5000",
        "approval/?run__input__contains=refund",
        "apitoken/?digest__startswith=a",
    ],
)
def test_lists_filter_by_no_lookup_of_a_url(world: World, lookup: str) -> None:
    world.waiting(actor=user("viewer"))
    response = browser("superuser").get(f"/admin/agentruns/{lookup}")
    assert response.status_code in (302, 400)  # one that found nothing would tell as much
    assert response.status_code == 400 or response.headers["Location"].endswith("?e=1")
