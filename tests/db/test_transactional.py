"""A transactional tool commits its ORM writes and its result together, or neither."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction
from django.db.models import F

from agentruns import Agent, RunResult, ToolContext, cancel_run, run_agent, start_run, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal.masking import mask_of
from agentruns.journal.read import run_rows
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.db.dying import elsewhere
from tests.db.helpers import kill, outcomes, payloads, sound, the_run
from tests.db.racing import at_once, drive
from tests.effects import Effects
from tests.shop.agents import call, post, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def make(number: str, **fields: object) -> Order:
    return Order.objects.create(number=number, customer="Ada", total_cents=100, **fields)


@tool(transactional=True)
def write_and(number: str, then: str, ctx: ToolContext) -> str:
    """Write an order, then meet a fate."""
    make(number)
    if then == "not know":
        raise ToolDurabilityError("who knows")
    if then == "swallow":
        try:
            with transaction.atomic(durable=False, savepoint=False):
                make(number)
        except IntegrityError:
            pass
    if then == "write elsewhere":
        Order.objects.using("other").create(number=number, customer="Eve", total_cents=1)
    if then == "read elsewhere":
        Order.objects.using("other").count()
    if then == "hook raises":
        transaction.on_commit(lambda: 1 / 0)
    if then == "be cancelled":
        cancel_run(ctx.run_id)
    if then == "ask for a rollback":
        transaction.set_rollback(True)
    if then.startswith("leave a block open"):
        transaction.atomic().__enter__()
    if then.endswith("raise"):
        raise ValueError("no")
    if then == "nest":
        with suppress(ValueError), transaction.atomic():
            make("undone")
            raise ValueError("only the inner block is undone")
        with transaction.atomic():
            Order.objects.select_for_update().filter(number=number).update(note="nested")
    return "written"


def do(then: str) -> RunResult:
    agent = shop_agent("writer", {"tools": [call("write_and", number="A1", then=then)]}, tools=[write_and])
    return run_agent(agent, "do it", "s1", idempotency_key="k")


FAILURES = [
    "raise", "not know", "swallow", "write elsewhere", "ask for a rollback", "leave a block open",
    "leave a block open and raise",
]  # fmt: skip


@pytest.mark.parametrize("then", FAILURES)
def test_what_fails_leaves_no_write_and_an_error_result(then: str) -> None:
    run = the_run(do(then))
    assert (run.status, outcomes(run)) == ("completed", ["error"])
    assert (Order.objects.count(), Order.objects.using("other").count()) == (0, 0)
    told = payloads(run, "tool_result")[0]["content"]
    assert ("journal's database" in told) == (then == "write elsewhere")
    assert not connection.in_atomic_block and connection.get_autocommit(), "it serves the next run"
    assert sweep().errors == 0


@pytest.mark.parametrize("then", ["end well", "read elsewhere", "hook raises", "nest", "be cancelled"])
def test_what_goes_well_is_written_once_with_its_result(then: str) -> None:
    """A click during the block costs neither write nor result."""
    run = the_run(do(then))
    assert run.status == ("cancelled" if then == "be cancelled" else "completed")
    assert (outcomes(run), Order.objects.count()) == (["ok"], 1)
    assert Message.objects.filter(kind="tool_started").count() == 1


def test_the_start_of_the_next_call_is_in_no_handlers_transaction(effects: Effects) -> None:
    """What a handler did to its connection, as SET synchronous_commit, decides nothing about a start."""
    batches: list[list[str]] = []

    class Seen(DatabaseStore):
        def append(self, batch: Any, **options: Any) -> None:
            super().append(batch, **options)
            batches.append([row.kind for row in batch.rows])

    turn = {"tools": [call("write_and", number="A1", then="return"), call("post", text="x")]}
    drive(start_run(shop_agent("writer", turn, tools=[write_and, post]), "do it", "s1"), Seen())
    first = next(kinds for kinds in batches if "tool_result" in kinds)
    assert first == ["tool_result"]
    assert (effects.count(), Order.objects.count()) == (1, 1)


CODES = {
    "postgresql": {"40P01": True, "40001": True, "55P03": True, "23505": False, "P0001": False},
    "sqlite": {
        "SQLITE_BUSY": True,
        "SQLITE_BUSY_SNAPSHOT": True,
        "SQLITE_LOCKED": True,
        "SQLITE_FULL": False,
    },
}[connection.vendor]


class Meets:
    """A wrapper of a handler's statements: so many of them meet an error of the server."""

    def __init__(self, code: str, times: int) -> None:
        self.code, self.left = code, times

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "shop_order" not in sql or not self.left:
            return execute(sql, params, many, context)
        self.left -= 1
        if connection.vendor == "postgresql":  # a real error, which breaks the transaction
            raised = (
                f"DO $$ BEGIN RAISE EXCEPTION 'met %', '{self.code}' USING ERRCODE = '{self.code}'; END $$"
            )
            return execute(raised, None, False, context)
        cause = sqlite3.OperationalError(f"met {self.code}")
        cause.sqlite_errorname = self.code
        raise OperationalError(str(cause)) from cause


