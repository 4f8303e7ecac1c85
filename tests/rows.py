"""Rows of the journal as a forger, or an eraser, makes them: with other parts, sealed or not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from django.db import connection, transaction

from agentruns.journal import read
from agentruns.journal.events import Row, row_hash
from agentruns.journal.read import COLUMNS, Parts, stored_rows
from agentruns.models import Message, Session, triggers
from agentruns.models.kinds import split
from agentruns.models.parts import commitment
from agentruns.utils import json as canonical


def columns(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    facts, content = split(kind, payload)
    return {"facts": facts, "content": content}


def change(row: Message, **changes: Any) -> None:
    """Give a row other members, without another commitment; the triggers have to be lifted."""
    Message.objects.filter(pk=row.pk).update(**columns(row.kind, {**row.payload, **changes}))


def erase(*seqs: int, run: Any) -> None:
    """Destroy the content of rows of a run, and say so in no row."""
    with triggers.lifted(connection):
        Message.objects.filter(run=run, seq__in=seqs).update(content=None, content_salt=None)


def row_of(message: Message) -> Row:
    """Read a stored row."""
    return read.row_of([getattr(message, name) for name in COLUMNS])


def parts_of(row: Row) -> Parts:
    facts, content = split(row.kind, row.payload)
    return Parts(canonical.dumps(facts), canonical.dumps(content))


def sealed(session_id: UUID, row: Row, parts: Parts | None = None) -> tuple[Row, Parts]:
    """Return a row with hashes that fit its parts, which are those of its payload unless given.

    It keeps the salt of its content, by which `sent` of a reply is keyed.
    """
    parts = parts or parts_of(row)
    salt = row.content_salt or "00" * 16
    row = row._replace(facts_salt=salt)
    if parts.content is not None:
        row = row._replace(content_salt=salt, content_hash=commitment(salt, parts.content))
    return row._replace(hash=row_hash(session_id, row, commitment(salt, parts.facts))), parts


def stored(session_id: UUID, row: Row, parts: Parts) -> Message:
    """Build the model instance of a row."""
    values = {name: value for name, value in row._asdict().items() if name != "payload"}
    content = None if parts.content is None else canonical.loads(parts.content)
    return Message(session_id=session_id, facts=canonical.loads(parts.facts), content=content, **values)


def write_raw(table: str, column: str, text: str, key: str, value: Any) -> None:
    """Change a column behind everybody's back."""
    with triggers.lifted(connection), connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = %s WHERE {key} = %s", [text, value])


def spoilt(run_id: Any) -> None:
    """Take from a journal what no run can be read without."""
    row = Message.objects.filter(run=run_id, kind__in=("assistant", "run_started")).latest("seq")
    kept = {key: value for key, value in row.payload.items() if key not in ("calls", "agent")}
    with triggers.lifted(connection):
        Message.objects.filter(pk=row.pk).update(**columns(row.kind, kept))


def forge(session_id: Any, change: Callable[[Any], object]) -> None:
    """Change rows as somebody would who can also write new hashes."""
    with triggers.lifted(connection), transaction.atomic():
        rows = Message.objects.filter(session_id=session_id).order_by("seq")
        change(rows)
        head = "0" * 64
        for pk, (row, parts) in zip(rows.values_list("pk", flat=True), list(stored_rows(rows)), strict=True):
            row, _parts = sealed(session_id, row._replace(prev_hash=head), parts)
            names = ("facts_salt", "content_salt", "content_hash", "prev_hash", "hash")
            Message.objects.filter(pk=pk).update(**{name: getattr(row, name) for name in names})
            head = row.hash
        Session.objects.filter(pk=session_id).update(head=head, next_seq=rows.count() + 1)


def row(kind: str, payload: dict[str, Any], **changed: Any) -> Row:
    """Build a row of a kind that no session has."""
    values = {
        "seq": 7, "run_id": uuid4(), "kind": kind, "call_id": "c1", "tool_name": "refund", "attempt": 1,
        "epoch": 0, "payload": {"v": 1, **payload}, "created_at": datetime.now(UTC), "prev_hash": "",
        "hash": "", "consumes": None,
    }  # fmt: skip
    return Row(**{**values, **changed})
