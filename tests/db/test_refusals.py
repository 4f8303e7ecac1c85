"""Exceptions of handlers: those that say that nothing happened, and those after which nobody knows.

Whatever leaves the outcome of a call unknown: a person is asked before its tool acts again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from agentruns import (
    Agent,
    NotOccurred,
    Occurred,
    RunResult,
    ToolContext,
    ToolRefused,
    Unknown,
    approve,
    cancel_run,
    deny,
    http_refusal,
    pause_run,
    resolve_orphan,
    resume_run,
    run_agent,
    send_message,
    service_refusal,
    start_run,
    tool,
)
from agentruns.exceptions import SessionBusyError, ToolDurabilityError
from agentruns.models import Approval, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.runs.waiting import uncleared
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages, frozen_clock
from agentruns.tools import Tool
from tests.db.doubts import wire
from tests.db.dying import die_at
from tests.db.helpers import names, only_the_first_is_late, outcomes, payloads, the_run, user
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

Answer = Occurred | NotOccurred | Unknown


class CardDeclined(Exception):
    """Says that the bank took nothing."""


class StolenCard(CardDeclined):
    pass


class ReadTimeout(Exception):
    """Stands for that of httpx."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class HTTPError(Exception):
    """Stands for that of an HTTP client."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.response = type("Response", (), {"status_code": status})


PROJECT = {"AGENTRUNS_REFUSALS": [f"{__name__}.CardDeclined", "agentruns.http_refusal"]}
REFUSALS: list[tuple[Exception, Any, dict[str, Any]]] = [
    (ToolRefused("no such card"), (), {}),
    (StolenCard("stolen"), CardDeclined, {}),
    (StolenCard("stolen"), (KeyError, CardDeclined), {}),
    (HTTPError(402), http_refusal, {}),
    (HTTPError(404), [CardDeclined, http_refusal], {}),
    (CardDeclined("no"), (), PROJECT),
    (HTTPError(422), (), PROJECT),
]
DOUBTS: list[tuple[Exception, Any, dict[str, Any]]] = [
    (ValueError("a bug"), (), {}),
    (ValueError("a bug"), CardDeclined, PROJECT),
    (HTTPError(409), http_refusal, PROJECT),
    (HTTPError(503), http_refusal, PROJECT),
    (CardDeclined("no"), lambda error: error.code == 3, {}),  # an answer that raises is none
    (ValueError("a bug"), (), {"AGENTRUNS_REFUSALS": ["nowhere.Error"]}),
    (ExceptionGroup("several", [ToolRefused("one of them")]), (), {}),
    (TimeoutError("timed out"), (), {}),
    (ReadTimeout("timed out"), (), {}),
    (Mute(), (), {}),
]


def payer(error: Exception | None, **options: Any) -> Tool[Any, Any]:
    """Return a tool that records its entry and then raises."""

    @tool(**options)
    def pay(ctx: ToolContext, cents: int) -> str:
        Effects.from_environment().record(ctx.idempotency_key, tool="pay")
        if error is not None:
            raise error
        return "paid"

    return pay


def go_on(*turns: object, tools: list[Any], key: str = "k1", **options: Any) -> RunResult:
    """Call as a supervisor does: the same call, whatever became of the one before."""
    model = ScriptedModel([*turns, {"text": "done"}])
    agent = Agent(f"payer-{key}", instructions="Pay.", tools=tools, model=model, **options)
    return run_agent(agent, "do it", "s1", idempotency_key=key)


def again(run_id: object) -> RunResult:
    """Sweep, and return the result of a run."""
    sweep()
    return result_of(Run.objects.get(pk=str(run_id)).pk)


def busy_agent() -> Agent:
    """Make an agent of which the session "busy" has an unfinished run."""
    agent = Agent("other", instructions="Help.", model=ScriptedModel([{"text": "done"}]))
    start_run(agent, "first", "busy")
    return agent


NOBODYS = "00000000-0000-7000-8000-000000000000"
charged: list[object] = []  # what a handler did before a service refused


def charge(amount: object = 0) -> str:
    charged.append(amount)
    return "busy"


def tell(text: str) -> Run:
    return start_run("other", text, "busy")


# Handlers whose first call is a service, which refuses.
def starts(ctx: ToolContext, cents: int) -> str:
    run = start_run("other", f"{cents} of {ctx.call_id}", "busy", owner=ctx.user, context={"cents": cents})
    return str(run.pk)


def starts_by_module(ctx: ToolContext, cents: int) -> None:
    import agentruns

    if cents != 0:
        agentruns.start_run("other", "more", session="busy")


def starts_by_agent(ctx: ToolContext, cents: int) -> None:
    OTHER[-1].start("more", "busy")


def writes(ctx: ToolContext, cents: int) -> None:
    send_message("nowhere", "hello")


def cancels(ctx: ToolContext, cents: int) -> None:
    cancel_run(NOBODYS)
    charge(cents)


def approves(ctx: ToolContext, cents: int) -> None:
    approve(NOBODYS, None)


# Handlers that did something before the refusal, or may have.
def charges_first(ctx: ToolContext, cents: int) -> None:
    charge(cents)
    start_run("other", "more", "busy")


def charges_in_arguments(ctx: ToolContext, cents: int) -> None:
    start_run("other", "more", charge(cents))


def charges_after(ctx: ToolContext, cents: int) -> None:
    try:
        start_run("other", "more", "busy")
    except SessionBusyError:
        charge(cents)
        raise


def starts_several(ctx: ToolContext, cents: int) -> None:
    for session in ("free", "busy"):
        start_run("other", "more", session)


def starts_again(ctx: ToolContext, cents: int) -> None:
    session = "free"
    while True:
        start_run("other", "more", session)
        session = "busy"


def starts_as_a_key(ctx: ToolContext, cents: int) -> None:
    sorted(("free", "busy"), key=BY_SESSION)


def drives(ctx: ToolContext, cents: int) -> None:
    run_agent("other", "more", "busy")


def raises(ctx: ToolContext, cents: int) -> None:
    raise SessionBusyError("It is busy.")


def changes(ctx: ToolContext, cents: int) -> None:
    LATEST["cents"] = cents
    start_run("other", "more", "busy")


def starts_through_another(ctx: ToolContext, cents: int) -> None:
    tell("more")


OTHER: list[Agent] = []
LATEST: dict[str, int] = {}
BY_SESSION = partial(start_run, "other", "more")
FIRST = [starts, starts_by_module, starts_by_agent, writes, cancels, approves]
LATER = [
    charges_first, charges_in_arguments, charges_after, starts_several, starts_again, starts_as_a_key, drives,
    raises, changes, starts_through_another,
]  # fmt: skip


def refused_inside(handler: Any, **options: Any) -> Run:
    """Drive a run that calls a tool with this handler twice, while the session "busy" is busy."""
    OTHER[:] = [busy_agent()]
    result = go_on(PAY, MORE, tools=[tool(name="pay", **options)(handler)])
    check_messages(result.messages[: None if result.status == "completed" else -1])
    return the_run(result)


@pytest.mark.parametrize("handler", FIRST)
def test_a_service_that_refuses_the_first_call_of_a_handler_leaves_no_doubt(handler: Any) -> None:
    run = refused_inside(handler)
    assert (run.status, outcomes(run)) == ("completed", ["error", "error"])
    assert all(told["content"].endswith(" Nothing happened.") for told in payloads(run, "tool_result"))
    assert Run.objects.exclude(pk=run.pk).count() == 1


@pytest.mark.parametrize("refuses", [(), service_refusal])
@pytest.mark.parametrize("handler", LATER)
def test_a_service_that_refuses_a_later_call_leaves_a_doubt_unless_the_tool_names_it(
    handler: Any, refuses: Any
) -> None:
    run = refused_inside(handler, refuses=refuses)
    expected = ("completed", ["error", "error"]) if refuses else ("awaiting-approval", ["error"])
    assert (run.status, outcomes(run)) == expected


PAY, MORE = {"tools": [call("pay", cents=1)]}, {"tools": [call("pay", cents=2)]}


@pytest.mark.parametrize(("error", "refuses", "settings"), REFUSALS)
@pytest.mark.parametrize("declares", ["nothing", "reconcile"])
def test_a_refusal_is_an_error_and_asks_nobody(
    declares: str, error: Exception, refuses: Any, settings: dict[str, Any], effects: Effects
) -> None:
    asked: list[str] = []

    def ask(ctx: ToolContext, args: dict[str, Any]) -> Answer:
        asked.append(ctx.call_id)
        return Unknown("no record")

    options = {"reconcile": ask, "timeout": 60} if declares == "reconcile" else {}
    with override_settings(**settings):
        result = go_on(PAY, MORE, tools=[payer(error, refuses=refuses, **options)])
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error", "error"], 2)
    assert (asked, payloads(run, "orphan_found"), Approval.objects.count()) == ([], [], 0)
    for told in payloads(run, "tool_result"):
        assert told["content"] == f"{type(error).__name__}: {error} Nothing happened."
        assert "in_doubt" not in told
    check_messages(result.messages)


@pytest.mark.parametrize(("error", "refuses", "settings"), DOUBTS)
def test_any_other_exception_leaves_a_doubt_and_the_next_call_asks(
    error: Exception, refuses: Any, settings: dict[str, Any], effects: Effects
) -> None:
    with override_settings(**settings):
        result = go_on(PAY, MORE, tools=[payer(error, refuses=refuses)])
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("awaiting-approval", ["error"], 1)
    (told,) = payloads(run, "tool_result")
    assert (told["in_doubt"], told["is_error"]) == (True, True)
    assert "may or may not have happened" in told["content"]
    check_messages(result.messages[:-1])  # the last turn still waits for its result
    (asked,) = payloads(run, "approval_requested")
    (wait,) = uncleared("default", run)
    assert (asked["settles"], wait.call_id in asked["why"], wait.gates_tool) == ([wait.call_id], True, True)


@pytest.mark.parametrize("declares", ["safe_to_retry", "transactional"])
def test_an_error_of_a_tool_that_can_be_repeated_is_an_error_as_ever(declares: str, effects: Effects) -> None:
    """It is not tried again: the model decides. Arguments that do not fit are no doubt either."""
    pay = payer(ValueError("a bug"), **{declares: True})
    run = the_run(go_on({"tools": [call("pay", cents="many")]}, PAY, MORE, tools=[pay]))
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"] * 3, 2)
    unfit, *told = payloads(run, "tool_result")
    assert not any("in_doubt" in one for one in (unfit, *told))
    assert ["ValueError: a bug" in one["content"] for one in told] == [True, True]


def test_approving_the_next_call_settles_the_doubt_about_the_failed_one(effects: Effects) -> None:
    """Each failure costs one card: approved, the next call runs, and its own failure asks again.

    Where two have to approve, the second one settles it; an edit voids what the first approved.
    """
    pay = payer(ConnectionError("lost"), requires_approval=lambda args, ctx: False, approvals=2)
    result = go_on(PAY, MORE, {"tools": [call("pay", cents=3)]}, tools=[pay])
    run, (first,) = the_run(result), [told.call_id for told in uncleared("default", the_run(result))]
    card = result.pending[0].pk
    approve(card, user("ann", "decide_approval"))
    approve(card, user("ben", "decide_approval"), arguments={"cents": 4})
    assert len(uncleared("default", run)) == 1
    approve(card, user("cid", "decide_approval"), digest=Approval.objects.get().digest)
    assert uncleared("default", run) == []
    assert payloads(run, "approval_decided")[-1]["settles"] == [first]
    result = again(run.pk)
    (second,) = [wait.call_id for wait in uncleared("default", run)]
    assert (result.status, effects.count(), second != first) == ("awaiting-approval", 2, True)
    assert first not in result.pending[0].why and second in result.pending[0].why
    deny(result.pending[0].pk, None, "enough")
    assert again(run.pk).status == "completed"
    later = go_on(MORE, tools=[pay], key="k2")
    assert later.status == "awaiting-approval", "a denial is no verdict"
    assert second in later.pending[0].why
    assert effects.count() == 2


@pytest.mark.parametrize(("verdict", "cards"), [("occurred", 0), ("not_occurred", 0), ("unknown", 1)])
def test_a_verdict_settles_the_doubt_about_a_failed_call(verdict: str, cards: int, effects: Effects) -> None:
    """It is recorded and runs nothing, also after the run has ended."""
    pay = payer(ConnectionError("lost"))
    run = the_run(go_on(PAY, tools=[pay]))
    (wait,) = uncleared("default", run)
    resolve_orphan(run.pk, wait.call_id, verdict, None, evidence="the statement")
    later = go_on(MORE, tools=[pay], key="k2")
    assert (len(later.pending), effects.count()) == (cards, 2 - cards)
    assert the_run(result_of(run.pk)).status == "completed"


def test_the_other_calls_of_the_reply_to_that_tool_are_not_run(effects: Effects) -> None:
    """Also one that a person has approved before there was a doubt; other tools go on."""
    pay = payer(ValueError("a bug"), requires_approval=lambda args, ctx: args["cents"] > 1)
    calls = [call("post", text="x"), call("pay", cents=2), call("pay", cents=1), call("pay", cents=3)]
    result = go_on({"tools": [*calls, call("post", text="y")]}, tools=[pay, *TOOLS])
    for card in result.pending:
        approve(card.pk, None)
    result = again(result.run_id)
    run = the_run(result)
    assert (run.status, outcomes(run)) == ("completed", ["ok", "error", "cancelled", "cancelled", "ok"])
    assert names(effects) == ["post", "pay", "post"]
    for told in payloads(run, "tool_result")[2:4]:
        assert "an earlier call's outcome is unknown" in told["content"]
    assert sorted(Approval.objects.values_list("status", flat=True)) == ["cancelled", "consumed"]
    check_messages(result.messages)


def test_a_stateless_run_tells_the_model_and_enforces_nothing(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call in doubt is reconciled without waiting for a handler that has ended."""
    agent = shop_agent("stateless", PAY, MORE, tools=[payer(ValueError("a bug"))])
    result = run_agent(agent, "do it")
    assert (result.status, effects.count()) == ("completed", 2)
    told = [row["content"][0] for row in result.messages if row["content"][0]["type"] == "tool_result"]
    assert ["may or may not have happened" in block["content"] for block in told] == [True, True]
    pay = payer(ToolDurabilityError("lost"), reconcile=ANSWERS[0][0], timeout=300)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    result = run_agent(shop_agent("payer", PAY, tools=[pay]), "do it")
    assert (result.status, effects.count()) == ("completed", 3)
    assert result.messages[2]["content"][0]["content"] == "paid, says the bank"


