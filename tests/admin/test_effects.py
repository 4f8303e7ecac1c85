"""What a run called: the answer to "was it done twice?" on its own page."""

from __future__ import annotations

import pytest

from agentruns import approve
from agentruns.services.control import resolve_orphan
from agentruns.services.forks import fork_run
from agentruns.services.sweep import sweep
from tests.admin.pages import text
from tests.admin.people import user
from tests.admin.world import World, secretive

pytestmark = pytest.mark.django_db(transaction=True)


def test_who_allowed_what_and_how_often_it_started(world: World) -> None:
    approval = world.waiting()
    shown = text(approval.run)
    assert "was started" not in shown
    approve(approval.pk, user("decider"))
    sweep()
    shown = text(approval.run)
    assert "A tool was started 1 time. No effect of this session ran twice" in shown
    assert "decider: Approved" in shown


def test_a_call_that_was_started_again(world: World) -> None:
    run = world.orphaned()
    (call_id,) = run.pending_calls
    resolve_orphan(run.pk, call_id, "not_occurred", user("superuser"), evidence="asked the bank")
    sweep()
    shown = text(run)
    assert "Tools were started 2 times. 1 call was started more than once." in shown


def test_what_is_sensitive_is_masked_and_a_forks_history_is_not_its_own(world: World) -> None:
    approval = world.waiting("secret", tools=[secretive])
    assert "DE02-secret" not in text(approval.run)
    run = world.completed()
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="more")
    assert "was started" not in text(fork)
