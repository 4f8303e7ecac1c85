"""Stores of a run's rows: the state they load, the batch they append; the database, or memory.

An append is guarded updates of Session and Run, one multi-row INSERT and the approvals it changes, all or
nothing. No model instances of rows are built: they cost more than the database does
(docs/explanation/performance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Protocol, Unpack
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from agentruns.conf import settings
from agentruns.exceptions import JournalConflictError, JournalUnreadableError
from agentruns.journal import events, payloads, telemetry
from agentruns.journal.connection import journal_alias, own_alias, require_no_transaction
from agentruns.journal.conversation import Conversation
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, CallApproval, RunState
from agentruns.journal.outbox import EVENTS, announce
from agentruns.journal.read import session_rows
from agentruns.models import Approval, Message, Run, Session
from agentruns.models.fields import CanonicalField, EscapedTextField
from agentruns.utils import clock as journal_clock
from agentruns.utils import json as canonical
from agentruns.utils.db import LOCK_TIMEOUT, uptime

COLUMNS = (
    "session_id", "seq", "run_id", "kind", "call_id", "tool_name", "attempt", "epoch",
    "payload", "created_at", "prev_hash", "hash", "consumes",
)  # fmt: skip
TYPES = (
    "uuid", "bigint", "uuid", "text", "text", "text", "integer", "bigint",
    "text", "timestamptz", "text", "text", "uuid",
)  # fmt: skip
# After these the run has moved on, so earlier crashes no longer count against it.
PROGRESS = (events.ASSISTANT, events.TOOL_RESULT)
# For the transaction of a durable append: what it commits is on the disk, and it waits for no lock for long.
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
_SESSION = Session._meta.db_table
_RUN = Run._meta.db_table
_MESSAGE = Message._meta.db_table

Offload = Callable[[dict[str, Any]], dict[str, Any]]


class SessionState:
    """The state of a session for whoever writes to it: its chain's head, its doubts and one run.

    Its conversation is made when it is first asked for: a decision or the start of a run needs none.
    """

    def __init__(self, session_id: UUID, run_id: UUID) -> None:
        self.session_id = session_id
        self.next_seq = 1
        self.head = canonical.GENESIS
        self.run = RunState(run_id)
        # tool -> call that may have happened, without a verdict -> its run
        self.doubts: dict[str, dict[str, UUID]] = {}
        # tool -> call that was left out of a fork -> the run that may execute it after all
        self.open_elsewhere: dict[str, dict[str, UUID]] = {}
        self.raised: set[str] = set()  # those whose handler raised: the approval of a next call settles them
        # call and preview of a late result -> the file that holds the whole of it
        self.returned_late: dict[tuple[str, str], events.StoredFile] = {}
        self._conversation: Conversation | None = None
        self._unread: list[Row] = []  # by the conversation

    def apply(self, row: Row) -> None:
        """Fold one more row of the session's journal."""
        self.next_seq, self.head = row.seq + 1, row.hash
        if row.run_id == self.run.run_id:
            self.run.apply(row)
        if row.kind == events.TOOL_RESULT and events.leaves_doubt(row.payload):
            self.doubts.setdefault(row.tool_name, {})[row.call_id] = row.run_id
            if row.payload.get("in_doubt"):
                self.raised.add(row.call_id)
        elif row.kind == events.APPROVAL_DECIDED:
            for call_id in row.payload.get("settles", ()):
                self.doubts.get(row.tool_name, {}).pop(call_id, None)
        elif row.kind == events.ORPHAN_RESOLVED and row.payload["verdict"] in events.CLEARING:
            self.doubts.get(row.tool_name, {}).pop(row.call_id, None)
        elif row.kind == events.LATE_RESULT and payloads.names_in(row.payload):
            self.returned_late[row.call_id, row.payload["content"]] = row.payload["stored"]
        elif "open_in" in row.payload:
            open_in = UUID(row.payload["open_in"])
            self.open_elsewhere.setdefault(row.tool_name, {})[row.call_id] = open_in
        elif (
            row.kind == events.TOOL_STARTED and "approval" in row.payload and events.COPIED not in row.payload
        ):
            self.open_elsewhere.pop(row.tool_name, None)  # a person could know of it, and let the call run
        self._unread.append(row)

    @property
    def conversation(self) -> Conversation:
        """The conversation up to the last row."""
        if self._conversation is None:
            self._conversation = Conversation()
        for row in self._unread:
            self._conversation.apply(row)
        self._unread = []
        return self._conversation

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation to send, as `Conversation.messages`."""
        return self.conversation.messages()

    def settled_messages(self) -> list[dict[str, Any]]:
        """Return the conversation so far, as `Conversation.settled_messages`."""
        return self.conversation.settled_messages()

    def fingerprint(self) -> str:
        """Return a digest of the conversation so far."""
        return self.conversation.fingerprint()


def load(alias: str, session_id: UUID, run_id: UUID) -> SessionState:
    """Rebuild the state of a session from its rows; raises JournalUnreadableError."""
    state = SessionState(session_id, run_id)
    try:
        for row in session_rows(alias, session_id):
            state.apply(row)
    except (DatabaseError, InterfaceError):
        raise
    except Exception as error:  # an altered row can be wrong in any way
        raise JournalUnreadableError(
            f"The journal of session {session_id} cannot be read ({type(error).__name__}): "
            "manage.py verify_journal names the row. Nothing can be done with its runs until it is mended."
        ) from error
    return state


class Batch:
    """The rows of one append. `epoch` is the writer's lease epoch, 0 for service rows.

    `local`: of a stateless run, which asks no database for the time. Adding folds at once: if the batch
    cannot be stored, discard its state and read it again.
    """

    def __init__(self, state: SessionState, epoch: int = 0, *, local: bool = False) -> None:
        self.state = state
        self.epoch = epoch
        self.clock = None if local else settings.DATABASE
        self.first_seq = state.next_seq
        self.first_head = state.head
        self.rows: list[Row] = []
        self.texts: list[str] = []
        self.before: dict[str, str] = {}  # call -> status of its approval before this batch, "" if new
        self.release = False
        self.delay: float | None = None  # seconds until the run may be claimed again
        self.failed_drive = False
        self.unpaused = False
        self.progressed = False  # whether a reply or a result is among the rows
        self.quiet = False  # nobody is told of these rows: no signal, no notification, no telemetry
        self.reported = False  # whether telemetry has its events

    @property
    def releases(self) -> bool:
        """Return whether the writer's lease ends with this append."""
        return self.release or self.delay is not None or self.state.run.status != "active"

    def add(
        self,
        kind: str,
        payload: Mapping[str, Any],
        *,
        call: Call | None = None,
        call_id: str = "",
        tool_name: str = "",
        attempt: int = 0,
        consumes: UUID | None = None,
        offload: Offload | None = None,
    ) -> Row:
        """Chain one more row and fold it; `payload` has the form of its kind in `events.PAYLOADS`.

        `offload` may put a large content into a file.
        """
        if call is not None:
            call_id, tool_name = call.id, call.tool
            self.before.setdefault(call.id, call.approval.status if call.approval else "")
        text = canonical.dumps({"v": events.VERSION, **payload})
        if offload is not None and payloads.may_be_large(text):
            text = canonical.dumps({"v": events.VERSION, **offload(dict(payload))})
        row = Row(
            seq=self.state.next_seq,
            run_id=self.state.run.run_id,
            kind=kind,
            call_id=call_id,
            tool_name=tool_name,
            attempt=attempt,
            epoch=self.epoch,
            payload=canonical.loads(text),
            created_at=journal_clock.now(self.clock),
            prev_hash=self.state.head,
            hash="",
            consumes=consumes,
        )
        row = row._replace(hash=events.row_hash(self.state.session_id, row, text))
        self.rows.append(row)
        self.texts.append(text)
        self.progressed = self.progressed or kind in PROGRESS
        self.state.apply(row)
        return row

    def result(
        self,
        call: Call,
        content: Any,
        outcome: str,
        *,
        is_error: bool = False,
        offload: Offload | None = None,
        **facts: Unpack[events.ResultFacts],
    ) -> Row:
        """Add the one `tool_result` of a call, with the arguments it ran with if a person edited them.

        A content equal to the preview of a late result stands for the whole of that result.
        """
        if isinstance(content, str) and (stored := self.state.returned_late.get((call.id, content))):
            facts["stored"] = stored
        if call.edited and call.attempt:
            facts["edited"] = call.arguments
        payload: events.ToolResult = {"content": content, "is_error": is_error, "outcome": outcome, **facts}
        return self.add(events.TOOL_RESULT, payload, call=call, attempt=call.attempt, offload=offload)

    def changed_approvals(self) -> list[tuple[Call, CallApproval, str]]:
        """Return each approval that this batch requests or changes, with its call and its status before."""
        return [
            (call, call.approval, self.before[call.id])
            for call in self.state.run.calls.values()
            if call.approval is not None and call.id in self.before
        ]


