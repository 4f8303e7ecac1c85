"""What a run does, call by call; the executor checks everything again, and in doubt does not run."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

import pytest

from agentruns import Agent, DatabaseStore, RunResult, ToolContext, exceptions as errors, tool
from agentruns.engine.leases import Lease, claim
from agentruns.journal.fold import fold
from agentruns.journal.read import run_rows
from agentruns.models import Approval, Message, Run, Session
from agentruns.services.approvals.decisions import answer, approve, deny
from agentruns.services.runs.control import adopt_definition, resolve_orphan
from agentruns.services.runs.lifecycle import result_of, resume_run, run_agent, start_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages, expire_leases
from agentruns.testing.crash import Crash, crash_after_tool_results, crashing_at
from agentruns.utils.failpoints import arm
from tests.db import helpers
from tests.db.doubts import wire
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run, transferring, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call, post, shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_run_with_one_call_and_repeating_it_is_the_same_run(effects: Effects) -> None:
    agent = shop_agent("one", {"tools": [call("post", text="hi")]})
    result = run_agent(agent, "say hi", "s1", idempotency_key="k1")
    assert (result.status, result.output) == ("completed", "all done")
    assert run_agent(agent, "say hi", "s1", idempotency_key="k1").run_id == result.run_id
    assert effects.count() == 1
    rows = Message.objects.filter(run_id=result.run_id).order_by("seq")
    assert list(rows.values_list("kind", flat=True)) == [
        "run_started", "user", "assistant", "tool_started", "tool_result", "assistant", "run_completed",
    ]  # fmt: skip
    check_messages(result.messages)
    the_run(result)


def test_a_gated_call_waits_and_runs_after_approval(effects: Effects) -> None:
    agent = shop_agent("gated", {"tools": [call("refund", cents=5000), call("post", text="refunded")]})
    result = run_agent(agent, "refund", "s1", idempotency_key="k1")
    assert (result.status, effects.count()) == ("awaiting-approval", 0)
    approve(result.pending[0].id, None, digest=result.pending[0].digest)
    assert sweep().completed == 1
    assert names(effects) == ["refund", "post"]
    the_run(result)


def test_a_denial_is_told_to_the_model_and_not_asked_again(effects: Effects) -> None:
    turn = {"tools": [call("refund", cents=5000)]}
    agent = shop_agent("denied", turn, turn)
    result = run_agent(agent, "refund", "s1", idempotency_key="k1")
    deny(result.pending[0].id, None, "too much")
    assert sweep().completed == 1
    run = the_run(result)
    assert (effects.count(), run.approvals.count()) == (0, 1)
    results = payloads(run, "tool_result")
    assert [(one["outcome"], one["is_error"]) for one in results] == [("denied", False)] * 2
    assert "too much" in results[1]["content"]


def test_a_fixed_session_is_made_on_first_use_and_goes_on() -> None:
    said: list[Any] = []
    model = ScriptedModel([lambda request: said.append(request.messages) or {"text": "noted"}])
    agent = Agent("bound", instructions="Remember.", model=model)
    for text in ("first", "second"):
        assert run_agent(agent, text, "room-7", idempotency_key=text).status == "completed"
    assert (Session.objects.get().key, Run.objects.count()) == ("room-7", 2)
    texts = [block["text"] for message in said[1] for block in message["content"]]
    assert texts == ["first", "noted", "second"]


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
    result, card = transferring()
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    card = approve(card.pk, ann)
    assert (card.status, card.approved_count) == ("pending", 1)
    assert sweep().found == 0
    with pytest.raises(errors.ApprovalStateError, match="takes 2 people"):
        approve(card.pk, ann)
    assert approve(card.pk, bob).status == "approved"
    assert (sweep().completed, effects.count()) == (1, 1)
    assert payloads(the_run(result), "tool_started")[0]["approved_by"] == ["ann", "bob"]


@pytest.mark.parametrize("verb", ["deny", "answer", "edit"])
def test_who_approved_may_change_their_mind_until_it_is_enough(verb: str) -> None:
    result, card = transferring()
    ann = user("ann", "decide_approval")
    card = approve(card.pk, ann)
    if verb == "edit":
        card = approve(card.pk, ann, digest=card.digest, arguments={"cents": 4})
        assert (card.status, card.approved_count, card.arguments) == ("pending", 1, {"cents": 4})
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
    odd = tool(name="odd", requires_approval=lambda args, ctx: args["no such"])(post.fn)
    assert run_turns({"tools": [call("odd", text="x")]}, tools=[odd]).status == "awaiting-approval"


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


def test_the_parallel_calls_of_a_reply_are_at_work_at_once_and_one_fails_alone(effects: Effects) -> None:
    """Wherever they stand in it; the others come one after the other."""
    met = threading.Barrier(3)

    @tool(safe_to_retry=True, parallel=True)
    def gather(ctx: ToolContext, number: int) -> str:
        """Wait for the others, and fail in the middle."""
        met.wait(LIMIT)
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


# Calls nobody knows the outcome of: who is asked, who is told, and what may run after them


def held_run(*turns: object, **options: object) -> Run:
    """Run until a wire is in doubt and the run is held."""
    return the_run(run_turns(*turns, tools=[*TOOLS, wire], **options))


def orphan_of(run: Run) -> str:
    (call_id,) = result_of(run.pk).orphans
    return call_id


def later(*turns: object, **options: object) -> RunResult:
    """Run another agent with the wire in the same session."""
    return run_agent(shop_agent("next", *turns, tools=[wire], **options), "go on", "s1", idempotency_key="k2")


def test_a_handler_that_does_not_know_is_held_for_staff_or_told_to_the_model(effects: Effects) -> None:
    turn = {"tools": [call("wire", text="x"), call("post", text="y"), call("search", query="z")]}
    run = held_run(turn)
    assert (run.status, outcomes(run)) == ("orphaned", ["ok"])
    assert [line.get("tool", line["key"]) for line in effects.lines()] == ["wire", "search"]
    assert sweep().found == 0
    run = held_run(turn, session="s2", on_orphan="surface")
    assert (run.status, outcomes(run)) == ("completed", ["unknown", "cancelled", "ok"])


@pytest.mark.parametrize(
    ("verdict", "ends", "effects_after"),
    [("occurred", ["ok", "ok"], 2), ("not_occurred", [], 2), ("unknown", ["unknown", "cancelled"], 1)],
)
def test_a_verdict_of_staff(verdict: str, ends: list[str], effects_after: int, effects: Effects) -> None:
    run = held_run({"tools": [call("wire", text="x"), call("post", text="y")]})
    for call_id, word, who, error, said in (
        (orphan_of(run), verdict, user("eve"), errors.PermissionDeniedError, "resolve_orphan"),
        ("018f0000-0000-7000-8000-000000000000", verdict, None, errors.RunStateError, "not in doubt"),
        (orphan_of(run), "maybe", None, ValueError, "occurred, not_occurred, unknown"),
    ):
        with pytest.raises(error, match=said):
            resolve_orphan(run.pk, call_id, word, who)
    staff = user("staff", "resolve_orphan")
    resolve_orphan(run.pk, orphan_of(run), verdict, staff, result="went out at noon", evidence="the bank's")
    assert payloads(run, "orphan_resolved")[0]["actor"]["name"] == "staff"
    sweep()
    run.refresh_from_db()
    keys = [one["key"] for one in payloads(run, "tool_started")]
    # After `not_occurred` the wire was sent again, with the same key, and is in doubt again.
    status, of_wire = ("orphaned", 2) if verdict == "not_occurred" else ("completed", 1)
    assert (run.status, outcomes(run), effects.count()) == (status, ends, effects_after)
    assert (keys.count(keys[0]), len(keys)) == (of_wire, effects_after)


def test_while_a_call_is_in_doubt_its_tool_asks_a_person(effects: Effects) -> None:
    """Also for other arguments, since models re-word them, and in the session's later runs."""
    again = {"tools": [call("wire", text="x, please"), call("post", text="meanwhile")]}
    run = held_run({"tools": [call("wire", text="x")]}, again)
    result = resume_run(run.pk)
    assert result.status == "awaiting-approval"
    card = Approval.objects.get()
    assert (card.tool_name, "unknown outcome" in card.why) == ("wire", True)
    deny(card.pk, None, "it did arrive")
    assert sweep().completed == 1
    assert effects.count("wire") == 1
    asked = later({"tools": [call("wire", text="other")]})
    assert asked.status == "awaiting-approval"
    check_messages(asked.messages[:-1])  # the last turn still waits for its results


