"""Stores of a run's rows, in the database or in memory; and the SQL that begins, appends to and claims a run.

An append consists of guarded updates of Session and Run, one multi-row INSERT, and the approvals that the
rows change. All of it is stored, or nothing. Its SQL builds no model instances, because they cost more than
the database does (docs/explanation/performance).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, ClassVar
from uuid import UUID

from django.db import connections, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.utils.crypto import salted_hmac

from agentruns.conf import settings
from agentruns.exceptions import JournalConflictError
from agentruns.journal import events, rulings, telemetry, waits
from agentruns.journal.batch import Batch, SessionState, load
from agentruns.journal.cards import CallApproval
from agentruns.journal.connection import acknowledged, journal_alias, own_alias, require_no_transaction
from agentruns.journal.deciders import withdrawn
from agentruns.journal.fold import Call
from agentruns.journal.outbox import announce, is_announced
from agentruns.models import Approval, ContextValue, Definition, Message, Run, Session, Spending
from agentruns.models.fields import CanonicalField, EscapedTextField
from agentruns.models.statuses import ApprovalStatus, RunStatus
from agentruns.models.token import VISITOR
from agentruns.utils import clock as journal_clock, json as canonical
from agentruns.utils.db import LOCK_TIMEOUT, as_id, in_transaction, later, uptime

# Columns of Approval that are stored as they are folded
AS_FOLDED = (
    "status", "title", "why", "risk", "approvers", "required", "requested_at", "holds", "expires_at",
    "due_at", "escalate_to",
)  # fmt: skip

# SHARED columns are equal in all rows of a batch; COLUMNS differ and have a type. psycopg prepares no
# statement of over fifty parameters.
SHARED = ("session_id", "run_id", "epoch", "created_at")
COLUMNS = {
    "seq": "bigint", "kind": "text", "call_id": "text", "tool_name": "text", "attempt": "integer",
    "facts": "text", "content": "text", "prev_hash": "text", "hash": "text", "consumes": "uuid",
    "facts_salt": "text", "content_salt": "text", "content_hash": "text",
}  # fmt: skip
TYPED_ROW = "(" + ", ".join(f"%s::{kind}" for kind in COLUMNS.values()) + ")"
UNTYPED_ROW = "(" + ", ".join("%s" for _kind in COLUMNS) + ")"
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
SQL = tuple[str, list[Any]]
Claimed = tuple[UUID, int, int, bool]  # session, epoch, attempts, whether an expired lease was taken over
Key = tuple[UUID, int, str]  # of a lease: run, epoch, owner
# Written into the SQL, because psycopg prepares no statement of over fifty parameters.
LITERALS = {None: "NULL", "": "''", 0: "0", "{}": "'{}'", "[]": "'[]'"}
UNLESS_THERE = " ON CONFLICT DO NOTHING"
KEPT = f'INSERT INTO "{ContextValue._meta.db_table}" (run_id, key, value) SELECT'
# Fields whose values need no conversion.
PLAIN = (models.CharField, models.TextField, models.BigIntegerField, models.PositiveIntegerField)


class DatabaseStore:
    """The store that appends to the journal in the project's database."""

    durable: ClassVar[bool] = True

    def __init__(self, alias: str | None = None) -> None:
        self.alias = alias or settings.DATABASE

    def append(self, batch: Batch, *, durable: bool = False) -> None:
        """Store a batch's rows, folded columns, approvals and events in one transaction; announce it.

        Inside another transaction it uses a savepoint. `durable` requires that no transaction is open, so
        that the commit is real; otherwise it raises NotDurableError. `durable` uses the journal's own
        connection if this thread has one. Raises JournalConflictError as `write_rows` and each `project` do.
        Raises OperationalError if a commit may be on no synchronous replica.
        """
        alias = self.alias
        if durable:
            require_no_transaction(alias)
            alias = own_alias(alias)
        connection = connections[alias]
        # On PostgreSQL rows alone are one statement, and that is a transaction by itself.
        is_more = connection.in_atomic_block or bool(batch.changed_approvals() or batch.charged)
        is_more = is_more or waits.concerns(batch) or rulings.concerns(batch) or is_announced(batch)
        is_one = connection.vendor == "postgresql" and durable and not is_more
        block = nullcontext() if is_one else transaction.atomic(using=alias, durable=durable)
        with acknowledged(connection), block:
            write_rows(connection, batch, durable=durable)
            for run, definition, first, doorbell in batch.births:  # after the parent is locked
                if not begin(connection, run, definition, first, doorbell=doorbell):
                    raise JournalConflictError(f"Session {run.session.key!r} of a child run is taken.")
                if first.changed_approvals():
                    project(alias, first)
                    announce(alias, first)
            if is_more:
                project(alias, batch)
                waits.project(alias, batch)
                rulings.project(alias, batch)
                announce(alias, batch)
        if settings.TELEMETRY:
            telemetry.stored(batch, alias)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state of a session from its rows; raises JournalUnreadableError."""
        return load(journal_alias(self.alias), session_id, run_id)


class MemoryStore:
    """The store of one stateless run; nothing survives the process."""

    durable: ClassVar[bool] = False

    def append(self, batch: Batch, *, durable: bool = False) -> None:
        """Report the batch to telemetry; its rows are folded already and stored nowhere."""
        telemetry.stored(batch, None)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Raise LookupError, because there is nothing to read back."""
        raise LookupError(f"Run {run_id} lives in memory only; there is nothing to load.")


