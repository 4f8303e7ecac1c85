"""What a 409 tells beside its text: where the thing stands, who made it so, and when."""

from __future__ import annotations

from typing import Any

from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.redaction import redact


def of_run(run: Run) -> dict[str, Any]:
    """Return where a run stands; of one that has ended, who ended it and when."""
    closing = run.messages.own().filter(kind__in=events.CLOSING).order_by("-seq").first()
    return {"run_id": str(run.pk), "run_status": run.status, **_who_and_when("ended", closing)}


def of_approval(approval: Approval) -> dict[str, Any]:
    """Return where an approval stands, and who decided, edited or cancelled it last."""
    rows = approval.run.messages.order_by("-seq")
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


def _who_and_when(done: str, row: Message | None) -> dict[str, Any]:
    if row is None:
        return {}
    actor = row.payload.get("actor") or {}
    return {
        f"{done}_by": actor.get("id") or None,
        f"{done}_by_name": redact(actor.get("name", "")),
        f"{done}_at": row.created_at,
    }
