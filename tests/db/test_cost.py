"""What a step costs: commits and queries, counted; flat, however long the history is."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import connection

from agentruns import run_agent
from tests import rebuild
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(rebuild.ALWAYS, reason="reading everything again after each append is not the cost"),
]


@pytest.fixture(autouse=True)
def _no_look_for_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver looks every five seconds, and on a slow machine a run lasts as long."""
    monkeypatch.setattr("agentruns.engine.leases.DRAIN_CHECK_SECONDS", 3600.0)


def cost(turns: list[Any], session: str) -> tuple[int, int]:
    """Return commits that insert journal rows, and all statements, of a whole run."""
    agent = shop_agent(f"cost-{session}", *turns)
    with captured_statements() as statements:
        assert run_agent(agent, "do it", session, idempotency_key=session).status == "completed"
    return sum('INTO "agentruns_message"' in sql for sql in statements), len(statements)


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_step_of_n_calls_costs_n_plus_one_commits(calls: int) -> None:
    empty, _ = cost([], "empty")
    commits, _ = cost([{"tools": [call("post", text=str(n)) for n in range(calls)]}], "full")
    assert empty == 2, "start, and the final reply together with run_completed"
    assert commits - empty == calls + 1


def test_parallel_calls_start_in_one_commit() -> None:
    empty, _ = cost([], "empty")
    commits, _ = cost([{"tools": [call("search", query=str(n)) for n in range(4)]}], "full")
    assert commits - empty == 1 + 1 + 4


def test_the_cost_of_a_step_does_not_grow_with_the_history() -> None:
    turn = {"tools": [call("lookup", number="A1")]}
    _, short = cost([turn] * 2, "short")
    _, longer = cost([turn] * 4, "longer")
    _, longest = cost([turn] * 40, "longest")
    per_step = (longer - short) / 2
    assert longest - longer == 36 * per_step
    limit = {"sqlite": 10, "postgresql": 6}[connection.vendor]  # two commits: BEGIN, statements, COMMIT
    assert per_step <= limit


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the limit is one of SQLite's")
def test_ten_steps_of_two_calls_take_less_than_two_hundred_milliseconds() -> None:
    """The seeds' own limit, of CPU time: on a busy machine the clock on the wall tells nothing."""
    turn = {"tools": [call("lookup", number="A1"), call("lookup", number="A2")]}

    def seconds(session: str) -> float:
        agent = shop_agent(f"timed-{session}", *[turn] * 10)
        began = time.process_time()
        assert run_agent(agent, "do it", session).status == "completed"
        return time.process_time() - began

    assert min(seconds(str(number)) for number in range(5)) < 0.2


def test_a_run_in_a_session_of_its_own_asks_little_beyond_its_steps() -> None:
    agent = shop_agent("cost")
    with captured_statements() as captured:
        assert run_agent(agent, "do it", "alone").status == "completed"
    # Asked to drain; BEGIN, PostgreSQL's limit of waits for a lock, session twice, definition, run, the first
    # rows in a savepoint, COMMIT; BEGIN, the last rows, COMMIT; the result.
    limit = {"sqlite": 18, "postgresql": 15}[connection.vendor]
    assert len(captured) <= limit, [sql[:80] for sql in captured]
