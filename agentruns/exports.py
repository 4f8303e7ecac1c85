"""A run for an auditor: its session's whole chain as JSON Lines, which anybody can verify without us.

docs/verify_export.py does so with nothing but Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db.models import TextField
from django.db.models.functions import Cast

from agentruns import canonical, transitions
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.masking import masked, sensitive_of
from agentruns.models import Definition, Message, Run, Session
from agentruns.redaction import is_on, redacted

FORMAT, VERSION = "agentruns-export", 1
_TEXT = "payload_text"


def export_run(run_id: UUID | str, *, true_values: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of an export: the run, the definitions of its session's runs, each row of its journal.

    The chain begins with the session, so every row of it is there, each with its run. What is sensitive or
    redacted is left out of a row, whose hash can then not be recomputed; `true_values` exports the rows as
    they are stored. Raises DurableRunNotFoundError.
    """
    alias, run = settings.DATABASE, transitions.find_run(run_id)
    session = Session.objects.using(alias).get(pk=run.session_id)
    runs = Run.objects.using(alias).filter(session_id=session.pk)
    definitions = Definition.objects.using(alias).in_bulk(_definitions(alias, session))
    agents = {run_id: definitions[key].body for run_id, key in runs.values_list("pk", "definition_id")}
    yield {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": events.timestamp(datetime.now(UTC)),
        "run": str(run.pk),
        "session": {"id": str(session.pk), "key": _shown(session.key, true_values)},
        "head": {"seq": session.next_seq - 1, "hash": session.head},
    }
    for key, definition in definitions.items():
        body = definition.body if true_values else redacted(definition.body)
        whole = canonical.dumps(body) == canonical.dumps(definition.body)
        yield {"definition": key, "body" if whole else "redacted": canonical.dumps(body)}
    rows = (
        Message.objects.using(alias).filter(session_id=session.pk, seq__lt=session.next_seq).order_by("seq")
    )
    names = [_TEXT if name == "payload" else name for name in Row._fields]
    for values in rows.annotate(**{_TEXT: Cast("payload", TextField())}).values_list(*names).iterator():
        yield _line(Row(*values), agents, true_values)


def _definitions(alias: str, session: Session) -> set[str]:
    """Return the hashes of all definitions that the session's runs ever had."""
    kinds = (events.RUN_STARTED, events.RUN_ADOPTED)
    rows = Message.objects.using(alias).filter(session_id=session.pk, kind__in=kinds)
    names = ("definition", "old", "new")
    payloads = rows.values_list("payload", flat=True)
    return {payload[name] for payload in payloads for name in names if payload.get(name)}


def _line(row: Row, agents: dict[UUID, Any], true_values: bool) -> dict[str, Any]:
    text = str(row.payload)
    line: dict[str, Any] = {
        "seq": row.seq,
        "run": str(row.run_id),
        "kind": row.kind,
        "call_id": row.call_id,
        "tool_name": row.tool_name,
        "attempt": row.attempt,
        "epoch": row.epoch,
        "created_at": events.timestamp(row.created_at),
        "consumes": str(row.consumes) if row.consumes else None,
        "prev_hash": row.prev_hash,
        "hash": row.hash,
    }
    shown = text if true_values else _readable(row, text, agents)
    return {**line, "payload": text} if shown == text else {**line, "redacted": shown}


def _readable(row: Row, text: str, agents: dict[UUID, Any]) -> str:
    """Return a payload's text as it may be read by anybody; the very same text where nothing is hidden."""
    sensitive = sensitive_of(agents.get(row.run_id) or {})
    if not sensitive and not is_on():
        return text
    read = row._replace(payload=canonical.loads(text))
    return canonical.dumps(redacted(masked(read, sensitive).payload))


def _shown(text: str, true_values: bool) -> str:
    return text if true_values else str(redacted(text))
