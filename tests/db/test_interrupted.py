"""Interrupted calls: repeated where their tool allows it, else in doubt, and the model is told."""

from __future__ import annotations

import json

import pytest

from agentruns import ToolContext, resume_run, tool
from agentruns.exceptions import (
    ToolDurabilityError,
)
from agentruns.models import Message
from agentruns.services.sweep import sweep
from tests.db.dying import die_at
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@tool(safe_to_retry=True)
def ping(ctx: ToolContext) -> str:
    """Reach out over a bad network."""
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt)
    raise ConnectionError("reset by peer")


def test_an_error_is_the_stored_result_and_never_tried_again(effects: Effects) -> None:
    """Whatever the tool declares: `safe_to_retry` speaks of a lost result only, and the model decides."""
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
    assert (told["kind"], told["toolName"]) == (ToolDurabilityError.kind, "post")
    assert told["toolCallId"] == answered["tool_use_id"] == asked["id"]
    assert answered["is_error"] is True
    assert effects.count() == 1


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
    wait_for(lambda: effects.count() == 3, "the other threads, which a real death would end")
    status = sweep().completed if caller == "sweep" else resume_run(run.pk).status
    assert status in (1, "completed")
    kinds = list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))
    rest = [kind for kind in kinds[kinds.index("run_resumed") :] if kind != "run_resumed"]
    repaired = ["orphan_found"] * 3 + ["tool_started"] * 3 + ["tool_result"] * 3
    assert rest == [*repaired, "assistant", "run_completed"]
    assert (effects.count(), len({line["key"] for line in effects.lines()})) == (6, 3)


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
