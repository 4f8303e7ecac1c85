"""A run closed at any prefix of its journal leaves a session that the next run can go on with."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from agentruns import Agent, DatabaseStore, ToolContext, approve, cancel_run, resume_run, run_agent, tool
from agentruns.engine.driver import Driver
from agentruns.engine.leases import Lease
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.services.sweep import sweep
from agentruns.testing import Crash, check_messages
from agentruns.testing.crash import CrashingStore
from agentruns.utils import clock
from tests.db.helpers import Checked, kill, outcomes, payloads, the_run
from tests.effects import Effects
from tests.settings import BRIEF
from tests.shop.agents import TOOLS, call
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@tool(transactional=True)
def book(ctx: ToolContext, customer: str) -> str:
    """Make an order; a second attempt that was not rolled back would break its unique number."""
    Order.objects.create(number=ctx.idempotency_key[:20], customer=customer, total_cents=1)
    return "booked"


CALM: Any = {"text": "all done"}
# One reply with a call of every kind. The gated one holds up what follows it, but for the reads.
CALLS = [
    *(call("post", text="hello"), call("post", wrong=1), call("charge", cents=500)),
    *(call("refund", cents=5000), call("search", query="x"), call("lookup", number="A1")),
    *(call("book", customer="Ada"), call("no_such_tool"), call("search", query="y")),
    call("post", text="goodbye"),
]


@pytest.fixture(autouse=True)
def _the_dead_release_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that crashes here is a process that died: its lease stays until it expires."""
    release = Lease.release

    def release_unless_dead(lease: Lease, **how: Any) -> None:
        if not how.get("failed"):
            release(lease, **how)

    monkeypatch.setattr(Lease, "release", release_unless_dead)


def agent_of(last: Any, name: str = "closing", **options: Any) -> Agent:
    """Make an agent whose reply calls everything and whose second turn is `last`."""
    usage = {"input_tokens": 10, "output_tokens": 5}
    model = Checked([{"tools": CALLS, "usage": usage}, last])
    return Agent(name, instructions="Do it all.", tools=[*TOOLS, book], model=model, **options)


def drive_to(agent: Agent, session: str, store: Any) -> Run:
    """Drive and approve until the run ends, or until the store stops it."""
    with suppress(Crash):
        for _ in range(3):
            run_agent(agent, "do it", session, store=store, idempotency_key=session)
            for card in Approval.objects.pending().filter(run__session__key=session):
                approve(card.pk, None, digest=card.digest)
    return Run.objects.get(session__key=session)


def revive(run: Run) -> None:
    """Let the dead worker's lease expire, and drive what is left as a caller who asks."""
    for _ in range(5):
        run.refresh_from_db()
        if run.is_ended:
            return
        kill(run)
        for card in Approval.objects.pending().filter(run=run):
            approve(card.pk, None, digest=card.digest)
        resume_run(run.pk)
    raise AssertionError(f"{run.pk} does not end: {run.status}")


def closed_well(run: Run, effects: Effects) -> bool:
    """Check every call of a closed run against the outside world; return whether a post is in doubt."""
    run.refresh_from_db()
    assert run.is_ended
    assert problems(run.session_id) == []
    assert not Approval.objects.filter(run=run, status__in=["pending", "approved"]).exists()
    results = Message.objects.filter(run=run, kind="tool_result")
    outcome = {row.call_id: row.payload["outcome"] for row in results}
    made = {one["id"]: one for reply in payloads(run, "assistant") for one in reply["calls"]}
    assert outcome.keys() == made.keys()
    assert results.count() == len(made)
    done = {line["key"] for line in effects.lines()} | set(Order.objects.values_list("number", flat=True))
    acted = {
        row.call_id
        for row in Message.objects.filter(run=run, kind="tool_started")
        if {row.payload["key"], row.payload["key"][:20]} & done
    }
    for call_id, word in outcome.items():
        assert word == "unknown" or (word == "ok") == (call_id in acted), made[call_id]
        assert word != "unknown" or made[call_id]["tool"] != "book", "it was rolled back, and that is known"
    once = [line["key"] for line in effects.lines() if line["tool"] not in ("search", "lookup")]
    assert len(once) == len(set(once))
    return any(made[call_id]["tool"] == "post" and word == "unknown" for call_id, word in outcome.items())


