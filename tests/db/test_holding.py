"""What an operator does to many runs at once: hold them after a restore, or surface what is in doubt."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import approve, resume_run, start_run
from agentruns.engine.leases import claim
from agentruns.exceptions import JournalUnreadableError
from agentruns.models import Approval, Run
from agentruns.services.sweep import hold_all, sweep
from tests.bells import Bell
from tests.db.doubts import wire
from tests.db.helpers import payloads, run_turns, the_run
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
    assert (hold_all(), hold_all()) == (4, 0)
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


def test_without_driving_workers_are_rung(settings: Any) -> None:
    """What is in doubt is surfaced in the name of the sweep that was asked to."""
    settings.AGENTRUNS_DISPATCHER = "tests.bells.Bell"
    run = start_run(shop_agent("rung", {"tools": [call("post", text="x")]}), "do it", "s1")
    held = run_turns({"tools": [call("wire", text="x")]}, session="held", tools=[wire])
    Bell.rung.clear()
    assert sweep(drives=False).surfaced == 0
    Bell.rung.clear()
    swept = sweep(drives=False, tell_model=True)
    assert (swept.notified, swept.driven, swept.surfaced) == (2, 0, 1)
    assert set(Bell.rung) == {run.pk, the_run(held).pk}
    (told,) = payloads(the_run(held), "tool_result")
    assert (told["outcome"], told["actor"]["name"]) == ("unknown", "resume_runs")
    assert Run.objects.filter(status="queued").count() == 2
    spoilt(run.pk)
    with pytest.raises(JournalUnreadableError, match="KeyError"):  # after all others are held
        hold_all()
    assert {*Run.objects.values_list("pk", "status")} == {(run.pk, "queued"), (the_run(held).pk, "paused")}