def meet(code: str, times: int, way: str) -> tuple[Run, int, str]:
    """Let a handler meet an error; give its run, how often it was entered and the result."""
    entered, meets = [], Meets(code, times)

    @tool(transactional=True, refuses=[LookupError])
    def write(ctx: ToolContext) -> str:
        entered.append(ctx.attempt)
        make("before")
        with connection.execute_wrapper(meets):
            try:
                make(f"A{len(entered)}")
            except DatabaseError as error:
                if way == "raises another":
                    raise ValueError("no order") from error
                if way == "refuses":
                    raise LookupError("somebody else has the order") from error
                if way == "raises":
                    raise
        if way == "goes on":
            make("after")
        return "written"

    agent = shop_agent("meeting", {"tools": [call("write")]}, tools=[write])
    run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
    assert entered == [1] * len(entered), "one attempt"
    return run, len(entered), str(payloads(run, "tool_result")[0]["content"])


WAYS = ["raises", "raises another", "swallows", "goes on"]


FIRST, *_, LAST = CODES
CASES = [*((code, "raises") for code in CODES), *((code, way) for code in (FIRST, LAST) for way in WAYS[1:])]


@pytest.mark.parametrize(("code", "way"), CASES)
def test_what_others_made_fail_is_tried_again_and_happens_once(code: str, way: str) -> None:
    run, entered, told = meet(code, 2, way)
    if CODES[code]:
        assert (run.status, outcomes(run), entered, told) == ("completed", ["ok"], 3, "written")
        assert {*Order.objects.values_list("number", flat=True)} - {"after"} == {"before", "A3"}
    else:
        assert (outcomes(run), entered, Order.objects.count()) == (["error"], 1, 0)
        assert f"Error: met {code}" in told and told.startswith("ValueError: no") == (way == "raises another")


@pytest.mark.parametrize("way", WAYS)
def test_a_conflict_that_does_not_pass_is_told_with_its_cause(way: str) -> None:
    run, entered, told = meet(FIRST, 100, way)
    assert (run.status, outcomes(run), entered, Order.objects.count()) == ("completed", ["error"], 6, 0)
    assert f"OperationalError: met {FIRST}" in told


def test_a_refusal_of_the_handlers_own_is_not_tried_again() -> None:
    run, entered, told = meet(FIRST, 100, "refuses")
    assert (outcomes(run), entered, Order.objects.count()) == (["error"], 1, 0)
    assert told.startswith("LookupError: somebody else")


@pytest.mark.parametrize("raises", [True, False])
def test_the_model_is_told_which_statement_failed(raises: bool) -> None:
    """The database's words, not that something was broken."""

    @tool(transactional=True)
    def twice(ctx: ToolContext) -> str:
        make("A1")
        try:
            make("A1")
        except IntegrityError:
            if raises:
                raise
        with suppress(DatabaseError):
            Order.objects.count()
        return "written"

    run = the_run(run_agent(shop_agent("twice", {"tools": [call("twice")]}, tools=[twice]), "do it", "s1"))
    told = payloads(run, "tool_result")[0]["content"]
    assert (outcomes(run), Order.objects.count()) == (["error"], 0)
    assert "IntegrityError: " in told and "number" in told, told
    assert raises or told.endswith("Everything the tool wrote was rolled back: nothing happened.")


def test_what_a_sensitive_tools_statement_failed_with_is_masked() -> None:
    @tool(transactional=True, sensitive_results=["*"])
    def twice(ctx: ToolContext) -> str:
        make("A1")
        with suppress(IntegrityError):
            make("A1")
        return "written"

    run = the_run(run_agent(shop_agent("twice", {"tools": [call("twice")]}, tools=[twice]), "do it", "s1"))
    (row,) = [row for row in run_rows("default", run.pk) if row.kind == "tool_result"]
    assert "IntegrityError" in row.payload["content"]
    shown = str(mask_of(run).row(row).payload["content"])
    assert "IntegrityError" not in shown and "rolled back" in shown


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
def test_two_runs_that_lock_two_orders_in_opposite_order_both_count() -> None:
    """A real deadlock: the server ends one of the two, and that one enters again."""
    make("A1"), make("A2")
    locked = {"A1": threading.Event(), "A2": threading.Event()}

    @tool(transactional=True)
    def count(first: str, second: str) -> str:
        for number in (first, second):
            Order.objects.select_for_update().get(number=number)
            locked[number].set()
            assert locked[second].wait(LIMIT)
        Order.objects.update(refunded_cents=F("refunded_cents") + 1)
        return "counted"

    def run(first: str, second: str) -> str:
        turn = {"tools": [call("count", first=first, second=second)]}
        agent = shop_agent(f"locks-{first}", turn, tools=[count])
        return str(run_agent(agent, "do it", first, idempotency_key=first).status)

    assert at_once(partial(run, "A1", "A2"), partial(run, "A2", "A1")) == ["completed", "completed"]
    assert [*Order.objects.values_list("refunded_cents", flat=True)] == [2, 2]
    assert [outcomes(each) for each in Run.objects.all()] == [["ok"], ["ok"]]


