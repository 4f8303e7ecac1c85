"""Erasure: the content of rows is destroyed wherever the journal and its projections repeat it.

The chain stays valid, because it is made of commitments. A `payload_erased` row records who erased a row and
why. Every run with the value must have ended, because the model of an unfinished run could repeat the value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from uuid import UUID

from django.db import DatabaseError, transaction
from django.db.models import Exists, OuterRef
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, JournalConflictError, JournalUnreadableError, RunStateError
from agentruns.journal import events, payloads
from agentruns.journal.batch import Batch
from agentruns.journal.copies import kin, tasks_of
from agentruns.journal.events import Row
from agentruns.journal.read import session_rows
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import History
from agentruns.models import Approval, ContextValue, Draft, Message, Review, Run, Session
from agentruns.models.kinds import split
from agentruns.models.parts import ERASED
from agentruns.models.statuses import Outcome, Verb
from agentruns.services import permissions
from agentruns.services.data.retention import (
    clear_admin_log,
    delete_answers_of,
    delete_files,
    erase_session,
    family_of,
)
from agentruns.services.runs.lifecycle import list_runs
from agentruns.services.runs.sessions import Owner
from agentruns.services.runs.write import find_run, lock_session
from agentruns.tools.excerpts import READER
from agentruns.utils import json as canonical
from agentruns.utils.bounds import said
from agentruns.utils.db import TRIES, delete_rows, in_transaction
from agentruns.utils.ids import secret
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.erasure")

CHUNK = 200  # rows of one statement: databases limit its values
# Shown to the person who erases, because only people can erase the content in these places.
UNREACHED = (
    gettext_lazy(
        "backups of the database and of the files, and what the database keeps on disk until VACUUM"
    ),
    gettext_lazy("exports, and databases that runs were imported into"),
    gettext_lazy("what the provider of the model keeps"),
    gettext_lazy("notifications, logs and traces written or sent before"),
    gettext_lazy("what a reply, a tool or a person repeated in other rows"),
    gettext_lazy("names of the people who acted and keys of sessions, unless the session itself is deleted"),
    gettext_lazy("the project's own tables"),
)
_COPIES = gettext_lazy("Session %r has copies of its rows.")

Place = tuple[UUID, int]  # session, seq
Value = tuple[Any, ...]  # name of a value, by which rows that repeat it are found
Chosen = Callable[[Row], bool]


@dataclass(slots=True)
class Erased:
    """The report of an erasure or a dry run: its rows as (run, seq, kind), and counts of other objects."""

    rows: list[tuple[UUID, int, str]] = field(default_factory=list)
    sessions: int = 0
    approvals: int = 0
    answers: int = 0
    files: int = 0
    refused: list[str] = field(default_factory=list)  # why nothing of a session was erased

    COUNTS = ("sessions", "approvals", "answers", "files")

    def add(self, other: Erased) -> None:
        """Add the rows and counts of another report, but not its `refused`."""
        self.rows += other.rows
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def record(self) -> dict[str, Any]:
        """Build a JSON object of the report and of places not reached; the caller redacts it."""
        return {
            "rows": [{"run": str(run), "seq": seq, "kind": kind} for run, seq, kind in self.rows],
            **{name: getattr(self, name) for name in self.COUNTS},
            "refused": self.refused,
            "not_reached": list(map(str, UNREACHED)),
        }


def erase_payload(run_id: UUID | str, seq: int, actor: Any, reason: str) -> Run:
    """Destroy the content of row `seq` of a run for good, with every row, copy and column that repeats it.

    This includes copies in forks, arguments of a reply's calls, late results of a call, and the input of the
    run if the row is its task. A second call deletes files that a crash left behind. Raises RunStateError if
    there is no such row, if it has no content, or if a run with a copy of it has not ended; ValueError
    without a reason; DurableRunNotFoundError, PermissionDeniedError, JournalUnreadableError.
    """
    erase_rows(run_id, actor, reason, seq=seq)
    return find_run(run_id)


def erase_call(run_id: UUID | str, call_id: str, actor: Any, reason: str) -> Run:
    """Destroy the content of all rows of a call, and of the reply that requests it, as `erase_payload`.

    This includes the text of the reply and the arguments of its other calls, because a reply's content is
    erased as a whole.
    """
    run = find_run(run_id)

    def chosen(row: Row) -> bool:
        asks = row.kind == events.ASSISTANT and any(call["id"] == call_id for call in row.payload["calls"])
        return asks or row.call_id == call_id

    _log(_erase(run.session_id, chosen, actor, reason, run))
    return find_run(run_id)


def erase_rows(run_id: UUID | str, actor: Any, reason: str, *, seq: int, dry_run: bool = False) -> Erased:
    """Erase row `seq` as `erase_payload`, or with `dry_run` only list the due rows; return the report."""
    run = find_run(run_id)
    return _log(_erase(run.session_id, lambda row: row.seq == seq, actor, reason, run, dry_run=dry_run))


def erase_user(user: Any, actor: Any, reason: str, *, dry_run: bool = False, people: bool = False) -> Erased:
    """Erase all sessions that a user owns, as `erase_customer`. Raises TypeError if `user` is the program."""
    Owner.of_user(user)
    return erase_customer(actor, reason, dry_run=dry_run, people=people, owner=user)


def erase_customer(
    actor: Any, reason: str, *, dry_run: bool = False, people: bool = False, **whose: Any
) -> Erased:
    """Destroy the content of all rows of a customer's sessions, and of their copies in forks.

    With `people`, then delete the sessions as `erase_whole_session`, because the names of people are facts
    of the rows, and go only with the rows. `refused` also names the sessions that still have copies of them.

    `whose` selects the sessions as in `list_runs`, by their owner, scope and the contexts of their runs. Rows
    that record earlier erasures stay. Each session is one transaction. A session that cannot be erased is
    only reported in `refused`, such as one with an unfinished run, or with another customer's. Raises
    ValueError without a customer, and without a reason if there is a session.
    """
    report = Erased()
    events.is_program(actor)  # raises for what is no actor: there may be no session to erase
    if all(value in (None, {}, "") for value in whose.values()):
        raise ValueError(_("Say whose: give an owner, a scope or values of a context."))
    given = {"owner_id": Owner.of(whose.get("owner")).id, "scope": whose.get("scope")}
    sessions = Session.objects.using(settings.DATABASE).only("pk", "key", "scope")
    sessions = sessions.filter(**{name: value for name, value in given.items() if value is not None})
    ids = [*{run.session_id for run in runs_of_customer(**whose)}] if whose.get("context") else None
    found = sessions.in_bulk(ids)  # None: all of them
    deleted: set[str] = set()
    below = Run.objects.using(settings.DATABASE).filter(parent__isnull=False, session_id__in=found)
    of_children = {*below.values_list("session_id", flat=True)}
    for pk, session in sorted(found.items(), key=lambda item: (item[0] in of_children, item[0])):
        if pk in of_children and not sessions.filter(pk=pk).exists():
            continue  # it went with its parent's session
        try:
            require_one_customer(pk, whose.get("context"))
            erased = _erase(pk, _may_go, actor, reason, None, dry_run=dry_run)  # copies in forks, too
            report.rows += erased.rows
            if people:
                erased = erase_whole_session(session.key, scope=session.scope, dry_run=dry_run)
                report.refused += erased.refused
                deleted.add(_COPIES % session.key)
                if not dry_run:  # no journal is left to say so
                    logger.info("Deleted session=%s by=%s: %s", pk, events.logged(actor), reason)
            report.add(erased)
        except (AgentRunsError, DatabaseError, OSError) as error:  # goes on with the next session
            report.refused.append(_("Session %(key)r: %(why)s") % {"key": session.key, "why": error})
    report.rows = [*dict.fromkeys(report.rows)]
    report.refused = [text for text in dict.fromkeys(report.refused) if text not in deleted]
    return _log(report)


def runs_of_customer(*, context: dict[str, Any] | None = None, **whose: Any) -> list[Run]:
    """List a customer's runs as `list_runs`, oldest first, with no more than their ids and contexts.

    Compares whole contexts, so it also finds values that no search finds, such as long or sensitive ones.
    """
    runs = list_runs(**whose).order_by("pk")
    for name, value in (context or {}).items():  # the index saves reading most of the other customers' runs
        others = ContextValue.objects.using(settings.DATABASE).filter(run_id=OuterRef("pk"), key=name)
        runs = runs.exclude(Exists(others.exclude(value=said(value))))
    return [run for run in runs.only("pk", "session_id", "context").iterator() if _fits(run, context)]


def require_one_customer(session_id: UUID, context: dict[str, Any] | None) -> None:
    """Raise RunStateError if a run of the session lacks one of these values in its context.

    Ignores runs of which nothing is left, because an erasure takes their contexts, too.
    """
    spoken = (events.USER, events.ASSISTANT, events.TOOL_RESULT)
    left = Message.objects.using(settings.DATABASE).filter(kind__in=spoken, content__isnull=False)
    runs = Run.objects.using(settings.DATABASE).filter(session_id=session_id)
    for run in runs.filter(Exists(left.filter(run_id=OuterRef("pk")))).only("pk", "context"):
        if not _fits(run, context):
            text = _(
                "Run %(run)s of the session has another %(name)s in its context, or none, so the session may "
                "have two customers. Look at the run; if all of it is to go, erase the session by its key."
            )
            raise RunStateError(text % {"run": run.pk, "name": ", ".join(context or ())})


def _fits(run: Run, context: dict[str, Any] | None) -> bool:
    """Check whether a run's context has these values, where 7 and "7" are equal as in a search."""
    return all(
        name in run.context and _as_text(run.context[name]) == _as_text(value)
        for name, value in (context or {}).items()
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else canonical.dumps(value)


def erase_whole_session(key: str, *, scope: str | None = None, dry_run: bool = False) -> Erased:
    """Delete a session as `erase_session` with `forget_key`, or with `dry_run` only count; return the report.

    After the deletion, the report's `refused` names the sessions that have copies of its rows.
    """
    alias = settings.DATABASE
    sessions = Session.objects.using(alias).filter(key=key, **({} if scope is None else {"scope": scope}))
    family = [pk for one in sessions.values_list("pk", flat=True) for pk in family_of(alias, one)]
    runs = [*Run.objects.using(alias).filter(session__in=family).values_list("pk", flat=True)]
    approvals = Approval.objects.using(alias).filter(run_id__in=runs).count()
    rows = Message.objects.using(alias).filter(run_id__in=runs).order_by("run_id", "seq")
    erased = Erased([*rows.values_list("run_id", "seq", "kind")], len(family), approvals)
    if not dry_run:
        pruned = erase_session(key, scope=scope, forget_key=True)  # refuses a key of several scopes
        erased.answers, erased.files = pruned.answers, pruned.files
        erased.refused = [_COPIES % copy for copy in pruned.copies]
    return _log(erased)


def _log(erased: Erased) -> Erased:
    logger.info(
        "Erased rows=%s approvals=%s files=%s; not reached: %s",
        [f"{run}/{seq}" for run, seq, _kind in erased.rows], erased.approvals, erased.files,
        "; ".join(map(str, UNREACHED)),
    )  # fmt: skip
    return erased


def _may_go(row: Row) -> bool:
    # Otherwise each erasure of a user would erase the reasons of the erasure before, without end.
    return row.kind != events.PAYLOAD_ERASED


def _erase(
    session_id: UUID, chosen: Chosen, actor: Any, reason: str, run: Run | None, *, dry_run: bool = False
) -> Erased:
    """Erase the rows of a session that `chosen` selects, and all rows that repeat them; return the report.

    Locks the session and its whole family of forks first. With `dry_run`, takes no lock and erases nothing.
    If `run` is given, `chosen` selects only rows of that run; raises RunStateError if no row is selected or
    the rows have no content. Raises ValueError without a reason.
    """
    events.is_program(actor)  # raises for what is no actor, before the journal is read
    if not reason.strip():
        raise ValueError(_("Say why: whoever audits this reads it."))
    alias = settings.DATABASE
    if dry_run:  # a dry run takes no lock
        return _Erasure(alias, _family(alias, session_id), session_id, chosen, run, actor).look()

    def action() -> Erased:
        held: set[UUID] = set()
        # A fork may have come while a lock was waited for.
        while missing := _family(alias, session_id) - held:
            for pk in sorted(missing):
                lock_session(alias, pk)
            held |= missing
        return _Erasure(alias, held, session_id, chosen, run, actor).carry_out(reason)

    return in_transaction(alias, action)


class _Erasure:
    """One erasure. Except in a dry run, the open transaction has locked all sessions of the `family`."""

    def __init__(
        self, alias: str, family: set[UUID], session_id: UUID, chosen: Chosen, run: Run | None, actor: Any
    ) -> None:
        self.alias, self.actor = alias, actor
        journals = {pk: _verified_rows(alias, pk) for pk in sorted(family)}
        mine = [row for row in journals[session_id] if run is None or row.run_id == run.pk]
        places = {(session_id, row.seq) for row in mine if chosen(row)}
        if run is not None and not places:
            raise RunStateError(_("Run %(run)s has no such row or call.") % {"run": run.pk})
        # Find the rows that repeat a value of the chosen rows, and the chosen rows themselves.
        values: dict[Place, set[Value]] = {}
        holders: dict[Value, set[Place]] = defaultdict(set)
        for pk, rows in journals.items():
            for row, held in _values(rows):
                values[pk, row.seq] = held
                for value in held:
                    holders[value].add((pk, row.seq))
        same, new = set[Place](), places
        while new:
            same |= new
            new = {holder for place in new for value in values[place] for holder in holders[value]} - same
        # Session -> rows that have or had a value; `gone` has the rows of these that still have content.
        self.rows = {
            pk: its for pk, rows in journals.items() if (its := [r for r in rows if (pk, r.seq) in same])
        }
        self.gone: dict[UUID, list[Row]] = {}
        for pk, rows in self.rows.items():
            if its := [row for row in rows if not row.is_erased and split(row.kind, row.payload)[1]]:
                self.gone[pk] = its
        if run is not None and not self.gone and not any(row.is_erased for row in self.rows[session_id]):
            text = _("The row of run %(run)s says nothing that can be erased.")
            raise RunStateError(text % {"run": run.pk})
        erasures = [(pk, row.payload) for pk in journals for row in journals[pk] if not _may_go(row)]
        before = {(pk, payload["seq"]): payload.get("file", "").split() for pk, payload in erasures}
        self.files: set[str] = set()
        for pk, row in ((pk, row) for pk, rows in self.rows.items() for row in rows):
            self.files |= {*payloads.names_in(row.payload), *before.get((pk, row.seq), ())}

    def look(self) -> Erased:
        """Report the rows to erase; raises PermissionDeniedError, or RunStateError if a run is unfinished."""
        run_ids = {row.run_id for rows in self.rows.values() for row in rows}
        for run in Run.objects.using(self.alias).filter(pk__in=run_ids).order_by("pk"):
            permissions.require(self.actor, "erase", run)
        hindrance = Run.objects.using(self.alias).unfinished().filter(session_id__in=[*self.rows]).first()
        if hindrance is not None:
            text = _(
                "Run %(run)s (%(status)s) reads what is to be erased, and could repeat it. Cancel it, or "
                "wait for its end; nothing was erased."
            )
            raise RunStateError(text % {"run": hindrance.pk, "status": hindrance.get_status_display()})
        erased = Erased(sessions=len(self.gone), files=len(self.files))
        erased.rows = [(row.run_id, row.seq, row.kind) for rows in self.gone.values() for row in rows]
        return erased

    def carry_out(self, reason: str) -> Erased:
        """Destroy the content of the rows, and columns that repeat it; files are deleted after the commit."""
        erased = self.look()
        store, who = DatabaseStore(self.alias), events.actor_ref(self.actor)
        for session_id, rows in self.gone.items():
            messages = Message.objects.using(self.alias).filter(session_id=session_id, content__isnull=False)
            for some in _chunks(rows):
                these = messages.filter(seq__in=[row.seq for row in some])
                if these.update(content=None, content_salt=None) != len(some):
                    raise JournalConflictError(f"Session {session_id}: the journal has moved on.")
            for run_id, its in groupby(sorted(rows, key=lambda row: row.run_id), lambda row: row.run_id):
                state = store.load(session_id, run_id)
                for some in _chunks([*its]):
                    batch = Batch(state)
                    batch.closed = True
                    for row in some:
                        payload: events.PayloadErased = {"seq": row.seq, "actor": who, "reason": reason}
                        if names := payloads.names_in(row.payload):
                            payload["file"] = " ".join(names)
                        batch.add(events.PAYLOAD_ERASED, payload)
                    store.append(batch)  # and folds the run's columns anew
        for session_id in self.rows:
            self._project(session_id, erased)

        def delete() -> None:
            erased.files = delete_files(self.files)

        transaction.on_commit(delete, using=self.alias)
        return erased

    def _project(self, session_id: UUID, erased: Erased) -> None:
        """Bring other columns and tables in line with a session's rows after an erasure.

        Rewrites titles, inputs, contexts, approvals, notes, keys and texts in Django's admin log. Deletes the
        API's idempotency records and drafts. Replaces the session's secret, because old digests would help to
        guess arguments. Counts in `erased`.
        """
        sessions = Session.objects.using(self.alias).filter(pk=session_id)
        session = sessions.get()
        history = History(session)
        if problem := history.read(self.alias):
            raise JournalConflictError(str(problem))
        left, calls = session_rows(self.alias, session_id), set[str]()
        for row in self.rows[session_id]:
            asked = row.payload["calls"] if row.kind == events.ASSISTANT else ()
            calls |= {row.call_id, *(call["id"] for call in asked)}
        run_ids = {row.run_id for row in self.rows[session_id]}
        runs = Run.objects.using(self.alias).filter(pk__in=run_ids)
        tasks = {run_id for run_id, row in tasks_of(left).items() if row.is_erased}
        runs.update(blocked_reason="")
        runs.filter(pk__in=tasks).update(input=ERASED, title=ERASED)
        started = [row for row in left if row.kind == events.RUN_STARTED]
        without = runs.filter(pk__in=[row.run_id for row in started if row.is_erased])
        without.update(context={})
        for row in started:
            if row.is_erased and events.COPIED not in row.payload:
                runs.filter(pk=row.run_id).update(idempotency_key=row.payload.get("key_hash", ""))
        delete_rows(Draft.objects.using(self.alias).filter(run__session_id=session_id))  # of a dead worker
        delete_rows(ContextValue.objects.using(self.alias).filter(run__in=without))
        # A note may repeat the erased text.
        Review.objects.using(self.alias).filter(run__in=runs).exclude(note="").update(note=ERASED)
        sessions.update(secret=secret())  # with the old key, erased arguments could be guessed from digests
        if next((row.run_id for row in started if events.COPIED not in row.payload), None) in tasks:
            sessions.exclude(title="").update(title=ERASED)
        requests = {row.call_id for row in left if row.kind == events.APPROVAL_REQUESTED and row.is_erased}
        approvals: set[UUID] = set()
        for call in (call for its in history.calls.values() for call in its.values() if call.id in calls):
            if (card := call.approval) is None:
                continue
            columns: dict[str, Any] = {"arguments": call.arguments, "digest": card.shown}
            columns |= {"title": card.title, "reason": card.reason, "holds": card.holds}
            columns |= {"why": ERASED, "same_call": ""} if call.id in requests else {}
            if Approval.objects.using(self.alias).filter(pk=card.id).update(**columns) != 1:
                raise JournalConflictError(f"Approval {card.id} is not there.")
            approvals.add(card.id)
        erased.approvals += len(approvals)
        erased.answers += delete_answers_of(self.alias, session, runs)
        clear_admin_log(self.alias, run_ids, approvals)


def _chunks(rows: list[Row]) -> Iterator[list[Row]]:
    return (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))