@pytest.mark.parametrize(("verdict", "asked"), [("occurred", 0), ("not_occurred", 0), ("unknown", 1)])
def test_a_late_verdict_only_records_and_lifts_the_doubt(verdict: str, asked: int) -> None:
    run = held_run({"tools": [call("wire", text="x")]})
    call_id = orphan_of(run)
    assert resume_run(run.pk).status == "completed"
    before = Message.objects.count()
    resolve_orphan(run.pk, call_id, verdict, None, evidence="the statement")
    assert Message.objects.count() == before + 1
    the_run(result_of(run.pk))
    assert len(later({"tools": [call("wire", text="y")]}, on_orphan="surface").pending) == asked


def test_surfacing_cancels_what_was_approved_after_it(effects: Effects) -> None:
    """Later calls are not run, also approved ones; a denied one keeps its denial."""
    refunds = [call("refund", cents=cents) for cents in (5000, 6000, 7000)]
    run = held_run({"tools": [call("wire", text="x"), *refunds]})
    approved, denied, pending = Approval.objects.order_by("requested_at", "id")
    approve(approved.pk, None)
    deny(denied.pk, None, "too much")
    result = resume_run(run.pk)
    assert result.status == "completed"
    assert outcomes(the_run(result)) == ["unknown", "cancelled", "denied", "cancelled"]
    assert Approval.objects.filter(pk__in=[approved.pk, pending.pk], status="cancelled").count() == 2
    assert effects.count() == 1
    check_messages(result.messages)


