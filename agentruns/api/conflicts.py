"""What a 409 tells beside its text: where the thing stands, who made it so, and when."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from agentruns.conf import settings
from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.models.querysets import MessageQuerySet
from agentruns.utils.redaction import redact


def of_run(run: Run, call_id: str = "") -> dict[str, Any]:
    """Return where a run stands; who ended or paused it, who resolved the call in doubt, and when."""
    rows = _rows(run.pk).own()
    facts: dict[str, Any] = {"run_id": str(run.pk), "run_status": run.status}
    facts |= _who_and_when("ended", rows.filter(kind__in=events.CLOSING).first())
    if run.status == Run.Status.PAUSED:
        facts |= _who_and_when("paused", rows.filter(kind=events.RUN_PAUSED).first())
    if call_id:
        verdicts = rows.filter(kind=events.ORPHAN_RESOLVED, call_id=call_id)
        facts |= {"call_id": call_id, **_who_and_when("resolved", verdicts.first())}
    return facts


def of_approval(approval: Approval) -> dict[str, Any]:
    """Return where an approval stands, and who decided, edited or cancelled it last."""
    rows = _rows(approval.run_id)
    if approval.status == Approval.Status.CANCELLED:
        last = rows.filter(kind__in=events.CLOSING).first()
    else:
        last = rows.filter(kind=events.APPROVAL_DECIDED, call_id=approval.call_id).first()
    return {
        "approval_id": str(approval.pk),
        "approval_status": approval.status,
        "digest": approval.digest,
        "run_id": str(approval.run_id),
        **_who_and_when("decided", last),
    }


def _rows(run_id: UUID) -> MessageQuerySet:
    return Message.objects.using(settings.DATABASE).filter(run_id=run_id).order_by("-seq")


def _who_and_when(done: str, row: Message | None) -> dict[str, Any]:
    if row is None:
        return {}
    actor = row.payload.get("actor") or {}
    return {
        f"{done}_by": actor.get("id") or None,
        f"{done}_by_name": redact(actor.get("name", "")),
        f"{done}_at": row.created_at,
    }
