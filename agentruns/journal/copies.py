"""The rows that a fork copied from its origin, and their comparison with the origin's journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from agentruns.journal import events, payloads
from agentruns.journal.events import Row
from agentruns.journal.fold import text_of
from agentruns.journal.read import stored_rows
from agentruns.models import Message, Run
from agentruns.utils import json as canonical


class Copy(NamedTuple):
    """A copied row: its own digest, and the run, number and hash of the row it claims to copy."""

    seq: int
    kind: str
    source: UUID
    source_seq: int  # another than its own for the result of a call that was open at the cut
    source_hash: str
    digest: str


def original(row: Row) -> Row:
    """Return a row without the mark of a copy, so that it is folded."""
    return row._replace(payload={name: value for name, value in row.payload.items() if name != events.COPIED})


def digest_of(row: Row) -> str:
    """Return a digest of a row's content, without its writer, time and origin."""
    return canonical.digest([row.kind, row.call_id, row.tool_name, row.attempt, original(row).payload])


def task_of(rows: Iterable[Row]) -> str:
    """Return the last task in these rows; raises PayloadError."""
    asked = None
    for row in rows:
        if row.kind == events.USER and row.payload.get("reason") != events.OUTPUT_INVALID:
            asked = row
    if asked is None:
        return ""
    payload: events.User = asked.payload
    stored = payloads.of(asked.run_id, asked.seq, payload)
    return text_of(payload["content"]) if stored is None else str(payloads.content_of(stored))


def copy_of(row: Row) -> Copy | None:
    """Return what a copied row claims; None for a result that the fork itself settled at its cut."""
    source: events.Copied = row.payload[events.COPIED]
    if "hash" not in source:
        return None
    source_seq = int(source["seq"])
    return Copy(row.seq, row.kind, UUID(source["run"]), source_seq, source["hash"], digest_of(row))


def altered(alias: str, copies: list[Copy]) -> Iterator[tuple[Copy, str]]:
    """Yield each copy that differs from its origin's row, if that is still there, and how it differs."""
    if not copies:
        return
    sessions = Run.objects.using(alias).filter(pk__in={copy.source for copy in copies})
    rows = Message.objects.using(alias).filter(
        session_id__in=sessions.values("session_id"), seq__lte=max(copy.source_seq for copy in copies)
    )
    theirs = {}
    for row in stored_rows(rows):
        theirs[row.run_id, row.seq] = (row.hash, _digest_of_stored(row))
    for copy in copies:
        there = theirs.get((copy.source, copy.source_seq))
        if there is not None and there[0] != copy.source_hash:
            yield copy, f"was copied from a row of run {copy.source} whose hash is another now."
        elif there is not None and there[1] != copy.digest:
            yield copy, f"is not what row {copy.source_seq} of run {copy.source} says."


def _digest_of_stored(row: Row) -> str:
    try:
        payload = events.upcast(row.kind, canonical.loads(str(row.payload)))
        return digest_of(row._replace(payload=payload))
    except (AttributeError, TypeError, ValueError):
        return ""


def happened_at(payload: dict[str, Any], written: datetime) -> datetime:
    """Return the time of a row's event: for a copy, that of the row it copies."""
    source = payload.get(events.COPIED)
    at = source.get("at") if isinstance(source, dict) else None
    return events.moment(at) or written
