"""A person clicks while a tool is at work in another process: nothing is lost, nothing runs that may not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from agentruns import approve, cancel_run, pause_run, resolve_orphan, resume_run
from agentruns.exceptions import ApprovalStateError, RunStateError, SessionBusyError
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from tests.crash.processes import expire_lease, finish, freeze, start_held
from tests.db.helpers import outcomes, sound
from tests.effects import Effects
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


class SlowTool:
    """A child that runs an agent and stops inside a tool until it is let go."""

    def __init__(self, agent: str, at: str, effects: Effects, gate: Path, **given: float) -> None:
        self.gate = gate
        self.child, self.run = start_held(agent, at, effects, gate, **{"lease": 60, **given})

    def let_go(self) -> Run:
        self.gate.unlink()
        finish(self.child)
        return sound(self.run)


def test_cancel_keeps_the_result_and_starts_nothing_more(effects: Effects, tmp_path: Path) -> None:
    slow = SlowTool("posts-in-the-middle", "post:after", effects, tmp_path / "gate")
    assert cancel_run(slow.run.pk, reason="stop").status == "running"
    run = slow.let_go()
    assert run.status == "cancelled"
    assert outcomes(run) == ["ok", "ok", "cancelled"]
    assert [line["tool"] for line in effects.lines() if "tool" in line] == ["lookup", "post"]


def test_pause_keeps_the_result_and_resume_runs_the_rest(effects: Effects, tmp_path: Path) -> None:
    slow = SlowTool("posts-in-the-middle", "post:after", effects, tmp_path / "gate")
    pause_run(slow.run.pk, reason="lunch")
    run = slow.let_go()
    assert (run.status, outcomes(run)) == ("paused", ["ok", "ok"])
    assert sweep().found == 0
    assert resume_run(run.pk).status == "completed"
    assert [line["tool"] for line in effects.lines() if "tool" in line] == ["lookup", "post", "charge"]


def test_the_heartbeat_keeps_a_slow_tool_alive_and_its_run_is_left_alone(
    effects: Effects, tmp_path: Path
) -> None:
    slow = SlowTool("calls-post", "post:before", effects, tmp_path / "gate", beat=0.2)
    first = slow.run.lease_expires_at
    wait_for(lambda: Run.objects.get().lease_expires_at > first, "the heartbeat to extend the lease")
    with pytest.raises(SessionBusyError) as busy:
        resume_run(slow.run.pk)
    assert busy.value.lease_expires_at is not None
    assert sweep().found == 0
    assert slow.let_go().status == "completed"
    assert effects.count() == 2  # the mark and the one post


def test_a_zombie_that_wakes_writes_evidence_and_no_engine_row(effects: Effects, tmp_path: Path) -> None:
    slow = SlowTool("calls-post", "post:after", effects, tmp_path / "gate", lease=1)
    freeze(slow.child)
    expire_lease(slow.run)
    sweep()
    assert Run.objects.get().status == "orphaned"
    before = Message.objects.count()
    slow.child.signal(signal.SIGCONT)
    run = slow.let_go()
    new = list(Message.objects.order_by("seq").values_list("kind", "epoch")[before:])
    assert new == [("late_result", 0)]
    call_id = Message.objects.get(kind="late_result").call_id
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(run.pk, call_id, "not_occurred", None)
    resolve_orphan(run.pk, call_id, "occurred", None, result="posted, says the late result")
    assert sweep().completed == 1
    assert [line.get("tool") for line in effects.lines()] == ["post", None]


def test_a_decision_after_cancel_is_refused(effects: Effects, tmp_path: Path) -> None:
    slow = SlowTool("asks-and-searches", "search:after", effects, tmp_path / "gate")
    cancel_run(slow.run.pk)
    with pytest.raises(ApprovalStateError, match="cancelled"):
        approve(Approval.objects.get().pk, None)
    run = slow.let_go()
    assert (run.status, Approval.objects.get().status) == ("cancelled", "cancelled")
    assert "refund" not in {line.get("tool") for line in effects.lines()}


def test_a_second_cancel_takes_the_run_from_a_worker_that_does_not_listen(
    effects: Effects, tmp_path: Path, settings: Any
) -> None:
    slow = SlowTool("posts-in-the-middle", "post:after", effects, tmp_path / "gate")
    assert cancel_run(slow.run.pk).status == "running"
    assert cancel_run(slow.run.pk).status == "running", "too soon: the worker had no chance to honour it"
    settings.AGENTRUNS_LEASE_SECONDS = 0.01
    wait_for(lambda: cancel_run(slow.run.pk, reason="now").status == "cancelled", "the lease to be over")
    run = slow.let_go()
    assert outcomes(run) == ["ok", "unknown", "cancelled"]
    late = Message.objects.get(kind="late_result")
    assert late.payload["content"] == "post done"
    assert [line["tool"] for line in effects.lines() if "tool" in line] == ["lookup", "post"]
