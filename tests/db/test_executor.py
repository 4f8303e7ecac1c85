"""The executor checks everything again, and in doubt does not run."""

from __future__ import annotations

import threading

import pytest

from agentruns import DatabaseStore, ToolContext, answer, approve, deny, run_agent, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.fold import fold
from agentruns.journal.read import run_rows
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import Crash, check_messages, crash_after_tool_results
from agentruns.utils.failpoints import arm
from tests import waiting
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_edited_call_runs_with_the_edit_and_says_so(effects: Effects) -> None:
    result = run_turns({"tools": [call("refund", cents=5000)]})
    card = result.pending[0]
    decided = approve(card.pk, None, digest=card.digest, arguments={"cents": "4000"})
    assert (decided.arguments, decided.digest != card.digest) == ({"cents": 4000}, True)
    assert sweep().completed == 1
    run = the_run(result)
    assert [line["cents"] for line in effects.lines()] == [4000]
    row = payloads(run, "tool_result")[0]
    assert row["edited"] == {"cents": 4000}
    sent = run_agent("agent-s1", "do it", "s1", idempotency_key="s1").messages[2]["content"][0]["content"]
    assert sent.startswith('Executed with the arguments a person set: {"cents":4000}')


@tool(requires_approval=True, approvals=2)
def launch(where: str) -> str:
    """Launch."""
    Effects.from_environment().record("launch")
    return "launched"


def test_two_people_approve_or_it_does_not_run(effects: Effects) -> None:
    result = run_turns({"tools": [call("launch", where="here")]}, tools=[launch])
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    card = approve(result.pending[0].pk, ann)
    assert (card.status, card.approved_count) == ("pending", 1)
    assert sweep().found == 0
    with pytest.raises(ApprovalStateError, match="takes 2 people"):
        approve(card.pk, ann)
    assert approve(card.pk, bob).status == "approved"
    assert (sweep().completed, effects.count()) == (1, 1)
    assert payloads(the_run(result), "tool_started")[0]["approved_by"] == ["ann", "bob"]


@pytest.mark.parametrize("verb", ["deny", "answer", "edit"])
def test_who_approved_may_change_their_mind_until_it_is_enough(verb: str) -> None:
    result = run_turns({"tools": [call("launch", where="here")]}, tools=[launch])
    ann = user("ann", "decide_approval")
    card = approve(result.pending[0].pk, ann)
    if verb == "edit":
        card = approve(card.pk, ann, digest=card.digest, arguments={"where": "there"})
        assert (card.status, card.approved_count, card.arguments) == ("pending", 1, {"where": "there"})
    else:
        changed = deny if verb == "deny" else answer
        assert changed(card.pk, ann, "not today").status == ("denied" if verb == "deny" else "answered")
        assert sweep().completed == 1
    the_run(result)


def test_calls_after_a_waiting_one_wait_too_unless_they_only_read(effects: Effects) -> None:
    first, second = call("post", text="first"), call("post", text="second")
    result = run_turns({"tools": [first, call("refund", cents=5000), second, call("search", query="x")]})
    assert result.status == "awaiting-approval"
    assert names(effects) == ["post", "search"]
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    assert names(effects) == ["post", "search", "refund", "post"]
    the_run(result)


def test_the_gate_asks_when_its_predicate_raises() -> None:
    odd = tool(name="odd", requires_approval=lambda args, ctx: args["no such"])(launch.fn)
    assert run_turns({"tools": [call("odd", where="here")]}, tools=[odd]).status == "awaiting-approval"


def test_repeated_and_missing_tool_use_ids_are_replaced(effects: Effects) -> None:
    block = {"type": "tool_use", "id": "same", "name": "post", "input": {"text": "x"}}
    missing = {"type": "tool_use", "name": "post", "input": {"text": "y"}}
    turn = {"content": [block, block, missing], "stop_reason": "tool_use"}
    result = run_turns(turn, turn)
    run = the_run(result)
    calls = [one for reply in payloads(run, "assistant") for one in reply["calls"]]
    assert len({one["provider_id"] for one in calls}) == len(calls) == 6
    assert [one.get("original") for one in calls][:3] == [None, {"id": "same"}, {"id": None}]
    assert effects.count() == 6