Store = DatabaseStore | MemoryStore


def project(alias: str, batch: Batch) -> None:
    """Write a batch's approvals, and the cost of the day.

    Raises JournalConflictError if an approval was changed or is refused.

    An approval is refused that misses `batch.guard`, and one that a call consumes although its token was
    revoked. The session is locked: who revokes a token locks it afterwards, and then finds what was consumed.
    """
    requested = {row.call_id for row in batch.rows if row.kind == events.APPROVAL_REQUESTED}
    new: list[Approval] = []
    for call, approval, before in batch.changed_approvals():
        if call.id in requested:
            new.append(new_approval(call, approval, batch.state.run.run_id))
            continue
        rows = Approval.objects.using(alias).filter(pk=approval.id, status=before)
        if batch.guard is not None and before == ApprovalStatus.PENDING:
            rows = rows.filter(batch.guard)
        if approval.status == ApprovalStatus.CONSUMED != before and withdrawn(alias, approval):
            raise JournalConflictError(f"A token that gave approval {approval.id} was revoked.")
        if rows.update(**card_columns(call, approval), same_call=same_call(call.tool, call.arguments)) != 1:
            raise JournalConflictError(f"Approval {approval.id} is not {before} any more.")
    # Not save(), whose signals would let receivers of the project work inside this transaction.
    Approval.objects.using(alias).bulk_create(new)
    if batch.charged:
        Spending.settle(alias, batch.state.run.run_id, batch.charged, batch.cost)


def new_approval(call: Call, approval: CallApproval, run_id: UUID) -> Approval:
    """Build the Approval instance of a call from its folded state."""
    same = same_call(call.tool, call.arguments)
    return Approval(id=approval.id, run_id=run_id, same_call=same, **card_columns(call, approval))


def card_columns(call: Call, approval: CallApproval) -> dict[str, Any]:
    """Build the columns of Approval from a call and its folded approval."""
    actor = approval.actor or {"id": "", "name": ""}
    user_id = None if actor["id"].startswith(VISITOR) else actor["id"] or None  # a visitor is no user
    is_decided = approval.status != ApprovalStatus.PENDING
    return {
        **{name: getattr(approval, name) for name in AS_FOLDED},
        "call_id": call.id,
        "tool_name": call.tool,
        "digest": approval.shown,
        "arguments": call.arguments,
        "approved_count": len(approval.given),
        "decided_at": approval.decided_at if is_decided else None,
        "decided_by_id": user_id if is_decided else None,
        "decided_by_name": actor["name"] if is_decided else "",
        "reason": approval.reason if is_decided else "",
    }


def same_call(tool: str, arguments: dict[str, Any]) -> str:
    """Compute a keyed hash of tool and arguments, which finds the same call in other sessions."""
    text = canonical.dumps({"tool": tool, "arguments": arguments})
    return salted_hmac("agentruns.same_call", text, algorithm="sha256").hexdigest()


