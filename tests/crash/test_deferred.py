"""A worker with a deferred call is killed at each boundary: one call, at most one effect, and one message."""

from __future__ import annotations

import pytest

from agentruns import approve, start_run
from agentruns.journal.verify import problems
from agentruns.models import Approval, Event, Run, Session
from agentruns.services.runs.control import resolve_orphan
from agentruns.services.sweep import sweep
from tests.crash.deferrals import agent
from tests.crash.processes import run_and_die
from tests.db.deferrals import told
from tests.db.helpers import names
from tests.effects import Effects
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

MODULE = "tests.crash.deferrals"
ASKING = ("after_model", "after_reply", "before_children", "after_children", "before_finish", "after_finish")
# The first end is the call's, and the second that of the run that hears the outcome.
DECIDED = (
    *("give_back:before", "give_back:after", "before_tool", "after_tool", "before_result_commit"),
    *("after_result", "before_finish", "after_finish", "before_settled", "before_start_commit"),
    *("after_start", "after_settled", "before_model", "before_finish:2", "after_finish:2"),
)


def settle() -> bool:
    """Sweep once, and give the verdict on each call in doubt that the ledger outside knows."""
    sweep()
    for run in Run.objects.filter(status="orphaned"):
        happened = "give_back" in names(Effects.from_environment())
        resolve_orphan(run.pk, run.pending_calls[0], "occurred" if happened else "not_occurred", None)
    return not Run.objects.unfinished().exclude(status="awaiting-approval").exists()


def go_on(effects: Effects) -> None:
    """Wait for the outcome, and check that all of it happened once."""

    def is_told() -> bool:
        return settle() and len(told()) > 0 and not Run.objects.unfinished().exists()

    wait_for(is_told, "the outcome")
    sweep()
    assert (names(effects), len(told()), Run.objects.count()) == (["give_back"], 1, 3)
    assert {run.status for run in Run.objects.all()} == {"completed"}
    assert not Event.objects.unsettled().exists()
    assert not any(problems(session.pk) for session in Session.objects.all())


def wait_for_card() -> Approval:
    """Wait until the run has ended and the call waits for people."""
    wait_for(lambda: settle() and Approval.objects.pending().exists(), "the card")
    return Approval.objects.get()


@pytest.mark.parametrize("point", ASKING)
def test_a_worker_is_killed_while_it_asks(point: str, effects: Effects) -> None:
    start_run(agent, "my money", "s1")
    run_and_die("work", point=point, module=MODULE)
    approve(wait_for_card().pk, None)
    go_on(effects)


@pytest.mark.parametrize("place", DECIDED)
def test_a_worker_is_killed_after_the_decision(place: str, effects: Effects) -> None:
    start_run(agent, "my money", "s1")
    approve(wait_for_card().pk, None)
    at = {"SHOP_KILL": place} if place.startswith("give_back") else {"point": place}
    run_and_die("work", module=MODULE, **at)
    go_on(effects)


def test_the_process_of_the_decision_is_killed(effects: Effects) -> None:
    start_run(agent, "my money", "s1")
    run_and_die("approve", str(wait_for_card().pk), point="after_decision", module=MODULE)
    go_on(effects)
