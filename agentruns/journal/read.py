"""Queries of the journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

from django.db.models import Max, Min, QuerySet, TextField
from django.db.models.functions import Cast

from agentruns.exceptions import RunStateError
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.models import Message, Run

FIELDS = Row._fields
NAMING = (events.RUN_STARTED, events.RUN_ADOPTED)  # rows that name definitions

_TEXT = "payload_text"


def session_rows(alias: str, session_id: UUID, after: int = 0) -> list[Row]:
    """Return a session's rows in order, upcast to today's form."""
    return _rows(Message.objects.using(alias).filter(session_id=session_id, seq__gt=after))


def run_rows(alias: str, run_id: UUID, after: int = 0, limit: int | None = None) -> list[Row]:
    """Return one run's rows in order, upcast to today's form."""
    rows = Message.objects.using(alias).filter(run_id=run_id, seq__gt=after)
    return _rows(rows, limit)


def call_rows(alias: str, run_id: UUID, call_ids: Iterable[str], after: int) -> list[Row]:
    """Return the rows of some calls of a run after row `after`, in order, upcast to today's form."""
    rows = Message.objects.using(alias).filter(run_id=run_id, seq__gt=after, call_id__in=call_ids)
    return _rows(rows)


def reply_before(alias: str, run_id: UUID, seq: int) -> int:
    """Return the row of a run's last reply up to row `seq`, its own or a copied one; 0 if there is none."""
    rows = Message.objects.using(alias).filter(run_id=run_id, kind=events.ASSISTANT, seq__lte=seq)
    return rows.aggregate(last=Max("seq"))["last"] or 0


def started_since(alias: str, calls: Mapping[str, UUID]) -> list[str]:
    """Return those of some calls, given with their runs, that have been started by now."""
    rows = Message.objects.using(alias).filter(run_id__in={*calls.values()}, call_id__in=calls)
    return sorted({*rows.filter(kind=events.TOOL_STARTED).values_list("call_id", flat=True)})


def rows_until(alias: str, run: Run, seq: int) -> list[Row]:
    """Return the rows of a session up to `seq`; raises RunStateError unless that is a row of the run."""
    seqs = Message.objects.using(alias).filter(run_id=run.pk).aggregate(first=Min("seq"), last=Max("seq"))
    first, last = seqs["first"] or 0, seqs["last"] or 0
    if not first <= seq <= last:
        raise RunStateError(f"Run {run.pk} has the rows {first} to {last}, not {seq}.")
    return _rows(Message.objects.using(alias).filter(session_id=run.session_id, seq__lte=seq))


def stored_rows(messages: QuerySet[Message]) -> Iterator[Row]:
    """Yield rows in order, each payload as its stored text: one that was tampered with may not parse."""
    names = [_TEXT if name == "payload" else name for name in FIELDS]
    texts = messages.annotate(**{_TEXT: Cast("payload", TextField())}).order_by("seq")
    for values in texts.values_list(*names).iterator(chunk_size=500):
        yield Row(*values)


def definitions_in(payload: Any) -> set[str]:
    """Return the hashes of the definitions that a row of one of the kinds `NAMING` names."""
    return {payload[key] for key in ("definition", "old", "new") if payload.get(key)}


def definitions_of(alias: str, session_id: UUID) -> set[str]:
    """Return the hashes of all definitions that a session's runs ever had."""
    rows = Message.objects.using(alias).filter(session_id=session_id, kind__in=NAMING)
    return set().union(*map(definitions_in, rows.values_list("payload", flat=True)))


def _rows(messages: QuerySet[Message], limit: int | None = None) -> list[Row]:
    values = messages.order_by("seq").values_list(*FIELDS)
    found = [Row(*value) for value in (values[:limit] if limit else values)]
    return [_upcast(row) for row in found] if events.UPCASTERS else found


def _upcast(row: Row) -> Row:
    return row._replace(payload=events.upcast(row.kind, row.payload))
