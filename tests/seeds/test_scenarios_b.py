"""Section B: what the two seed systems test, where no other test of ours shows it."""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4

import pytest

from agentruns import ToolContext, answer, approve, deny, resume_run, run_agent, tool
from agentruns.exceptions import ApprovalStateError, NotFoundError
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.helpers import outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.seeds.dying import die_at
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

WAIT = 60


def names(effects: Effects) -> list[str]:
    return [line["tool"] for line in effects.lines()]


def test_b1_17_the_parallel_calls_of_a_reply_are_at_work_at_once(effects: Effects, agents: None) -> None:
    """Wherever they stand in it; the others come one after the other."""
    met = threading.Barrier(3)

    @tool(safe_to_retry=True, parallel=True)
    def gather(ctx: ToolContext, number: int) -> str:
        """Wait for the others."""
        met.wait(WAIT)
        effects.record(ctx.idempotency_key, tool="gather")
        return "met"

    gathered = [call("gather", number=number) for number in range(3)]
    turn = {"tools": [gathered[0], call("post", text="a"), call("lookup", number="b"), *gathered[1:]]}
    run = the_run(run_turns(turn, tools=[*TOOLS, gather]))
    assert outcomes(run) == ["ok"] * 5
    assert sorted(names(effects)) == ["gather", "gather", "gather", "lookup", "post"]
    assert [name for name in names(effects) if name != "gather"] == ["post", "lookup"]


def test_b1_17_one_of_several_parallel_calls_fails_alone(effects: Effects, agents: None) -> None:
    @tool(safe_to_retry=True, parallel=True)
    def gather(number: int) -> str:
        """Fail in the middle."""
        if number == 1:
            raise ValueError("not this one")
        return f"gathered {number}"

    calls = [call("gather", number=number) for number in range(3)]
    result = run_turns({"tools": calls}, tools=[gather])
    the_run(result)
    told = [block["content"] for block in result.messages[2]["content"]]
    assert (told[0], "not this one" in told[1], told[2]) == ("gathered 0", True, "gathered 2")
    check_messages(result.messages)


MIXED = {
    "tools": [
        call("search", query="x"),
        call("search", query="y"),
        call("post", text="hi"),
        call("lookup", number="A1"),
    ]
}


def test_b1_21_of_safe_and_unsafe_calls_the_one_in_flight_is_judged_by_what_it_declares(
    effects: Effects, agents: None
) -> None:
    """Safe ones in flight: they run again, and the unsafe one after them runs as if nothing had been."""
    run = die_at("before_result_commit", shop_agent("mixed", MIXED))
    assert sweep().completed == 1
    assert outcomes(run) == ["ok"] * 4
    assert names(effects)[-2:] == ["post", "lookup"]
    assert len({line["key"] for line in effects.lines()}) == 4


def test_b1_21_an_unsafe_call_in_flight_leaves_the_safe_ones_before_it_alone(
    effects: Effects, agents: None
) -> None:
    run = die_at("before_result_commit", shop_agent("mixed", MIXED), nth=3)
    assert sweep().waiting == 1
    assert names(effects) == ["search", "search", "post"]
    result = resume_run(run.pk)
    assert outcomes(the_run(result)) == ["ok", "ok", "unknown", "cancelled"]
    assert len(names(effects)) == 3
    check_messages(result.messages)


def test_b2_19_the_next_turn_of_the_model_reads_the_denial(effects: Effects, agents: None) -> None:
    seen: list[Any] = []

    def look(request: Any) -> dict[str, str]:
        check_messages(request.messages)
        seen.append(request.messages[-1]["content"][0])
        return {"text": "understood"}

    agent = shop_agent("asker", {"tools": [call("refund", cents=5000)]}, look)
    result = run_agent(agent, "refund it", "s1", idempotency_key="k")
    deny(result.pending[0].pk, user("ann", "decide_approval"), "she was refunded by phone")
    assert sweep().completed == 1
    assert "she was refunded by phone" in seen[0]["content"]
    assert not seen[0].get("is_error")
    assert (the_run(result).output, effects.count()) == ("understood", 0)


def test_b2_22_a_person_answers_what_the_model_asks(effects: Effects, agents: None) -> None:
    @tool(requires_approval=True)
    def ask_a_person(question: str) -> str:
        """Ask a person."""
        raise AssertionError("nobody runs this")

    seen: list[Any] = []

    def read(request: Any) -> dict[str, str]:
        seen.append(request.messages[-1]["content"])
        return {"text": "the green one"}

    turn = {"tools": [call("ask_a_person", question="Which lamp?")]}
    agent = shop_agent("asker", turn, read, tools=[ask_a_person])
    result = run_agent(agent, "sell a lamp", "s1", idempotency_key="k")
    (card,) = result.pending
    assert card.arguments == {"question": "Which lamp?"}
    with pytest.raises(NotFoundError):
        answer(uuid4(), None, "the red one")
    assert Approval.objects.get().status == "pending"
    answer(card.pk, user("ann", "decide_approval"), "The green one.", digest=card.digest)
    with pytest.raises(ApprovalStateError, match="answered already: decided by ann"):
        answer(card.pk, None, "the red one")
    assert sweep().completed == 1
    assert "The green one." in seen[0][0]["content"]
    run = the_run(result)
    assert (outcomes(run), payloads(run, "tool_started")) == (["answered"], [])


def test_b2_18_whoever_comes_later_finds_what_waits_and_decides_it(effects: Effects, agents: None) -> None:
    """Nothing is kept by the process that asked: the card, its call and its run are rows."""
    run_turns({"tools": [call("refund", cents=5000)]})
    card = Approval.objects.pending().select_related("run").get()
    assert (card.run.input, card.tool_name, card.arguments) == ("do it", "refund", {"cents": 5000})
    approve(card.pk, None, digest=card.digest)
    assert sweep().completed == 1
    assert (Run.objects.get().output, effects.count()) == ("all done", 1)
    assert not Approval.objects.pending().exists()
