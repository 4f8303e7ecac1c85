"""Approval rows follow the journal in the transaction that appends to it."""

from __future__ import annotations

from typing import Any

from django.db.models import Q

from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, Card
from agentruns.models import Approval


def project(alias: str, batch: Batch, guard: Q | None = None) -> None:
    """Make the Approval rows equal to the cards a batch changed, by conditional updates.

    `guard` narrows the update of pending cards (digest, expiry by the database clock). Raises
    JournalConflictError when an update finds no row: somebody else decided, or the card expired.
    """
    requested = {row.call_id: row for row in batch.rows if row.kind == events.APPROVAL_REQUESTED}
    for call, card, before in batch.changed_cards():
        if call.id in requested:
            _insert(alias, batch, call, card, requested[call.id])
            continue
        rows = Approval.objects.using(alias).filter(pk=card.id, status=before)
        if guard is not None and before == "pending":
            rows = rows.filter(guard)
        if rows.update(**_columns(call, card)) != 1:
            raise JournalConflictError(f"Approval {card.id} is not {before} any more.")


def _insert(alias: str, batch: Batch, call: Call, card: Card, row: Row) -> None:
    Approval.objects.using(alias).create(
        id=card.id,
        run_id=batch.state.run.run_id,
        call_id=call.id,
        tool_name=call.tool,
        risk=card.risk,
        why=row.payload["why"],
        approvers=card.approvers,
        required=card.required,
        requested_at=row.created_at,
        **_columns(call, card),
    )


def _columns(call: Call, card: Card) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "status": card.status,
        "title": card.title,
        "arguments": call.arguments,
        "digest": card.digest,
        "approved_count": len(card.given),
        "expires_at": card.expires_at,
    }
    if card.status != "pending":
        actor = card.actor or {"id": "", "name": ""}
        columns |= {
            "decided_at": card.decided_at,
            "decided_by_id": actor["id"] or None,
            "decided_by_name": actor["name"],
            "reason": card.reason,
        }
    return columns
