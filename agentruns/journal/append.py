"""The append: guarded updates of Session and Run and one multi-row INSERT, all or nothing.

No model instances are built here; they cost more than the database does (docs/explanation/performance).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.conf import settings
from agentruns.exceptions import JournalConflictError
from agentruns.journal.batch import Batch
from agentruns.models import Message, Run, Session
from agentruns.models.fields import CanonicalField, EscapedTextField

COLUMNS = (
    "session_id", "seq", "run_id", "kind", "call_id", "tool_name", "attempt", "epoch",
    "payload", "created_at", "prev_hash", "hash", "consumes",
)  # fmt: skip
TYPES = (
    "uuid", "bigint", "uuid", "text", "text", "text", "integer", "bigint",
    "text", "timestamptz", "text", "text", "uuid",
)  # fmt: skip
ENDED = "(" + ", ".join(f"'{status}'" for status in Run.ENDED) + ")"

# The other folded columns are stored as they are.
_PREPARE = {
    field.attname: field.get_prep_value
    for field in Run._meta.concrete_fields
    if isinstance(field, CanonicalField | EscapedTextField)
}
_SESSION = Session._meta.db_table
_RUN = Run._meta.db_table
_MESSAGE = Message._meta.db_table


def append(alias: str, batch: Batch, *, closed: bool = False) -> None:
    """Store a batch in the open transaction.

    Engine rows (a batch with an epoch) require that epoch; service rows require a run that has not ended,
    unless `closed` says that they change no status. Raises JournalConflictError if the writer did not know
    the whole journal, lost its lease, or the run has ended; the caller rolls back.
    """
    connection = connections[alias]
    session_id, run_id = _id(connection, batch.state.session_id), _id(connection, batch.state.run.run_id)
    times = [connection.ops.adapt_datetimefield_value(row.created_at) for row in batch.rows]
    sets, values = _run_columns(connection, batch, times[-1])
    where = "" if closed else f" AND status NOT IN {ENDED}"
    if batch.epoch:
        where += " AND lease_epoch = %s"
    run = [*values, run_id, *([batch.epoch] if batch.epoch else ())]
    session = [batch.state.next_seq, batch.state.head, session_id, batch.first_seq, batch.first_head]
    rows = _rows(connection, batch, session_id, run_id, times)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_cte(len(batch.rows), sets, where), [*session, *run, *rows])
            stored = cursor.rowcount
        else:
            stored = _three_statements(cursor, sets, where, session, run, rows)
        if stored != len(batch.rows):
            raise JournalConflictError(f"Run {batch.state.run.run_id}: the journal has moved on.")


@cache
def _cte(count: int, sets: str, where: str) -> str:
    # Each UPDATE reads FROM the one before: sibling CTEs run in no fixed order, and Session is locked first.
    row = "(" + ", ".join(f"%s::{kind}" for kind in TYPES) + ")"
    columns = ", ".join(COLUMNS)
    return (
        f'WITH s AS (UPDATE "{_SESSION}" SET next_seq = %s, head = %s'
        f" WHERE id = %s AND next_seq = %s AND head = %s RETURNING id),"
        f' r AS (UPDATE "{_RUN}" AS run SET {sets} FROM s'
        f" WHERE run.id = %s AND run.session_id = s.id{where} RETURNING run.id)"
        f' INSERT INTO "{_MESSAGE}" ({columns})'
        f" SELECT v.* FROM r, (VALUES {', '.join([row] * count)}) AS v"
    )


def _three_statements(
    cursor: Any, sets: str, where: str, session: list[Any], run: list[Any], rows: list[Any]
) -> int:
    cursor.execute(
        f'UPDATE "{_SESSION}" SET next_seq = %s, head = %s WHERE id = %s AND next_seq = %s AND head = %s',
        session,
    )
    if cursor.rowcount != 1:
        return 0
    cursor.execute(f'UPDATE "{_RUN}" SET {sets} WHERE id = %s{where}', run)
    if cursor.rowcount != 1:
        return 0
    row = "(" + ", ".join(["%s"] * len(COLUMNS)) + ")"
    count = len(rows) // len(COLUMNS)
    cursor.execute(f'INSERT INTO "{_MESSAGE}" ({", ".join(COLUMNS)}) VALUES {", ".join([row] * count)}', rows)
    return count


def clock(connection: BaseDatabaseWrapper, seconds: float = 0) -> tuple[str, list[Any]]:
    """Return SQL for the database's clock plus `seconds`, with its parameters."""
    if connection.vendor == "postgresql":
        return "(clock_timestamp() + make_interval(secs => %s))", [seconds]
    # Six digits, as Django writes times: texts of unequal length compare wrongly.
    return "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s)", [f"{seconds:+.3f} seconds"]


def _run_columns(connection: BaseDatabaseWrapper, batch: Batch, updated_at: Any) -> tuple[str, list[Any]]:
    """Return the SET clause of Run: the folded columns and those of the lease."""
    folded = batch.state.run.columns()
    status = folded.pop("status")
    sets = ["updated_at = %s"]
    values: list[Any] = [updated_at]
    for name, value in folded.items():
        sets.append(f"{name} = %s")
        values.append(_prepared(name, value))
    if not batch.epoch:
        # A service row leaves the lease alone: a live worker learns of it at its next append.
        sets.append("status = CASE WHEN status = 'running' AND %s THEN 'running' ELSE %s END")
        values += [status not in Run.ENDED, "queued" if status == "active" else status]
    elif batch.releases:
        sets.append("status = %s, lease_owner = '', lease_expires_at = NULL, lease_epoch = lease_epoch + 1")
        values.append("queued" if status == "active" else status)
        if batch.delay is None:
            sets.append("not_before = NULL")
        else:
            later, later_values = clock(connection, batch.delay)
            sets.append(f"not_before = {later}")
            values += later_values
    else:
        later, later_values = clock(connection, settings.LEASE_SECONDS)
        sets.append(f"status = 'running', lease_expires_at = {later}")
        values += later_values
    if batch.failed_drive:
        sets.append("attempts = attempts + 1")
    elif batch.progressed or batch.unpaused:
        sets.append("attempts = 0")
    if batch.epoch:
        sets.append("blocked_reason = %s")
        values.append(_prepared("blocked_reason", batch.state.run.paused))
    return ", ".join(sets), values


def _prepared(name: str, value: Any) -> Any:
    prepare = _PREPARE.get(name)
    return value if prepare is None else prepare(value)


def _id(connection: BaseDatabaseWrapper, value: Any) -> Any:
    return Run._meta.pk.get_db_prep_value(value, connection)


def _rows(
    connection: BaseDatabaseWrapper, batch: Batch, session_id: Any, run_id: Any, times: list[Any]
) -> list[Any]:
    flat: list[Any] = []
    for row, text, created_at in zip(batch.rows, batch.texts, times, strict=True):
        flat += (
            session_id,
            row.seq,
            run_id,
            row.kind,
            row.call_id,
            row.tool_name,
            row.attempt,
            row.epoch,
            text,
            created_at,
            row.prev_hash,
            row.hash,
            None if row.consumes is None else _id(connection, row.consumes),
        )
    return flat
