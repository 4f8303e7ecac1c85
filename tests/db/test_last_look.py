"""The last look at the lease, right before a handler's first instruction; and a handler's own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from django.db import connection, transaction

from agentruns import NotOccurred, Occurred, ToolContext, resolve_orphan, tool
from agentruns.exceptions import LeaseLostError
from agentruns.journal import telemetry
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.utils import failpoints
from tests.crash.processes import expire_lease
from tests.db.dying import die_at, elsewhere
from tests.db.helpers import only_the_first_is_late, outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)
ONE_WRITER = connection.vendor == "sqlite"
first_spans: list[Callable[[], object]] = []  # what blocks the next span of a tool
longer: list[Callable[[], object]] = []  # what makes the leases of this test long from now on


class Slow:
    """A listener whose span takes its time before a handler is entered."""

    @contextmanager
    def span(self, name: str, facts: dict[str, Any]) -> Iterator[None]:
        if name == "tool" and first_spans:
            first_spans.pop()()
        yield

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Hear of it."""

    def carried(self) -> Any:
        return nullcontext()


@pytest.fixture(autouse=True)
def _short_leases(settings: Any) -> Iterator[None]:
    """A lease lasts a second until one was waited out, and no heartbeat extends it."""
    settings.AGENTRUNS_LEASE_SECONDS = 1
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 3600
    settings.AGENTRUNS_TELEMETRY = f"{__name__}.Slow"
    telemetry._made.clear()
    longer[:] = [lambda: setattr(settings, "AGENTRUNS_LEASE_SECONDS", 600)]
    yield
    first_spans.clear()
    telemetry._made.clear()


def act(ctx: ToolContext) -> str:
    Effects.from_environment().record(ctx.call_id, attempt=ctx.attempt)
    return f"attempt {ctx.attempt}"


