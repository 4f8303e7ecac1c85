"""Queries that read the journal's rows and the definitions that they name."""

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
from agentruns.models import Definition, Message, Run, Session
from agentruns.models.kinds import merged
from agentruns.utils import json as canonical
from agentruns.utils.db import as_id

COLUMNS = (
    "seq", "run_id", "kind", "call_id", "tool_name", "attempt", "epoch", "facts", "content", "created_at",
    "prev_hash", "hash", "consumes", "facts_salt", "content_salt", "content_hash",
)  # fmt: skip
# Reading an altered row can raise any of these.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
NAMING = tuple(kind for kind in events.KINDS.values() if kind.names_definitions)

_WITH_SECRET = (
    f'SELECT {", ".join(COLUMNS)}, (SELECT secret FROM "{Session._meta.db_table}" WHERE id = %s)'
    f' FROM "{Message._meta.db_table}" WHERE session_id = %s ORDER BY seq'
)
_KIND, _FACTS, _CONTENT = COLUMNS.index("kind"), COLUMNS.index("facts"), COLUMNS.index("content")


class Parts(NamedTuple):
    """The facts and the content of a row, as stored texts."""

    facts: str
    content: str | None  # None: erased

    def payload(self, kind: str) -> dict[str, Any]:
        """Parse and join the two parts to a payload, converted to the current form."""
        content = None if self.content is None else canonical.loads(self.content)
        return events.upcast(kind, merged(kind, canonical.loads(self.facts), content))


def session_rows(alias: str, session_id: UUID, after: int = 0) -> list[Row]:
    """Read a session's rows after number `after`, in order, in the current form."""
    rows = Message.objects.using(alias).filter(session_id=session_id, seq__gt=after)
    return read_rows(rows.order_by("seq"))


def rows_with_secret(alias: str, session_id: UUID) -> tuple[list[Row], str]:
    """Read a session's rows and its secret, by one query if it has rows. Raises Session.DoesNotExist."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(_WITH_SECRET, [as_id(connection, session_id)] * 2)
        stored = cursor.fetchall()
    if not stored:
        return [], Session.objects.using(alias).values_list("secret", flat=True).get(pk=session_id)
    convert = _quickly(connection)
    return [convert(values) for values in stored], stored[-1][-1]


def _quickly(connection: BaseDatabaseWrapper) -> Callable[[Sequence[Any]], Row]:
    """Build a faster `row_of` for stored values, because Django's converters take longer than the query."""
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
    """Read a run's rows after number `after`, in order, in the current form; at most `limit` rows."""
    rows = Message.objects.using(alias).filter(run_id=run_id, seq__gt=after).order_by("seq")
    return read_rows(rows[:limit] if limit else rows)


def rows_until(alias: str, run: Run, seq: int) -> list[Row]:
    """Read a session's rows up to `seq`; raises RunStateError if `seq` is not within the run's rows."""
    seqs = Message.objects.using(alias).filter(run_id=run.pk).aggregate(first=Min("seq"), last=Max("seq"))
    first, last = seqs["first"] or 0, seqs["last"] or 0
    if not first <= seq <= last:
        raise RunStateError(f"Run {run.pk} has the rows {first} to {last}, not {seq}.")
    rows = Message.objects.using(alias).filter(session_id=run.session_id, seq__lte=seq)
    return read_rows(rows.order_by("seq"))


def stored_rows(messages: QuerySet[Message]) -> Iterator[tuple[Row, Parts]]:
    """Yield rows in order, with an empty payload and unparsed parts, because altered text may not parse."""
    for values in _as_stored(messages.order_by("seq")).iterator(chunk_size=500):
        yield _row(values, {}), Parts(values[_FACTS], values[_CONTENT])


def _as_stored(messages: QuerySet[Message], *, contents: bool = True) -> Any:
    texts = {f"{name}_text": Cast(name, TextField()) for name in ("facts", "content")}
    if not contents:
        texts["content_text"] = Value(None, TextField())  # type: ignore[assignment]
    names = [f"{name}_text" if f"{name}_text" in texts else name for name in COLUMNS]
    return messages.annotate(**texts).values_list(*names)


def definitions_in(payload: Any) -> set[str]:
    """List the hashes of the definitions that the payload of a `NAMING` row names."""
    return {payload[key] for key in ("definition", "old", "new") if payload.get(key)}


def definitions_of(alias: str, session_id: UUID) -> set[str]:
    """List the hashes of all definitions that a session's runs ever had."""
    rows = Message.objects.using(alias).filter(session_id=session_id, kind__in=NAMING)
    return set().union(*map(definitions_in, rows.values_list("facts", flat=True)))


def definition_bodies(alias: str, digests: Collection[str]) -> dict[str, Any]:
    """Find the bodies of the known definitions by hash; agents of this process need no query."""
    agents = (agent for agent in registered() if agent.definition_hash in digests)
    bodies = {agent.definition_hash: agent.definition() for agent in agents}
    if missing := {*digests} - bodies.keys():
        bodies |= dict(Definition.objects.using(alias).filter(pk__in=missing).values_list("hash", "body"))
    return bodies


def definition_body(alias: str, digest: str) -> dict[str, Any]:
    """Find the body of one definition; raises LookupError if there is none."""
    return dict(definition_bodies(alias, [digest])[digest])


def read_rows(messages: QuerySet[Message]) -> list[Row]:
    """Read the rows of a query in its order, in the current form."""
    return [row_of(values) for values in messages.values_list(*COLUMNS)]


def readable_rows(messages: QuerySet[Message], *, contents: bool = True) -> list[Row]:
    """Read rows and skip damaged rows, so that a list of many runs opens although one row is damaged.

    Without `contents` the rows are read as if their contents were erased.
    """
    rows = []
    for values in _as_stored(messages, contents=contents):
        with suppress(*UNREADABLE):
            rows.append(_row(values, Parts(values[_FACTS], values[_CONTENT]).payload(values[_KIND])))
    return rows


def row_of(values: Sequence[Any]) -> Row:
    """Build a row from the values of `COLUMNS`, in the current form."""
    kind = values[_KIND]
    return _row(values, events.upcast(kind, merged(kind, values[_FACTS], values[_CONTENT])))


def _row(values: Sequence[Any], payload: Any) -> Row:
    return Row(*values[:_FACTS], payload, *values[_CONTENT + 1 :])  # type: ignore[call-arg]
