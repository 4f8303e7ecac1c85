"""What the buttons say about a worker that does not honour a cancel."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from agentruns.admin.runs import actions
from agentruns.admin.runs.limits import Drift, adopt
from agentruns.conf import settings
from agentruns.models import Run
from agentruns.services.waiting import APPROVAL, ORPHAN, Wait

pytestmark = pytest.mark.django_db


def a_run(status: str, **columns: Any) -> Run:
    """Return a run that is stored nowhere, and asks no database for its times."""
    return Run(status=status, created_at=None, updated_at=None, **columns)


@pytest.mark.parametrize(("leases", "offered"), [(0.5, False), (1.5, True)])
def test_a_second_cancel_is_offered_after_a_lease(leases: float, offered: bool) -> None:
    now = timezone.now()
    run = a_run("running", lease_expires_at=now + timedelta(seconds=30))
    asked = now - timedelta(seconds=settings.LEASE_SECONDS * leases)
    situation = actions.Situation(run=run, waits=[], cancel_requested=("ann", asked), may=["cancel"])
    action = actions.cancel(situation)
    assert (not action.why_not) == offered
    assert any("kept as evidence" in line for line in action.effect) == offered


def test_of_several_calls_in_doubt_each_is_named() -> None:
    run = UUID(int=2)
    doubts = [
        Wait(kind=ORPHAN, run_id=run, call_id=name, tool=name, attempt=1, text="It died.") for name in "ab"
    ]
    other = Wait(kind=APPROVAL, run_id=run, approval_id=UUID(int=1), call_id="c")
    notes = actions.notes(actions.Situation(run=a_run("orphaned"), waits=[*doubts, other]))
    assert [note[:20] for note in notes] == ["a, attempt 1: It die", "b, attempt 1: It die"]


@pytest.mark.parametrize(
    ("status", "uncleared", "said"),
    [
        ("completed", 0, "Completed. It waits for nobody."),
        ("completed", 1, "Completed. Somebody still has to say what became of a call:"),
        ("cancelled", 2, "Cancelled. Somebody still has to say what became of 2 calls:"),
    ],
)
def test_an_ended_run_says_what_is_left_to_do(status: str, uncleared: int, said: str) -> None:
    situation = actions.Situation(run=a_run(status), waits=[], uncleared=uncleared)
    assert actions.headline(situation) == said


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"is_paused": True}, "It is paused already."),
        ({"run": a_run("orphaned"), "is_paused": True}, "It is paused already."),
        ({"run": a_run("failed")}, "It has ended: failed."),
        ({"cancel_requested": ("ann", timezone.now())}, "It is being cancelled."),
        ({"may": []}, "You lack the permission agentruns.pause_run."),
        ({}, ""),
    ],
)
def test_why_a_run_cannot_be_paused(known: dict[str, Any], why: str) -> None:
    situation = actions.Situation(
        **{"run": a_run("paused"), "waits": [], "may": ["pause"], **known}  # type: ignore[arg-type]
    )
    action = actions.pause(situation)
    assert (action.why_not, action.forbidden) == (why, known.get("may") == [])


def test_adopting_says_that_a_paused_run_stays_paused() -> None:
    situation = actions.Situation(run=a_run("paused"), waits=[], is_paused=True)
    nothing = adopt(situation, Drift(None, is_served=False, parts=[]))
    assert "It stays paused until somebody resumes it." in nothing.effect
    assert nothing.why_not == "This web server does not know the agent: there is nothing to adopt."
