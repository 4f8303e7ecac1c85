"""Rows of the journal as a forger, or an eraser, makes them: with other parts, sealed or not."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import connection

from agentruns.journal import read
from agentruns.journal.events import Row, row_hash
from agentruns.journal.read import COLUMNS, Parts
from agentruns.models import Message, triggers
from agentruns.models.parts import commitment, split
from agentruns.utils import json as canonical


def columns(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the two columns of a payload."""
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
    """Return a stored row as it is read."""
    return read.row_of([getattr(message, name) for name in COLUMNS])


def parts_of(row: Row) -> Parts:
    """Return the texts of a row's payload."""
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
    """Return the model instance of a row."""
    values = {name: value for name, value in row._asdict().items() if name != "payload"}
    content = None if parts.content is None else canonical.loads(parts.content)
    return Message(session_id=session_id, facts=canonical.loads(parts.facts), content=content, **values)
