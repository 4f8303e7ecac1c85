"""Whatever leaves the outcome of a call unknown: a person is asked before its tool acts again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import connection, transaction

from agentruns import (
    Agent,
    NotOccurred,
    Occurred,
    RunResult,
    ToolContext,
    Unknown,
    approve,
    cancel_run,
    deny,
    pause_run,
    resolve_orphan,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.exceptions import ToolDurabilityError
from agentruns.models import Approval, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages, frozen_clock
from tests.db.dying import die_at
from tests.db.helpers import only_the_first_is_late, outcomes, payloads, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.shop.models import Order
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


class SoftTimeLimitExceeded(Exception):
    """Stands for that of celery and billiard, which is known by its name."""


class ReadTimeout(Exception):
    """Stands for that of httpx."""


def raising(error: BaseException) -> Callable[[], None]:
    def fate() -> None:
        raise error

    return fate


FATES: dict[str, Callable[[], None]] = {
    "durability error": raising(ToolDurabilityError("the answer was lost")),
    "time limit": raising(SoftTimeLimitExceeded()),
    "memory": raising(MemoryError()),
    "exit": raising(SystemExit(1)),
    "ctrl-c": raising(KeyboardInterrupt()),
    "cancelled": raising(asyncio.CancelledError()),
}


TIMEOUT = "timeout"


def act(ctx: ToolContext, fate: str) -> str:
    """Act; the first time something happens after it."""
    ledger = Effects.from_environment()
    ledger.record("act", call=ctx.call_id)
    if ledger.count() == 1 and fate == TIMEOUT:
        wait_for(ctx.is_cancelled, "the time to be over")
    elif ledger.count() == 1:
        FATES[fate]()
    return "done"


@tool
def shaky(ctx: ToolContext, fate: str, text: str) -> str:
    """Declare nothing."""
    return act(ctx, fate)


@tool(name="shaky", timeout=0.3)
def shaky_in_time(ctx: ToolContext, fate: str, text: str) -> str:
    """Declare a time only."""
    return act(ctx, fate)


def go_on(agent: Agent) -> RunResult:
    """Call as a supervisor does: the same call, whatever became of the one before."""
    return run_agent(agent, "do it", "s1", idempotency_key="k")


def surfaced(agent: Agent) -> RunResult:
    """Call until the model was told of the call in doubt."""
    with suppress(KeyboardInterrupt):
        if go_on(agent).status == "orphaned":
            assert sweep().found == 0, "a sweep never decides for a person"
    return go_on(agent)


@pytest.mark.parametrize("fate", [*FATES, TIMEOUT])
def test_a_person_is_asked_each_time_the_tool_would_act_again(
    fate: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_first_is_late(monkeypatch, lambda: effects.count() == 1)
    calls = [call("shaky", fate=fate, text=text) for text in ("send it", "send it", "please send it")]
    declared = shaky_in_time if fate == TIMEOUT else shaky
    agent = shop_agent("shaky", *[{"tools": [one]} for one in calls], tools=[declared])
    result = surfaced(agent)
    doubtful = effects.lines()[0]["call"]
    assert (result.status, effects.count()) == ("awaiting-approval", 1)
    assert doubtful in result.pending[0].why
    approve(result.pending[0].pk, None, reason="it did not go out")
    sweep()
    result = result_of(Run.objects.get().pk)
    assert (result.status, effects.count()) == ("awaiting-approval", 2), "an approval clears no doubt"
    assert doubtful in result.pending[0].why
    deny(result.pending[0].pk, None, "enough")
    assert sweep().completed == 1
    run = the_run(result)
    assert (outcomes(run), effects.count()) == (["unknown", "ok", "denied"], 2)
    check_messages(result_of(run.pk).messages)


def test_ctrl_c_inside_a_handler_stops_the_process_and_leaves_the_call_in_doubt(effects: Effects) -> None:
    agent = shop_agent("shaky", {"tools": [call("shaky", fate="ctrl-c", text="x")]}, tools=[shaky])
    with pytest.raises(KeyboardInterrupt):
        go_on(agent)
    run = Run.objects.get()
    assert (run.status, run.lease_expires_at, run.attempts) == ("queued", None, 1)
    sweep()
    run = the_run(result_of(run.pk))
    assert (run.status, outcomes(run), effects.count()) == ("orphaned", [], 1)
    assert payloads(run, "run_resumed")[0]["reason"] == "the last drive failed"


@pytest.mark.parametrize("fate", ["cancelled", "exit", "memory", "time limit"])
def test_what_stops_a_handler_does_not_stop_the_sweep(fate: str) -> None:
    start_run(shop_agent("shaky", {"tools": [call("shaky", fate=fate, text="x")]}, tools=[shaky]), "x", "s1")
    start_run(shop_agent("steady"), "do it", "s2")
    swept = sweep()
    assert (swept.waiting, swept.completed, swept.errors) == (1, 1, 0)


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ReadTimeout("timed out")])
def test_a_read_timeout_leaves_the_call_in_doubt_and_says_what_may_have_happened(
    error: Exception, effects: Effects
) -> None:
    @tool
    def wire(ctx: ToolContext) -> str:
        """Send, and do not hear the answer."""
        effects.record("wire")
        raise error

    turn = {"tools": [call("wire")]}
    result = go_on(shop_agent("wired", turn, turn, tools=[wire]))
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("awaiting-approval", ["error"], 1)
    (told,) = payloads(run, "tool_result")
    assert (told["in_doubt"], "may or may not have happened" in told["content"]) == (True, True)
    check_messages(result.messages[:-1])  # the last turn still waits for its result


def test_each_verdict_lifts_its_own_doubt_and_no_other(effects: Effects) -> None:
    @tool
    def wire(text: str) -> str:
        """Never know."""
        effects.record("wire")
        raise ToolDurabilityError("who knows")

    def ask(number: int) -> RunResult:
        agent = shop_agent(f"wire-{number}", {"tools": [call("wire", text=str(number))]}, tools=[wire])
        return run_agent(agent, "do it", "s1", idempotency_key=f"k{number}")

    first = ask(1)
    resume_run(str(first.run_id))
    second = ask(2)
    approve(second.pending[0].pk, None)
    sweep()
    second = result_of(Run.objects.get(pk=str(second.run_id)).pk)
    resume_run(str(second.run_id))
    both = [*first.orphans, *second.orphans]
    third = ask(3)
    assert all(doubtful in third.pending[0].why for doubtful in both)
    deny(third.pending[0].pk, None, "not now")
    sweep()
    resolve_orphan(str(first.run_id), both[0], "unknown", None)
    resolve_orphan(str(first.run_id), both[0], "occurred", None, evidence="the statement")
    fourth = ask(4)
    why = fourth.pending[0].why
    assert (both[0] in why, both[1] in why) == (False, True)
    deny(fourth.pending[0].pk, None, "not now")
    sweep()
    resolve_orphan(str(second.run_id), both[1], "not_occurred", None)
    fifth = ask(5)
    assert (fifth.status, Approval.objects.count(), effects.count()) == ("orphaned", 3, 3)
    the_run(fifth)


def test_timeouts_in_one_process_count_as_attempts_and_resume_counts_anew(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_first_is_late(monkeypatch, lambda: effects.count() == len(starts()), times=5)
    cured: list[bool] = []

    def starts() -> list[dict[str, Any]]:
        return payloads(Run.objects.get(), "tool_started")

    @tool(safe_to_retry=True, timeout=0.05)
    def slow(ctx: ToolContext) -> str:
        """Take too long until cured."""
        effects.record(ctx.idempotency_key)
        if not cured:
            wait_for(lambda: ctx.is_cancelled() or bool(cured), "the time to be over")
        return "done"

    result = go_on(shop_agent("slow", {"tools": [call("slow")]}, tools=[slow]))
    run = the_run(result)
    assert (run.status, run.blocked_reason, run.attempts) == ("paused", "attempts_exhausted", 5)
    assert len(payloads(run, "tool_started")) == 5
    cured.append(True)
    assert resume_run(run.pk).status == "completed"
    run = the_run(result)
    assert (outcomes(run), run.attempts) == (["ok"], 0)
    assert len({line["key"] for line in effects.lines()}) == 1


def no_idea(ctx: ToolContext, args: dict[str, Any]) -> Unknown:
    return Unknown("no record")


def test_a_caller_who_asks_is_told_when_reconcile_does_not_know(effects: Effects) -> None:
    """The answer Unknown() falls through to what becomes of a tool that declares nothing."""

    @tool(reconcile=no_idea)
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        effects.record(ctx.idempotency_key)
        return "paid"

    agent = shop_agent("payer", {"tools": [call("pay")]}, tools=[pay])
    run = die_at("after_tool", agent)
    assert resume_run(run.pk).status == "completed"
    assert (outcomes(the_run(result_of(run.pk))), effects.count()) == (["unknown"], 1)


@pytest.mark.parametrize("timeout", [None, 300])
def test_a_reconciler_that_leaves_the_process_does_not_know(timeout: float | None, effects: Effects) -> None:
    def leaves(ctx: ToolContext, args: dict[str, Any]) -> None:
        raise SystemExit(1)

    @tool(reconcile=leaves, timeout=timeout)
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        effects.record(ctx.idempotency_key)
        raise ConnectionError("lost")

    with frozen_clock() as clock:
        start_run(shop_agent("payer", {"tools": [call("pay")]}, tools=[pay]), "do it", "s1")
        sweep()
        clock.forward(seconds=301)
        sweep()
    run = the_run(result_of(Run.objects.get().pk))
    assert (run.status, outcomes(run), effects.count()) == ("orphaned", [], 1)
    evidence = payloads(run, "orphan_found")[-1]["evidence"]
    assert "did not return within" not in evidence, "nobody waits for a thread that has ended"


@pytest.mark.parametrize("where", ["handler", "reconcile"])
def test_what_turns_autocommit_off_and_does_not_know_hides_no_row(where: str, effects: Effects) -> None:
    def careless(ctx: ToolContext, args: dict[str, Any]) -> Unknown:
        transaction.set_autocommit(False)
        return Unknown("no record")

    @tool(reconcile=careless if where == "reconcile" else no_idea)
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        effects.record(ctx.idempotency_key)
        if where == "handler":
            transaction.set_autocommit(False)
        raise ToolDurabilityError("lost")

    result = go_on(shop_agent("payer", {"tools": [call("pay")]}, tools=[pay]))
    assert connection.get_autocommit()
    connection.close()  # what was not committed is gone with it
    assert the_run(result).status == "orphaned"
    assert len(payloads(the_run(result), "orphan_found")) == 2, "reconcile was asked, then it was held"


def test_a_stateless_call_in_doubt_is_reconciled_without_waiting_for_a_handler_that_has_ended(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    @tool(reconcile=lambda ctx, args: Occurred("paid, says the bank"), timeout=300)
    def pay(ctx: ToolContext) -> str:
        """Pay, and do not know."""
        effects.record(ctx.idempotency_key)
        raise ToolDurabilityError("lost")

    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    result = run_agent(shop_agent("payer", {"tools": [call("pay")]}, tools=[pay]), "do it")
    assert (result.status, effects.count()) == ("completed", 1)
    assert result.messages[2]["content"][0]["content"] == "paid, says the bank"


@pytest.mark.parametrize("word", ["pause", "cancel", "die"])
def test_a_call_after_a_parallel_group_is_not_in_doubt_before_the_group_is_done(
    word: str, effects: Effects
) -> None:
    """Nothing is journaled as started while its worker still waits for something else."""
    happens: dict[str, Callable[[str], object]] = {"pause": pause_run, "cancel": cancel_run, "die": str}

    @tool(safe_to_retry=True, parallel=True)
    def read(ctx: ToolContext, number: int) -> str:
        """Read; the last one is the slowest, and something happens to the run."""
        if number == 2 and ctx.attempt == 1:
            wait_for(lambda: len(payloads(Run.objects.get(), "tool_result")) == 1, "the first one's result")
            happens[word](ctx.run_id)
            if word == "die":
                raise KeyboardInterrupt
        return "read"

    calls = [call("read", number=1), call("post", text="x"), call("read", number=2)]
    agent = shop_agent("group", {"tools": calls}, tools=[read, *TOOLS])
    with suppress(KeyboardInterrupt):
        go_on(agent)
    run = the_run(result_of(Run.objects.get().pk))
    assert (effects.count(), len(payloads(run, "tool_started"))) == (0, 2)
    if word == "cancel":
        assert (run.status, outcomes(run)) == ("cancelled", ["ok", "ok", "cancelled"])
        return
    assert resume_run(run.pk).status == "completed"
    assert (outcomes(the_run(result_of(run.pk))), effects.count()) == (["ok"] * 3, 1)


@pytest.mark.django_db(transaction=False)
def test_a_reconciler_inside_a_testcase_sees_what_the_test_sees() -> None:
    def look(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
        return Occurred("seen") if Order.objects.exists() else NotOccurred()

    @tool(reconcile=look, timeout=5)
    def order(ctx: ToolContext) -> str:
        """Order, and lose the answer."""
        Order.objects.create(number="A1", customer="Ada", total_cents=1)
        raise ConnectionError("lost")

    with frozen_clock() as clock:
        result = go_on(shop_agent("orders", {"tools": [call("order")]}, tools=[order]))
        clock.forward(seconds=6)
        sweep()
    assert payloads(the_run(result), "tool_result")[0]["content"] == "seen"
