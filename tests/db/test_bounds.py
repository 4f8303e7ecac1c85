"""What no row, statement or column can hold is refused where it arrives, and costs nothing that was paid."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from agentruns import Agent, ToolContext, approve, deny, resolve_orphan, run_agent, start_run, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ModelReply, ProviderError
from agentruns.services.runs.control import cancel_run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.utils.bounds import MAX_CALLS, MAX_DEPTH
from tests.db.doubts import wire
from tests.db.failures import start
from tests.db.helpers import outcomes, payloads, the_run, user
from tests.db.replies import Counting, nested, uses
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.shop.agents import TOOLS, act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool
def take(ctx: ToolContext, value: Any) -> Any:
    """Act, and return what was given."""
    act("take", ctx)
    return value


@tool(requires_approval=True)
def gated(ctx: ToolContext, value: Any) -> str:
    """Act when a person agrees."""
    return act("gated", ctx)


def run_replies(*replies: ModelReply, tools: Any = (take, gated, *TOOLS)) -> tuple[Any, Counting]:
    """Run an agent whose model gives these replies, then "all done"; sweep as a worker would."""
    model = Counting(*replies)
    agent = Agent("bounded", instructions="Serve.", tools=tools, model=model)
    start_run(agent, "do it", "s1", idempotency_key="k")
    for _ in range(7):  # more than MAX_ATTEMPTS
        Run.objects.update(not_before=None)
        if not sweep().errors:
            break
    return result_of(Run.objects.get().pk), model


@pytest.mark.parametrize("depth", [MAX_DEPTH, 600, 5_000])
def test_a_deep_input_is_told_to_the_model(depth: int, effects: Effects) -> None:
    deep = [(name, {"value": nested(depth)}) for name in ("take", "gated", "nobody")]
    result, model = run_replies(uses(*deep, ("post", {"text": "beside it"})))
    run = the_run(result)
    assert (run.status, model.asked, effects.count()) == ("completed", 2, 1)
    assert (outcomes(run), run.usage["output_tokens"]) == (["error", "error", "error", "ok"], 11)
    for told in payloads(run, "tool_result")[:2]:
        assert f"more than {MAX_DEPTH} levels" in told["content"]
    for asked in payloads(run, "assistant")[0]["calls"][:3]:
        kept = asked["original"]["input"]
        assert (isinstance(kept, str), "bottom" in kept) == (True, depth < 5_000)


def test_the_deepest_input_that_is_taken(effects: Effects) -> None:
    at_bound = {"value": nested(MAX_DEPTH - 1)}
    result, model = run_replies(uses(("take", at_bound), ("gated", at_bound)))
    assert (result.status, model.asked, effects.count()) == ("awaiting-approval", 1, 1)
    approve(result.pending[0].pk, None, arguments=at_bound)
    assert sweep().completed == 1
    assert (effects.count(), problems(Run.objects.get().session_id)) == (2, [])


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 600])
@pytest.mark.parametrize(
    "block",
    [
        {"type": "server_tool_use", "id": "s1", "name": "find", "input": ...},
        {"type": "text", "text": "x", "citations": ...},
        {"type": "tool_use", "id": "t1", "name": "post", "input": {}, "caller": ...},
        {"type": "tool_use", "id": "t1", "name": ..., "input": {}},
    ],
)
def test_a_deep_block_that_cannot_be_answered_fails_the_run(block: Any, depth: int, effects: Effects) -> None:
    block = {name: nested(depth) if value is ... else value for name, value in block.items()}
    result, model = run_replies(ModelReply([block], "tool_use", {"output_tokens": 10}))
    run = the_run(result)
    assert (run.status, model.asked, effects.count()) == ("failed", 1, 0)
    assert f"nested more than {MAX_DEPTH} levels" in run.error
    assert run.usage["output_tokens"] == 10, "it was paid"


def deep(name: str, wrap: Callable[[Any], Any], returns: Any) -> Any:
    """Make a tool that acts, and returns something deep as its annotation says, if it has one."""

    def handler(ctx: ToolContext, depth: int):  # type: ignore[no-untyped-def]
        """Act."""
        act(name, ctx)
        return wrap(nested(depth))

    handler.__annotations__ |= {"return": returns} if returns else {}
    return tool(name=name)(handler)


def test_a_deep_result_is_kept_and_can_be_read(effects: Effects) -> None:
    tools = [
        deep("untyped", lambda value: value, None),
        deep("listed", lambda value: [value], list[Any]),
        deep("mapped", lambda value: {"deep": value}, dict[str, Any]),
    ]
    calls = [(one.name, {"depth": depth}) for depth in (MAX_DEPTH, 100, 488, 900) for one in tools]
    result, model = run_replies(uses(*calls), tools=tools)
    run = the_run(result)
    assert (run.status, model.asked, effects.count(), outcomes(run)) == ("completed", 2, 12, ["ok"] * 12)
    told = [block["content"] for block in result.messages[2]["content"]]
    assert all("bottom" in text for text in told[:9]), "Python itself prints no list as deep as the last"


@pytest.mark.parametrize("depth", [MAX_DEPTH, 600, 5_000])
def test_what_people_give_is_bounded_too(depth: int) -> None:
    result, _ = run_replies(uses(("gated", {"value": 1}), ("wire", {"text": "x"})), tools=[gated, wire])
    card = result.pending[0]
    with pytest.raises(ApprovalStateError, match=f"more than {MAX_DEPTH} levels"):
        approve(card.pk, None, arguments={"value": nested(depth)})
    deny(card.pk, None, "no")
    sweep()
    (doubt,) = result_of(card.run_id).orphans
    resolve_orphan(card.run_id, doubt, "occurred", None, result=nested(depth))
    sweep()
    assert (Run.objects.get().status, problems(Run.objects.get().session_id)) == ("completed", [])


def test_a_deep_input_of_claude(effects: Effects) -> None:
    """The SDK itself reads some 200 levels; what it cannot read is not asked for again."""
    for depth, status, asked in ((150, "completed", 2), (600, "failed", 1)):
        with FakeAnthropic([{"tools": [call("take", value=nested(depth))]}, {"text": "all done"}]) as fake:
            model = AnthropicModel("claude-sonnet-5-5", fake.client(), context_window=100_000_000)
            agent = Agent("deep", instructions="Be deep.", tools=[take], model=model)
            result = run_agent(agent, "do it", f"s{depth}")
        assert (result.status, len(fake.calls), effects.count()) == (status, asked, 0)


@pytest.mark.parametrize("count", [MAX_CALLS, MAX_CALLS + 1, 5_200])
def test_a_reply_with_too_many_calls(count: int, effects: Effects) -> None:
    result, model = run_replies(uses(*(("post", {"text": str(n)}) for n in range(count))))
    run = the_run(result)
    assert (run.status, model.asked, effects.count()) == ("completed", 2, MAX_CALLS)
    kept = min(count, MAX_CALLS + 1)
    assert len(result.messages[1]["content"]) == len(result.messages[2]["content"]) == kept
    row = payloads(run, "assistant")[0]
    assert [block["id"] for block in row.get("left_out", [])] == [f"t{n}" for n in range(kept, count)]
    last = result.messages[2]["content"][-1]
    assert (f"has {count} calls" in last["content"], last.get("is_error", False)) == (count > MAX_CALLS,) * 2


def test_many_calls_for_a_person_and_the_longest_approvers_fit_the_cards() -> None:
    asking = tool(requires_approval=True, approvers="é" * 200, name="asking")(take.fn)
    calls = [("asking", {"value": 1}), *(("gated", {"value": n}) for n in range(5_200))]
    result, model = run_replies(uses(*calls), tools=[asking, gated])
    assert (result.status, model.asked, len(result.pending)) == ("awaiting-approval", 1, MAX_CALLS)
    assert len(result.pending[0].approvers) == 200
    cancel_run(result.run_id)
    assert the_run(result).status == "cancelled"


def test_a_tool_name_is_matched_exactly(effects: Effects) -> None:
    nearly = {"delete.user": "delete_user", "delete_user ": "delete_user", "x" * 65: "x" * 64}
    declared = [tool(name=name)(take.fn) for name in sorted({*nearly.values()})]
    result, model = run_replies(uses(*((name, {"value": 1}) for name in nearly)), tools=declared)
    run = the_run(result)
    assert (run.status, model.asked, effects.count()) == ("completed", 2, 0)
    for asked, told in zip(nearly, payloads(run, "tool_result"), strict=True):
        assert (told["outcome"], f"there is no tool {asked!r}" in told["content"]) == ("error", True)


LONG = "é" * 300


@pytest.mark.parametrize(
    "beside",
    [
        {"request_id": b"\xff"}, {"request_id": 7, "model": None}, {"model": ["a"]},
        {"model": LONG * 10, "request_id": "\x00\ud800" * 1_000}, {"request_id": nested(600)}, {},
    ],
)  # fmt: skip
def test_a_paid_reply_is_kept_whatever_is_beside_it(beside: Any, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {"counting": {"input": 1, "output": 2}}
    block = {
        "type": "tool_use",
        "id": "t1" if beside else "i" * 5_000,
        "name": "post",
        "input": {"text": LONG},
    }
    result, model = run_replies(ModelReply([block], "tool_use", {"output_tokens": 10}, **beside))
    assert (the_run(result).status, model.asked, effects.count()) == ("completed", 2, 1)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ODD = {"code": b"x", "type": 7, "status": "teapot", "request_id": b"\xff", "retry_after": "soon"}


@pytest.mark.parametrize("usage", [{"output_tokens": b"1"}, {"output_tokens": nested(600)}, "none"])
@pytest.mark.parametrize("disposition", ["fail", "pause", "retry"])
def test_an_error_of_a_provider_is_journaled_whatever_is_in_it(disposition: Any, usage: Any) -> None:
    run = start([ProviderError("no", disposition=disposition, usage=usage, **ODD)])  # type: ignore[arg-type]
    assert run.status == {"fail": "failed", "pause": "paused", "retry": "queued"}[disposition]
    assert (len(payloads(run, "model_failed")), run.attempts) == (1, 0)


def test_an_exception_without_words_is_journaled() -> None:
    with pytest.raises(Mute):
        start([Mute()])
    assert payloads(Run.objects.get(), "model_failed")[0]["error"]["type"] == "Mute"


def test_people_with_long_names(effects: Effects) -> None:
    boss = user("boss", "decide_approval", "resume_run")
    boss.username = LONG  # longer than a column of ours; Django's own field allows that on SQLite alone
    result = run_agent(shop_agent("hers", {"tools": [call("refund", cents=5000)]}), "do it", "s1", actor=boss)
    approve(result.pending[0].pk, boss)
    assert (Approval.objects.get().decided_by_name, Run.objects.get().owner_name) == (LONG[:200], LONG[:200])
    assert payloads(Run.objects.get(), "approval_decided")[0]["actor"]["name"] == LONG
    sweep(name=LONG)
    assert (the_run(result).status, effects.count()) == ("completed", 1)


def test_what_no_card_or_clock_can_hold_is_refused_at_the_declaration() -> None:
    for option, values in {
        "approvers": (LONG, "a" * 201, "staff\x00", " ", 7),
        "approvals": (10**12,),
        "timeout": (1e15, timedelta.max, 10**400),
    }.items():
        for value in values:
            with pytest.raises(TypeError, match=option):
                tool(**{"requires_approval": True, option: value})(take.fn)  # type: ignore[arg-type]
