"""The kinds of journal rows, a row as read, a row to be written, and how old rows are read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from agentruns.utils import json as canonical

VERSION = 1

RUN_STARTED = "run_started"
USER = "user"
ASSISTANT = "assistant"
APPROVAL_REQUESTED = "approval_requested"
APPROVAL_DECIDED = "approval_decided"
APPROVAL_EXTENDED = "approval_extended"
TOOL_STARTED = "tool_started"
TOOL_RESULT = "tool_result"
MODEL_FAILED = "model_failed"
LATE_RESULT = "late_result"
ORPHAN_FOUND = "orphan_found"
ORPHAN_RESOLVED = "orphan_resolved"
RUN_RESUMED = "run_resumed"
RUN_PAUSE_REQUESTED = "run_pause_requested"
RUN_PAUSED = "run_paused"
RUN_CANCEL_REQUESTED = "run_cancel_requested"
RUN_ADOPTED = "run_adopted"
RUN_COMPLETED = "run_completed"
RUN_FAILED = "run_failed"
RUN_CANCELLED = "run_cancelled"

PROGRAM = {"id": "", "name": "the program"}  # stands for an actor who is nobody

COPIED = "copied"  # in the payload of a fork's history: from where. It is no part of the fork's own life

OUTPUT_INVALID = "output_invalid"  # why a `user` row is there that no user wrote

CLEARING = ("occurred", "not_occurred")  # verdicts that lift a doubt; newer code may know others

CLOSING = {RUN_COMPLETED: "completed", RUN_FAILED: "failed", RUN_CANCELLED: "cancelled"}

# (kind, v) -> payload of the next version. Old rows are upcast when read and never rewritten.
UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}


class Row(NamedTuple):
    """One row of the journal."""

    seq: int
    run_id: UUID
    kind: str
    call_id: str
    tool_name: str
    attempt: int
    epoch: int
    payload: dict[str, Any]
    created_at: datetime
    prev_hash: str
    hash: str
    consumes: UUID | None


def upcast(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload in today's form; one of a newer version is returned as it is."""
    while step := UPCASTERS.get((kind, payload.get("v", VERSION))):
        payload = step(payload)
    return payload


def actor_ref(actor: Any) -> dict[str, str] | None:
    """Return what the journal keeps of a user, who may be deleted later; None for the program itself."""
    if actor is None or isinstance(actor, dict):
        return actor
    if isinstance(actor, str):  # a named part of the program, such as `resume_runs`
        return {"id": "", "name": actor}
    return {"id": str(actor.pk), "name": actor.get_username()}


def timestamp(moment: datetime) -> str:
    """Return a time as the chain hashes it: UTC, six digits."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def moment(text: str | None) -> datetime | None:
    """Return the time that `timestamp` wrote, or None."""
    return datetime.fromisoformat(text) if text else None


def row_hash(session_id: UUID, row: Row, payload_text: str) -> str:
    """Return the hash that binds a row to the row before it and to its session."""
    return canonical.chain_hash(
        row.prev_hash,
        {
            "session": str(session_id),
            "seq": row.seq,
            "run": str(row.run_id),
            "kind": row.kind,
            "call_id": row.call_id,
            "tool_name": row.tool_name,
            "attempt": row.attempt,
            "epoch": row.epoch,
            "payload": payload_text,
            "created_at": timestamp(row.created_at),
            "consumes": str(row.consumes) if row.consumes else None,
        },
    )