def test_a_timeout_is_no_result_and_what_comes_late_is_evidence(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    helpers.only_the_first_is_late(monkeypatch, lambda: effects.count() == 1)

    @tool(timeout=0.2)
    def slow(text: str) -> str:
        """Take longer than allowed."""
        effects.record("slow")
        let_go.wait(LIMIT)
        return "too late"

    result = run_turns({"tools": [call("slow", text="x")]}, tools=[slow])
    assert result.status == "orphaned"
    assert not Message.objects.filter(kind="late_result").exists()
    let_go.set()
    wait_for(Message.objects.filter(kind="late_result").exists, "what came late")
    assert Message.objects.get(kind="late_result").payload["content"] == "too late"
    with pytest.raises(errors.RunStateError, match="did happen"):
        resolve_orphan(result.run_id, result.orphans[0], "not_occurred", None)
    the_run(result)


# Under the definition it was started with, or under another that staff adopted


def test_another_definition_drives_a_run_once_staff_adopted_it() -> None:
    with isolated_registry():
        run, other = (
            start_run(shop_agent("drift"), "do it", key, idempotency_key=key) for key in ("s1", "s2")
        )
    staff = user("staff", "adopt_definition", "resume_run")
    with isolated_registry():
        shop_agent("drift", max_steps=7)
        before = Run.objects.values().get(pk=run.pk)
        with pytest.raises(errors.DurableConfigMismatchError) as mismatch:
            resume_run(run.pk)
        assert mismatch.value.parts == ("max_steps",)
        assert Run.objects.values().get(pk=run.pk) == before
        assert sweep().blocked == 2
        blocked = Run.objects.get(pk=run.pk)
        assert (blocked.attempts, blocked.status) == (0, "queued")
        assert "max_steps" in blocked.blocked_reason
        with pytest.raises(errors.PermissionDeniedError, match="adopt_definition"):
            adopt_definition(run.pk, user("eve"))
        adopted = adopt_definition(run.pk, staff, reason="only the limit changed")
        assert (adopted.status, adopted.blocked_reason) == ("queued", "")
        with pytest.raises(errors.RunStateError, match="already"):
            adopt_definition(run.pk, staff)
        assert sweep().completed == 1
    run.refresh_from_db()
    (row,) = payloads(run, "run_adopted")
    assert (row["actor"]["name"], row["new"]) == ("staff", run.definition_id)
    assert row["old"] != row["new"]
    with pytest.raises(errors.RunStateError, match="has ended"):
        adopt_definition(run.pk)
    with isolated_registry():
        shop_agent("drift")
        assert resume_run(other.pk).status == "completed"


def test_a_call_started_before_is_judged_by_what_its_tool_declared_then(effects: Effects) -> None:
    """Declaring it safe afterwards does not make an effect that may have happened repeatable."""

    def deployed(**declares: Any) -> Agent:
        posts = tool(name="posts", **declares)(post.fn)
        return shop_agent("changed", {"tools": [call("posts", text="x")]}, tools=[posts])

    with isolated_registry(), crashing_at("after_tool"):
        run_agent(deployed(), "do it", "s1", idempotency_key="k")
    expire_leases()
    run = Run.objects.get()
    with isolated_registry():
        deployed(safe_to_retry=True)
        adopt_definition(run.pk)
        sweep()
        run.refresh_from_db()
        assert (run.status, effects.count()) == ("orphaned", 1)
        assert outcomes(the_run(resume_run(run.pk))) == ["unknown"]
    assert effects.count() == 1


def test_what_is_adopted_just_before_the_claim_is_what_drives(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(shop_agent("moved", {"tools": [call("post", text="old")]}), "do it", "s1")

    def adopt_first(alias: str, run_id: UUID, agent: str) -> Lease | None:
        shop_agent("moved", {"tools": [call("post", text="new")]}, max_steps=7)
        adopt_definition(run_id, reason="deployed")
        return claim(alias, run_id, agent)

    with monkeypatch.context() as patch:
        patch.setattr("agentruns.engine.worker.claim", adopt_first)
        assert (sweep().queued, effects.count()) == (1, 0)
    assert sweep().completed == 1
    assert [line["text"] for line in effects.lines()] == ["new"]
    run.refresh_from_db()
    assert run.attempts == 0


# The crash harness that users get: a store that stops at the nth append of a drive


@pytest.mark.parametrize(
    ("turn", "nth", "acted", "at_the_end", "outcome"),
    [
        (call("post", text="x"), 1, 0, 1, "ok"),
        (call("post", text="x"), 2, 1, 1, "unknown"),
        (call("lookup", number="A1"), 2, 1, 2, "ok"),
    ],
    ids=["the first append is the reply", "a tool that declares nothing", "a safe tool"],
)
def test_a_tool_acts_once_or_twice_over_a_crash_and_the_model_is_told_of_what_is_unknown(
    turn: Any, nth: int, acted: int, at_the_end: int, outcome: str, effects: Effects
) -> None:
    agent = shop_agent("crashes", {"tools": [turn]})
    store = crash_after_tool_results(DatabaseStore(), nth)
    with pytest.raises(Crash, match=r"tool_result|assistant"):
        run_agent(agent, "do it", "s1", store=store, idempotency_key="k")
    assert (effects.count(), Run.objects.get().step) == (acted, nth - 1)
    assert not Message.objects.filter(kind="tool_result").exists()
    result = run_agent(agent, "do it", "s1", idempotency_key="k")
    assert (result.status, effects.count()) == ("completed", at_the_end)
    assert outcomes(the_run(result)) == [outcome]
    assert ("tool-durability-error" in str(result.messages)) is (outcome == "unknown")


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(ValueError, match="before_tool"):
        arm("somewhere")
