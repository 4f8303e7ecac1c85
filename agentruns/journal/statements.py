"""The SQL of an append, which writes rows and updates their session and run; and the SQL of a claim.

It builds no model instances, because they cost more than the database does (docs/explanation/performance).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from agentruns.conf import settings
from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.connection import acknowledged
from agentruns.models import Message, Run, Session
from agentruns.models.fields import CanonicalField, EscapedTextField
from agentruns.utils import clock as journal_clock
from agentruns.utils.db import LOCK_TIMEOUT, as_id, later, uptime

# The columns of a batch's rows: the shared ones, and the others with their types. psycopg prepares no
# statement of over fifty parameters.
SHARED = ("session_id", "run_id", "epoch", "created_at")
COLUMNS = {
    "seq": "bigint", "kind": "text", "call_id": "text", "tool_name": "text", "attempt": "integer",
    "facts": "text", "content": "text", "prev_hash": "text", "hash": "text", "consumes": "uuid",
    "facts_salt": "text", "content_salt": "text", "content_hash": "text",
}  # fmt: skip
# For the transaction of a durable append: its commit waits for the disk, its statements for no lock for long.
SETTINGS = (
    f"{LOCK_TIMEOUT}, set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off'"
    " THEN 'on' ELSE current_setting('synchronous_commit') END, true)"
)
ENDED = "(" + ", ".join(f"'{status}'" for status in Run.ENDED) + ")"

# The other folded columns are stored as they are.
_PREPARE = {
    field.attname: field.get_prep_value
    for field in Run._meta.concrete_fields
    if isinstance(field, CanonicalField | EscapedTextField)
}
# A running run's `updated_at` is renewed this often only: each time adds an entry to every index of Run.
DATED = timedelta(minutes=1)
# The folded columns that a continuing worker's rows may change: CALLS by any row, MOVING by ASKED kinds.
CALLS = ("pending_calls",)
MOVING = ("step", "usage", "tokens", "cost", *CALLS)
ASKED = (events.ASSISTANT, events.MODEL_FAILED)
SESSION = Session._meta.db_table
RUN = Run._meta.db_table
INTO = f'INSERT INTO "{Message._meta.db_table}" ({", ".join((*SHARED, *COLUMNS))})'


def write_rows(connection: BaseDatabaseWrapper, batch: Batch, *, durable: bool = False) -> None:
    """Store a batch in the open transaction, on PostgreSQL by one statement.

    Raises JournalConflictError in three cases: the writer did not know the whole journal; the run has ended
    and the batch is not `closed`; the batch has an epoch, but the run has another epoch or owner. The owner
    is compared because a rewound database can give an epoch twice. The caller rolls back after the error. On
    PostgreSQL, `durable` limits waits for locks, and turns `synchronous_commit` on if it is off.
    """
    state = batch.state
    session_id, run_id = as_id(connection, state.session_id), as_id(connection, state.run.run_id)
    at = connection.ops.adapt_datetimefield_value(batch.at)
    sets, values, dated = _run_columns(connection, batch, at)
    where = "" if batch.closed else f" AND status NOT IN {ENDED}"
    lease = [each for each in (batch.epoch, batch.owner) if each] if batch.epoch else []
    where += "".join((" AND lease_epoch = %s", " AND lease_owner = %s")[: len(lease)])
    run = [*values, run_id, *lease]
    known: list[Any] = [session_id, batch.first_seq, batch.first_head]
    head: list[Any] = [state.next_seq, state.head]
    rows, count = row_values(connection, batch), len(batch.rows)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Each part reads FROM the one before, as they run in no fixed order: Session is locked first, and
            # nothing changes unless everything does, because the statement commits even if it has stored too
            # few rows. The settings come before all of them, and with the statement: a pooler may pass on
            # another client's SET.
            row = "(" + ", ".join(f"%s::{kind}" for kind in COLUMNS.values()) + ")"
            sent = uptime()
            cursor.execute(
                f"WITH c AS MATERIALIZED (SELECT {SETTINGS if durable else 1}),"
                f' l AS (SELECT id FROM c, "{SESSION}" AS session'
                " WHERE id = %s AND next_seq = %s AND head = %s FOR NO KEY UPDATE OF session),"
                f' r AS (UPDATE "{RUN}" AS run SET {sets} FROM l WHERE run.id = %s AND'
                f" run.session_id = l.id{where} RETURNING run.id, session_id, updated_at),"
                f' s AS (UPDATE "{SESSION}" AS session SET next_seq = %s, head = %s FROM r'
                f" WHERE session.id = r.session_id RETURNING session.id)"
                f" {INTO} SELECT s.id, r.id, %s::bigint, %s::timestamptz, v.*"
                f" FROM s, r, (VALUES {', '.join([row] * count)}) AS v"
                " RETURNING extract(epoch FROM clock_timestamp())::float8",
                [*known, *run, *head, batch.epoch, at, *rows],
            )
            stored = cursor.rowcount == count
            if stored:
                moment = datetime.fromtimestamp(cursor.fetchone()[0], UTC)
                journal_clock.told(batch.clock or connection.alias, moment, sent)
        else:
            row = "(" + ", ".join(["%s"] * len(COLUMNS)) + ")"
            into = f"{INTO} SELECT %s, %s, %s, %s, v.* FROM (VALUES {', '.join([row] * count)}) AS v"
            head_sql = f'UPDATE "{SESSION}" SET next_seq = %s, head = %s WHERE id = %s'
            stored = (
                cursor.execute(f"{head_sql} AND next_seq = %s AND head = %s", [*head, *known]).rowcount
                and cursor.execute(f'UPDATE "{RUN}" SET {sets} WHERE id = %s{where}', run).rowcount
                and cursor.execute(into, [session_id, run_id, batch.epoch, at, *rows]).rowcount
            )
    if not stored:
        raise JournalConflictError(f"Run {state.run.run_id}: the journal has moved on.")
    state.dated = dated


def commit_again(connection: BaseDatabaseWrapper, session_id: UUID) -> None:
    """Wait until a synchronous replica has all rows read before, by a commit that only locks the session.

    A row that was just read may be on no replica yet. Raises OperationalError if the server stopped waiting.
    """
    if connection.vendor == "postgresql":
        sql = f'WITH c AS MATERIALIZED (SELECT {SETTINGS}) SELECT 1 FROM c, "{SESSION}" AS session'
        with acknowledged(connection), connection.cursor() as cursor:
            cursor.execute(f"{sql} WHERE id = %s FOR NO KEY UPDATE OF session", [session_id])


def clock(connection: BaseDatabaseWrapper, seconds: float = 0) -> tuple[str, list[Any]]:
    """Build SQL for the database's clock plus `seconds`, with its parameters."""
    if connection.vendor == "postgresql":
        return "(clock_timestamp() + make_interval(secs => %s))", [seconds]
    # Six digits, as Django writes times: texts of unequal length compare wrongly.
    return "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s)", [f"{seconds:+.3f} seconds"]


