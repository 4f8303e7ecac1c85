"""The first append of a run: session, definition, run and first rows; on PostgreSQL by one statement."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from agentruns.journal import statements
from agentruns.journal.batch import Batch
from agentruns.journal.statements import COLUMNS, INTO, SESSION, SETTINGS, row_values
from agentruns.models import ContextValue, Definition, Run
from agentruns.utils import clock as journal_clock
from agentruns.utils.db import as_id, uptime

SQL = tuple[str, list[Any]]
# Written into the SQL, because psycopg prepares no statement of over fifty parameters.
LITERALS = {None: "NULL", "": "''", 0: "0", "{}": "'{}'", "[]": "'[]'"}
UNLESS_THERE = " ON CONFLICT DO NOTHING"
KEPT = f'INSERT INTO "{ContextValue._meta.db_table}" (run_id, key, value) SELECT'
# Fields whose values need no conversion.
PLAIN = (models.CharField, models.TextField, models.BigIntegerField, models.PositiveIntegerField)


def begin(
    connection: BaseDatabaseWrapper,
    run: Run,
    definition: Definition,
    batch: Batch,
    *,
    unless: Iterable[QuerySet[Any]] = (),
    lease: float = 0,
    doorbell: str = "",
) -> bool:
    """Store a run with its first rows, and its session if that is new; return False if nothing was stored.

    Nothing is stored if the key of a new session is taken, if the writer did not know the whole journal of a
    stored session, or if a query of `unless` finds a row. Raises IntegrityError if another run has this key
    or is unfinished. `lease`: seconds that the creator leases the run for; `doorbell`: the channel to notify.
    """
    session, is_one = run.session, connection.vendor == "postgresql"
    looks = [query.values("pk").query.get_compiler(connection=connection).as_sql() for query in unless]
    where = "".join(f" AND NOT EXISTS ({sql})" for sql, _ in looks)
    source = " FROM c" if is_one else ""
    if session._state.adding:
        made, values = _insert(connection, session)
        head = f"{made}{source} WHERE TRUE{where}{UNLESS_THERE}"
    else:
        values = [session.next_seq, session.head]
        values += [as_id(connection, session.pk), batch.first_seq, batch.first_head]
        head = f'UPDATE "{SESSION}" SET next_seq = %s, head = %s{source} WHERE "{SESSION}".id = %s'
        head += f" AND next_seq = %s AND head = %s{where}"
    values += [value for _, parameters in looks for value in parameters]
    defined, body = _insert(connection, definition)
    until = statements.clock(connection, lease) if lease else None
    begun, columns = _insert(connection, run, lease_expires_at=until)
    at = connection.ops.adapt_datetimefield_value(batch.at)
    last = [batch.epoch, at, *row_values(connection, batch)]
    row = ", ".join(f"%s::{kind}" if is_one else "%s" for kind in COLUMNS.values())
    rows = f"(VALUES {', '.join([f'({row})'] * len(batch.rows))}) AS v"
    kept, pairs = "", list[Any]()
    if searchable := ContextValue.of(run, definition.body):  # the searchable values of the context
        pairs = [text for value in searchable for text in (value.key, value.value)]
        values_sql = f"v.* FROM (VALUES {', '.join(['(%s, %s)'] * len(searchable))}) AS v"
        kept = f", k AS ({KEPT} r.id, {values_sql}, r)" if is_one else f"{KEPT} %s, {values_sql}"
    with connection.cursor() as cursor:
        if not is_one:
            if not cursor.execute(head, values).rowcount:
                return False
            ids = [as_id(connection, pk) for pk in (session.pk, run.pk)]
            cursor.execute(f"{defined} WHERE TRUE{UNLESS_THERE}", body)
            cursor.execute(begun, columns)
            if kept:
                cursor.execute(kept, [ids[1], *pairs])
            cursor.execute(f"{INTO} SELECT %s, %s, %s, %s, v.* FROM {rows}", [*ids, *last])
            return True
        # Each part reads FROM the one before: Session is locked first, and nothing is stored unless all is.
        sent, notifies = uptime(), f", pg_notify('{doorbell}', '')" if doorbell else ""
        cursor.execute(
            f"WITH c AS MATERIALIZED (SELECT {SETTINGS if connection.get_autocommit() else 1}),"
            f' s AS ({head} RETURNING "{SESSION}".id),'
            f" d AS ({defined} FROM s WHERE TRUE{UNLESS_THERE}), r AS ({begun} FROM s RETURNING id){kept}"
            f" {INTO} SELECT s.id, r.id, %s::bigint, %s::timestamptz, v.* FROM s, r, {rows}"
            f" RETURNING clock_timestamp(){notifies}",
            [*values, *body, *columns, *pairs, *last],
        )
        if stored := cursor.fetchone():
            journal_clock.told(batch.clock or connection.alias, stored[0], sent)
    return stored is not None


def _insert(connection: BaseDatabaseWrapper, row: models.Model, **sql: SQL | None) -> SQL:
    """Build INSERT ... SELECT for a row, with its parameters; `sql` gives columns the database computes."""
    into, fields = _columns(type(row))
    given: list[str] = []
    values: list[Any] = []
    for field, is_plain in fields:
        value = row.__dict__[field.attname]
        if computed := sql.get(field.attname):
            given.append(computed[0])
            values += computed[1]
            continue
        if not is_plain and value is not None:
            value = field.get_db_prep_save(value, connection=connection)
        given.append(LITERALS.get(value, "%s"))
        if value not in LITERALS:
            values.append(value)
    return f"{into} SELECT {', '.join(given)}", values


@cache
def _columns(model: type[models.Model]) -> tuple[str, list[tuple[Any, bool]]]:
    fields = model._meta.concrete_fields
    names = ", ".join(f'"{field.column}"' for field in fields)
    into = f'INSERT INTO "{model._meta.db_table}" ({names})'
    return into, [(field, type(field) in PLAIN) for field in fields]
