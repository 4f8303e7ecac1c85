"""Approval rows, updated in the transaction that appends to the journal."""

from __future__ import annotations

from typing import Any

from django.db.models import Q

from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, CallApproval
from agentruns.models import Approval


def project(alias: str, batch: Batch, guard: Q | None = None) -> None:
    """Write the approvals that a batch requests or changes, by conditional updates.

    `guard` narrows the update of pending approvals (digest, expiry by the database clock). Raises
    JournalConflictError when an update finds no row: somebody else decided, or the approval expired.
    """
    requested = {row.call_id: row for row in batch.rows if row.kind == events.APPROVAL_REQUESTED}
    for call, approval, before in batch.changed_approvals():
        if call.id in requested:
            _insert(alias, call, approval, requested[call.id])
            continue
        rows = Approval.objects.using(alias).filter(pk=approval.id, status=before)
        if guard is not None and before == "pending":
            rows = rows.filter(guard)
        if rows.update(**_columns(call, approval)) != 1:
            raise JournalConflictError(f"Approval {approval.id} is not {before} any more.")


def _insert(alias: str, call: Call, approval: CallApproval, row: Row) -> None:
    payload: events.ApprovalRequested = row.payload
    Approval.objects.using(alias).create(
        id=approval.id,
        run_id=row.run_id,
        call_id=call.id,
        tool_name=call.tool,
        risk=approval.risk,
        why=payload["why"],
        approvers=approval.approvers,
        required=approval.required,
        requested_at=row.created_at,
        **_columns(call, approval),
    )


def _columns(call: Call, approval: CallApproval) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "status": approval.status,
        "title": approval.title,
        "arguments": call.arguments,
        "digest": approval.digest,
        "approved_count": len(approval.given),
        "expires_at": approval.expires_at,
    }
    if approval.status != "pending":
        actor = approval.actor or {"id": "", "name": ""}
        columns |= {
            "decided_at": approval.decided_at,
            "decided_by_id": actor["id"] or None,
            "decided_by_name": actor["name"],
            "reason": approval.reason,
        }
    return columns