class Store(Protocol):
    """The contract of a store: one append is all or nothing."""

    durable: ClassVar[bool]

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Store a batch, or raise and leave nothing of it."""

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state from what is stored."""


class DatabaseStore:
    """Appends to the journal in the project's own database."""

    durable: ClassVar[bool] = True

    def __init__(self, alias: str | None = None) -> None:
        self.alias = alias or settings.DATABASE

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Store rows, folded columns and approvals in one transaction (a savepoint inside another).

        `durable` insists that no transaction is open, so that the commit is real, and commits on the
        journal's own connection, where this thread has one. Raises
        JournalConflictError when the writer did not know the whole journal.
        """
        alias = self.alias
        if durable:
            require_no_transaction(alias)
            alias = own_alias(alias)
        with transaction.atomic(using=alias, durable=durable):
            write_rows(alias, batch, closed=closed, durable=durable)
            project(alias, batch, guard)
            if settings.NOTIFIERS or any(signal.receivers for _name, signal in EVENTS.values()):
                announce(alias, batch)
        if settings.TELEMETRY:
            telemetry.stored(batch, alias)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state from the session's rows."""
        return load(journal_alias(self.alias), session_id, run_id)


class MemoryStore:
    """Keeps rows for the life of one stateless run; nothing survives the process."""

    durable: ClassVar[bool] = False

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Accept a batch: its state is folded already."""
        telemetry.stored(batch, None)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Refuse: there is nothing to read back."""
        raise LookupError(f"Run {run_id} lives in memory only; there is nothing to load.")


