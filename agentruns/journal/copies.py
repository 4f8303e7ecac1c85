"""Rows that a fork copied from its origin: comparison with the origin, and other sessions that have them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Exists, OuterRef

from agentruns.content import described
from agentruns.journal import events, payloads
from agentruns.journal.events import Row
from agentruns.journal.fold import text_of
from agentruns.journal.read import stored_rows
from agentruns.models import Message, Run, Session
from agentruns.models.kinds import split
from agentruns.utils import json as canonical

TITLE_LENGTH = 200
SAID = (events.USER, events.ASSISTANT, events.RUN_FAILED, events.RUN_CANCELLED)


class Copy(NamedTuple):
    """A copied row, and the run, number and hash of the row that it claims to copy."""

    row: Row
    source: UUID
    source_seq: int  # differs from that of `row` for the result of a call that was open at the cut
    source_hash: str

    def is_of(self, source: Row) -> bool:
        """Check whether the copy equals the source row; erased content is compared by its hash."""
        is_erased = self.row.is_erased or source.is_erased

        def values(row: Row) -> list[Any]:
            payload = original(row).payload
            parts = [split(row.kind, payload)[0], row.content_hash] if is_erased else [payload]
            return [row.kind, row.call_id, row.tool_name, row.attempt, canonical.dumps(parts)]

        return values(self.row) == values(source)


def original(row: Row) -> Row:
    """Remove the mark of a copy from a row's payload, so that the row can be folded."""
    return row._replace(payload={name: value for name, value in row.payload.items() if name != events.COPIED})


def task_of(rows: Iterable[Row]) -> str:
    """Read the text of the last task in these rows; "" if there is no task. Raises PayloadError."""
    asked = last_task(rows)
    return "" if asked is None else payloads.said_in(asked.run_id, asked.seq, asked.payload)


def title_of(text: str) -> str:
    """Make a task's title: its first line that is not blank, cut to `TITLE_LENGTH`; "" if there is none."""
    lines = (line.strip() for line in text[: 10 * TITLE_LENGTH].splitlines())
    return next((line for line in lines if line), "")[:TITLE_LENGTH]


def last_task(rows: Iterable[Row]) -> Row | None:
    """Find the row of the last task in these rows; None if there is no task."""
    return next(iter([row for row in rows if is_task(row)][-1:]), None)


def tasks_of(rows: Iterable[Row]) -> dict[UUID, Row]:
    """Map each run to the row of its last task, which in a fork may be a copied row."""
    return {row.run_id: row for row in rows if is_task(row)}


def is_task(row: Row) -> bool:
    """Check whether a row is a task: neither a later message nor a request to correct an answer."""
    return row.kind == events.USER and "reason" not in row.payload


def said_in(row: Row) -> str:
    """Read the text for people from a row of a kind in `SAID`.

    This is a task or a message, a reply, or the reason why the run failed or was cancelled. Returns "" for a
    request to correct an answer. Reads no file: a content stored in a file appears as its preview.
    """
    payload = row.payload
    if row.kind == events.USER:
        return "" if payload.get("reason") == events.OUTPUT_INVALID else described(payload["content"])
    if row.kind == events.ASSISTANT:
        return text_of(payload["content"])
    return str(payload["error"]["text"] if row.kind == events.RUN_FAILED else payload["reason"])


def copy_of(row: Row) -> Copy | None:
    """Parse a copied row's mark, which names the source row; None for a result that the fork itself added."""
    source: events.Copied = row.payload[events.COPIED]
    if "hash" not in source:
        return None
    return Copy(row, UUID(source["run"]), int(source["seq"]), source["hash"])


def altered(alias: str, copies: list[Copy]) -> Iterator[tuple[Copy, str]]:
    """Yield each copy that differs from its source row, and the difference; skip sources that are gone."""
    if not copies:
        return
    sessions = Run.objects.using(alias).filter(pk__in={copy.source for copy in copies})
    last = max(copy.source_seq for copy in copies)
    rows = Message.objects.using(alias).filter(session_id__in=sessions.values("session_id"), seq__lte=last)
    theirs: dict[tuple[UUID, int], tuple[str, Row | None]] = {}
    for row, parts in stored_rows(rows):
        theirs[row.run_id, row.seq] = row.hash, None
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # it does not parse
            theirs[row.run_id, row.seq] = row.hash, row._replace(payload=parts.payload(row.kind))
    for copy in copies:
        there = theirs.get((copy.source, copy.source_seq))
        if there is not None and there[0] != copy.source_hash:
            yield copy, f"was copied from a row of run {copy.source} whose hash is another now."
        elif there is not None and (there[1] is None or not copy.is_of(there[1])):
            yield copy, f"is not what row {copy.source_seq} of run {copy.source} says."


def kin(alias: str, session_ids: Collection[UUID]) -> set[UUID]:
    """Find sessions whose first row equals the first row of one of `session_ids`, as its copy or original.

    Compares the hashes of the contents, because a fork between two sessions may be pruned. Returns only forks
    whose origin run is gone, and the sessions that a copied first row of `session_ids` names. The result may
    include sessions of `session_ids`.
    """
    firsts = Message.objects.using(alias).filter(seq=1)
    mine = list(firsts.filter(session_id__in=session_ids).values_list("content_hash", "facts"))
    same = firsts.filter(content_hash__in=[shared for shared, _ in mine])
    origin = Run.objects.using(alias).filter(pk=OuterRef("origin_id"))
    forks = Run.objects.using(alias).filter(~Exists(origin), origin__isnull=False, origin_seq__isnull=False)
    keys = {facts.get("session", "") for _, facts in mine if events.COPIED in facts}
    named = Session.objects.using(alias).filter(key__in=keys)
    forked = same.filter(session_id__in=forks.values("session_id")).values_list("session_id", flat=True)
    return {*forked, *same.filter(session_id__in=named.values("pk")).values_list("session_id", flat=True)}


def happened_at(payload: dict[str, Any], written: datetime) -> datetime:
    """Find when a row's event happened: for a copied row when the original was written, else `written`."""
    source = payload.get(events.COPIED)
    at = source.get("at") if isinstance(source, dict) else None
    return events.moment(at) or written