def fails(ctx: ToolContext, args: dict[str, Any]) -> Answer:
    raise OSError("the bank is closed")


def no_idea(ctx: ToolContext, args: dict[str, Any]) -> Unknown:
    return Unknown("no record")


def leaves(ctx: ToolContext, args: dict[str, Any]) -> Answer:
    raise SystemExit(1)


ANSWERS: list[tuple[Callable[..., Any], str, list[str]]] = [
    (lambda ctx, args: Occurred("paid, says the bank"), "completed", ["ok"]),
    (lambda ctx, args: NotOccurred(), "completed", ["error"]),
    (no_idea, "orphaned", []),
    (fails, "orphaned", []),
    (leaves, "orphaned", []),
]


@pytest.mark.parametrize(("ask", "status", "ends"), ANSWERS)
@pytest.mark.parametrize("timeout", [None, 30])
def test_what_raised_is_asked_about_when_its_time_is_over(
    timeout: int | None, ask: Callable[..., Any], status: str, ends: list[str], effects: Effects
) -> None:
    """Without a time limit at once: nothing says how long the request may still be on its way."""
    asked: list[str] = []

    def reconcile(ctx: ToolContext, args: dict[str, Any]) -> Answer:
        asked.append(ctx.idempotency_key)
        return ask(ctx, args)  # type: ignore[no-any-return]

    pay = payer(ConnectionError("reset by peer"), reconcile=reconcile, timeout=timeout)
    with frozen_clock() as clock:
        result = go_on(PAY, tools=[pay])
        run = the_run(result)
        (found, *_) = payloads(run, "orphan_found")
        assert (found["action"], found["raised"]) == ("reconcile", "ConnectionError: reset by peer")
        if timeout is not None:
            assert (asked, result.status, run.lease_expires_at) == ([], "queued", None)
            clock.forward(seconds=29)
            sweep()
            assert (asked, outcomes(run)) == ([], [])
            clock.forward(seconds=2)
            sweep()
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count(), len(asked)) == (status, ends, 1, 1)
    for told in payloads(run, "tool_result"):
        assert told["reconciled"] is True
        if told["is_error"]:
            assert told["content"] == "ConnectionError: reset by peer Nothing happened."
        else:
            assert told["raised"] == "ConnectionError: reset by peer"
    if not ends:
        evidence = payloads(run, "orphan_found")[-1]["evidence"]
        assert "reset by peer" in evidence
        assert "did not return within" not in evidence, "nobody waits for a thread that has ended"
        assert resume_run(run.pk).status == "completed"
        assert (outcomes(the_run(result)), effects.count()) == (["unknown"], 1)