def write_rows(alias: str, batch: Batch, *, closed: bool = False, durable: bool = False) -> None:
    """Store a batch in the open transaction, which is the batch's own if `durable`.

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
            sent = uptime()
            cursor.execute(_cte(len(batch.rows), sets, where, durable), [*session, *run, *rows])
            stored = cursor.rowcount
            if stored:
                journal_clock.told(batch.clock or alias, cursor.fetchone()[0], sent)
        else:
            stored = _three_statements(cursor, sets, where, session, run, rows)
        if stored != len(batch.rows):
            raise JournalConflictError(f"Run {batch.state.run.run_id}: the journal has moved on.")


@cache
def _cte(count: int, sets: str, where: str, durable: bool) -> str:
    # Each UPDATE reads FROM the one before: sibling CTEs run in no fixed order, and Session is locked first.
    # The settings come before all of them, and with the statement: a pooler may pass on another client's SET.
    row = "(" + ", ".join(f"%s::{kind}" for kind in TYPES) + ")"
    columns = ", ".join(COLUMNS)
    return (
        f"WITH c AS MATERIALIZED (SELECT {SETTINGS if durable else 1}),"
        f' s AS (UPDATE "{_SESSION}" SET next_seq = %s, head = %s FROM c'
        f" WHERE id = %s AND next_seq = %s AND head = %s RETURNING id),"
        f' r AS (UPDATE "{_RUN}" AS run SET {sets} FROM s'
        f" WHERE run.id = %s AND run.session_id = s.id{where} RETURNING run.id)"
        f' INSERT INTO "{_MESSAGE}" ({columns})'
        f" SELECT v.* FROM r, (VALUES {', '.join([row] * count)}) AS v"
        " RETURNING clock_timestamp()"
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


def project(alias: str, batch: Batch, guard: Q | None = None) -> None:
    """Write the approvals that a batch requests or changes, by conditional updates.

    `guard` narrows the update of pending approvals (digest, expiry by the database clock). Raises
    JournalConflictError when an update finds no row: somebody else decided, or the approval expired.
    """
    requested = {row.call_id: row for row in batch.rows if row.kind == events.APPROVAL_REQUESTED}
    for call, approval, before in batch.changed_approvals():
        if call.id in requested:
            new_approval(call, approval, requested[call.id]).save(force_insert=True, using=alias)
            continue
        rows = Approval.objects.using(alias).filter(pk=approval.id, status=before)
        if guard is not None and before == "pending":
            rows = rows.filter(guard)
        if rows.update(**_columns(call, approval)) != 1:
            raise JournalConflictError(f"Approval {approval.id} is not {before} any more.")


def new_approval(call: Call, approval: CallApproval, request: Row) -> Approval:
    """Return the Approval row for an `approval_requested` row, with what was folded since."""
    payload: events.ApprovalRequested = request.payload
    return Approval(
        id=approval.id,
        run_id=request.run_id,
        call_id=call.id,
        tool_name=call.tool,
        risk=approval.risk,
        why=payload["why"],
        approvers=approval.approvers,
        required=approval.required,
        requested_at=request.created_at,
        **_columns(call, approval),
    )


def _columns(call: Call, approval: CallApproval) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "status": approval.status,
        "title": approval.title,
        "arguments": call.arguments,
        "digest": approval.digest,
        "approved_count": len(approval.given),
        "expires_at": approval.expires_at,
    }
    if approval.status != "pending":
        actor = approval.actor or {"id": "", "name": ""}
        columns |= {
            "decided_at": approval.decided_at,
            "decided_by_id": actor["id"] or None,
            "decided_by_name": actor["name"],
            "reason": approval.reason,
        }
    return columns
