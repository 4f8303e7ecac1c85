"""Exceptions of handlers: those that say that nothing happened, and those after which nobody knows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
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
    deny,
    http_refusal,
    resolve_orphan,
    resume_run,
    run_agent,
    tool,
)
from agentruns.models import Approval, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.services.waiting import uncleared
from agentruns.testing import ScriptedModel, check_messages, frozen_clock
from agentruns.tools import Tool
from tests.db.helpers import names, only_the_first_is_late, outcomes, payloads, the_run, user
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

DENIED = "an earlier call's outcome is unknown"
Answer = Occurred | NotOccurred | Unknown


class CardDeclined(Exception):
    """Says that the bank took nothing."""


class StolenCard(CardDeclined):
    """One of them."""


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
]


def payer(error: Exception | None, **options: Any) -> Tool[Any, Any]:
    """Return a tool that records its entry and then raises."""

    @tool(**options)
    def pay(ctx: ToolContext, cents: int) -> str:
        """Pay."""
        Effects.from_environment().record(ctx.idempotency_key, tool="pay")
        if error is not None:
            raise error
        return "paid"

    return pay


def go_on(*turns: object, tools: list[Any], key: str = "k1", **options: Any) -> RunResult:
    agent = Agent(
        f"payer-{key}",
        instructions="Pay.",
        tools=tools,
        model=ScriptedModel([*turns, {"text": "done"}]),
        **options,
    )
    return run_agent(agent, "do it", "s1", idempotency_key=key)


def again(run_id: object) -> RunResult:
    """Sweep, and return the result of a run."""
    sweep()
    return result_of(Run.objects.get(pk=str(run_id)).pk)


PAY, MORE = {"tools": [call("pay", cents=1)]}, {"tools": [call("pay", cents=2)]}


@pytest.mark.parametrize(("error", "refuses", "settings"), REFUSALS)
@pytest.mark.parametrize("declares", ["nothing", "reconcile"])
def test_a_refusal_is_an_error_and_asks_nobody(
    declares: str,
    error: Exception,
    refuses: Any,
    settings: dict[str, Any],
    effects: Effects,
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
    (asked,) = payloads(run, "approval_requested")
    (wait,) = uncleared("default", run)
    assert (asked["settles"], wait.call_id in asked["why"], wait.gates_tool) == ([wait.call_id], True, True)


@pytest.mark.parametrize("declares", ["safe_to_retry", "transactional"])
def test_an_error_of_a_tool_that_can_be_repeated_is_an_error_as_ever(declares: str, effects: Effects) -> None:
    result = go_on(PAY, MORE, tools=[payer(ValueError("a bug"), **{declares: True})])
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error", "error"], 2)
    assert not any("in_doubt" in told for told in payloads(run, "tool_result"))


def test_arguments_that_do_not_fit_are_no_doubt(effects: Effects) -> None:
    result = go_on({"tools": [call("pay", cents="many")]}, PAY, tools=[payer(None)])
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error", "ok"], 1)


def test_approving_the_next_call_settles_the_doubt_about_the_failed_one(effects: Effects) -> None:
    """Each failure costs one card: approved, the next call runs, and its own failure asks again."""
    pay = payer(ConnectionError("lost"))
    result = go_on(PAY, MORE, {"tools": [call("pay", cents=3)]}, tools=[pay])
    run, (first,) = the_run(result), [told.call_id for told in uncleared("default", the_run(result))]
    approve(result.pending[0].pk, user("boss", "decide_approval"))
    assert uncleared("default", the_run(result)) == []
    assert payloads(run, "approval_decided")[0]["settles"] == [first]
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


def test_an_approval_by_two_settles_with_the_second(effects: Effects) -> None:
    result = go_on(
        PAY, MORE, tools=[payer(ValueError("a bug"), requires_approval=lambda args, ctx: False, approvals=2)]
    )
    card = result.pending[0].pk
    approve(card, user("ann", "decide_approval"))
    assert len(uncleared("default", the_run(result))) == 1
    approve(card, user("ben", "decide_approval"), arguments={"cents": 3})  # voids what the first approved
    assert len(uncleared("default", the_run(result))) == 1
    approve(card, user("cid", "decide_approval"), digest=Approval.objects.get().digest)
    assert uncleared("default", the_run(result)) == []


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
    assert [DENIED in told["content"] for told in payloads(run, "tool_result")[2:4]] == [True, True]
    assert sorted(Approval.objects.values_list("status", flat=True)) == ["cancelled", "consumed"]
    check_messages(result.messages)


def test_a_stateless_run_tells_the_model_and_enforces_nothing(effects: Effects) -> None:
    agent = shop_agent("stateless", PAY, MORE, tools=[payer(ValueError("a bug"))])
    result = run_agent(agent, "do it")
    assert (result.status, effects.count()) == ("completed", 2)
    told = [row["content"][0] for row in result.messages if row["content"][0]["type"] == "tool_result"]
    assert ["may or may not have happened" in block["content"] for block in told] == [True, True]


def fails(ctx: ToolContext, args: dict[str, Any]) -> Answer:
    raise OSError("the bank is closed")


ANSWERS: list[tuple[Callable[..., Any], str, list[str]]] = [
    (lambda ctx, args: Occurred("paid, says the bank"), "completed", ["ok"]),
    (lambda ctx, args: NotOccurred(), "completed", ["error"]),
    (lambda ctx, args: Unknown("no record"), "orphaned", []),
    (fails, "orphaned", []),
]


@pytest.mark.parametrize(("ask", "status", "ends"), ANSWERS)
@pytest.mark.parametrize("timeout", [None, 30])
def test_what_raised_is_asked_about_when_its_time_is_over(
    timeout: int | None,
    ask: Callable[..., Any],
    status: str,
    ends: list[str],
    effects: Effects,
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
        assert "reset by peer" in payloads(run, "orphan_found")[-1]["evidence"]
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
    pay = payer(ConnectionError("lost"), reconcile=lambda ctx, args: Unknown("no record"))
    result = go_on(PAY, tools=[pay])
    resolve_orphan(str(result.run_id), result.orphans[0], "not_occurred", None, evidence="the statement")
    result = again(result.run_id)
    assert (result.status, effects.count()) == ("orphaned", 2)
    assert len({line["key"] for line in effects.lines()}) == 1