def test_a_run_goes_on_in_another_registry_with_the_same_definition(effects: Effects) -> None:
    turns = {"tools": [call("refund", cents=5000)]}
    with isolated_registry():
        result = run_agent(shop_agent("moved", turns), "do it", "s1", idempotency_key="k")
    approve(result.pending[0].pk, None)
    with isolated_registry():
        shop_agent("moved", turns)
        assert sweep().completed == 1
    assert effects.count() == 1


def test_the_parallel_calls_of_a_reply_are_at_work_at_once_and_one_fails_alone(effects: Effects) -> None:
    """Wherever they stand in it; the others come one after the other."""
    met = threading.Barrier(3)

    @tool(safe_to_retry=True, parallel=True)
    def gather(ctx: ToolContext, number: int) -> str:
        """Wait for the others, and fail in the middle."""
        met.wait(waiting.LIMIT)
        effects.record(ctx.idempotency_key, tool="gather")
        if number == 1:
            raise ValueError("not this one")
        return f"gathered {number}"

    gathered = [call("gather", number=number) for number in range(3)]
    turn = {"tools": [gathered[0], call("post", text="a"), call("lookup", number="b"), *gathered[1:]]}
    result = run_turns(turn, tools=[*TOOLS, gather])
    the_run(result)
    assert sorted(names(effects)) == ["gather", "gather", "gather", "lookup", "post"]
    assert [name for name in names(effects) if name != "gather"] == ["post", "lookup"]
    told = [block["content"] for block in result.messages[2]["content"]]
    assert "not this one" in told.pop(3)
    assert told == ["gathered 0", "post done", "lookup done", "gathered 2"]
    check_messages(result.messages)


def test_every_effect_has_a_key_of_its_own_that_anybody_can_derive(effects: Effects) -> None:
    """It follows from the run, the step, the place in the reply, the tool and its arguments."""
    calls = [call("post", text="a"), call("post", text="a"), call("charge", cents=5)]
    run = the_run(run_turns({"tools": calls}, {"tools": [*calls, call("refund", cents=5000)]}))
    keys = [line["key"] for line in effects.lines()]
    assert (len(keys), len(set(keys))) == (6, 6)
    assert keys == [row["key"] for row in payloads(run, "tool_started")]
    for _ in range(2):
        (*done, _waits) = fold(run.pk, run_rows("default", run.pk)).calls.values()
        assert [one.idempotency_key(run.pk) for one in done] == keys[3:]
    run_turns({"tools": calls}, session="s2")
    assert len({line["key"] for line in effects.lines()}) == 9, "another run has other keys"


# The crash harness that users get: a store that stops at the nth append of a drive


def crash(name: str, nth: int, **arguments: object) -> Run:
    agent = shop_agent(f"crashes-{name}", {"tools": [call(name, **arguments)]})
    store = crash_after_tool_results(DatabaseStore(), nth)
    with pytest.raises(Crash, match=r"tool_result|assistant"):
        run_agent(agent, "do it", "s1", store=store, idempotency_key="k")
    return Run.objects.get()


def test_a_tool_that_declares_nothing_acts_once_and_the_model_is_told(effects: Effects) -> None:
    run = crash("post", 2, text="x")
    assert (effects.count(), Message.objects.filter(kind="tool_result").count()) == (1, 0)
    result = run_agent(run.agent, "do it", "s1", idempotency_key="k")
    assert (result.status, effects.count()) == ("completed", 1)
    assert outcomes(the_run(result)) == ["unknown"]
    assert "tool-durability-error" in str(result.messages)


def test_a_safe_tool_acts_twice_and_the_model_never_sees_the_crash(effects: Effects) -> None:
    run = crash("lookup", 2, number="A1")
    result = run_agent(run.agent, "do it", "s1", idempotency_key="k")
    assert (result.status, effects.count()) == ("completed", 2)
    assert outcomes(the_run(result)) == ["ok"]
    assert "tool-durability-error" not in str(result.messages)


def test_the_first_append_is_the_reply(effects: Effects) -> None:
    run = crash("post", 1, text="x")
    assert (effects.count(), run.step) == (0, 0)
    assert run_agent(run.agent, "do it", "s1", idempotency_key="k").status == "completed"
    assert effects.count() == 1


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(ValueError, match="before_tool"):
        arm("somewhere")