def goes_on(session: str, effects: Effects, *, asks: bool) -> None:
    """Run again in the session: it calls tools, and Claude takes all of its conversation."""
    before = effects.count()
    turn = {"tools": [call("lookup", number="B2"), call("post", text="next"), call("charge", cents=1)]}
    agent = Agent("next", instructions="Go on.", tools=TOOLS, model=Checked([turn, {"text": "done"}]))
    result = run_agent(agent, "and now?", session, idempotency_key=f"{session}-2")
    assert result.status == ("awaiting-approval" if asks else "completed"), session
    for card in result.pending:
        approve(card.pk, None, digest=card.digest)
        result = run_agent(agent, "and now?", session, idempotency_key=f"{session}-2")
    assert (result.status, effects.count()) == ("completed", before + 3)
    check_messages(result.messages)
    assert {*outcomes(the_run(result))} == {"ok"}


def cancel_dead(run: Run, when: str) -> str:
    """Cancel a run whose worker died, and say how it must end."""
    if when == "within its lease":
        assert cancel_run(run.pk).status == "running", "its worker may be alive, and is only asked"
    kill(run)
    if when != "after its lease":
        sweep()
    run.refresh_from_db()
    if when == "after a sweep" and run.is_ended:
        return "completed"
    if when != "within its lease":
        assert when == "after its lease" or run.status in ("orphaned", "awaiting-approval")
        cancel_run(run.pk)
    return "cancelled"


@pytest.mark.parametrize("when", ["after its lease", "within its lease", "after a sweep"])
def test_a_run_that_died_at_any_prefix_and_is_cancelled(when: str, effects: Effects) -> None:
    agent, ends = agent_of(CALM), set()
    for nth in range(1, 100):
        session, store = f"dead-{nth}", CrashingStore(DatabaseStore(), nth)
        run = drive_to(agent, session, store)
        if store.left > 0:
            assert nth > 12, "it was stopped in every place"
            break
        end = cancel_dead(run, when)
        goes_on(session, effects, asks=closed_well(run, effects))
        assert run.status == end
        ends.add(end)
    assert "cancelled" in ends


def refuses(request: Any) -> Any:
    raise ProviderError("a reply of nonsense", disposition="fail", type="invalid_reply")


FAIL = {"on_budget": "fail"}
ENDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "fails": (refuses, {}, "invalid_reply: a reply of nonsense"),
    "refusal": ({"tools": CALLS, "stop_reason": "refusal"}, {}, "refusal: The model refused."),
    "max_steps": (CALM, {"max_steps": 1, **FAIL}, "BudgetExceededError: max_steps: 1 of 1"),
    "token_budget": (CALM, {"token_budget": 15, **FAIL}, "BudgetExceededError: token_budget: 15 of 15"),
    "deadline": (CALM, {"deadline": timedelta(hours=1), **FAIL}, "BudgetExceededError: deadline: 72"),
}


# Each prefix with two of the ends, in `make test` with one, or with all of them.
SHIFTS = range(len(ENDS)) if os.environ.get("AGENTRUNS_LONG") else (0,) if BRIEF else (0, 2)


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_run_that_died_at_any_prefix_and_then_fails(
    shift: int, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in range(1, 100):
        how = list(ENDS)[(nth + shift) % len(ENDS)]
        last, options, said = ENDS[how]
        store = CrashingStore(DatabaseStore(), nth)
        session = f"{how}-{nth}"
        run = drive_to(agent_of(last, name=f"closing-{how}", **options), session, store)
        if store.left > 0:
            assert nth > 12, "it was stopped in every place"
            return
        with monkeypatch.context() as patch:
            if how == "deadline":
                patch.setattr(Driver, "now", lambda driver: clock.now(driver.alias) + timedelta(hours=2))
            revive(run)
        run.refresh_from_db()
        assert (run.status, run.error.startswith(said)) == ("failed", True), run.error
        goes_on(session, effects, asks=closed_well(run, effects))