def _family(alias: str, session_id: UUID) -> set[UUID]:
    """Find the ids of a session and of all sessions that share values with it, transitively.

    These are the sessions of forks and origins, and of child runs and parents.
    """
    family: set[UUID] = set()
    new = {session_id}
    while new:
        family |= new
        runs = Run.objects.using(alias)
        forks = runs.filter(origin_seq__isnull=False, origin__session_id__in=new)
        children = runs.filter(parent__session_id__in=new)
        parents = runs.filter(pk__in=runs.filter(session_id__in=new).values("parent_id"))
        mine = runs.filter(origin_seq__isnull=False, session_id__in=new)
        near = (forks, runs.filter(pk__in=mine.values("origin_id")), children, parents)
        there = {pk for some in near for pk in some.values_list("session_id", flat=True)}
        new = (there | kin(alias, new)) - family
    return family


def _verified_rows(alias: str, session_id: UUID) -> list[Row]:
    sessions = Session.objects.using(alias).filter(pk=session_id)
    for _try in range(TRIES):
        session = sessions.get()
        problem = History(session).read(alias)
        if problem is None:
            return session_rows(alias, session_id)
        if sessions.filter(head=session.head).exists():  # else it was written to while it was read
            break
    text = _("%(problem)s Nothing was erased: what repeats a value cannot be told from a damaged journal.")
    raise JournalUnreadableError(text % {"problem": problem})


