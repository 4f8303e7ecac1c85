"""What the buttons say about a worker that does not honour a cancel."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest
from django.utils import timezone

from agentruns.admin import advice
from agentruns.admin.waiting import Reason
from agentruns.conf import settings
from agentruns.models import Run


@pytest.mark.parametrize(("leases", "offered"), [(0.5, False), (1.5, True)])
def test_a_second_cancel_is_offered_after_a_lease(leases: float, offered: bool) -> None:
    now = timezone.now()
    run = Run(status="running", lease_expires_at=now + timedelta(seconds=30))
    asked = now - timedelta(seconds=settings.LEASE_SECONDS * leases)
    situation = advice.Situation(run=run, reasons=[], cancel_requested=("ann", asked), may_cancel=True)
    action = advice.cancel(situation)
    assert (not action.why_not) == offered
    assert any("kept as evidence" in line for line in action.effect) == offered


def test_of_several_calls_in_doubt_each_is_named_and_the_advice_given_once() -> None:
    doubts = [Reason("in doubt", call=name, tool=name, attempt=1, evidence="It died.") for name in "ab"]
    other = Reason("Waits for approval", approval=UUID(int=1), call="c")
    notes = advice.notes(advice.Situation(run=Run(status="orphaned"), reasons=[*doubts, other]))
    assert [note[:20] for note in notes] == [
        "a, attempt 1: It die",
        "b, attempt 1: It die",
        "Look in the outside ",
    ]
