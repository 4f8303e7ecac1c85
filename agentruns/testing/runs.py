"""Functions that drive runs in a test, in the test's own process."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db.models.functions import Now

from agentruns.conf import settings

if TYPE_CHECKING:  # agents.py may import this package before the models can be
    from agentruns import RunResult
    from agentruns.models import Run
    from agentruns.models.run import RunQuerySet


class StillRunning(AssertionError):
    """Raised by `run_until_blocked` if a run is leased, or can still continue after the last sweep."""


def run_until_blocked(
    run: Run | RunResult | UUID | str | None = None, *, fast_forward: bool = False, sweeps: int = 100
) -> list[RunResult]:
    """Sweep until every run has ended or waits for a person, an event, a back-off, or code that can drive it.

    Returns the results of the driven runs, in the order of their start. With `run`, drives only this run, and
    returns its result in any case. Approvals and waits that are due end. With `fast_forward`, the clock is
    frozen (see `frozen_clock`) and moves to the end of each back-off and wait. Raises StillRunning if a run
    is leased by a worker, dead or alive, or if runs can still continue after `sweeps` sweeps.
    """
    from agentruns.models import Event
    from agentruns.models.statuses import RunStatus
    from agentruns.services.approvals.decisions import expire_due
    from agentruns.services.events import settle_due
    from agentruns.services.runs.lifecycle import result_of
    from agentruns.services.sweep import candidates, sweep
    from agentruns.testing.database import frozen_clock

    run_id = _id(run)
    driven = {run_id} if run_id else set()
    with frozen_clock() if fast_forward else nullcontext() as clock:
        for _ in range(sweeps):
            expire_due()
            settle_due()
            if ready := candidates(run_id):
                driven |= {each.pk for each in ready}
                sweep(run_id=run_id)
                continue
            if clock is None:
                break
            later = _unfinished(run_id).filter(status=RunStatus.QUEUED, not_before__gt=Now())
            events = Event.objects.using(settings.DATABASE).unsettled().filter(run__in=_unfinished(run_id))
            timers = [*later.values_list("not_before", flat=True), *events.values_list("due_at", flat=True)]
            if (timer := min(filter(None, timers), default=None)) is None:
                break
            clock.move_to(timer)
        else:
            names = ", ".join(f"{each.agent} {each.pk} ({each.status})" for each in _unfinished(run_id))
            raise StillRunning(f"After {sweeps} sweeps these could still go on: {names}.")
        for leased in _unfinished(run_id).filter(lease_expires_at__gte=Now()):
            raise StillRunning(
                f"Run {leased.pk} is held by a worker's lease until "
                f"{leased.lease_expires_at:%Y-%m-%d %H:%M:%S %Z}. If that worker is dead, as after a crash "
                "that the test made, call expire_leases() first."
            )
    return [result_of(pk) for pk in sorted(driven)]


def expire_leases(run: Run | RunResult | UUID | str | None = None) -> int:
    """Make the leases of all unfinished runs, or of `run`, expire now; return the number of these leases.

    A dead worker's run can then be claimed. A living worker loses its run, as if it had slept too long.
    """
    leased = _unfinished(_id(run)).filter(lease_expires_at__isnull=False)
    return leased.update(lease_expires_at=Now() - timedelta(seconds=1))


def _id(run: Any) -> UUID | None:
    found = getattr(run, "run_id", None) or getattr(run, "pk", run)
    return None if found is None else UUID(str(found))


def _unfinished(run_id: UUID | None) -> RunQuerySet:
    from agentruns.models import Run

    runs = Run.objects.using(settings.DATABASE).unfinished().order_by("pk")
    return runs if run_id is None else runs.filter(pk=run_id)