def test_a_reconciler_that_hangs_puts_the_call_in_doubt(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_first_is_late(monkeypatch, lambda: True, times=0)
    over = threading.Event()
    pay = payer(ConnectionError("lost"), reconcile=lambda ctx, args: over.wait(LIMIT), timeout=0.2)
    with frozen_clock() as clock:
        result = go_on(PAY, tools=[pay])
        clock.forward(seconds=1)
        sweep()
    over.set()
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("orphaned", [], 1)
    assert "did not return within 0.2 s" in payloads(run, "orphan_found")[-1]["evidence"]


def test_a_verdict_of_staff_on_what_raised_enters_the_handler_again(effects: Effects) -> None:
    """A person says that it did not happen: unlike reconcile, that is asked for once each time."""
    pay = payer(ConnectionError("lost"), reconcile=no_idea)
    result = go_on(PAY, tools=[pay])
    resolve_orphan(str(result.run_id), result.orphans[0], "not_occurred", None, evidence="the statement")
    result = again(result.run_id)
    assert (result.status, effects.count()) == ("orphaned", 2)
    assert len({line["key"] for line in effects.lines()}) == 1


class SoftTimeLimitExceeded(Exception):
    """Stands for that of celery and billiard, which is known by its name."""


FATES: dict[str, BaseException] = {
    "durability error": ToolDurabilityError("the answer was lost"),
    "time limit": SoftTimeLimitExceeded(),
    "memory": MemoryError(),
    "exit": SystemExit(1),
    "ctrl-c": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError(),
}


def shaky(ctx: ToolContext, fate: str, text: str) -> str:
    """Act; the first time something happens after it."""
    ledger = Effects.from_environment()
    ledger.record("act", call=ctx.call_id)
    if ledger.count() == 1 and fate == "timeout":
        wait_for(ctx.is_cancelled, "the time to be over")
    elif ledger.count() == 1:
        raise FATES[fate]
    return "done"


def surfaced(*turns: object, tools: list[Any]) -> RunResult:
    """Call until the model was told of the call in doubt."""
    with suppress(KeyboardInterrupt):
        if go_on(*turns, tools=tools).status == "orphaned":
            assert sweep().found == 0, "a sweep never decides for a person"
    return go_on(*turns, tools=tools)


@pytest.mark.parametrize("fate", [*FATES, "timeout"])
def test_a_person_is_asked_each_time_the_tool_would_act_again(
    fate: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_first_is_late(monkeypatch, lambda: effects.count() == 1)
    calls = [call("shaky", fate=fate, text=text) for text in ("send it", "send it", "please send it")]
    declared = tool(shaky, timeout=0.3) if fate == "timeout" else tool(shaky)
    result = surfaced(*[{"tools": [one]} for one in calls], tools=[declared])
    doubtful = effects.lines()[0]["call"]
    assert (result.status, effects.count()) == ("awaiting-approval", 1)
    assert doubtful in result.pending[0].why
    approve(result.pending[0].pk, None, reason="it did not go out")
    result = again(result.run_id)
    assert (result.status, effects.count()) == ("awaiting-approval", 2), "an approval clears no doubt"
    assert doubtful in result.pending[0].why
    deny(result.pending[0].pk, None, "enough")
    assert sweep().completed == 1
    run = the_run(result)
    assert (outcomes(run), effects.count()) == (["unknown", "ok", "denied"], 2)
    check_messages(result_of(run.pk).messages)


@pytest.mark.parametrize("fate", ["cancelled", "exit", "memory", "time limit", "ctrl-c"])
def test_what_stops_a_handler_does_not_stop_the_sweep(fate: str, effects: Effects) -> None:
    """Only ctrl-c stops the process; the call is in doubt each time."""
    shaken = shop_agent("shaky", {"tools": [call("shaky", fate=fate, text="x")]}, tools=[tool(shaky)])
    run = start_run(shaken, "x", "s1")
    start_run(shop_agent("steady"), "do it", "s2")
    if fate == "ctrl-c":
        with pytest.raises(KeyboardInterrupt):
            sweep()
        run.refresh_from_db()
        assert (run.status, run.lease_expires_at, run.attempts) == ("queued", None, 1)
    swept = sweep()
    assert (swept.waiting, swept.completed, swept.errors) == (1, 1, 0)
    run = the_run(result_of(run.pk))
    assert (run.status, outcomes(run), effects.count()) == ("orphaned", [], 1)
    assert fate != "ctrl-c" or payloads(run, "run_resumed")[0]["reason"] == "the last drive failed"


def test_each_verdict_lifts_its_own_doubt_and_no_other(effects: Effects) -> None:
    def ask(number: int) -> RunResult:
        return go_on({"tools": [call("wire", text=str(number))]}, tools=[wire], key=f"k{number}")

    first = ask(1)
    resume_run(str(first.run_id))
    second = ask(2)
    approve(second.pending[0].pk, None)
    second = again(second.run_id)
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

    result = go_on({"tools": [call("slow")]}, tools=[slow])
    run = the_run(result)
    assert (run.status, run.blocked_reason, run.attempts) == ("paused", "attempts_exhausted", 5)
    assert len(payloads(run, "tool_started")) == 5
    cured.append(True)
    assert resume_run(run.pk).status == "completed"
    run = the_run(result)
    assert (outcomes(run), run.attempts) == (["ok"], 0)
    assert len({line["key"] for line in effects.lines()}) == 1


def test_a_caller_who_asks_is_told_when_reconcile_does_not_know(effects: Effects) -> None:
    """The answer Unknown() falls through to what becomes of a tool that declares nothing."""
    run = die_at("after_tool", shop_agent("payer", PAY, tools=[payer(None, reconcile=no_idea)]))
    assert resume_run(run.pk).status == "completed"
    assert (outcomes(the_run(result_of(run.pk))), effects.count()) == (["unknown"], 1)


@pytest.mark.parametrize("where", ["handler", "reconcile"])
def test_what_turns_autocommit_off_and_does_not_know_hides_no_row(where: str) -> None:
    def at(place: str) -> Unknown:
        if place == where:
            transaction.set_autocommit(False)
        return Unknown("no record")

    @tool(reconcile=lambda ctx, args: at("reconcile"))
    def pay() -> str:
        raise ToolDurabilityError(at("handler").evidence)

    result = go_on({"tools": [call("pay")]}, tools=[pay])
    assert connection.get_autocommit()
    connection.close()  # what was not committed is gone with it
    assert the_run(result).status == "orphaned"
    assert len(payloads(the_run(result), "orphan_found")) == 2, "reconcile was asked, then it was held"


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
    with suppress(KeyboardInterrupt):
        go_on({"tools": calls}, tools=[read, *TOOLS])
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

    Order.objects.create(number="A1", customer="Ada", total_cents=1)
    with frozen_clock() as clock:
        result = go_on(PAY, tools=[payer(ConnectionError("lost"), reconcile=look, timeout=5)])
        clock.forward(seconds=6)
        sweep()
    assert payloads(the_run(result), "tool_result")[0]["content"] == "seen"


@pytest.mark.parametrize("declared", [{}, {"safe_to_retry": True}, {"transactional": True}])
def test_an_unexpected_exception_is_logged_with_its_traceback(
    declared: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(pin: str) -> str:
        """Read what is not there, as the author of a first tool does."""
        owners: dict[str, str] = {}
        return owners["owner " + pin]

    go_on({"tools": [call("broken", pin="pin-7306")]}, tools=[tool(**declared, sensitive=["pin"])(broken)])
    [record] = [each for each in caplog.records if each.getMessage().startswith("Tool failed")]
    text = logging.Formatter().format(record)
    assert (record.levelno, 'return owners["owner " + pin]' in text) == (logging.ERROR, True)
    assert "pin-7306" not in text
