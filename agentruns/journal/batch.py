"""The state of a session, loaded from its rows, and the batch of rows that a writer adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from secrets import token_hex
from typing import Any, NamedTuple, Unpack
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models import Q

from agentruns.conf import settings
from agentruns.exceptions import JournalUnreadableError
from agentruns.journal import doubts, events, outsiders, payloads
from agentruns.journal.cards import CallApproval
from agentruns.journal.conversation import KINDS, Conversation, unread_after
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, RunState
from agentruns.journal.read import Parts, rows_with_secret
from agentruns.models import Definition, Run, Session, Tombstone
from agentruns.models.kinds import Kind, P, split
from agentruns.models.parts import commitment, keyed
from agentruns.models.statuses import RunStatus
from agentruns.utils import clock as journal_clock, json as canonical

SALT = 16  # bytes
# Kinds of rows that show progress: earlier crashes no longer count against the run.
PROGRESS = frozenset(kind for kind in events.KINDS.values() if kind.is_progress)
Offload = Callable[[dict[str, Any]], dict[str, Any]]


class LastRow(NamedTuple):
    """The number and the time of a session's last row.

    The time identifies the row, because even a row that was altered keeps its time. `restored_at` is when a
    run of the session was last held for lost rows, or None.
    """

    seq: int
    at: datetime
    restored_at: datetime | None


# The last row of each session that this process has seen committed: a journal without it was rewound. A
# failover to an asynchronous replica, or a restored backup, takes acknowledged rows back. The database then
# looks intact, so only the memory of a process can tell.
seen_committed: dict[UUID, LastRow] = {}
MOST_SEEN = 10_000  # sessions; beyond this the session driven longest ago is forgotten


class Birth(NamedTuple):
    """A child run to be stored with the rows that start its call: its first rows and its definition.

    `doorbell` is the channel of PostgreSQL to notify.
    """

    run: Run
    definition: Definition
    first: Batch
    doorbell: str


class SessionState:
    """The state of a session for a writer: its last hash, its calls in doubt, and the state of one run."""

    def __init__(self, session_id: UUID, run_id: UUID, secret: str = "") -> None:
        self.session_id = session_id
        self.secret = secret  # key of its calls' digests; "" for a state that is only read
        self.next_seq = 1
        self.head = canonical.GENESIS
        self.at: datetime | None = None  # the time of the last row
        self.restored_at: datetime | None = None  # when a run of the session was last held for lost rows
        self.run = RunState(run_id)
        self.home: tuple[str, str, str | None] | None = None  # key, scope and owner, once a run has begun
        self.in_doubt = doubts.Doubts()
        self.deferred: dict[str, Row] = {}  # run of a deferred call -> its result, until a message tells more
        # tool -> call that was left out of a fork -> the run that may execute it after all
        self.open_elsewhere: dict[str, dict[str, UUID]] = {}
        # (call, preview of a late result as JSON) -> the stored files with the full result
        self.returned_late: dict[tuple[str, str], events.StoredFile | list[events.StoredFile]] = {}
        self.dated: datetime | None = None  # the run's `updated_at`, if this process wrote it
        self.unread: list[int] = []  # messages that no reply has read
        self.asking: dict[int, list[str]] = {}  # task or message that no reply has read -> ids of its users
        self.read: dict[str, UUID] = {}  # tools that have read text of outsiders -> the first run that did
        self._asked: list[str] = []  # ids of the last run's requesters
        self.has_erased = False  # whether a part of the conversation is a placeholder
        self.is_rewound = False  # a row that this process has seen committed is not in the journal
        self._conversation: Conversation | None = None  # built at first use: a decision needs none
        self._unread: list[Row] = []  # rows that the conversation has not applied yet

    def apply(self, row: Row) -> None:
        """Fold one more row of the session's journal; rows must come in order."""
        self.next_seq, self.head, self.at = row.seq + 1, row.hash, row.created_at
        self.has_erased = self.has_erased or (row.kind in KINDS and row.is_erased)
        if row.run_id == self.run.run_id:
            self.run.apply(row)
        for tool in outsiders.readers(row.kind, row.tool_name, row.payload):
            self.read.setdefault(tool, row.run_id)
        if row.kind in doubts.KINDS:
            self.in_doubt.apply(row)
            self.deferred = doubts.deferred_after(self.deferred, row)
        if begun := events.RUN_STARTED.of(row):
            self._asked = begun.get("requesters", [])
            if self.home is None and events.COPIED not in begun:
                owner = begun.get("owner")
                self.home = begun["session"], begun["scope"], owner["id"] if owner else None
        elif said := events.USER.of(row):
            self.unread = unread_after(self.unread, row)
            is_message = said.get("reason") == events.MESSAGE or "about" in said
            self.asking[row.seq] = events.askers(said) if is_message else self._asked
        elif reply := events.ASSISTANT.of(row):
            self.unread, read = unread_after(self.unread, row), reply.get("read", row.seq)
            self.asking = {seq: who for seq, who in self.asking.items() if seq > read}
        elif (late := events.LATE_RESULT.of(row)) and "stored" in late:
            self.returned_late[row.call_id, canonical.dumps(late["content"])] = late["stored"]
        elif (pause := events.RUN_PAUSED.of(row)) and pause.get("restored"):
            self.restored_at = row.created_at
        elif (result := events.TOOL_RESULT.of(row)) and "open_in" in result:
            self.open_elsewhere.setdefault(row.tool_name, {})[row.call_id] = UUID(result["open_in"])
        elif result and "deferred" in result and events.COPIED in result:
            self.open_elsewhere.setdefault(row.tool_name, {})[row.call_id] = UUID(result["deferred"]["run"])
        elif (start := events.TOOL_STARTED.of(row)) and "approval" in start and events.COPIED not in start:
            self.open_elsewhere.pop(row.tool_name, None)  # a person let a call run, knowing of these
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

    def was_sent_for(self, reply: Row) -> bool | None:
        """Check whether a reply's request sent this conversation; None if unknown, as after an erasure."""
        if (sent := reply.payload.get("sent")) is None or reply.content_salt is None or self.has_erased:
            return None
        now = self.conversation.fingerprint(reply.payload.get("read"))
        return bool(sent == keyed(reply.content_salt, now))


