"""What the buttons say about a worker that does not honour a cancel."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from agentruns.admin import advice
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