def write_rows(connection: BaseDatabaseWrapper, batch: Batch, *, durable: bool = False) -> None:
    """Store a batch's rows, and its columns of Session and Run; on PostgreSQL by one statement.

    Needs an open transaction, except on PostgreSQL. Raises JournalConflictError in three cases: the writer
    did not know the whole journal; the run has ended and the batch is not `closed`; the batch has an epoch,
    but the run has another epoch or owner. The owner is compared because a rewound database can give an epoch
    twice. The caller rolls back after the error. On PostgreSQL, `durable` limits waits for locks, and turns
    `synchronous_commit` on if it is off.
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
    rows, row_parameters = row_values(connection, batch)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Each part reads FROM the one before, as they run in no fixed order: Session is locked first, and
            # nothing changes unless everything does, because the statement commits even if it has stored too
            # few rows. The settings come before all of them, and with the statement: a pooler may pass on
            # another client's SET.
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
                f" FROM s, r, {rows} RETURNING extract(epoch FROM clock_timestamp())::float8",
                [*known, *run, *head, batch.epoch, at, *row_parameters],
            )
            stored = cursor.rowcount == len(batch.rows)
            if stored:
                moment = datetime.fromtimestamp(cursor.fetchone()[0], UTC)
                journal_clock.told(batch.clock or connection.alias, moment, sent)
        else:
            into = f"{INTO} SELECT %s, %s, %s, %s, v.* FROM {rows}"
            head_sql = f'UPDATE "{SESSION}" SET next_seq = %s, head = %s WHERE id = %s'
            stored = (
                cursor.execute(f"{head_sql} AND next_seq = %s AND head = %s", [*head, *known]).rowcount
                and cursor.execute(f'UPDATE "{RUN}" SET {sets} WHERE id = %s{where}', run).rowcount
                and cursor.execute(into, [session_id, run_id, batch.epoch, at, *row_parameters]).rowcount
            )
    if not stored:
        raise JournalConflictError(f"Run {state.run.run_id}: the journal has moved on.")
    state.dated = dated


def commit_again(connection: BaseDatabaseWrapper, session_id: UUID) -> None:
    """Wait until a synchronous replica has all rows read before, by a commit that only locks the session.

    A row that was just read may be on no replica yet. Raises OperationalError if the server stopped waiting.
    Does nothing except on PostgreSQL.
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
    """Build the SET clause of Run with its values; return both, and the `updated_at` that the run then has.

    A worker that keeps its lease writes only the columns that its rows can change. It leaves out `updated_at`
    if that is recent enough. This saves work on indexes: SQLite updates the index of each column in the
    clause, and PostgreSQL updates all indexes as soon as an indexed column changes.
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
        values += [Run.Status.QUEUED if status == RunStatus.ACTIVE else status, blocked]
        if batch.delay is None and batch.rows[-1].kind not in (events.RUN_ADOPTED, events.LEFT_OUT):
            sets.append("not_before = NULL")
        elif batch.delay is not None:
            until, seconds = clock(connection, batch.delay)
            sets.append(f"not_before = {until}")
            values += seconds
    else:
        # A service row leaves the lease alone: a live worker learns of it at its next append.
        sets.append("status = CASE WHEN status = 'running' AND %s THEN 'running' ELSE %s END")
        values += [status not in Run.ENDED, Run.Status.QUEUED if status == RunStatus.ACTIVE else status]
    if batch.failed_drive:
        sets.append("attempts = attempts + 1")
    elif batch.progressed or batch.unpaused:
        sets.append("attempts = 0")
    return ", ".join(sets), values, dated


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


def extend_many(rows: QuerySet[Run, Key], seconds: float) -> set[Key]:
    """Extend the leases of runs except those of locked rows; return the keys of the runs it extended.

    `rows` is a query of keys. On PostgreSQL one statement extends them, so that a process that vanishes
    leaves no row locked.
    """
    connection = connections[rows.db]
    if connection.vendor != "postgresql":

        def extend() -> set[Key]:
            found = set(rows)
            rows.update(lease_expires_at=later(seconds))
            return found

        return in_transaction(rows.db, extend)
    sql, where = rows.query.get_compiler(connection=connection).as_sql()
    values: list[Any] = [*where, timedelta(seconds=seconds)]
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH free (id, epoch, owner) AS ({sql} FOR NO KEY UPDATE SKIP LOCKED)"
            f' UPDATE "{RUN}" AS run SET lease_expires_at = statement_timestamp() + %s FROM free'
            " WHERE run.id = free.id RETURNING free.id, free.epoch, free.owner",
            values,
        )
        return {*cursor.fetchall()}


def row_values(connection: BaseDatabaseWrapper, batch: Batch) -> SQL:
    """Build VALUES for a batch's rows, in the order of COLUMNS, with their parameters."""
    flat = list[Any]()
    for row, parts in zip(batch.rows, batch.parts, strict=True):
        flat += (
            row.seq, row.kind, row.call_id, row.tool_name, row.attempt,
            parts.facts, parts.content, row.prev_hash, row.hash,
            None if row.consumes is None else as_id(connection, row.consumes),
            row.facts_salt, row.content_salt, row.content_hash,
        )  # fmt: skip
    one = TYPED_ROW if connection.vendor == "postgresql" else UNTYPED_ROW
    return f"(VALUES {', '.join([one] * len(batch.rows))}) AS v", flat


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
    stored session, or if a query of `unless` finds a row. Raises IntegrityError if another run has the same
    key, or if another run of the session is unfinished. `lease` is the number of seconds for which the
    creator leases the run. `doorbell` is the channel of PostgreSQL to notify.
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
    begun, columns = _insert(connection, run, lease_expires_at=clock(connection, lease) if lease else None)
    rows, row_parameters = row_values(connection, batch)
    last = [batch.epoch, connection.ops.adapt_datetimefield_value(batch.at), *row_parameters]
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
    """Build INSERT ... SELECT for a row, with its parameters; `sql` has columns the database computes."""
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
