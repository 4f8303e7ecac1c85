"""Calls that wait for a person: no way around the gate, and no decision is lost or counts twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command

from agentruns import ToolContext, approve, pause_run, resume_run, run_agent, start_run, tool
from agentruns.agents.agent import Agent
from agentruns.exceptions import DurableConfigMismatchError, JournalConflictError
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user
from tests.db.dying import die_at
from tests.db.helpers import names, outcomes, run_turns, the_run
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, act, call, refund, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

ALL: list[Any] = [*TOOLS]


UNGATED = [one for one in ALL if one.name != "refund"]


REFUND = {"tools": [call("refund", cents=5000)]}


DRIFTS: dict[str, dict[str, Any]] = {
    "the limits": {"max_steps": 7},
    "no such tool any more": {"tools": UNGATED},
    "the tool asks nobody any more": {"tools": [*UNGATED, tool(refund.fn, name="refund")]},
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_decision_under_another_definition_is_kept_and_carried_out_by_the_right_one(
    drift: str, effects: Effects
) -> None:
    with isolated_registry():
        (card,) = run_agent(shop_agent("drifter", REFUND), "do it", "s1", idempotency_key="k").pending
    with isolated_registry():
        shop_agent("drifter", REFUND, **DRIFTS[drift])
        assert approve(card.pk, None, digest=card.digest).status == "approved"
        assert sweep().blocked == 1
        with pytest.raises(DurableConfigMismatchError):
            resume_run(card.run_id)
        assert (Run.objects.get().status, Approval.objects.get().status) == ("queued", "approved")
        assert effects.count() == 0
    with isolated_registry():
        shop_agent("drifter", REFUND)
        assert sweep().completed == 1
    assert (Approval.objects.get().status, effects.count()) == ("consumed", 1)


def test_going_on_with_a_run_that_waits_leaves_it_waiting(effects: Effects) -> None:
    agent = shop_agent("waiter", REFUND)
    (card,) = run_agent(agent, "do it", "s1", idempotency_key="k").pending
    rows = Message.objects.count()
    for go_on in (
        partial(resume_run, card.run_id),
        partial(resume_run, card.run_id, drive=False),
        partial(run_agent, agent, "do it", "s1", idempotency_key="k"),
    ):
        result = go_on()
        assert (result.status, result.output, len(result.pending)) == ("awaiting-approval", None, 1)
        assert Message.objects.count() == rows
    approve(card.pk, None)
    assert (sweep().completed, effects.count()) == (1, 1)


def test_a_gate_met_after_a_crash_is_a_gate(effects: Effects) -> None:
    run = die_at("after_result", shop_agent("gated", {"tools": [call("lookup", number="A1")]}, REFUND))
    assert sweep().waiting == 1
    run = Run.objects.get(pk=run.pk)
    assert (run.status, run.output, names(effects)) == ("awaiting-approval", None, ["lookup"])
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    assert names(effects) == ["lookup", "refund"]


def two_cards() -> list[Approval]:
    turn = {"tools": [call("search", query="x"), call("refund", cents=5000), call("refund", cents=6000)]}
    pending = run_turns(turn).pending
    return sorted(pending, key=lambda card: card.arguments["cents"])


def test_a_start_that_is_refused_takes_no_result_with_it(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of the next call cannot be used up: its row is not what the journal says."""
    monkeypatch.setattr("agentruns.engine.driver.SAME_STATE_RETRIES", 1)

    @tool
    def work(ctx: ToolContext) -> str:
        """Act while somebody approves the call after this one, and its card is damaged."""
        (card,) = Approval.objects.pending()
        approve(card.pk, None, digest=card.digest)
        Approval.objects.update(status="denied")
        return act("work", ctx)

    agent = shop_agent("damaged", {"tools": [call("work"), call("refund", cents=5000)]}, tools=[work, refund])
    with pytest.raises(JournalConflictError):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    run = Run.objects.get()
    assert (names(effects), outcomes(run)) == (["work"], ["ok"])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_no_call_of_a_batch_vanishes(order: list[int], effects: Effects) -> None:
    cards = two_cards()
    assert names(effects) == ["search"]
    for index in order:
        approve(cards[index].pk, None, digest=cards[index].digest)
        sweep()
    run = Run.objects.get()
    assert (run.status, outcomes(run)) == ("completed", ["ok"] * 3)
    assert [line["cents"] for line in effects.lines()[1:]] == [5000, 6000]


def test_the_second_gate_belongs_to_the_owner_as_the_first_did(effects: Effects) -> None:
    ann, mallory = make_user("ann"), make_user("mallory")
    agent = shop_agent("twice", REFUND, {"tools": [call("refund", cents=6000)]})
    result = run_agent(agent, "do it", "s1", actor=ann, idempotency_key="k")
    for cents in (5000, 6000):
        card = Approval.objects.pending().get()
        assert card.arguments == {"cents": cents}
        body = {"digest": card.digest}
        assert Api(mallory).get(f"/approvals/{card.pk}")[0] == 404
        assert Api(mallory).post(f"/approvals/{card.pk}/approve", body)[0] == 404
        shown = Api(ann).get("/approvals", status="pending")[1]["items"]
        assert [one["id"] for one in shown] == [str(card.pk)]
        approve(card.pk, None, digest=card.digest)
        sweep()
    run = the_run(result)
    assert (run.status, run.owner_id, effects.count()) == ("completed", ann.pk, 2)


def command(*words: str, **options: Any) -> None:
    with suppress(SystemExit):
        call_command(*words, **options)


def again(agent: Agent) -> None:
    start_run(agent, "do it", "s1")
    run_agent(agent, "do it", "s1")


def swept(agent: Agent, sweeping: Callable[[], Any]) -> None:
    start_run(agent, "do it", "s1")
    sweeping()


WAYS: dict[str, Callable[[Agent], Any]] = {
    "run": lambda agent: run_agent(agent, "do it", "s1", idempotency_key="k"),
    "start and sweep": lambda agent: swept(agent, sweep),
    "resume": lambda agent: resume_run(pause_run(start_run(agent, "do it", "s1").pk).pk),
    "the same call again": again,
    "run_agent": lambda agent: command("run_agent", agent.name, "do it", session="s1"),
    "resume_runs": lambda agent: swept(agent, lambda: command("resume_runs")),
    "without a session": lambda agent: run_agent(agent, "do it"),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_drive_a_run_goes_around_the_gate(way: str, effects: Effects) -> None:
    reads = [one for one in ALL if not one.transactional]
    WAYS[way](shop_agent("gated", REFUND, tools=reads))
    assert effects.count() == 0
    if way != "without a session":
        assert (Run.objects.get().status, Approval.objects.get().status) == ("awaiting-approval", "pending")


@pytest.mark.parametrize("name", ["Refund", "REFUND", "re_fund", "refund2", "refun", "refund-"])
def test_a_name_that_is_nearly_a_tools_is_no_tools(name: str, effects: Effects) -> None:
    run = the_run(run_turns({"tools": [call(name, cents=5000)]}))
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"], 0)
    assert not Approval.objects.exists()
