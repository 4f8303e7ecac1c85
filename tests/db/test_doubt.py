"""Calls nobody knows the outcome of: who is asked, who is told, and what may run after them."""

from __future__ import annotations

import threading

import pytest

from agentruns import RunResult, ToolContext, approve, deny, resolve_orphan, resume_run, run_agent, tool
from agentruns.exceptions import PermissionDeniedError, RunStateError
from agentruns.models import Approval, Message, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.doubts import wire
from tests.db.helpers import only_the_first_is_late, outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def held_run(*turns: object, **options: object) -> Run:
    """Run until a wire is in doubt and the run is held."""
    return the_run(run_turns(*turns, tools=[*TOOLS, wire], **options))


def orphan_of(run: Run) -> str:
    (call_id,) = result_of(run.pk).orphans
    return call_id


def later(*turns: object, **options: object) -> RunResult:
    """Run another agent with the wire in the same session."""
    return run_agent(shop_agent("next", *turns, tools=[wire], **options), "go on", "s1", idempotency_key="k2")


def test_a_handler_that_does_not_know_is_held_for_staff(effects: Effects) -> None:
    run = held_run({"tools": [call("wire", text="x"), call("post", text="y"), call("search", query="z")]})
    assert (run.status, outcomes(run)) == ("orphaned", ["ok"])
    assert [line.get("tool", line["key"]) for line in effects.lines()] == ["wire", "search"]
    assert sweep().found == 0


def test_an_agent_may_prefer_to_be_told() -> None:
    run = held_run({"tools": [call("wire", text="x"), call("post", text="y")]}, on_orphan="surface")
    assert (run.status, outcomes(run)) == ("completed", ["unknown", "cancelled"])


@pytest.mark.parametrize(
    ("verdict", "ends", "effects_after"),
    [("occurred", ["ok", "ok"], 2), ("not_occurred", [], 2), ("unknown", ["unknown", "cancelled"], 1)],
)
def test_a_verdict_of_staff(verdict: str, ends: list[str], effects_after: int, effects: Effects) -> None:
    run = held_run({"tools": [call("wire", text="x"), call("post", text="y")]})
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


def test_a_verdict_needs_the_permission_and_a_call_in_doubt() -> None:
    run = held_run({"tools": [call("wire", text="x")]})
    with pytest.raises(PermissionDeniedError, match="resolve_orphan"):
        resolve_orphan(run.pk, orphan_of(run), "occurred", user("eve"))
    with pytest.raises(RunStateError, match="not in doubt"):
        resolve_orphan(run.pk, "018f0000-0000-7000-8000-000000000000", "occurred", None)
    with pytest.raises(ValueError, match="occurred, not_occurred, unknown"):
        resolve_orphan(run.pk, orphan_of(run), "maybe", None)


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
    only_the_first_is_late(monkeypatch, lambda: effects.count() == 1)

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
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(result.run_id, result.orphans[0], "not_occurred", None)
    the_run(result)


def test_a_timeout_of_a_safe_tool_is_tried_again(effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    only_the_first_is_late(monkeypatch, lambda: effects.count() == 1)

    @tool(timeout=0.2, safe_to_retry=True)
    def sluggish(ctx: ToolContext, text: str) -> str:
        """Take longer than allowed, and say that this is safe."""
        effects.record("sluggish")
        if ctx.attempt == 1:
            wait_for(ctx.is_cancelled, "the time to be over")
        return "in time"

    assert run_turns({"tools": [call("sluggish", text="x")]}, tools=[sluggish]).status == "completed"
    wait_for(lambda: effects.count() == 2, "both attempts")
    assert [one["attempt"] for one in Message.objects.filter(kind="tool_started").values("attempt")] == [1, 2]
