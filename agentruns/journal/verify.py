"""Verification of a journal: its chain, sequence and pairing, and the columns folded from its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db.models import DateTimeField, Exists, ForeignKey, Model, OuterRef, QuerySet, TextField
from django.db.models.functions import Cast

from agentruns.conf import settings
from agentruns.exceptions import PayloadError
from agentruns.journal import events, payloads
from agentruns.journal.conversation import unread_after
from agentruns.journal.copies import Copy, altered, copy_of, is_task, title_of
from agentruns.journal.doubts import deferred_after
from agentruns.journal.events import Row
from agentruns.journal.fold import WAITING, Call, RunState
from agentruns.journal.read import NAMING, Parts, definitions_in, stored_rows
from agentruns.journal.store import card_columns
from agentruns.models import Approval, Definition, Event, Message, Run, Session, Tombstone
from agentruns.models.event import DEFERRED
from agentruns.models.parts import commitment
from agentruns.models.statuses import ApprovalStatus, GateVerdict, Outcome, RunStatus
from agentruns.models.tombstone import NAMED, forgotten
from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_ROW_DEPTH, NAME_LENGTH, is_deeper
from agentruns.utils.redaction import redacted

MARK = " (imported)"  # after the name of a person who decided in another database
TRIES = 10
PAGE = 200
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in a row of the journal (`seq`), or in a column folded from the rows.

    A `column` can be rewritten from the journal: it holds `stored` and should hold `folded`, and its row had
    this `status` when it was read. A problem without approval and run concerns a column of the session.
    `file` is the name of a damaged file that an intact row names.
    """

    session: str
    what: str
    seq: int | None = None
    kind: str = ""
    run: UUID | None = None
    approval: UUID | None = None
    column: str = ""
    stored: str | None = None
    folded: Any = None
    status: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"Session {self.session}: {self.what}"

    @property
    def model(self) -> type[Model]:
        """The model that has the column."""
        return Approval if self.approval else Run if self.run else Session


def problems(session_id: UUID, alias: str | None = None) -> list[str]:
    """List the problems of a session's journal and folded columns as texts; see `check`."""
    return [str(problem) for problem in check(session_id, alias)]


def check(session_id: UUID, alias: str | None = None, *, files: bool = True) -> list[Problem]:
    """List the problems of a session: its first bad row alone, or else everything that differs from its rows.

    Compares the folded columns, definitions, and rows that a fork copied. With `files`, also reads the stored
    files. This may take long, so call it outside of transactions. Takes no lock; checks a session with
    problems again if it was written to meanwhile, TRIES times at most. Raises Session.DoesNotExist.
    """
    alias = alias or settings.DATABASE
    stored = Session.objects.using(alias).filter(pk=session_id)
    for _ in range(TRIES):
        session = stored.get()
        problems = History(session).problems(alias, files)
        if not problems or stored.filter(next_seq=session.next_seq, head=session.head).exists():
            break
    return problems


def strays(alias: str) -> Iterator[Problem]:
    """Yield problems: rows without a session, altered tombstones, and pruned keys that can be used again."""
    session = Session.objects.using(alias).filter(pk=OuterRef("session_id"))
    rows = Message.objects.using(alias).filter(~Exists(session)).order_by("session_id")
    for session_id in rows.values_list("session_id", flat=True).distinct():
        yield Problem(str(session_id), "has rows in the journal, and is gone itself.")
    tombstones = Tombstone.objects.using(alias).prefetch_related("pruned_keys")
    for tombstone in tombstones.iterator(chunk_size=PAGE):
        refused = {(key.key, str(key.run_id)) for key in tombstone.pruned_keys.all()}
        named = dict(tombstone.idempotency_keys)
        if named.pop(NAMED, forgotten(tombstone.key)) != forgotten(tombstone.key):
            yield Problem(tombstone.key, "was pruned, and its tombstone has another key since.")
        for _, run_id in {*named.items()} - refused:
            what = f"was pruned, and the idempotency key of its run {run_id} is not refused any more."
            yield Problem(tombstone.key, what)