def _run_columns(
    connection: BaseDatabaseWrapper, batch: Batch, at: Any
) -> tuple[str, list[Any], datetime | None]:
    """Build the SET clause of Run with its values; return both, and the run's new `updated_at`.

    A worker that continues leaves out columns that its rows cannot change, and `updated_at` if that is recent
    enough: SQLite updates the index of each column in the clause, and PostgreSQL then updates all indexes.
    """
    folded = batch.state.run.columns()
    status = folded.pop("status")
    sets: list[str] = []
    values: list[Any] = []
    goes_on, dated = batch.epoch > 0 and not batch.releases, batch.state.dated
    if not goes_on or dated is None or batch.at - dated > DATED:
        dated, sets, values = batch.at, ["updated_at = %s"], [at]
    kinds = {row.kind for row in batch.rows}
    changed = MOVING if kinds.intersection(ASKED) else CALLS
    for name in changed if goes_on and events.RUN_STARTED not in kinds else folded:
        sets.append(f"{name} = %s")
        prepare = _PREPARE.get(name)
        values.append(prepare(folded[name]) if prepare else folded[name])
    if goes_on:  # `status` is "running" as long as the epoch is the writer's
        until, seconds = clock(connection, settings.LEASE_SECONDS)
        sets.append(f"lease_expires_at = {until}")
        values += seconds
    elif batch.epoch:
        sets.append("status = %s, lease_owner = '', lease_expires_at = NULL, lease_epoch = lease_epoch + 1")
        sets.append("blocked_reason = %s")
        blocked = _PREPARE["blocked_reason"](batch.state.run.paused)
        values += ["queued" if status == "active" else status, blocked]
        if batch.delay is None and batch.rows[-1].kind != events.RUN_ADOPTED:  # which keeps `not_before`
            sets.append("not_before = NULL")
        elif batch.delay is not None:
            until, seconds = clock(connection, batch.delay)
            sets.append(f"not_before = {until}")
            values += seconds
    else:
        # A service row leaves the lease alone: a live worker learns of it at its next append.
        sets.append("status = CASE WHEN status = 'running' AND %s THEN 'running' ELSE %s END")
        values += [status not in Run.ENDED, "queued" if status == "active" else status]
    if batch.failed_drive:
        sets.append("attempts = attempts + 1")
    elif batch.progressed or batch.unpaused:
        sets.append("attempts = 0")
    return ", ".join(sets), values, dated