def load(alias: str, session_id: UUID, run_id: UUID) -> SessionState:
    """Rebuild a session's state from its rows; raises JournalUnreadableError if it cannot be read or is gone.

    Sets `is_rewound` if a row that this process has seen committed is gone, even if the session is gone with
    it. Does not set `is_rewound` if a run has been held for lost rows since.
    """
    known = seen_committed.get(session_id)
    with reading_journal(session_id):
        try:
            rows, secret = rows_with_secret(alias, session_id)
        except Session.DoesNotExist:
            if known is None or Tombstone.objects.using(alias).filter(pk=session_id).exists():
                raise
            rows, secret = [], ""
        state = SessionState(session_id, run_id, secret)
        for row in rows:
            state.apply(row)
        if known is not None:
            held, before = state.restored_at, known.restored_at
            is_told = held is not None and (before is None or held > before)
            is_gone = len(rows) < known.seq or rows[known.seq - 1].created_at != known.at
            state.is_rewound = is_gone and not is_told
    return state


@contextmanager
def reading_journal(session_id: UUID) -> Iterator[None]:
    """Turn any exception in the block into JournalUnreadableError, except errors of the database."""
    try:
        yield
    except (DatabaseError, InterfaceError, JournalUnreadableError):
        raise
    except Exception as error:  # an altered row can be wrong in any way
        raise JournalUnreadableError(
            f"The journal of session {session_id} cannot be read ({type(error).__name__}): "
            "manage.py verify_journal names the row. Nothing can be done with its runs until it is mended."
        ) from error