class History:
    """The rows of a session, checked one by one and folded by run.

    `check_...` explains why a row of the kind in its name does not fit its call; "" if it fits.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seq = 0
        self.head = canonical.GENESIS
        self.states: dict[UUID, RunState] = {}
        self.tasks: dict[UUID, Row] = {}
        self.home: dict[str, Any] = {}  # columns of the session, by its first run
        self.calls: dict[UUID, dict[str, Call]] = {}  # of every reply, not only of the last
        self.approvals: set[UUID] = set()
        self.copies: list[Copy] = []
        self.pointing: list[Row] = []  # at files that hold their content
        self.copied_calls: set[str] = set()
        self.unread: list[int] = []  # messages that no reply has read
        self.deferred: dict[str, Row] = {}  # as in SessionState
        self.erased: dict[int, str] = {}  # row whose content is gone, until a row says so -> its kind
        self.definitions: set[str] = set()

    def problems(self, alias: str, files: bool) -> list[Problem]:
        """Read and check everything; list what is wrong as `check` does."""
        if (problem := self.read(alias)) is not None:  # a fold of a wrong journal means nothing
            return [problem]
        problems: list[Problem] = []
        for row in self.pointing if files else ():
            file = ""
            try:
                for stored in payloads.files(row.run_id, row.seq, row.payload):
                    file = stored.name
                    payloads.check(stored)
            except PayloadError as error:
                what = f"points at a file that is not there as it was stored: {error}"
                problems.append(self.problem(row.seq, row.kind, what, file))
        definitions = Definition.objects.using(alias).filter(pk__in=self.definitions).order_by("pk")
        for pk, text in definitions.annotate(text=Cast("body", TextField())).values_list("pk", "text"):
            if canonical.sha256(text) != pk:
                problems.append(Problem(self.session.key, f"definition {pk} was altered."))
        problems += [
            self.problem(copy.row.seq, copy.row.kind, what) for copy, what in altered(alias, self.copies)
        ]
        problems += self._runs(alias)
        columns = {name: stored_form(Session, name, getattr(self.session, name)) for name in self.home}
        problems += _differences(Problem(self.session.key, ""), Session, columns, self.home)
        return [*problems, *self._approvals(alias), *self._events(alias)]

    def read(self, alias: str) -> Problem | None:
        """Read all rows; return the problem of the first wrong row or of the journal's end, or None."""
        rows = Message.objects.using(alias).filter(session_id=self.session.pk)
        try:
            for row, parts in stored_rows(rows):  # a parsed payload would hide changes of its text
                if (wrong := self.add(row, parts)) is not None:
                    return wrong
        except (ValueError, TypeError) as error:
            return self.problem(self.seq + 1, "", f"cannot be read: {error}.")
        return self.cut()

    def add(self, row: Row, parts: Parts) -> Problem | None:
        """Check one more row, stored as `parts`, and fold the row; return its problem, or None."""
        expected = self.seq + 1
        if row.seq != expected:
            return self.problem(expected, "", f"is missing; the next row is {row.seq} ({row.kind}).")
        if row.prev_hash != self.head:
            return self.problem(row.seq, row.kind, "does not follow the row before it.")
        try:
            facts_hash = commitment(row.facts_salt, parts.facts)
            intact = row.hash == events.row_hash(self.session.pk, row, facts_hash)
            if parts.content is None or row.content_salt is None:  # one without the other hides nothing
                intact = intact and parts.content is row.content_salt
            else:
                intact = intact and row.content_hash == commitment(row.content_salt, parts.content)
        except (AttributeError, TypeError, ValueError):  # such as an invalid time
            intact = False
        if not intact:
            return self.problem(row.seq, row.kind, "was altered.")
        state = self.states.setdefault(row.run_id, RunState(row.run_id))
        calls = self.calls.setdefault(row.run_id, {})
        try:
            row = row._replace(payload=parts.payload(row.kind))
            if not (what := self._unpaired(row, state, calls)):
                state.apply(row)
        except Exception as error:  # a forged row can be wrong in any way
            what = f"cannot be folded: {error!r}."
        if what:
            return self.problem(row.seq, row.kind, what)
        calls.update(state.calls)
        if is_task(row):
            self.tasks[row.run_id] = row
        self.unread = unread_after(self.unread, row)
        self.deferred = deferred_after(self.deferred, row)
        if row.kind in NAMING:
            self.definitions |= definitions_in(row.payload)
        if row.payload.get("stored"):
            self.pointing.append(row)
        if row.is_erased and not row.payload.get(events.COPIED, {}).get("erased"):
            self.erased[row.seq] = row.kind
        elif erasure := events.PAYLOAD_ERASED.of(row):
            self.erased.pop(erasure["seq"], None)
        self.seq, self.head = row.seq, row.hash
        return None

    def problem(self, seq: int, kind: str, what: str, file: str = "") -> Problem:
        """Build the problem of a row; `kind` is "" for a missing row."""
        name = f"seq {seq} ({kind})" if kind else f"seq {seq}"
        return Problem(self.session.key, f"{name} {what}", seq=seq, kind=kind, file=file)

    def cut(self) -> Problem | None:
        """Find a problem at the journal's end: lost rows, a wrong head, or an erasure that no row records."""
        # Called after the last row, as only then all rows about erased contents have been read.
        if (remembered := self.session.next_seq - 1) != self.seq:
            is_lost = remembered > self.seq and self.session.head != self.head
            why = f"rows {self.seq + 1} to {remembered} are lost" if is_lost else "the session was altered"
            what = f"its head is seq {remembered}, the journal ends at {self.seq}: {why}."
        elif self.session.head != self.head:
            what = f"its head is not the hash of seq {self.seq}, at which the journal ends."
        elif self.erased:
            what = "its content is gone and no row says that it was erased."
            return self.problem(*min(self.erased.items()), what)
        else:
            return None
        return Problem(self.session.key, what, seq=min(self.seq, remembered) + 1)

    def _unpaired(self, row: Row, state: RunState, calls: dict[str, Call]) -> str:
        """Explain why a row does not fit the rows before it; "" if it fits."""
        if is_deeper(row.payload, MAX_ROW_DEPTH):
            return f"is nested more than {MAX_ROW_DEPTH} levels deep: it cannot be read everywhere."
        reply = events.ASSISTANT.of(row)
        if events.COPIED in row.payload:
            if state.started_at is not None:
                return "is copied from another run after its own run had started."
            if row.consumes is not None:
                return "is copied from another run and consumes an approval."
            if (copy := copy_of(row)) is not None:  # to be compared with its origin
                self.copies.append(copy)
            self.copied_calls |= {row.call_id, *(call["id"] for call in (reply["calls"] if reply else ()))}
            return ""
        if reply:
            for call in state.open_calls():
                return f"is a reply while call {call.id} has no result."
            if reply.get("read", 0) >= row.seq:
                return f"is a reply to row {reply['read']}, which came later."
            for asked in reply["calls"]:
                if asked["id"] in calls:
                    return f"asks for call {asked['id']} a second time."
        if (omission := events.LEFT_OUT.of(row)) and omission.get("seq", 0) >= row.seq:
            return f"leaves out row {omission['seq']}, which came later."
        if row.kind == events.RUN_COMPLETED and self.unread:
            return f"completes the run, and no reply has read the message of row {self.unread[0]}."
        if row.kind not in _PAIRED:
            return ""
        known = calls.get(row.call_id)
        if known is None and row.kind == events.ORPHAN_RESOLVED and row.call_id in self.copied_calls:
            return ""  # a fork may clear a doubt of its origin
        if known is None and row.kind == events.LATE_RESULT and row.payload.get("lost"):
            return ""  # evidence of what a restore took back
        if known is None:
            return f"is of call {row.call_id}, which no reply asked for."
        check = getattr(self, f"check_{row.kind}", None)
        return str(check(row, known, row.payload)) if check else ""

    def check_approval_requested(self, row: Row, call: Call, payload: events.ApprovalRequested) -> str:
        if (approval := UUID(payload["approval"])) in self.approvals or call.approval is not None:
            return f"asks for an approval of call {call.id} a second time."
        if not call.is_open:
            return f"asks for an approval of call {call.id}, which has a result."
        if payload["digest"] != call.digest:
            return f"asks for an approval of call {call.id} with other arguments than it has."
        self.approvals.add(approval)
        return ""

    def check_approval_decided(self, row: Row, call: Call, payload: events.ApprovalDecided) -> str:
        if (approval := call.approval) is None:
            return f"decides on call {call.id}, for which no approval was asked."
        if approval.status != ApprovalStatus.PENDING:
            return f"decides on approval {approval.id}, which is {approval.status} already."
        if "arguments" not in payload and payload["digest"] != approval.digest:
            return f"decides on another digest than that of approval {approval.id}."
        return ""

    def check_approval_voided(self, row: Row, call: Call, payload: events.ApprovalVoided) -> str:
        if (approval := call.approval) is None or str(approval.id) != payload["approval"]:
            return f"voids an approval of call {call.id} that was not asked for."
        renewed = UUID(payload["renews"]) if "renews" in payload else None
        may_void = approval.status in (ApprovalStatus.PENDING, ApprovalStatus.APPROVED)
        if renewed:  # only a start of which nothing was committed gives its approval back
            is_undone = call.declares == "transactional" and call.is_open and not call.orphan
            is_used = approval.status == ApprovalStatus.CONSUMED
            may_void = is_undone and is_used and renewed not in self.approvals
        if not may_void:
            return f"voids approval {approval.id}, which is {approval.status}."
        if not set(payload["voided"]) <= set(approval.given):
            return f"voids what nobody gave to approval {approval.id}."
        self.approvals |= {renewed} if renewed else set()
        return ""

    def check_tool_started(self, row: Row, call: Call, payload: events.ToolStarted) -> str:
        if not call.is_open:
            return f"starts call {call.id}, which has a result."
        if row.attempt != call.attempt + 1:
            return f"is attempt {row.attempt} of call {call.id}, after attempt {call.attempt}."
        if payload["digest"] != call.digest:
            return f"starts call {call.id} with other arguments than were recorded."
        if call.verdict == GateVerdict.REFUSE or (call.verdict == GateVerdict.ASK and call.approval is None):
            return f"starts call {call.id}, which the gate did not let through."
        # The first start consumes the approval, once, and only as it was approved.
        approval, used = call.approval, row.consumes
        if approval is None:
            return f"consumes approval {used}, which is not of call {call.id}." if used else ""
        if approval.digest != payload["digest"]:
            return f"starts call {call.id} with other arguments than approval {approval.id} shows."
        if used is None:
            if call.attempt and approval.status == ApprovalStatus.CONSUMED:
                return ""
            return f"starts call {call.id} without approval {approval.id}, which is {approval.status}."
        if used != (approval.renewed or approval.id):
            return f"consumes approval {used}, which is not of call {call.id}."
        if approval.status == ApprovalStatus.CONSUMED:
            return f"consumes approval {approval.id} a second time."
        if approval.status != ApprovalStatus.APPROVED:
            return f"consumes approval {approval.id}, which is {approval.status}."
        return ""

    def check_event_awaited(self, row: Row, call: Call, payload: events.EventAwaited) -> str:
        waits = call.is_open and 0 < call.attempt == row.attempt and call.event is None
        return "" if waits else f"lets call {call.id} wait, which is not at work."

    def check_event_delivered(self, row: Row, call: Call, payload: events.EventDelivered) -> str:
        if call.is_open is not payload.get("late", False) and call.attempt:
            return ""
        return f"delivers an event to call {call.id}, which {'waits' if call.is_open else 'does not wait'}."

    def check_tool_result(self, row: Row, call: Call, payload: events.ToolResult) -> str:
        if not call.is_open:
            return f"is a second result of call {call.id}."
        if payload["outcome"] == Outcome.OK and call.attempt == 0 and not call.is_started:
            return f"says that call {call.id} was done, which never started."
        return ""

    def check_orphan_found(self, row: Row, call: Call, payload: events.OrphanFound) -> str:
        # A transactional call, too, where its handler ended the transaction by itself.
        started = call.is_started or (call.declares == "transactional" and call.is_open and call.attempt > 0)
        started = started or (call.may_be_lost and call.is_open)
        return "" if started else f"doubts call {call.id}, which has a result or never started."

    def _runs(self, alias: str) -> Iterator[Problem]:
        session, unseen = self.session, dict(self.states)
        # The state of the session's first run, which names the session's owner; empty without a run
        first = next((state for state in unseen.values() if state.started_at), RunState(session.pk))
        key, imported_into = session.key, session.scope if session.imported_at else None
        runs = Run.objects.using(alias).filter(session_id=self.session.pk).order_by("created_at", "pk")
        for pk, stored in _stored(runs):
            if (state := unseen.pop(pk, None)) is None:
                yield Problem(key, f"run {pk} has no row in the journal.", run=pk)
                continue
            if (status := str(stored["status"])) in (Run.Status.QUEUED, Run.Status.RUNNING):
                # A worker that has yet to learn of a delivered event keeps the run.
                is_kept = stored["lease_owner"] and state.status in WAITING
                stored["status"] = state.status if is_kept else RunStatus.ACTIVE
            about = Problem(key, f"run {pk}", run=pk, status=status)
            asked = _asked(self.tasks.get(pk), stored["input"])
            folded = {**state.columns(), **state.given(imported_into), **asked}
            folded["owner_name"] = first.given()["owner_name"]  # at the time of the session's first run
            yield from _differences(about, Run, stored, folded)
            if state is first:
                shared = ("scope", "owner_id", "owner_name", *(["title"] if asked.get("title") else []))
                self.home = {"key": first.session} | {name: folded[name] for name in shared}
        for pk in unseen:
            yield Problem(key, f"run {pk} is missing, and has rows in the journal.", run=pk)

    def _approvals(self, alias: str) -> Iterator[Problem]:
        key = self.session.key
        unseen = {
            call.approval.id: (run_id, call, call.approval)
            for run_id, calls in self.calls.items()
            for call in calls.values()
            if call.approval is not None
        }
        approvals = Approval.objects.using(alias).filter(run__session_id=self.session.pk).order_by("pk")
        for pk, stored in _stored(approvals):
            run_id, call, approval = unseen.pop(pk, (None, None, None))
            place = (stored["run_id"], stored["call_id"])
            if call is None or approval is None or place != (str(run_id), call.id):
                yield Problem(key, f"approval {pk} is not one that the journal asked for.", approval=pk)
                continue
            folded = card_columns(call, approval)
            if self.session.imported_at and folded["decided_at"]:
                name = folded["decided_by_name"][: NAME_LENGTH - len(MARK)] + MARK
                folded |= {"decided_by_id": None, "decided_by_name": name.strip()}
            about = Problem(key, f"approval {pk}", run=run_id, approval=pk, status=str(stored["status"]))
            yield from _differences(about, Approval, stored, folded)
        for pk, (run_id, _, _) in unseen.items():
            yield Problem(key, f"approval {pk} of run {run_id} is missing.", run=run_id, approval=pk)

    def _events(self, alias: str) -> Iterator[Problem]:
        awaited = {
            (run_id, call.id): (state.scope, call.event["name"], call.event["key"])
            for run_id, state in self.states.items()
            for call in state.open_calls()
            if call.event is not None and not self.session.imported_at
        }
        for run_id, row in self.deferred.items() if not self.session.imported_at else ():
            awaited[row.run_id, row.call_id] = self.states[row.run_id].scope, DEFERRED, run_id
        waits = Event.objects.using(alias).unsettled().filter(run__session_id=self.session.pk)
        columns = ("run_id", "call_id", "scope", "name", "key")
        rows = waits.exclude(waits_since=None).values_list(*columns)
        stored = {(run_id, call_id): event for run_id, call_id, *event in rows}
        for run_id, call_id in sorted({*awaited, *stored}, key=str):
            due, has = awaited.get((run_id, call_id)), stored.get((run_id, call_id))
            if due is None and has is not None and has[1] == DEFERRED:  # told, and settled next
                continue
            if has is None or due is None or due != tuple(has):
                what = f"run {run_id}: the event of call {call_id} is not the one that the journal waits for."
                yield Problem(self.session.key, what, kind=events.EVENT_AWAITED, run=run_id)