Claimed = tuple[UUID, int, int, bool]  # session, epoch, attempts, whether an expired lease was taken over


def claim_one(runs: QuerySet[Run], owner: str, seconds: float) -> Claimed | None:
    """Lease the run that `runs` selects; return None if `runs` is empty or another process has the run.

    PostgreSQL claims by one statement, which is a transaction by itself. Elsewhere the epoch shows that the
    run was not claimed since it was read.
    """
    connection = connections[runs.db]
    if connection.vendor != "postgresql":
        columns = ("session_id", "lease_epoch", "attempts", "lease_expires_at")
        with transaction.atomic(using=runs.db):
            for session_id, epoch, attempts, expired_at in runs.values_list(*columns):
                took_over = expired_at is not None  # which counts as an attempt
                taken = runs.filter(lease_epoch=epoch).update(
                    status="running",
                    lease_owner=owner,
                    lease_epoch=epoch + 1,
                    lease_expires_at=later(seconds),
                    attempts=attempts + took_over,
                    not_before=None,
                    blocked_reason="",
                )
                return (session_id, epoch + 1, attempts + took_over, took_over) if taken == 1 else None
        return None
    seen = runs.order_by().values("pk", "lease_expires_at")
    sql, where = seen.query.get_compiler(connection=connection).as_sql()
    values: list[Any] = [*where, owner, timedelta(seconds=seconds)]
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH c AS MATERIALIZED (SELECT {LOCK_TIMEOUT}),"
            f" seen AS ({sql} AND EXISTS (SELECT FROM c) FOR NO KEY UPDATE SKIP LOCKED)"
            f" UPDATE \"{RUN}\" AS run SET status = 'running', lease_owner = %s,"
            " lease_epoch = run.lease_epoch + 1, lease_expires_at = statement_timestamp() + %s,"
            " attempts = run.attempts + (seen.lease_expires_at IS NOT NULL)::int,"
            " not_before = NULL, blocked_reason = '' FROM seen WHERE run.id = seen.pk"
            " RETURNING run.session_id, run.lease_epoch, run.attempts, seen.lease_expires_at IS NOT NULL",
            values,
        )
        claimed: Claimed | None = cursor.fetchone()
    return claimed


def row_values(connection: BaseDatabaseWrapper, batch: Batch) -> list[Any]:
    flat: list[Any] = []
    for row, parts in zip(batch.rows, batch.parts, strict=True):
        flat += (
            row.seq, row.kind, row.call_id, row.tool_name, row.attempt,
            parts.facts, parts.content, row.prev_hash, row.hash,
            None if row.consumes is None else as_id(connection, row.consumes),
            row.facts_salt, row.content_salt, row.content_hash,
        )  # fmt: skip
    return flat
