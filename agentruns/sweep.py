"""The sweep: expire what is due, then drive every run that can go on and that this process serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models.functions import Now

from agentruns import approvals
from agentruns.conf import settings
from agentruns.driver import require_no_transaction
from agentruns.exceptions import DurableConfigMismatchError
from agentruns.models import Control, Run
from agentruns.worker import advance

logger = logging.getLogger("agentruns.sweep")

BATCH = 100


@dataclass(slots=True)
class Swept:
    """What one sweep did; the last four count the runs it drove by where they stand now."""

    found: int = 0
    driven: int = 0
    expired: int = 0
    blocked: int = 0
    errors: int = 0
    completed: int = 0
    waiting: int = 0
    failed: int = 0
    queued: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


def candidates(run_id: UUID | str | None = None, limit: int | None = None) -> list[Run]:
    """Return the runs that can be claimed now, oldest first."""
    runs = Run.objects.using(settings.DATABASE).runnable().select_related("session").order_by("created_at")
    if run_id is not None:
        runs = runs.filter(pk=run_id)
    return list(runs[: limit or BATCH])


def sweep(
    *,
    name: str = "resume_runs",
    run_id: UUID | str | None = None,
    limit: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Swept:
    """Do one sweep. What one run raises is logged and counted, and the others go on."""
    alias = settings.DATABASE
    require_no_transaction(alias)
    swept = Swept(expired=approvals.expire_due())
    Control.objects.using(alias).update_or_create(name=name, defaults={"seen_at": Now()})
    for run in candidates(run_id, limit):
        if should_stop():
            break
        swept.found += 1
        _advance(run, alias, swept, should_stop)
    return swept


def _advance(run: Run, alias: str, swept: Swept, should_stop: Callable[[], bool]) -> None:
    try:
        if not advance(run, alias, should_stop=should_stop):
            return
    except DurableConfigMismatchError as error:
        swept.blocked += 1
        _block(run, alias, str(error))
        return
    except (DatabaseError, InterfaceError):
        raise
    except Exception:
        swept.errors += 1
        logger.exception("Drive failed run=%s agent=%s", run.pk, run.agent)
        return
    swept.driven += 1
    status = Run.objects.using(alias).values_list("status", flat=True).get(pk=run.pk)
    group = {"completed": "completed", "failed": "failed", "cancelled": "failed", "queued": "queued"}
    name = group.get(status, "waiting")
    setattr(swept, name, getattr(swept, name) + 1)


def _block(run: Run, alias: str, why: str) -> None:
    """Say why a run is not claimed; it costs no attempt and is looked at again at the next sweep."""
    rows = Run.objects.using(alias).filter(pk=run.pk, status=run.status, lease_epoch=run.lease_epoch)
    rows.exclude(blocked_reason=why).update(blocked_reason=why)
