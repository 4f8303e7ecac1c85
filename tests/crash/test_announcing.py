"""SIGKILL in a project's own code that a commit calls: no call counts as started that nobody entered."""

from __future__ import annotations

import pytest

from agentruns import approve
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from tests.crash import announcing
from tests.crash.processes import expire_lease, run_and_die
from tests.db.helpers import names, outcomes
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)


def dies(*action: str, **given: str) -> None:
    """Do it in another process, and make sure that this was killed."""
    run_and_die(*action, serve=announcing.perform, **given)


@pytest.mark.parametrize("told", ["notifier", "signal", "model signal"])
def test_a_card_is_told_of_before_the_call_beside_it_starts(told: str, effects: Effects) -> None:
    dies("run", "asks-after-a-post", "s1", TOLD=told)
    run = Run.objects.get()
    assert names(effects) == ["told"]
    assert not Message.objects.filter(run=run, kind="tool_started").exists()
    expire_lease(run)
    sweep()
    run.refresh_from_db()
    assert (run.status, names(effects)) == ("awaiting-approval", ["told", "post"]), "nothing is in doubt"
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    assert (outcomes(run), names(effects)) == (["ok", "ok"], ["told", "post", "refund"])
    assert problems(run.session_id) == []


def test_a_verdict_is_told_of_before_the_next_call_starts(effects: Effects) -> None:
    dies("run", "charges-then-posts", "s1", TOLD="nothing", SHOP_KILL="charge:after")
    run = Run.objects.get()
    expire_lease(run)
    dies("sweep", TOLD="telemetry")
    assert names(effects) == ["charge", "told"]
    expire_lease(run)
    assert sweep().completed == 1
    assert (outcomes(run), names(effects)) == (["ok", "ok"], ["charge", "told", "post"])
    assert problems(run.session_id) == []


def test_a_handlers_own_hook_runs_before_the_next_call_starts(effects: Effects) -> None:
    dies("run", "writes-then-posts", "s1", TOLD="hook")
    run = Run.objects.get()
    assert (outcomes(run), names(effects)) == (["ok"], ["told"])
    expire_lease(run)
    assert sweep().completed == 1
    assert (outcomes(run), names(effects)) == (["ok", "ok"], ["told", "post"])
    assert problems(run.session_id) == []
