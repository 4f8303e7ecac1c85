"""User code may do to its connection whatever it likes: the journal is committed on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections

from agentruns import ToolContext, run_agent, tool
from agentruns.journal import connection as journal_connection
from agentruns.models import CommitFence, Message
from tests.db.dying import elsewhere
from tests.db.helpers import outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.hostile import HOSTILITIES, clean
from tests.shop.agents import act, call, shop_agent
from tests.shop.models import Order
from tests.statements import captured_statements, statement_wrapper

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    clean()


@pytest.mark.parametrize("place", ["predicate", "model", "handler"])
@pytest.mark.parametrize("hostility", HOSTILITIES.values(), ids=HOSTILITIES)
def test_each_payment_is_journaled_before_it_and_happens_once(
    place: str, hostility: Callable[[], None], effects: Effects
) -> None:
    def at(here: str, value: Any, *_asked: Any) -> Any:
        if here == place:
            hostility()
        return value

    @tool(requires_approval=lambda arguments, ctx: at("predicate", False))
    def pay(cents: int, ctx: ToolContext) -> str:
        rows = Message.objects.filter(run_id=ctx.run_id, kind="tool_started", call_id=ctx.call_id)
        assert elsewhere(rows.count) == 1, "the start is committed before the handler is entered"
        return str(at("handler", act("pay", ctx)))

    turns = [*({"tools": [call("pay", cents=number)]} for number in (1, 2, 3)), {"text": "paid"}]
    agent = shop_agent("hostile", *(partial(at, "model", turn) for turn in turns), tools=[pay])
    with suppress(RuntimeError, DatabaseError):  # the caller's own look at the result meets it, too
        run_agent(agent, "pay three times", "s1", idempotency_key="k")
    clean()
    run = the_run(run_agent(agent, "pay three times", "s1", idempotency_key="k"))
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["ok"] * 3, 3)
    assert not Message.objects.filter(run=run, kind="late_result").exists()


def test_a_transactional_call_runs_after_one_that_left_its_connection_read_only() -> None:
    """The connections that Django lists, and user code may close or change, are not the journal's."""
    seen: list[str] = []

    @tool
    def look() -> str:
        seen.extend(one.alias for one in connections.all(initialized_only=True))
        HOSTILITIES["read_only"]()
        return "seen"

    @tool(transactional=True)
    def book() -> str:
        return str(Order.objects.create(number="booked", customer="Ada", total_cents=1).number)

    with captured_statements() as statements:
        result = run_turns({"tools": [call("look"), call("book")]}, tools=[look, book])
    assert len(statements) > 3
    assert {*seen} <= {*connections}
    assert not journal_connection._opened.__dict__, "closed with the drive"
    assert outcomes(the_run(result)) == ["ok", "ok"]
    assert Order.objects.filter(number="booked").count() == 1


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no poolers")
def test_each_append_is_on_the_disk_whatever_a_pooler_passes_on(effects: Effects) -> None:
    """As from another client of the same server connection, which SET synchronous_commit for itself."""
    in_force: list[str] = []

    def spoilt(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if 'INTO "agentruns_message"' not in sql or context["connection"].alias == "default":
            return execute(sql, params, many, context)
        raw = context["connection"].connection
        raw.execute("SET SESSION synchronous_commit TO off")
        with raw.transaction():  # shows what was in force when the statement's own would be committed
            result = execute(sql, params, many, context)
            in_force.append(raw.execute("SHOW synchronous_commit").fetchone()[0])
        return result

    with statement_wrapper(spoilt):
        run_turns({"tools": [call("post", text="x")]})
    assert in_force == ["on"] * 3


def another_transaction() -> None:
    """Undo the transaction, and write and commit in another one."""
    with connection.cursor() as cursor:
        cursor.execute("ROLLBACK")
    Order.objects.create(number="written", customer="Eve", total_cents=1)
    with connection.cursor() as cursor, suppress(DatabaseError):  # SQLite has committed already
        cursor.execute("COMMIT")


RAW: dict[str, Callable[[], None]] = {
    "another transaction by SQL": another_transaction,
    "commit by SQL": lambda: connection.cursor().execute("COMMIT") and None,
    "rollback by SQL": lambda: connection.cursor().execute("ROLLBACK") and None,
    "commit by the driver": lambda: connection.connection.commit(),
    "rollback by the driver": lambda: connection.connection.rollback(),
    "SQL of the driver": lambda: connection.connection.cursor().execute("COMMIT") and None,
    "script of the driver": lambda: connection.connection.executescript("SELECT 1;"),  # SQLite's
    "close": lambda: connection.close(),
    "close by the driver": lambda: connection.connection.close(),
    "close all": lambda: connections.close_all(),
    "a block left open": HOSTILITIES["open_block"],
}
# They end no transaction, but what the journal adds to it may fail.
SPOILING = (
    "read_only", "no_time", "statements_refused", "failed_transaction", "other_schema", "not_synchronous",
)  # fmt: skip
RAW |= {name: HOSTILITIES[name] for name in SPOILING}


@pytest.mark.parametrize("swallows", [False, True], ids=["raises", "swallows"])
@pytest.mark.parametrize("way", RAW)
def test_a_transactional_handler_cannot_end_its_transaction(way: str, swallows: bool) -> None:
    entered: list[str] = []

    @tool(transactional=True)
    def write(ctx: ToolContext) -> str:
        entered.append(ctx.call_id)
        Order.objects.create(number="written", customer="Eve", total_cents=1)
        try:
            RAW[way]()
        except Exception:
            if not swallows:
                raise
        return "written"

    result = run_turns({"tools": [call("write")]}, tools=[write])
    clean()
    run = the_run(result)
    assert len(entered) == 1, "not five times"
    assert not CommitFence.objects.exists()
    written = Order.objects.filter(number="written").count()
    if run.status == "completed":
        [settled] = payloads(run, "tool_result")
        assert written == (settled["outcome"] == "ok"), settled
    else:  # nobody can know: a person is asked
        assert (run.status, written) == ("orphaned", 0)


def test_what_a_handler_committed_behind_the_journal_is_in_doubt(effects: Effects) -> None:
    """Nobody can say of it that nothing happened, and it is not done again."""

    @tool(transactional=True)
    def write(ctx: ToolContext) -> str:
        raw = connection.connection
        raw.rollback()
        raw.cursor().execute(
            "INSERT INTO shop_order (number, customer, total_cents, refunded_cents, note)"
            " VALUES ('written', 'Eve', 1, 0, '')"
        )
        raw.commit()
        return "written"

    result = run_turns({"tools": [call("write")]}, tools=[write])
    clean()
    run = the_run(result)
    assert (run.status, outcomes(run), Order.objects.count()) == ("orphaned", [], 1)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no statement_timeout")
def test_the_time_that_a_transactional_handler_gives_statements_is_not_the_journals() -> None:
    entered: list[str] = []

    @tool(transactional=True)
    def write(ctx: ToolContext) -> str:
        entered.append(ctx.call_id)
        Order.objects.create(number="written", customer="Eve", total_cents=1)
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout TO 20")
        return "written"

    def slowly(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if 'INTO "agentruns_message"' in sql:
            context["connection"].connection.execute("SELECT pg_sleep(0.1)")  # as on a busy server
        return execute(sql, params, many, context)

    with statement_wrapper(slowly):
        run = the_run(run_turns({"tools": [call("write")]}, tools=[write]))
    assert (len(entered), outcomes(run), Order.objects.count()) == (1, ["ok"], 1)
