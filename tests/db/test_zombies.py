"""A worker goes on without its lease: not one engine row by it, and what it knows is kept as evidence."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from agentruns import NotOccurred, Occurred, ToolContext, resolve_orphan, run_agent, start_run, tool
from agentruns.engine.leases import Lease, extend_all
from agentruns.engine.worker import advance
from agentruns.exceptions import RunStateError, ToolDurabilityError
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from agentruns.utils import failpoints
from tests.crash.disasters import forked
from tests.crash.processes import Forked, ended, expire_lease
from tests.db.dying import elsewhere
from tests.db.helpers import kill, only_the_first_is_late, outcomes, payloads
from tests.effects import Effects
from tests.shop.agents import call, refund, shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

ASKS = {"tools": [call("refund", cents=5000)]}


def act(ctx: ToolContext, done: str = "posted") -> str:
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt)
    return done


def lose_the_run(ctx: ToolContext) -> None:
    """Another worker takes the run over and drives it, as if this one had slept through its lease."""
    kill(Run.objects.get(pk=ctx.run_id))
    elsewhere(sweep)


def run(tool: Any, *arguments: dict[str, Any]) -> Run:
    """Run an agent that calls a tool, once or with each of the arguments, whatever becomes of this worker."""
    calls = [call(tool.name, **each) for each in arguments or ({},)]
    run_agent(shop_agent("zombie", {"tools": calls}, tools=[tool]), "do it", "s1", idempotency_key="k")
    return the_only_run()


def resolve(found: Run, verdict: str, **options: Any) -> None:
    """Give a verdict on the only call in doubt."""
    (call_id,) = result_of(found.pk).orphans
    resolve_orphan(found.pk, call_id, verdict, None, **options)


def the_only_run() -> Run:
    found = Run.objects.get()
    assert problems(found.session_id) == []
    if found.is_ended:
        check_messages(result_of(found.pk).messages)
    return found


def late(found: Run) -> list[dict[str, Any]]:
    return payloads(found, "late_result")


def is_frozen(child: Forked) -> bool:
    """Whether a process has stopped itself; on a slow machine its lease may be over before it does."""
    return Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def kinds_after(found: Run, kind: str) -> list[str]:
    """List the kinds of the rows after the first of a kind."""
    kinds = list(Message.objects.filter(run=found).order_by("seq").values_list("kind", flat=True))
    return kinds[kinds.index(kind) + 1 :]


def test_a_handler_of_a_tool_that_declares_nothing_leaves_evidence(effects: Effects) -> None:
    @tool
    def post(ctx: ToolContext) -> str:
        """Lose the run, then act."""
        lose_the_run(ctx)
        return act(ctx)

    found = run(post)
    assert (found.status, outcomes(found), effects.count()) == ("orphaned", [], 1)
    assert kinds_after(found, "orphan_found") == ["late_result"]
    assert late(found)[0]["content"] == "posted"
    with pytest.raises(RunStateError, match="did happen"):
        resolve(found, "not_occurred")
    resolve(found, "occurred", result="posted, late")
    sweep()
    assert (the_only_run().status, outcomes(found), effects.count()) == ("completed", ["ok"], 1)


def test_an_error_that_came_late_does_not_forbid_the_verdict_not_occurred(effects: Effects) -> None:
    @tool
    def fail(ctx: ToolContext) -> str:
        """Lose the run, then fail before acting."""
        if ctx.attempt == 1:
            lose_the_run(ctx)
            raise ConnectionRefusedError("no route")
        return act(ctx)

    found = run(fail)
    assert (found.status, late(found)[0]["is_error"], effects.count()) == ("orphaned", True, 0)
    resolve(found, "not_occurred")
    assert sweep().completed == 1
    assert (outcomes(the_only_run()), [line["attempt"] for line in effects.lines()]) == (["ok"], [2])


def test_evidence_that_comes_after_the_verdict_not_occurred_stops_the_second_attempt(
    effects: Effects,
) -> None:
    """The verdict was right when it was given; now it is known to be wrong, and nothing has run yet."""

    @tool
    def late_post(ctx: ToolContext) -> str:
        """Act after a person looked and saw nothing."""
        lose_the_run(ctx)
        resolve_orphan(ctx.run_id, ctx.call_id, "not_occurred", None, evidence="nothing is there")
        return act(ctx)

    found = run(late_post)
    assert (late(found)[0]["content"], effects.count()) == ("posted", 1)
    sweep()
    found = the_only_run()
    assert (found.status, effects.count(), len(payloads(found, "tool_started"))) == ("orphaned", 1, 1)
    resolve(found, "occurred", result="posted")
    assert sweep().completed == 1
    assert effects.count() == 1


def known(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
    happened = Effects.from_environment().count(ctx.idempotency_key)
    return Occurred("known outside") if happened else NotOccurred()


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"safe_to_retry": True}, ("attempt 2", 2)), ({"reconcile": known}, ("known outside", 1))],
)
def test_the_result_of_the_worker_that_took_over_stands(
    options: Any, expected: tuple[str, int], effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    @tool(**options)
    def work(ctx: ToolContext) -> str:
        """Act, then lose the run, and be told so."""
        act(ctx)
        if ctx.attempt == 1:
            lose_the_run(ctx)
            ctx.heartbeat()
            wait_for(ctx.is_cancelled, "is_cancelled() to be true")
            wait_for(lambda: "Lease lost" in caplog.text, "the warning")
        return f"attempt {ctx.attempt}"

    with caplog.at_level("WARNING", logger="agentruns.leases"):
        found = run(work)
    assert (found.status, outcomes(found)) == ("completed", ["ok"])
    assert (payloads(found, "tool_result")[0]["content"], effects.count()) == expected
    assert kinds_after(found, "run_completed") == ["late_result"]
    assert late(found)[0]["content"] == "attempt 1"
    assert len({line["key"] for line in effects.lines()}) == 1


def test_every_handler_of_a_parallel_group_leaves_its_evidence() -> None:
    @tool(safe_to_retry=True, parallel=True)
    def read(ctx: ToolContext, number: int) -> str:
        """Read; the first one loses the run, the second one is slower than that."""
        if ctx.attempt == 1 and number == 1:
            lose_the_run(ctx)
        elif ctx.attempt == 1:
            wait_for(Message.objects.filter(kind="late_result").exists, "the first one's evidence")
        return f"{number} at attempt {ctx.attempt}"

    found = run(read, {"number": 1}, {"number": 2})
    assert (found.status, outcomes(found)) == ("completed", ["ok", "ok"])
    wait_for(lambda: len(late(found)) == 2, "the second one's evidence")
    assert {one["content"] for one in late(found)} == {"1 at attempt 1", "2 at attempt 1"}
    the_only_run()


def test_those_of_a_parallel_group_that_had_to_wait_are_known_not_to_have_begun(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentruns.engine.tool_calls.PARALLEL", 1)

    @tool(safe_to_retry=True, parallel=True)
    def read(ctx: ToolContext, number: int) -> str:
        """Read; the first one loses the run."""
        if ctx.attempt == 1:
            act(ctx)
            lose_the_run(ctx)
        return "read"

    found = run(read, {"number": 1}, {"number": 2})
    assert (found.status, outcomes(found), effects.count()) == ("completed", ["ok", "ok"], 1)
    assert [one.get("never_entered", False) for one in late(found)] == [False, True]


def test_a_second_attempt_is_not_told_to_stop_because_the_first_one_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, entered = [], threading.Event()
    only_the_first_is_late(monkeypatch, entered.is_set)

    @tool(safe_to_retry=True, timeout=0.3)
    def slow(ctx: ToolContext) -> str:
        """Take too long the first time; say at each attempt whether to stop."""
        entered.set()
        if ctx.attempt == 1:
            wait_for(ctx.is_cancelled, "the time to be over")
        told.append((ctx.attempt, ctx.is_cancelled()))
        return "done"

    found = run(slow)
    assert (found.status, outcomes(found)) == ("completed", ["ok"])
    wait_for(lambda: len(told) == 2, "both attempts")
    assert dict(told) == {1: True, 2: False}


def test_a_handler_that_outlives_a_ctrl_c_of_its_engine_leaves_evidence(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()

    def ctrl_c(*futures: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    @tool(timeout=300)
    def long(ctx: ToolContext) -> str:
        """Be at work while somebody presses Ctrl-C."""
        let_go.wait(LIMIT)
        return act(ctx, "done")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("agentruns.engine.tool_calls.wait", ctrl_c)  # where the engine waits for the handler
        run(long)
    sweep()
    found = the_only_run()
    assert (found.status, outcomes(found)) == ("orphaned", [])
    let_go.set()
    wait_for(lambda: bool(late(found)), "the evidence")
    assert (late(found)[0]["content"], effects.count()) == ("done", 1)
    with pytest.raises(RunStateError, match="did happen"):
        resolve(found, "not_occurred")


def test_a_ctrl_c_inside_one_of_a_parallel_group_loses_no_others_evidence() -> None:
    @tool(safe_to_retry=True, parallel=True)
    def read(ctx: ToolContext, number: int) -> str:
        """Read, but stop the process at the first attempt of the first."""
        if ctx.attempt == 1 and number == 1:
            raise KeyboardInterrupt
        if ctx.attempt == 1:
            wait_for(lambda: Run.objects.get(pk=ctx.run_id).attempts == 1, "the engine to stop")
        return f"{number} at attempt {ctx.attempt}"

    with pytest.raises(KeyboardInterrupt):
        run(read, {"number": 1}, {"number": 2})
    wait_for(lambda: bool(payloads(Run.objects.get(), "late_result")), "the other one's evidence")
    sweep()
    found = the_only_run()
    assert (found.status, outcomes(found)) == ("completed", ["ok", "ok"])
    assert [one["content"] for one in late(found)] == ["2 at attempt 1"]


def test_a_process_frozen_before_the_handler_for_longer_than_its_lease_does_not_enter_it(
    effects: Effects,
) -> None:
    started = start_run("calls-post", "do it", "s1")
    child = forked(effects, "advance", str(started.pk), point="before_tool", freezes=True, lease=1)
    try:
        wait_for(Message.objects.filter(kind="tool_started").exists, "the call to be started")
        expire_lease(started)
        sweep()
        assert Run.objects.get().status == "orphaned"
        wait_for(lambda: is_frozen(child), "the process to be frozen")
        child.signal(signal.SIGCONT)
        wait_for(Message.objects.filter(kind="late_result").exists, "what the frozen process knows")
    finally:
        code = ended(child)
    found = the_only_run()
    assert (code, effects.count(), late(found)[0]["never_entered"]) == (0, 0, True)
    assert kinds_after(found, "orphan_found") == ["late_result"]
    resolve(found, "not_occurred")
    assert sweep().completed == 1
    assert (outcomes(the_only_run()), effects.count()) == (["ok"], 1)


class UnansweredStore(DatabaseStore):
    """Lets others go on to the next reply before the first commit of a kind of row is told to its worker."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.others_went_on = kind, threading.Event()

    def append(self, batch: Any, **options: Any) -> None:
        super().append(batch, **options)
        if any(row.kind == self.kind for row in batch.rows) and not self.others_went_on.is_set():
            kill(Run.objects.get())
            elsewhere(sweep)
            self.others_went_on.set()
            raise OperationalError("the connection broke before the acknowledgement came")


