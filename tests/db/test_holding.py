"""What an operator does to many runs at once: hold them after a restore, or surface what is in doubt."""

from __future__ import annotations

import pytest

from agentruns import approve, resume_run, start_run
from agentruns.engine.leases import claim
from agentruns.exceptions import JournalUnreadableError
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import hold_all, sweep
from tests.bells import Bell
from tests.db.doubts import wire
from tests.db.helpers import outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.rows import spoilt
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_after_a_restore_every_unfinished_run_is_held(effects: Effects) -> None:
    done = run_turns(session="done")
    queued = start_run(shop_agent("queued", {"tools": [call("post", text="x")]}), "do it", "queued")
    leased = start_run(shop_agent("leased"), "do it", "leased")
    assert claim("default", leased.pk) is not None, "its lease is of a time that is gone"
    waiting = run_turns({"tools": [call("refund", cents=5000)]}, session="waiting")
    doubtful = run_turns({"tools": [call("wire", text="x")]}, session="doubtful", tools=[wire])
    assert hold_all() == 4
    assert hold_all() == 0
    statuses = dict(Run.objects.values_list("session__key", "status"))
    assert statuses == {
        "done": "completed", "queued": "paused", "leased": "paused", "waiting": "paused",
        "doubtful": "orphaned",
    }  # fmt: skip
    approve(Approval.objects.get().pk, None)
    assert sweep().found == 0
    assert effects.count() == 1, "the wire that went out before"
    for run_id in (leased.pk, waiting.run_id, doubtful.run_id):
        assert resume_run(run_id).status == "completed"
    # Whether it was posted in rows that are lost only a person can find out.
    assert resume_run(queued.pk).status == "awaiting-approval"
    approve(Approval.objects.get(run=queued.pk).pk, None)
    assert resume_run(queued.pk).status == "completed"
    for result in (done, waiting, doubtful):
        the_run(result)


def test_surfacing_is_done_in_the_name_of_the_sweep() -> None:
    result = run_turns({"tools": [call("wire", text="x")]}, tools=[wire])
    assert sweep().surfaced == 0
    swept = sweep(tell_model=True)
    assert (swept.surfaced, swept.completed) == (1, 1)
    run = the_run(result)
    assert outcomes(run) == ["unknown"]
    assert payloads(run, "tool_result")[0]["actor"]["name"] == "resume_runs"


def test_without_driving_workers_are_rung(settings: object) -> None:
    settings.AGENTRUNS_DISPATCHER = "tests.bells.Bell"  # type: ignore[attr-defined]
    run = start_run(shop_agent("rung", {"tools": [call("post", text="x")]}), "do it", "s1")
    held = run_turns({"tools": [call("wire", text="x")]}, session="held", tools=[wire])
    Bell.rung.clear()
    swept = sweep(drives=False, tell_model=True)
    assert (swept.notified, swept.driven, swept.surfaced) == (2, 0, 1)
    assert set(Bell.rung) == {run.pk, the_run(held).pk}
    assert Message.objects.filter(kind="tool_result", run=held.run_id).count() == 1
    assert Run.objects.filter(status="queued").count() == 2


def test_a_run_that_cannot_be_read_is_told_after_all_others_are_held() -> None:
    unread = start_run(shop_agent("unread"), "do it", "first")
    read = start_run(shop_agent("read"), "do it", "second")
    spoilt(unread.pk)
    with pytest.raises(JournalUnreadableError, match="KeyError"):
        hold_all()
    assert dict(Run.objects.values_list("pk", "status")) == {unread.pk: "queued", read.pk: "paused"}
