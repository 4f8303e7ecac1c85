"""What a step costs: commits and queries, counted; flat, however long the history is."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import connection, connections
from django.db.backends.signals import connection_created

from agentruns import run_agent, start_run
from agentruns.engine.worker import answer
from tests import rebuild
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("nothing_by_time"),
    pytest.mark.skipif(rebuild.ALWAYS, reason="reading everything again after each append is not the cost"),
]


def cost(turns: list[Any], session: str) -> tuple[int, int]:
    """Count the commits that insert journal rows, and all statements, of a whole run."""
    agent = shop_agent(f"cost-{session}", *turns)
    with captured_statements() as statements:
        assert run_agent(agent, "do it", session, idempotency_key=session).status == "completed"
    return sum('INTO "agentruns_message"' in sql for sql in statements), len(statements)


@pytest.mark.parametrize(
    ("calls", "commits"),
    [
        *([[call("post", text=str(number)) for number in range(n)], 1 + n] for n in (1, 2, 5)),
        [[call("search", query=str(number)) for number in range(4)], 1 + 1 + 4],
    ],
    ids=["1", "2", "5", "parallel calls start in one"],
)
def test_a_step_of_n_calls_costs_n_plus_one_commits(calls: list[Any], commits: int) -> None:
    empty, _ = cost([], "empty")
    assert empty == 2, "start, and the final reply together with run_completed"
    assert cost([{"tools": calls}], "full")[0] - empty == commits


def test_the_cost_of_a_step_does_not_grow_with_the_history() -> None:
    turn = {"tools": [call("lookup", number="A1")]}
    _, short = cost([turn] * 2, "short")
    _, longer = cost([turn] * 4, "longer")
    _, longest = cost([turn] * 40, "longest")
    per_step = (longer - short) / 2
    assert longest - longer == 36 * per_step
    # Two commits: BEGIN, three statements and COMMIT each, or one statement that is all of that.
    limit = {"sqlite": 10, "postgresql": 2}[connection.vendor]
    assert per_step <= limit


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the limit is one of SQLite's")
def test_ten_steps_of_two_calls_take_less_than_two_hundred_milliseconds() -> None:
    """The seeds' own limit, of CPU time: on a busy machine the clock on the wall tells nothing."""
    turn = {"tools": [call("lookup", number="A1"), call("lookup", number="A2")]}

    def seconds(session: str) -> float:
        agent = shop_agent(f"timed-{session}", *[turn] * 10)
        began = time.process_time()  # waits: not for the clock; CPU time, the best of many
        assert run_agent(agent, "do it", session).status == "completed"
        return time.process_time() - began  # waits: the same

    # The other core of the same processor may be at work, so the first tries may be slow.
    assert any(seconds(str(number)) < 0.2 for number in range(100))


def test_a_run_asks_little_beyond_its_steps() -> None:
    agent = shop_agent("cost")
    # SQLite: BEGIN, session, definition, run, rows, COMMIT; BEGIN, session, run, rows, COMMIT. On PostgreSQL
    # one statement is the start, and one the end. Nothing is asked for the result. The next run of the
    # session asks little more.
    limits = {"sqlite": (11, 20), "postgresql": (2, 6)}[connection.vendor]
    for text, limit in zip(("do it", "and now?"), limits, strict=True):
        with captured_statements() as captured:
            assert run_agent(agent, text, "alone").status == "completed"
        assert len(captured) <= limit, [sql[:80] for sql in captured]


def test_a_queued_run_asks_as_little() -> None:
    agent = shop_agent("cost")
    with captured_statements() as captured:
        run = start_run(agent, "do it", "alone", idempotency_key="k")
    assert len(captured) <= {"sqlite": 6, "postgresql": 1}[connection.vendor], captured
    with captured_statements() as captured:
        answer(str(run.pk))
    # The run; the claim: BEGIN, the limit of waits, the run, its update, COMMIT; its rows; the last rows.
    assert len(captured) <= {"sqlite": 11, "postgresql": 4}[connection.vendor], captured
    run.refresh_from_db()
    assert run.status == "completed"


def test_a_connection_that_lives_long_is_used_by_the_next_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONN_MAX_AGE counts for the journal's own, too, which ends with the thread's."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    connection.close()
    opened: list[Any] = []

    def count(**facts: Any) -> None:
        opened.append(facts["connection"])

    connection_created.connect(count)
    try:
        for number in range(3):
            assert run_agent(shop_agent("cost"), "do it", f"s{number}").status == "completed"
        assert [one.alias for one in opened] == ["default", "default of the journal"]
        connections.close_all()
        assert [one.connection for one in opened] == [None, None]
        assert run_agent(shop_agent("cost"), "do it", "after").status == "completed"
        assert len(opened) == 4
    finally:
        connection_created.disconnect(count)
        connection.close()