def counter(*fate: Any) -> Agent:
    """Declare an agent that counts one more on an order in a transaction, and calls `fate` inside."""

    @tool(transactional=True)
    def count(ctx: ToolContext) -> str:
        order = Order.objects.select_for_update().get(number="A1")
        order.refunded_cents += 1
        order.save()
        for one in fate:
            one(ctx)
        return f"attempt {ctx.attempt}"

    make("A1")
    return shop_agent("counter", {"tools": [call("count")]}, tools=[count])


def count_once(*fate: Any) -> Run:
    return the_run(run_agent(counter(*fate), "do it", "s1", idempotency_key="k"))


def counted_once(run: Run) -> Run:
    """Check that the run has ended, and its count is there once."""
    run = sound(run)
    assert (run.status, outcomes(run), Order.objects.get().refunded_cents) == ("completed", ["ok"], 1)
    return run


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite: nobody takes over while it writes")
def test_the_writes_of_a_zombie_roll_back_with_its_lease() -> None:
    """The other worker waits for the zombie's row lock, and then counts on what was there before it."""
    workers = []

    def take_over(ctx: ToolContext) -> None:
        if ctx.attempt > 1:
            return
        elsewhere(lambda: kill(Run.objects.get()))
        workers.append(threading.Thread(target=elsewhere, args=(sweep,)))
        workers[0].start()
        started = Message.objects.filter(kind="tool_started")
        wait_for(lambda: elsewhere(started.all().count) == 2, "the other worker to start the call again")

    run = count_once(take_over)
    workers[0].join(LIMIT)
    assert payloads(counted_once(run), "tool_result")[0]["content"] == "attempt 2"
    assert not payloads(run, "late_result"), "what was rolled back is no evidence"


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite: the heartbeat waits for the block")
def test_a_heartbeat_keeps_the_lease_of_a_block_that_takes_longer(settings: Any) -> None:
    settings.AGENTRUNS_LEASE_SECONDS, settings.AGENTRUNS_HEARTBEAT_SECONDS = 60, 0.2

    def outlive(ctx: ToolContext) -> None:
        def ends() -> Any:
            return elsewhere(lambda: Run.objects.get().lease_expires_at)

        until = ends()
        wait_for(lambda: ends() > until, "a heartbeat in the block")
        assert elsewhere(sweep).found == 0

    counted_once(count_once(outlive))


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="PostgreSQL: others write during the block")
def test_a_block_that_outlives_its_lease_keeps_others_out_until_it_is_done(settings: Any) -> None:
    """SQLite has one writer: nobody can take the run over before the block has committed."""
    settings.AGENTRUNS_LEASE_SECONDS, settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.3, 0.1
    workers = []

    def outlive(ctx: ToolContext) -> None:
        wait_for(Run.objects.runnable().exists, "the lease to expire")
        workers.append(threading.Thread(target=elsewhere, args=(sweep,)))
        workers[0].start()
        time.sleep(0.2)  # waits: until the other one wants the write lock; it may also come later

    run = count_once(outlive)
    workers[0].join(LIMIT)
    sweep()  # on a slow machine the lease may have run out again on the way
    assert len(payloads(counted_once(run), "tool_started")) == 1


def test_two_runs_that_lock_the_same_order_both_count() -> None:
    agent = counter()
    for number in range(4):
        start_run(agent, "do it", f"s{number}")
    at_once(sweep, sweep)
    assert set(Run.objects.values_list("status", flat=True)) == {"completed"}
    assert Order.objects.get().refunded_cents == 4
    assert {outcome for run in Run.objects.all() for outcome in outcomes(run)} == {"ok"}


def test_ctrl_c_inside_the_block_undoes_it_and_the_call_runs_again() -> None:
    def stop(ctx: ToolContext) -> None:
        if ctx.attempt == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count_once(stop)
    assert Order.objects.get().refunded_cents == 0
    assert sweep().completed == 1
    counted_once(Run.objects.get())
