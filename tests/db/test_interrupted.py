"""Interrupted calls: repeated where their tool allows it, else in doubt, and the model is told."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from agentruns import Agent, ToolContext, resume_run, run_agent, tool
from agentruns.exceptions import (
    AgentRunsError,
    ToolDurabilityError,
)
from agentruns.models import Message
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages
from tests.db.dying import die_at
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool(safe_to_retry=True)
def ping(ctx: ToolContext) -> str:
    """Reach out over a bad network."""
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt)
    raise ConnectionError("reset by peer")


def test_a_safe_tool_that_raises_is_not_tried_again(effects: Effects) -> None:
    """The flag speaks of a lost result only; an error is a result, and the model decides."""
    run = the_run(run_turns({"tools": [call("ping")]}, tools=[ping]))
    assert (effects.count(), outcomes(run), run.attempts) == (1, ["error"], 0)


def test_the_error_is_the_stored_result_whatever_the_tool_declares(effects: Effects) -> None:
    run = the_run(run_turns({"tools": [call("ping"), call("broken")]}, tools=[*TOOLS, ping]))
    first, second = payloads(run, "tool_result")
    assert (first["is_error"], second["is_error"], effects.count()) == (True, True, 2)
    assert "ConnectionError: reset by peer" in first["content"]
    assert "ValueError: the printer is on fire" in second["content"]


def test_the_result_of_an_interrupted_call_has_one_json_form(effects: Effects) -> None:
    run = die_at("after_tool", shop_agent("poster", {"tools": [call("post", text="hi")]}))
    result = resume_run(run.pk)
    asked, answered = result.messages[1]["content"][0], result.messages[2]["content"][0]
    told = json.loads(answered["content"])
    assert set(told) == {"error", "kind", "toolName", "toolCallId"}
    assert (told["kind"], told["toolName"]) == ("tool-durability-error", "post")
    assert told["toolCallId"] == answered["tool_use_id"] == asked["id"]
    assert answered["is_error"] is True
    assert effects.count() == 1


def test_the_next_turn_sees_the_doubt_and_decides(effects: Effects) -> None:
    """Here it looks before it posts again: the lookup is what the model chose."""

    def decide(request: Any) -> dict[str, Any]:
        check_messages(request.messages)
        told = json.loads(request.messages[-1]["content"][0]["content"])
        assert "zero or one times" in told["error"]
        return {"tools": [call("lookup", number=told["toolName"])]}

    run = die_at("after_tool", shop_agent("careful", {"tools": [call("post", text="hi")]}, decide))
    assert resume_run(run.pk).status == "completed"
    assert [line["tool"] for line in effects.lines()] == ["post", "lookup"]


def test_the_model_never_sees_the_crash_of_a_safe_tool(effects: Effects) -> None:
    turn = {"tools": [{**call("lookup", number="A1"), "id": "the-call"}]}
    smooth = run_turns(turn, session="smooth")
    run = die_at("after_tool", shop_agent("bumpy", turn), "bumpy")
    bumpy = resume_run(run.pk)
    assert bumpy.messages == smooth.messages
    assert (effects.count(), outcomes(run)) == (3, ["ok"])


@tool(safe_to_retry=True)
def count_down(ctx: ToolContext) -> str:
    """Work the first time and raise the second."""
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt, call=ctx.call_id)
    if ctx.attempt > 1:
        raise ValueError("gone meanwhile")
    return "there"


def test_a_second_attempt_takes_the_normal_path(effects: Effects) -> None:
    """It gets a real context, and its error becomes its result as any other's."""
    run = die_at("after_tool", shop_agent("counter", {"tools": [call("count_down")]}, tools=[count_down]))
    assert sweep().completed == 1
    first, second = effects.lines()
    assert (first["attempt"], second["attempt"], first["call"] == second["call"]) == (1, 2, True)
    (row,) = payloads(run, "tool_result")
    assert (row["outcome"], "gone meanwhile" in row["content"]) == ("error", True)


@pytest.mark.parametrize("caller", ["sweep", "person"])
def test_everything_in_doubt_is_settled_before_the_model_is_asked(caller: str, effects: Effects) -> None:
    searches = [call("search", query=str(number)) for number in range(3)]
    run = die_at("before_result_commit", shop_agent("searcher", {"tools": searches}))
    deadline = time.monotonic() + 10
    while effects.count() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # a real death would end the other threads
    status = sweep().completed if caller == "sweep" else resume_run(run.pk).status
    assert status in (1, "completed")
    kinds = list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))
    rest = [kind for kind in kinds[kinds.index("run_resumed") :] if kind != "run_resumed"]
    repaired = ["orphan_found"] * 3 + ["tool_started"] * 3 + ["tool_result"] * 3
    assert rest == [*repaired, "assistant", "run_completed"]
    assert (effects.count(), len({line["key"] for line in effects.lines()})) == (6, 3)


def test_callers_can_tell_a_doubt_in_a_history() -> None:
    assert issubclass(ToolDurabilityError, AgentRunsError)
    run = die_at("after_tool", shop_agent("poster", {"tools": [call("post", text="hi")]}))
    resume_run(run.pk)
    model = ScriptedModel([{"text": "fine"}])
    later = run_agent(Agent("later", instructions="x", model=model), "next", "s1", idempotency_key="k2")
    results = [
        block
        for message in later.messages
        for block in message["content"]
        if block["type"] == "tool_result" and ToolDurabilityError.kind in block["content"]
    ]
    assert len(results) == 1


MIXED = {
    "tools": [
        call("search", query="x"),
        call("search", query="y"),
        call("post", text="hi"),
        call("lookup", number="A1"),
    ]
}


def test_of_safe_and_unsafe_calls_the_one_in_flight_is_judged_by_what_it_declares(effects: Effects) -> None:
    """Safe ones in flight: they run again, and the unsafe one after them runs as if nothing had been."""
    run = die_at("before_result_commit", shop_agent("mixed", MIXED))
    assert sweep().completed == 1
    assert outcomes(run) == ["ok"] * 4
    assert names(effects)[-2:] == ["post", "lookup"]
    assert len({line["key"] for line in effects.lines()}) == 4


def test_an_unsafe_call_in_flight_leaves_the_safe_ones_before_it_alone(effects: Effects) -> None:
    run = die_at("before_result_commit", shop_agent("mixed", MIXED), nth=3)
    assert sweep().waiting == 1
    assert names(effects) == ["search", "search", "post"]
    result = resume_run(run.pk)
    assert outcomes(the_run(result)) == ["ok", "ok", "unknown", "cancelled"]
    assert len(names(effects)) == 3
    check_messages(result.messages)