# Kinds of rows that are about a call which a reply asked for
_PAIRED = {kind for kind in events.KINDS if hasattr(History, f"check_{kind}")}
_PAIRED |= {events.ORPHAN_RESOLVED, events.LATE_RESULT}


def _asked(task: Row | None, stored: str | None) -> dict[str, Any]:
    """Build `input` and `title` of a run from its task.

    Returns {} if there is no task, if its file cannot be read, or if it has files: the text then depends on
    SECRET_KEY.
    """
    if task is None or payloads.has_blocks(task.payload):
        return {}
    text = canonical.unescape_text(stored or "")
    try:
        file = payloads.of(task.run_id, task.seq, task.payload)
        if file is None or file.sha256 != canonical.sha256(text if file.is_text else canonical.dumps(text)):
            text = payloads.said_in(task.run_id, task.seq, task.payload)
    except PayloadError:  # which is reported by itself
        return {}
    return {"input": text, "title": title_of(text)}


def _stored(rows: QuerySet[Any]) -> Iterator[tuple[UUID, dict[str, str | None]]]:
    """Yield the columns of rows as stored texts, because an altered value may not even parse."""
    names = [field.attname for field in rows.model._meta.concrete_fields]
    texts = {f"stored_{name}": Cast(name, TextField()) for name in names}
    for pk, *values in rows.annotate(**texts).values_list("pk", *texts):
        yield pk, {name: _text(rows.model, name, text) for name, text in zip(names, values, strict=True)}


