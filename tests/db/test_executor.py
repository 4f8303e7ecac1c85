"""The executor checks everything again, and in doubt does not run."""

from __future__ import annotations

import threading
from typing import Annotated

import pytest
from pydantic import AfterValidator

from agentruns import ToolContext, answer, approve, deny, run_agent, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.fold import fold
from agentruns.journal.read import run_rows
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests import waiting
from tests.db.helpers import kill, names, outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = {"cents": 100}


def within(value: int) -> int:
    if value > LIMIT["cents"]:
        raise ValueError(f"more than {LIMIT['cents']}")
    return value


@tool(requires_approval=True)
def pay(cents: Annotated[int, AfterValidator(within)]) -> str:
    """Pay."""
    Effects.from_environment().record("pay")
    return "paid"


@tool(requires_approval=True, safe_to_retry=True)
def read(cents: Annotated[int, AfterValidator(within)]) -> str:
    """Read."""
    Effects.from_environment().record("read")
    return "read"


@pytest.fixture(autouse=True)
def _limit() -> object:
    yield
    LIMIT["cents"] = 100


def test_arguments_that_no_longer_validate_do_not_run(effects: Effects) -> None:
    agent = shop_agent("payer", {"tools": [call("pay", cents=50)]}, tools=[pay])
    result = run_agent(agent, "pay", "s1", idempotency_key="k")
    LIMIT["cents"] = 10
    approve(result.pending[0].pk, None)
    assert sweep().completed == 1
    run = the_run(result)
    assert (outcomes(run), effects.count()) == (["error"], 0)
    assert "more than 10" in payloads(run, "tool_result")[0]["content"]


def test_a_started_call_that_cannot_go_on_is_held_and_not_called_undone() -> None:
    agent = shop_agent("reader", {"tools": [call("read", cents=50)]}, tools=[read])
    result = run_agent(agent, "read", "s1", idempotency_key="k")
    approve(result.pending[0].pk, None)
    with pytest.MonkeyPatch.context() as patch:  # the process dies between tool_started and the handler
        patch.setattr("agentruns.engine.leases.Lease.release", lambda self, **how: None)
        patch.setattr(
            "agentruns.engine.tool_calls.reached", lambda point: 1 / 0 if point == "before_tool" else None
        )
        sweep()
    run = Run.objects.get()
    assert Message.objects.filter(kind="tool_started").count() == 1
    kill(run)
    LIMIT["cents"] = 10
    sweep()
    run = the_run(result)
    assert (run.status, outcomes(run)) == ("orphaned", [])


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


def test_two_people_approve_or_it_does_not_run(effects: Effects) -> None:
    @tool(requires_approval=True, approvals=2)
    def launch() -> str:
        """Launch."""
        Effects.from_environment().record("launch")
        return "launched"

    agent = shop_agent("launcher", {"tools": [call("launch")]}, tools=[launch])
    result = run_agent(agent, "launch", "s1", idempotency_key="k")
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    card = approve(result.pending[0].pk, ann)
    assert (card.status, card.approved_count) == ("pending", 1)
    assert sweep().found == 0
    with pytest.raises(ApprovalStateError, match="takes 2 people"):
        approve(card.pk, ann)
    assert approve(card.pk, bob).status == "approved"
    assert sweep().completed == 1
    assert effects.count() == 1
    assert payloads(the_run(result), "tool_started")[0]["approved_by"] == ["ann", "bob"]


@pytest.mark.parametrize("verb", ["deny", "answer", "edit"])
def test_who_approved_may_change_their_mind_until_it_is_enough(verb: str) -> None:

    @tool(requires_approval=True, approvals=2)
    def launch(where: str) -> str:
        """Launch."""
        return "launched"

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


def test_the_gate_asks_when_its_predicate_raises() -> None:
    @tool(requires_approval=lambda args, ctx: args["no such"])
    def odd() -> str:
        """Do something odd."""
        return "odd"

    agent = shop_agent("odd", {"tools": [call("odd")]}, tools=[odd])
    assert run_agent(agent, "do it", "s1", idempotency_key="k").status == "awaiting-approval"


def test_calls_after_a_waiting_one_wait_too_unless_they_only_read(effects: Effects) -> None:
    turn = {
        "tools": [
            call("post", text="first"),
            call("refund", cents=5000),
            call("post", text="second"),
            call("search", query="x"),
        ]
    }
    result = run_turns(turn)
    assert result.status == "awaiting-approval"
    assert [line["tool"] for line in effects.lines()] == ["post", "search"]
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    assert [line["tool"] for line in effects.lines()] == ["post", "search", "refund", "post"]
    the_run(result)


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


def test_the_parallel_calls_of_a_reply_are_at_work_at_once(effects: Effects) -> None:
    """Wherever they stand in it; the others come one after the other."""
    met = threading.Barrier(3)

    @tool(safe_to_retry=True, parallel=True)
    def gather(ctx: ToolContext, number: int) -> str:
        """Wait for the others."""
        met.wait(waiting.LIMIT)
        effects.record(ctx.idempotency_key, tool="gather")
        return "met"

    gathered = [call("gather", number=number) for number in range(3)]
    turn = {"tools": [gathered[0], call("post", text="a"), call("lookup", number="b"), *gathered[1:]]}
    run = the_run(run_turns(turn, tools=[*TOOLS, gather]))
    assert outcomes(run) == ["ok"] * 5
    assert sorted(names(effects)) == ["gather", "gather", "gather", "lookup", "post"]
    assert [name for name in names(effects) if name != "gather"] == ["post", "lookup"]


def test_one_of_several_parallel_calls_fails_alone() -> None:
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


def test_every_effect_has_a_key_of_its_own_that_the_journal_knows(effects: Effects) -> None:
    turn = {"tools": [call("post", text="a"), call("post", text="a"), call("charge", cents=5)]}
    run = the_run(run_turns(turn, turn))
    keys = [line["key"] for line in effects.lines()]
    assert (len(keys), len(set(keys))) == (6, 6)
    assert keys == [row["key"] for row in payloads(run, "tool_started")]


def test_whoever_derives_the_key_gets_the_same(effects: Effects) -> None:
    """It follows from the run, the step, the place in the reply, the tool and its arguments."""
    turn = {"tools": [call("post", text="a"), call("refund", cents=5000)]}
    run = the_run(run_turns(turn))
    (key,) = [line["key"] for line in effects.lines()]
    for _ in range(2):
        calls = list(fold(run.pk, run_rows("default", run.pk)).calls.values())
        assert calls[0].idempotency_key(run.pk) == key
    run_turns(turn, session="s2")
    assert len({line["key"] for line in effects.lines()}) == 2, "another run is another key"