def known(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
    return Occurred("it is there") if Effects.from_environment().count(ctx.call_id) else NotOccurred()


def wait_out_the_lease() -> None:
    elsewhere(lambda: expire_lease(Run.objects.get()))
    longer[0]()  # what is extended or claimed now stays live, however slow the machine


def lose_the_run() -> None:
    """Let another worker end the run once the lease is over, with a verdict where it waits for one."""

    def is_completed() -> bool:
        sweep()
        run = Run.objects.get()
        if run.status == "orphaned":
            resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
        return run.status == "completed"

    wait_out_the_lease()
    elsewhere(lambda: wait_for(is_completed, "the other worker"))


def run_with(*tools: Any) -> Run:
    """Run an agent that calls each of the tools in one reply; whatever becomes of this worker."""
    turn = {"tools": [call(one.name) for one in tools]}
    return the_run(run_turns(turn, tools=list(dict.fromkeys(tools))))


def attempts(effects: Effects) -> list[int]:
    return [line["attempt"] for line in effects.lines()]


def plain(ctx: ToolContext) -> str:
    return act(ctx)


async def in_a_loop(ctx: ToolContext) -> str:
    return act(ctx)


TOOLS = {
    "nothing": tool(plain),
    "reconcile": tool(plain, reconcile=known),
    "timeout": tool(plain, safe_to_retry=True, timeout=LIMIT),
    "async": tool(in_a_loop, safe_to_retry=True),
    "transactional": tool(plain, transactional=True),
}


@pytest.mark.parametrize("kind", TOOLS)
def test_no_handler_is_entered_after_a_wait_that_outlasted_the_lease(kind: str, effects: Effects) -> None:
    is_writing = kind == "transactional" and ONE_WRITER  # then nobody can take over
    first_spans.append(wait_out_the_lease if is_writing else lose_the_run)
    run = run_with(TOOLS[kind])
    assert (run.status, outcomes(run), attempts(effects)) == ("completed", ["ok"], [1 if is_writing else 2])
    assert [one["never_entered"] for one in payloads(run, "late_result")] == [True] * (not is_writing)


@pytest.mark.parametrize("taken", [False, True], ids=["over", "taken"])
def test_nothing_of_a_parallel_group_is_entered_then(
    taken: bool, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody took over, a call that was not entered has its turn again."""
    monkeypatch.setattr("agentruns.engine.tool_calls.PARALLEL", 1)
    first_spans.append(lose_the_run if taken else wait_out_the_lease)
    run = run_with(*[tool(plain, safe_to_retry=True, parallel=True)] * 2)
    assert (run.status, outcomes(run), attempts(effects)) == ("completed", ["ok", "ok"], [1 + taken] * 2)
    late = Message.objects.filter(kind="late_result")
    assert [row.payload["never_entered"] for row in late] == [True, True] * taken
    assert len(set(late.values_list("call_id", flat=True))) == 2 * taken


def test_a_thread_that_nobody_waits_for_any_more_enters_no_handler(
    effects: Effects, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its handler something takes longer than the tool's time; a person says that nothing happened."""
    settings.AGENTRUNS_LEASE_SECONDS = 600
    only_the_first_is_late(monkeypatch, lambda: not first_spans)
    let_go = threading.Event()
    first_spans.append(lambda: let_go.wait(LIMIT))
    run = run_with(tool(plain, timeout=1))
    assert (run.status, attempts(effects)) == ("orphaned", [])
    resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
    assert elsewhere(sweep).completed == 1
    let_go.set()
    wait_for(Message.objects.filter(kind="late_result").exists, "what became of the first attempt")
    late = Message.objects.get(kind="late_result")
    assert (late.attempt, late.payload["never_entered"], attempts(effects)) == (1, True, [2])


def test_the_outside_world_is_asked_under_a_lease_only(effects: Effects) -> None:
    asked: list[int] = []

    def known_and_counted(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
        asked.append(threading.get_ident())
        return known(ctx, args)

    agent = shop_agent("asks", {"tools": [call("plain")]}, tools=[tool(plain, reconcile=known_and_counted)])
    run = die_at("before_tool", agent)
    failpoints.arm("after_repair", lose_the_run)  # between recovery and the question
    sweep()
    assert (Run.objects.get(pk=run.pk).status, attempts(effects)) == ("completed", [2])
    assert len(asked) == 1, "by the worker that has the run"
    assert asked[0] != threading.get_ident()


CASES: list[Any] = [
    *itertools.product(["nothing", "timeout", "async"], [False, True]),
    ("transactional", False),
    pytest.param("in a block", False, marks=pytest.mark.skipif(ONE_WRITER, reason="the block itself")),
]


@pytest.mark.parametrize(("kind", "taken"), CASES)
def test_a_handler_that_prepares_for_long_looks_before_it_acts(
    kind: str, taken: bool, effects: Effects
) -> None:
    """A transactional one needs no more time: what is written is rolled back if somebody has the run."""

    def work(ctx: ToolContext) -> str:
        """Prepare for longer than the lease, then act if the run is still this worker's."""
        if ctx.attempt == 1:
            (lose_the_run if taken else wait_out_the_lease)()
        with transaction.atomic() if kind == "in a block" else nullcontext():
            ctx.require_lease()
            if kind == "in a block":
                transaction.set_rollback(True)
        if kind != "transactional":
            assert elsewhere(lambda: Run.objects.runnable().exists()) is False, "the lease is live"
        return act(ctx)

    async def work_async(ctx: ToolContext) -> str:
        return work(ctx)

    options: dict[str, Any] = {"transactional": kind == "transactional"}
    if kind == "timeout":
        options = {"timeout": LIMIT, "safe_to_retry": True}
    run = run_with(tool(work_async if kind == "async" else work, **options))
    assert (run.status, outcomes(run), attempts(effects)) == ("completed", ["ok"], [2 if taken else 1])
    late = payloads(run, "late_result")
    assert [one.get("never_entered", False) for one in late] == [False] * taken
    assert all(one["is_error"] and "LeaseLostError" in one["content"] for one in late)


def test_a_handler_that_nobody_waits_for_may_not_act(
    effects: Effects, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_LEASE_SECONDS = 600
    refused, entered = list[str](), threading.Event()
    only_the_first_is_late(monkeypatch, entered.is_set)

    @tool(timeout=0.3)
    def slow(ctx: ToolContext) -> str:
        """Prepare for longer than the time of the tool."""
        entered.set()
        wait_for(ctx.is_cancelled, "the time to be over")
        try:
            ctx.require_lease()
        except LeaseLostError as error:
            refused.append(str(error))
            raise
        return act(ctx)

    assert (run_with(slow).status, attempts(effects)) == ("orphaned", [])
    wait_for(lambda: bool(refused), "the look")
    assert "Stop before you act" in refused[0]
    ToolContext(run_id="r", call_id="c", tool_name="t", idempotency_key="k").require_lease()  # has no engine
