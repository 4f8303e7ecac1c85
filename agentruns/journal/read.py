"""Queries of the journal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, cast
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Max, Min, QuerySet, TextField, Value
from django.db.models.functions import Cast

from agentruns.agents.agent import registered
from agentruns.exceptions import RunStateError
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.statements import as_id
from agentruns.models import Definition, Message, Run, Session
from agentruns.models.parts import merged
from agentruns.utils import json as canonical

COLUMNS = (
    "seq", "run_id", "kind", "call_id", "tool_name", "attempt", "epoch", "facts", "content", "created_at",
    "prev_hash", "hash", "consumes", "facts_salt", "content_salt", "content_hash",
)  # fmt: skip
# A row that was altered can raise any of these in whoever reads it.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
NAMING = (events.RUN_STARTED, events.RUN_ADOPTED)  # rows that name definitions

_WITH_SECRET = (
    f'SELECT {", ".join(COLUMNS)}, (SELECT secret FROM "{Session._meta.db_table}" WHERE id = %s)'
    f' FROM "{Message._meta.db_table}" WHERE session_id = %s ORDER BY seq'
)
_KIND, _FACTS, _CONTENT = COLUMNS.index("kind"), COLUMNS.index("facts"), COLUMNS.index("content")


class Parts(NamedTuple):
    """The two parts of a row as stored texts."""

    facts: str
    content: str | None  # None: erased

    def payload(self, kind: str) -> dict[str, Any]:
        """Return both as one payload, upcast to today's form."""
        content = None if self.content is None else canonical.loads(self.content)
        return events.upcast(kind, merged(kind, canonical.loads(self.facts), content))


def session_rows(alias: str, session_id: UUID, after: int = 0) -> list[Row]:
    """Return a session's rows in order, upcast to today's form."""
    rows = Message.objects.using(alias).filter(session_id=session_id, seq__gt=after)
    return read_rows(rows.order_by("seq"))


def rows_with_secret(alias: str, session_id: UUID) -> tuple[list[Row], str]:
    """Return a session's rows as `session_rows`, and its secret: one query for both, unless it has no row."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(_WITH_SECRET, [as_id(connection, session_id)] * 2)
        found = cursor.fetchall()
    if not found:
        return [], Session.objects.using(alias).values_list("secret", flat=True).get(pk=session_id)
    convert = _quickly(connection)
    return [convert(values) for values in found], found[-1][-1]


def _quickly(connection: BaseDatabaseWrapper) -> Callable[[Sequence[Any]], Row]:
    """Build a faster `row_of` for stored values: Django's converters take longer than the whole query."""
    is_sqlite, zone, ops = connection.vendor == "sqlite", connection.timezone, cast("Any", connection.ops)
    load, uuid = canonical.loads, cache(UUID)  # most ids stand in the row before

    def convert(values: Sequence[Any]) -> Row:
        (
            seq, run_id, kind, call_id, tool, attempt, epoch, facts, content, at, before, own, consumes,
            facts_salt, content_salt, content_hash, _secret,
        ) = values  # fmt: skip
        if is_sqlite:
            run_id, consumes = uuid(run_id), consumes and uuid(consumes)
            if type(at) is datetime and at.tzinfo is None:
                at = at.replace(tzinfo=zone)
            else:  # as the project's own `detect_types` or converters have it
                at = ops.convert_datetimefield_value(at, None, connection)
        payload = merged(kind, load(facts), None if content is None else load(content))
        return Row(
            seq, run_id, kind, call_id, tool, attempt, epoch, events.upcast(kind, payload), at, before, own,
            consumes, facts_salt, content_salt, content_hash,
        )  # fmt: skip

    return convert


def run_rows(alias: str, run_id: UUID, after: int = 0, limit: int | None = None) -> list[Row]:
    """Return one run's rows in order, upcast to today's form."""
    rows = Message.objects.using(alias).filter(run_id=run_id, seq__gt=after).order_by("seq")
    return read_rows(rows[:limit] if limit else rows)


def rows_until(alias: str, run: Run, seq: int) -> list[Row]:
    """Return the rows of a session up to `seq`; raises RunStateError unless that is a row of the run."""
    seqs = Message.objects.using(alias).filter(run_id=run.pk).aggregate(first=Min("seq"), last=Max("seq"))
    first, last = seqs["first"] or 0, seqs["last"] or 0
    if not first <= seq <= last:
        raise RunStateError(f"Run {run.pk} has the rows {first} to {last}, not {seq}.")
    rows = Message.objects.using(alias).filter(session_id=run.session_id, seq__lte=seq)
    return read_rows(rows.order_by("seq"))


def stored_rows(messages: QuerySet[Message]) -> Iterator[tuple[Row, Parts]]:
    """Yield rows in order without a payload, and its parts: a text that was tampered with may not parse."""
    for values in _as_stored(messages.order_by("seq")).iterator(chunk_size=500):
        yield _row(values, {}), Parts(values[_FACTS], values[_CONTENT])


def _as_stored(messages: QuerySet[Message], *, contents: bool = True) -> Any:
    texts = {f"{name}_text": Cast(name, TextField()) for name in ("facts", "content")}
    if not contents:
        texts["content_text"] = Value(None, TextField())  # type: ignore[assignment]
    names = [f"{name}_text" if f"{name}_text" in texts else name for name in COLUMNS]
    return messages.annotate(**texts).values_list(*names)


def definitions_in(payload: Any) -> set[str]:
    """Return the hashes of the definitions that a row of one of the kinds `NAMING` names."""
    return {payload[key] for key in ("definition", "old", "new") if payload.get(key)}


def definitions_of(alias: str, session_id: UUID) -> set[str]:
    """Return the hashes of all definitions that a session's runs ever had."""
    rows = Message.objects.using(alias).filter(session_id=session_id, kind__in=NAMING)
    return set().union(*map(definitions_in, rows.values_list("facts", flat=True)))


def definition_bodies(alias: str, digests: Collection[str]) -> dict[str, Any]:
    """Return definitions by their digests; those of this process's agents without a query."""
    found = {one.definition_hash: one.definition() for one in registered() if one.definition_hash in digests}
    if missing := {*digests} - found.keys():
        stored = Definition.objects.using(alias).filter(pk__in=missing)
        found |= dict(stored.values_list("hash", "body"))
    return found


def definition_body(alias: str, digest: str) -> dict[str, Any]:
    """Find one definition; LookupError if it is not there."""
    return dict(definition_bodies(alias, [digest])[digest])


def read_rows(messages: QuerySet[Message]) -> list[Row]:
    """Return rows in the order of a query, upcast to today's form."""
    return [row_of(values) for values in messages.values_list(*COLUMNS)]


def readable_rows(messages: QuerySet[Message], *, contents: bool = True) -> list[Row]:
    """Read rows without the damaged ones, so that a list of many runs opens all the same.

    Without `contents` the rows are as if their contents were erased.
    """
    found = []
    for values in _as_stored(messages, contents=contents):
        with suppress(*UNREADABLE):
            row = _row(values, {})
            found.append(row._replace(payload=Parts(values[_FACTS], values[_CONTENT]).payload(row.kind)))
    return found


def row_of(values: Sequence[Any]) -> Row:
    """Return the row with these `COLUMNS`, upcast to today's form."""
    kind = values[_KIND]
    return _row(values, events.upcast(kind, merged(kind, values[_FACTS], values[_CONTENT])))


def _row(values: Sequence[Any], payload: Any) -> Row:
    return Row(*values[:_FACTS], payload, *values[_CONTENT + 1 :])  # type: ignore[call-arg]