def test_a_start_whose_acknowledgement_came_after_others_went_on_to_the_next_reply(effects: Effects) -> None:
    store = UnansweredStore("tool_started")

    @tool(parallel=True, safe_to_retry=True)
    def look(ctx: ToolContext) -> str:
        return act(ctx)

    agent = shop_agent("zombie", {"tools": [call("look")]}, ASKS, tools=[look, refund])
    advance(start_run(agent, "do it", "s1"), "default", store=store)
    assert store.others_went_on.is_set()
    assert (the_only_run().status, outcomes(the_only_run())) == ("awaiting-approval", ["ok"])
    assert [line["attempt"] for line in effects.lines()] == [2], "by the worker that took over"


@pytest.mark.parametrize("outcome", ["ok", "unknown"])
def test_a_result_whose_acknowledgement_came_after_others_went_on_to_the_next_reply(
    outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = UnansweredStore("tool_result")

    @tool(parallel=True, safe_to_retry=True)
    def look(ctx: ToolContext, number: int) -> str:
        """Look something up; the second one is slower than that, or says that it does not know."""
        if ctx.attempt == 1 and number == 2:
            assert store.others_went_on.wait(LIMIT)
            if outcome == "unknown":
                raise ToolDurabilityError("no answer")
        return f"{number} at attempt {ctx.attempt}"

    group = [call("look", number=1), call("look", number=2)]
    agent = shop_agent("zombie", {"tools": group}, ASKS, tools=[look, refund])
    with caplog.at_level(logging.WARNING, "agentruns.engine"):
        advance(start_run(agent, "do it", "s1"), "default", store=store)
    found = the_only_run()
    assert "Lease lost" in caplog.text
    assert (found.status, outcomes(found)) == ("awaiting-approval", ["ok", "ok"])
    assert [one["content"] for one in late(found)] == ["2 at attempt 1"] * (outcome == "ok")


@pytest.mark.parametrize("point", ["after_finish", "after_release"])
def test_a_beat_after_its_own_driver_gave_the_run_back_is_no_lost_lease(
    point: str, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.02
    beat, release = threading.Event(), Lease.release

    def extend(alias: str, leases: list[Lease]) -> Any:
        extended, lost = extend_all(alias, leases)
        if lost:
            beat.set()
        return extended, lost

    def release_and_beat(lease: Lease, **options: Any) -> None:
        release(lease, **options)
        assert beat.wait(LIMIT)

    monkeypatch.setattr("agentruns.engine.leases.extend_all", extend)
    found = start_run(shop_agent("brief"), "do it", "s1")
    if point == "after_finish":
        failpoints.arm(point, lambda: beat.wait(LIMIT))
    else:
        monkeypatch.setattr(Lease, "release", release_and_beat)
    with caplog.at_level("WARNING", logger="agentruns"):
        advance(found, "default", should_stop=lambda: point == "after_release")
    assert beat.is_set()
    assert caplog.text == ""
    assert the_only_run().status == ("completed" if point == "after_finish" else "queued")
