"""What a step costs: commits and queries, counted; flat, however long the history is."""

from __future__ import annotations

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


def test_a_step_of_n_calls_costs_n_plus_one_commits() -> None:
    empty, _ = cost([], "empty")
    assert empty == 2, "start, and the final reply together with run_completed"
    for n in (1, 2, 5):
        calls = [call("post", text=str(number)) for number in range(n)]
        assert cost([{"tools": calls}], f"s{n}")[0] - empty == 1 + n
    parallel = [call("search", query=str(number)) for number in range(4)]
    assert cost([{"tools": parallel}], "parallel")[0] - empty == 1 + 1 + 4, "they start in one"


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
    with captured_statements() as captured:
        run = start_run(agent, "do it", "queued", idempotency_key="k")
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
    connection_created.connect(count := lambda **facts: opened.append(facts["connection"]), weak=False)
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
