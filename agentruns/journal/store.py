"""Stores of a run's rows, in the database or in memory.

An append is guarded updates of Session and Run, one multi-row INSERT and the approvals it changes, all or
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar
from uuid import UUID

from django.db import connections, transaction
from django.utils.crypto import salted_hmac

from agentruns.conf import settings
from agentruns.exceptions import JournalConflictError
from agentruns.journal import events, telemetry
from agentruns.journal.batch import Batch, SessionState, load
from agentruns.journal.connection import acknowledged, journal_alias, own_alias, require_no_transaction
from agentruns.journal.fold import Call, CallApproval
from agentruns.journal.outbox import announce, is_announced
from agentruns.journal.statements import write_rows
from agentruns.models import Approval
from agentruns.models.token import VISITOR
from agentruns.utils import json as canonical

# Columns of Approval that are stored as they are folded
AS_FOLDED = (
    "status", "title", "why", "risk", "approvers", "required", "requested_at", "digest", "expires_at",
)  # fmt: skip


class DatabaseStore:
    """The store that appends to the journal in the project's database."""

    durable: ClassVar[bool] = True

    def __init__(self, alias: str | None = None) -> None:
        self.alias = alias or settings.DATABASE

    def append(self, batch: Batch, *, durable: bool = False) -> None:
        """Store rows, folded columns and approvals in one transaction, or in a savepoint inside another.

        `durable` requires that no transaction is open, so that the commit is real, and uses the journal's own
        connection if this thread has one. Raises JournalConflictError if the writer did not know the whole
        journal.
        """
        alias = self.alias
        if durable:
            require_no_transaction(alias)
            alias = own_alias(alias)
        connection = connections[alias]
        # On PostgreSQL rows alone are one statement, and that is a transaction by itself.
        is_more = connection.in_atomic_block or batch.changed_approvals() or is_announced(batch)
        is_one = connection.vendor == "postgresql" and durable and not is_more
        block = nullcontext() if is_one else transaction.atomic(using=alias, durable=durable)
        with acknowledged(connection), block:
            write_rows(connection, batch, durable=durable)
            if is_more:
                project(alias, batch)
                announce(alias, batch)
        if settings.TELEMETRY:
            telemetry.stored(batch, alias)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state of a session from its rows; raises JournalUnreadableError."""
        return load(journal_alias(self.alias), session_id, run_id)


class MemoryStore:
    """The store of one stateless run; nothing survives the process."""

    durable: ClassVar[bool] = False

    def append(self, batch: Batch, *, durable: bool = False) -> None:
        """Report the batch to telemetry; its rows are folded already and stored nowhere."""
        telemetry.stored(batch, None)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Raise LookupError, because there is nothing to read back."""
        raise LookupError(f"Run {run_id} lives in memory only; there is nothing to load.")


Store = DatabaseStore | MemoryStore


def project(alias: str, batch: Batch) -> None:
    """Write the approvals of a batch; raises JournalConflictError if an approval was changed meanwhile."""
    requested = {row.call_id for row in batch.rows if row.kind == events.APPROVAL_REQUESTED}
    for call, approval, before in batch.changed_approvals():
        if call.id in requested:
            new_approval(call, approval, batch.state.run.run_id).save(force_insert=True, using=alias)
            continue
        rows = Approval.objects.using(alias).filter(pk=approval.id, status=before)
        if batch.guard is not None and before == "pending":
            rows = rows.filter(batch.guard)
        columns = card_columns(call, approval)
        if rows.update(**columns, same_call=same_call(call.tool, call.arguments)) != 1:
            raise JournalConflictError(f"Approval {approval.id} is not {before} any more.")


def new_approval(call: Call, approval: CallApproval, run_id: UUID) -> Approval:
    """Build the Approval instance of a call from its folded state."""
    same = same_call(call.tool, call.arguments)
    return Approval(id=approval.id, run_id=run_id, same_call=same, **card_columns(call, approval))


def card_columns(call: Call, approval: CallApproval) -> dict[str, Any]:
    """Build the columns of Approval from a call and its folded approval."""
    actor = approval.actor or {"id": "", "name": ""}
    user_id = None if actor["id"].startswith(VISITOR) else actor["id"] or None  # a visitor is no user
    is_decided = approval.status != "pending"
    return {
        **{name: getattr(approval, name) for name in AS_FOLDED},
        "call_id": call.id,
        "tool_name": call.tool,
        "arguments": call.arguments,
        "approved_count": len(approval.given),
        "decided_at": approval.decided_at if is_decided else None,
        "decided_by_id": user_id if is_decided else None,
        "decided_by_name": actor["name"] if is_decided else "",
        "reason": approval.reason if is_decided else "",
    }


def same_call(tool: str, arguments: dict[str, Any]) -> str:
    """Compute a keyed hash of tool and arguments, which finds the same call in other sessions."""
    text = canonical.dumps({"tool": tool, "arguments": arguments})
    return salted_hmac("agentruns.same_call", text, algorithm="sha256").hexdigest()