def _text(model: type[Model], name: str, text: str | None) -> str | None:
    """Bring a stored text into one form for all databases; leave a text that does not parse unchanged."""
    field = model._meta.get_field(name)
    with suppress(ValueError, ValidationError, ArithmeticError):
        if text and isinstance(field, DateTimeField):  # each database writes times in its own form
            moment = datetime.fromisoformat(text)
            return str(moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC))
        if text is not None and isinstance(field, ForeignKey):
            return str(field.to_python(text))
        if text and name == "cost":  # SQLite keeps it as a float
            return f"{Decimal(text).normalize():.12g}"
    return text


def _differences(
    about: Problem, model: type[Model], stored: dict[str, str | None], folded: dict[str, Any]
) -> Iterator[Problem]:
    """Yield a problem for each column that differs; `about` names the row."""
    for name, value in folded.items():
        due = stored_form(model, name, value)
        if stored[name] == due:
            continue
        # Redacted before they are cut, as redaction would not find a part of a secret.
        was, says = map(shown, redacted([stored[name], due]))
        what = f"{name} is {was}, the journal says {says}."
        if name == "arguments":  # they may be sensitive
            what = "arguments differ from the journal's."
        what = f"{about.what}: {what}" if about.what else what
        yield replace(about, what=what, column=name, stored=stored[name], folded=value)


def stored_form(model: type[Model], name: str, value: Any) -> str | None:
    """Convert a column's value to the text that the database stores, in one form for all databases."""
    with suppress(TypeError, ValueError, ValidationError):  # the id of a user under another user model
        value = model._meta.get_field(name).get_prep_value(value)  # type: ignore[union-attr]
    return _text(model, name, None if value is None else str(value))


def shown(text: str | None) -> str:
    """Quote a stored text, cut to its first characters if it is long."""
    return repr(text) if text is None or len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
