"""The history a fork has from its origin: is it what the origin's journal says?"""

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
    """What a copied row says, and of which row it says to be one; `digest` leaves that out."""

    seq: int
    kind: str
    source: UUID
    source_hash: str
    digest: str


def original(row: Row) -> Row:
    """Return a row as it was in the life of the run that wrote it: to be folded, though it is a copy."""
    return row._replace(payload={name: value for name, value in row.payload.items() if name != events.COPIED})


def digest_of(row: Row) -> str:
    """Return a digest of what a row says, but for who wrote it when, and where it was copied from."""
    return canonical.digest([row.kind, row.call_id, row.tool_name, row.attempt, original(row).payload])


def task_of(rows: Iterable[Row]) -> str:
    """Return what was asked last in these rows, by whoever asked it; raises PayloadError."""
    asked = None
    for row in rows:
        if row.kind == events.USER and row.payload.get("reason") != events.OUTPUT_INVALID:
            asked = row
    if asked is None:
        return ""
    stored = payloads.of(asked.run_id, asked.seq, asked.payload)
    return text_of(asked.payload["content"]) if stored is None else str(payloads.content_of(stored))


def copy_of(row: Row) -> Copy | None:
    """Return what a copied row claims; None for what a fork settled at its cut, which is no copy of a row."""
    source = row.payload[events.COPIED]
    if "hash" not in source:
        return None
    return Copy(row.seq, row.kind, UUID(source["run"]), source["hash"], digest_of(row))


def altered(alias: str, copies: list[Copy]) -> Iterator[tuple[Copy, str]]:
    """Yield the copies that differ from the origin's rows, as far as these are still there, and how."""
    if not copies:
        return
    sessions = Run.objects.using(alias).filter(pk__in={copy.source for copy in copies})
    rows = Message.objects.using(alias).filter(
        session_id__in=sessions.values("session_id"), seq__lte=copies[-1].seq
    )
    theirs = {}
    for row in stored_rows(rows):
        theirs[row.run_id, row.seq] = (row.hash, _digest_of_stored(row))
    for copy in copies:
        there = theirs.get((copy.source, copy.seq))
        if there is not None and there[0] != copy.source_hash:
            yield copy, f"was copied from a row of run {copy.source} whose hash is another now."
        elif there is not None and there[1] != copy.digest:
            yield copy, f"is not what row {copy.seq} of run {copy.source} says."


def _digest_of_stored(row: Row) -> str:
    try:
        payload = events.upcast(row.kind, canonical.loads(str(row.payload)))
        return digest_of(row._replace(payload=payload))
    except (AttributeError, TypeError, ValueError):
        return ""


def happened_at(payload: dict[str, Any], written: datetime) -> datetime:
    """Return when what a row tells of happened: of a copy, when the row that it is a copy of was written."""
    source = payload.get(events.COPIED)
    at = source.get("at") if isinstance(source, dict) else None
    return events.moment(at) or written