class Batch:
    """The rows of one append, folded into `state` as they are added.

    `epoch` and `owner` come from the writer's lease; they are 0 and "" for a writer without a lease. A
    `local` batch belongs to a stateless run and uses this machine's clock. If a batch cannot be stored,
    discard `state` and load it again.
    """

    def __init__(self, state: SessionState, epoch: int = 0, *, owner: str = "", local: bool = False) -> None:
        self.state = state
        self.epoch = epoch
        self.owner = owner
        self.clock = None if local else settings.DATABASE
        self.first_seq = state.next_seq
        self.first_head = state.head
        self.rows: list[Row] = []
        self.parts: list[Parts] = []
        self.births: list[Birth] = []
        self.before: dict[str, str] = {}  # call -> status of its approval before this batch, "" if new
        self.release = False
        self.delay: float | None = None  # seconds until the run may be claimed again
        self.failed_drive = False
        self.unpaused = False
        self.progressed = False  # whether a reply or a result is among the rows
        self.charged: list[int] = []  # rows of Spending to which `cost` is added, with the reply
        self.cost = Decimal(0)
        self.quiet = False  # send no signal, no notification and no telemetry about these rows
        self.closed = False  # service rows that change no status: stored although the run has ended
        self.rulings: list[Any] = []  # rulings.Ruling: decisions of standing rules about these cards
        self.guard: Q | None = None  # condition on pending approvals: expiry by the database's clock
        self.needs_due_event = False  # it ends a wait: only if that is over by the database's clock
        self.reported = False  # whether telemetry has its events

    @cached_property
    def at(self) -> datetime:
        """The time of the batch's rows by the journal's clock."""
        return journal_clock.now(self.clock)

    @property
    def releases(self) -> bool:
        """Check whether the writer's lease ends with this append."""
        return self.release or self.delay is not None or self.state.run.status != RunStatus.ACTIVE

    def add(
        self,
        kind: Kind[P],
        payload: P,
        *,
        call: Call | None = None,
        call_id: str = "",
        tool_name: str = "",
        attempt: int = 0,
        consumes: UUID | None = None,
        offload: Offload | None = None,
    ) -> Row:
        """Add one row, link it to the hash chain, and fold it; `offload` may store its content in a file."""
        if call is not None:
            call_id, tool_name = call.id, call.tool
            self.before.setdefault(call.id, call.approval.status if call.approval else "")
        facts, content = split(kind, {"v": events.VERSION, **payload})
        salts = token_hex(2 * SALT)
        facts_salt, content_salt = salts[: 2 * SALT], salts[2 * SALT :]
        if kind == events.ASSISTANT and "sent" in content:
            content["sent"] = keyed(content_salt, content["sent"])
        text = canonical.dumps(content)
        if offload is not None and payloads.may_be_large(text):
            facts, content = split(kind, {"v": events.VERSION, **offload(dict(payload))})
            text = canonical.dumps(content)
        about = {"call_id": call_id, "tool_name": tool_name, "attempt": attempt, "consumes": consumes}
        about |= {"facts_salt": facts_salt, "content_salt": content_salt}
        name = str(kind)  # as rows that are read have it
        return self._chain(name, facts, text, content_hash=commitment(content_salt, text), **about)

    def resume(self, who: events.Actor | None, reason: str, *, unpause: bool = True) -> None:
        """Add the row with which a run goes on; `unpause` ends a pause and forgets failed attempts."""
        resumed = events.RunResumed(actor=who, epoch=self.epoch, reason=reason, unpause=unpause)
        self.add(events.RUN_RESUMED, resumed)
        self.unpaused = unpause

    def copy(self, row: Row, source: events.Copied) -> Row:
        """Add a copy of another session's row, marked with `source`; its content keeps its salt and hash."""
        if row.is_erased:
            source = {**source, "erased": True}
        facts, content = split(row.kind, {**row.payload, events.COPIED: source})
        about = {"call_id": row.call_id, "tool_name": row.tool_name, "attempt": row.attempt, "consumes": None}
        about |= {"facts_salt": token_hex(SALT), "content_salt": row.content_salt}
        text = None if row.is_erased else canonical.dumps(content)
        salt = row.content_salt
        content_hash = row.content_hash if text is None or salt is None else commitment(salt, text)
        return self._chain(row.kind, facts, text, content_hash=content_hash, **about)

    def _chain(self, kind: str, facts: dict[str, Any], content: str | None, **columns: Any) -> Row:
        parts = Parts(canonical.dumps(facts), content)
        # Set before the query for the time, which may fail: `Driver.commit` retries such rows for longer.
        self.progressed = self.progressed or kind in PROGRESS
        row = Row(
            seq=self.state.next_seq,
            run_id=self.state.run.run_id,
            kind=kind,
            epoch=self.epoch,
            payload=parts.payload(kind),
            created_at=self.at,
            prev_hash=self.state.head,
            hash="",
            **columns,
        )
        facts_hash = commitment(row.facts_salt, parts.facts)
        row = row._replace(hash=events.row_hash(self.state.session_id, row, facts_hash))
        self.rows.append(row)
        self.parts.append(parts)
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
        """Add the `tool_result` row that ends a call.

        Records the call's arguments if a person edited them and the call was started. If `content` is the
        preview of a late result, names the files with the full result.
        """
        late = self.state.returned_late  # contents stored in files; here they are previews
        if late and (key := (call.id, canonical.dumps(content))) in late:
            facts["stored"] = late[key]
        if call.edited and call.attempt:
            facts["edited"] = call.arguments
        payload: events.ToolResult = {"content": content, "is_error": is_error, "outcome": outcome, **facts}
        return self.add(events.TOOL_RESULT, payload, call=call, attempt=call.attempt, offload=offload)

    def changed_approvals(self) -> list[tuple[Call, CallApproval, str]]:
        """List the approvals of calls with rows in this batch, as (call, approval, earlier status or "")."""
        return [
            (call, call.approval, self.before[call.id])
            for call in self.state.run.calls.values()
            if call.approval is not None and call.id in self.before
        ]