def _values(rows: list[Row]) -> Iterator[tuple[Row, set[Value]]]:
    """Yield each row of a session with a key for each value in it, such as a task, a reply or a result.

    Rows that repeat a value share its key, so that an erasure finds them.
    """
    # A copy in a fork has the commitment of its original, and its call ids.
    again: dict[UUID, UUID] = {}  # run -> the first run of its task
    parents: dict[UUID, str] = {}  # child run -> the call that started it, with its task and its end
    tasks = {row.seq: run_id for run_id, row in tasks_of(rows).items()}
    replies: dict[UUID, int] = {}  # run -> its last reply
    digests: dict[str, tuple[str, str]] = {}  # call -> tool and digest
    calls: dict[str, str] = {}  # provider's id -> call
    read: dict[str, str] = {}  # call of `read_result` -> call with the result that it repeats
    for row in rows:
        payload, call = row.payload, row.call_id
        held: set[Value] = {("content", row.content_hash)}
        if payloads.has_blocks(row.payload):
            held |= {("file", stored.sha256) for stored in payloads.files(row.run_id, row.seq, row.payload)}
        if "about" in payload:
            held.add(("returned", payload["about"]["call"]))
        match row.kind:
            case events.RUN_STARTED | events.RUN_ADOPTED:
                origin = payload.get("origin") or {}
                if origin and "seq" not in origin:
                    first = UUID(origin["run"])
                    again[row.run_id] = again.get(first, first)
                if "parent" in payload:
                    parents[row.run_id] = payload["parent"]["call"]
                if payload.get("context"):
                    held.add(("context", canonical.dumps(payload["context"])))
                if "instructions" in payload:  # a preview differs each time, as it names its file
                    file = payload.get("stored", {})
                    held.add(("instructions", file.get("sha256", payload["instructions"])))
            case events.USER if payload.get("reason") == events.OUTPUT_INVALID:
                held.add(("reply", row.run_id, replies.get(row.run_id)))
            case events.USER if row.seq in tasks:
                held.add(("task", again.get(row.run_id, row.run_id)))
            case events.ASSISTANT:
                replies[row.run_id] = row.seq
                held.add(("reply", row.run_id, row.seq))
                held |= {("asked", one["id"]) for one in payload["calls"]}
                digests |= {one["id"]: (one["tool"], one["digest"]) for one in payload["calls"]}
                calls |= {one["provider_id"]: one["id"] for one in payload["calls"]}
                pages = (one for one in payload["calls"] if one["tool"] == READER)
                read |= {one["id"]: calls.get(str(one["arguments"].get("result")), "") for one in pages}
            case events.APPROVAL_REQUESTED:
                held.add(("asked", call))
            case events.APPROVAL_VOIDED if "held" in payload:
                held.add(("asked", call))
            case events.APPROVAL_DECIDED:
                held.add(("asked" if "arguments" in payload else "decided", call))
                if payload["verb"] != Verb.APPROVE:
                    held |= {("returned", call), ("denied", *digests.get(call, (call,)))}
            case events.TOOL_RESULT:
                held |= {("returned", call), ("returned", read.get(call) or call)}
                outcome = payload["outcome"] if row.attempt == 0 else ""
                if outcome == Outcome.ERROR or payload.get("edited") is not None:
                    held.add(("asked", call))  # an error names the invalid arguments
                if outcome == Outcome.DENIED:  # perhaps for the reason of an earlier denial
                    held.add(("denied", *digests.get(call, (call,))))
            case events.LATE_RESULT | events.ORPHAN_FOUND | events.ORPHAN_RESOLVED:
                held |= {("returned", call), ("returned", read.get(call) or call)}
            case events.RUN_FAILED if payload["error"]["type"] != "OutputInvalidError":
                held.add(("failed", row.run_id))
            case events.RUN_COMPLETED | events.RUN_FAILED:
                held.add(("reply", row.run_id, replies.get(row.run_id)))
            case events.LEFT_OUT if payload["actor"] is None:
                held.add(("failed", row.run_id))
            case events.RUN_PAUSED | events.RUN_PAUSE_REQUESTED | events.MODEL_FAILED:
                held.add(("paused" if "actor" in payload else "failed", row.run_id))
            case events.RUN_CANCEL_REQUESTED | events.RUN_CANCELLED:
                held.add(("cancelled", row.run_id))
        if row.run_id in parents and (row.seq in tasks or row.kind in events.CLOSING):
            held.add(("asked" if row.seq in tasks else "returned", parents[row.run_id]))
        yield row, held
