"""The reply that is being written: who reads it lets its worker know, which stores it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django.db import DatabaseError, InterfaceError, transaction

from agentruns.conf import settings
from agentruns.models import Draft, Run
from agentruns.utils.db import later, short_lock_waits
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.drafts")

WATCHED = 20  # seconds for which a worker stores drafts, unless somebody goes on reading
AT_WORK = ("queued", "running")


def watch(run_ids: Iterable[UUID]) -> None:
    """Let workers know that somebody reads what these runs write; where that cannot be, there is no draft."""
    alias = settings.DATABASE
    found = [Draft(run_id=run_id, watched_until=later(WATCHED)) for run_id in run_ids]
    try:
        with transaction.atomic(using=alias), short_lock_waits(alias):
            Draft.objects.using(alias).bulk_create(
                found, update_conflicts=True, unique_fields=["run"], update_fields=["watched_until"]
            )
    except (DatabaseError, InterfaceError) as error:
        logger.warning("No drafts for now, as it cannot be stored that somebody listens: %s", error)


def draft_of(run: Run) -> str:
    """Return what is written so far of a run's next reply."""
    if run.status not in AT_WORK:
        return ""
    its = Draft.objects.using(settings.DATABASE).filter(pk=run.pk, epoch=run.lease_epoch, step=run.step)
    return its.values_list("text", flat=True).first() or ""
