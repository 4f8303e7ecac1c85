"""Forks: a task continued from a row of its journal in a new session, or run again from the start."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, get_agent
from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.engine.wakeup import notify_on_commit
from agentruns.exceptions import RunStateError, SessionBusyError
from agentruns.journal import events, payloads
from agentruns.journal.copies import original, task_of
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, RunState
from agentruns.journal.read import call_rows, reply_before, rows_until
from agentruns.journal.store import Batch, DatabaseStore, SessionState
from agentruns.models import Run, Session
from agentruns.services import permissions
from agentruns.services.control import agent_again
from agentruns.services.runs import (
    RunRequest,
    check_name,
    first_row,
    refuse_pruned,
    store_definition,
    submit,
    user_row,
)
from agentruns.services.write import find_run, lock_session
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.db import in_transaction
from agentruns.utils.ids import uuid7

PERMISSION = "agentruns.fork_run"
SEES = "agentruns.view_run"  # whose is a fork reads all of its history
NOT_EXECUTED = "Not executed in this fork."
CHUNK = 200  # rows of one INSERT: databases limit the values of a statement


def fork_run(
    run_id: UUID | str,
    at: int,
    *,
    text: str | None = None,
    agent: Agent | str | None = None,
    actor: Any = None,
    session: str | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a new run, in a new session, that goes on from the row `at` of a run's journal.

    The rows up to there are copied. A call open there gets the result that it has got since; without one it
    is settled as unknown if it has started by now, else as cancelled. Belongs to the actor. Raises
    RunStateError where there is no such row, where nothing is left to do and no `text` says what, or for a
    key that stands for another run; SessionBusyError where `session` is taken; DurableRunNotFoundError,
    UnknownAgentError, PermissionDeniedError, PayloadError.
    """
    permissions.require_somebody(actor)
    origin = find_run(run_id)
    for permission in (PERMISSION, SEES):
        permissions.require(actor, permission, origin, owner_may=True)
    if text is not None and not text.strip():
        raise ValueError(_("The text is empty; say what the agent is to do, or leave it out."))
    rows = rows_until(settings.DATABASE, origin, at)
    fork = _Fork(
        origin=origin,
        agent=get_agent(agent) if agent is not None else agent_again(origin),
        rows=rows,
        task=task_of(rows) if text is None else text,
        text=text,
        actor=actor,
        run_id=uuid7(),
        key=idempotency_key or "",
        session=session or "",
    )
    name = session or _session_key(origin, fork.run_id)
    for what, value in (("session", name), ("idempotency key", fork.key)):
        check_name(what, value)
    fork.put_away(settings.DATABASE)
    return in_transaction(settings.DATABASE, lambda: _write(settings.DATABASE, fork, name))


def run_again(run_id: UUID | str, actor: Any = None, *, idempotency_key: str | None = None) -> Run:
    """Queue a new run of an ended run's task, in its session and for its owner, and return it.

    The model sees what was done before. Raises RunStateError when the run has not ended, SessionBusyError,
    DurableRunNotFoundError, UnknownAgentError, PermissionDeniedError.
    """
    run = find_run(run_id)
    permissions.require(actor, PERMISSION, run, owner_may=True)
    if not run.is_ended:
        raise RunStateError(
            _("Run %(run)s is %(status)s: it goes on by itself. Cancel it first, or fork it.")
            % {"run": run.pk, "status": run.get_status_display()}
        )
    request = RunRequest(
        agent=agent_again(run),
        text=run.input,
        session=run.session.key,
        actor=actor,
        key=idempotency_key or "",
        again=run,
    )
    return submit(request).run


class Fate(NamedTuple):
    """The end in a fork of a call that is open at its cut: a `result` it has got since, or an outcome."""

    call: Call
    outcome: str
    result: Row | None = None
    open_in: UUID | None = None  # the run that may yet execute it


def fates(alias: str, run: Run, state: RunState, at: int) -> list[Fate]:
    """Return what a fork at a row makes of the calls open there, from all that is known of them by now.

    `state` is the run's as of that row.
    """
    calls = state.open_calls()
    home = _home(alias, run, at) if calls else None
    if home is None:  # pruned: nobody can say what became of them
        return [Fate(call, "unknown") for call in calls]
    results, now = {}, deepcopy(state)
    for row in call_rows(alias, home.pk, {call.id for call in calls}, after=at):
        now.apply(row)
        if row.kind == events.TOOL_RESULT:
            results[row.call_id] = row
    return [_fate(now.calls[call.id], results.get(call.id), home) for call in calls]


def _fate(call: Call, result: Row | None, home: Run) -> Fate:
    # An import calls unknown what had not started when it was exported.
    if result is not None and (call.attempt or call.outcome == "unknown"):
        return Fate(call, call.outcome, result)
    # Unlike a run whose lease is free, the origin may yet commit, or has, what a transactional tool did.
    in_flight = call.declares == "transactional" and call.is_open and call.orphan != "not_occurred"
    if call.is_started or in_flight:
        return Fate(call, "unknown")
    return Fate(call, "cancelled", open_in=home.pk if call.is_open else None)


def _home(alias: str, run: Run, at: int) -> Run | None:
    """Return the run that the last reply up to a row was given to; a fork only copied it. None if pruned."""
    found: Run | None = run
    seq = reply_before(alias, run.pk, at)
    while found is not None and found.origin_seq is not None and seq <= found.origin_seq:
        found = Run.objects.using(alias).filter(pk__in=[found.origin_id]).first()
    return found


@dataclass(slots=True, kw_only=True)
class _Fork:
    """The part of a journal to be forked, read before the transaction: its rows never change."""

    origin: Run
    agent: Agent
    rows: list[Row]
    task: str  # its `text`, or what was asked last before the cut
    text: str | None
    actor: Any
    run_id: UUID
    key: str
    session: str  # "" where the caller named none
    session_id: UUID = field(default_factory=uuid7)
    stored: dict[str, Any] = field(default_factory=dict)  # what the `user` row holds of a long text

    @property
    def at(self) -> int:
        return self.rows[-1].seq

    def owner(self) -> dict[str, Any]:
        if self.actor is None:
            return {"owner_id": self.origin.owner_id, "owner_name": self.origin.owner_name}
        return {"owner_id": self.actor.pk, "owner_name": self.actor.get_username()}

    def put_away(self, alias: str) -> None:
        """Store a long text in a file before any transaction; inside the caller's own it stays in its row."""
        if self.text and payloads.may_be_large(self.text) and not connections[alias].in_atomic_block:
            self.stored = payloads.put(f"{self.session_id}/input", self.text)


def _session_key(origin: Run, run_id: UUID) -> str:
    """Return a session key that begins with the origin's."""
    suffix = f" (fork {run_id.hex[-8:]})"
    return origin.session.key[: NAME_LENGTH - len(suffix)] + suffix


def _write(alias: str, fork: _Fork, name: str) -> Run:
    found = _made_before(alias, fork)
    if found is not None:
        return found
    # Pruned meanwhile it would leave a fork whose files are deleted as nobody's.
    lock_session(alias, fork.origin.session_id)
    find_run(fork.origin.pk)
    session = Session(id=fork.session_id, key=name, **fork.owner())
    Session.objects.using(alias).bulk_create([session], ignore_conflicts=True)
    if not Session.objects.using(alias).filter(pk=session.pk).exists():
        raise SessionBusyError(f"There is a session {name!r} already; a fork needs a new one.")
    store_definition(alias, fork.agent)
    run = Run(
        id=fork.run_id,
        session_id=session.pk,
        agent=fork.agent.name,
        version=fork.agent.version,
        definition_id=fork.agent.definition_hash,
        idempotency_key=fork.key,
        input=fork.task,
        origin_id=fork.origin.pk,
        origin_seq=fork.at,
        **fork.owner(),
    )
    # DO NOTHING, so that losing a race for the key leaves the caller's transaction usable.
    Run.objects.using(alias).bulk_create([run], ignore_conflicts=True)
    if not Run.objects.using(alias).filter(pk=run.pk).exists():
        Session.objects.using(alias).filter(pk=session.pk).delete()
        found = _made_before(alias, fork)
        if found is None:
            raise SessionBusyError(f"Idempotency key {fork.key!r} was taken by another run; try again.")
        return found
    _append(DatabaseStore(alias), SessionState(session.pk, run.pk), fork, name)
    notify_on_commit(alias, run.pk)
    return find_run(run.pk)


def _made_before(alias: str, fork: _Fork) -> Run | None:
    """Return the fork that this call made already (acknowledgement lost), or that its key stands for."""
    runs = Run.objects.using(alias).select_related("session")
    found = runs.filter(pk=fork.run_id).first()
    if found is None and fork.key:
        owner_id = fork.owner()["owner_id"]
        found = runs.filter(owner_id=owner_id, idempotency_key=fork.key).first()
        if found is None:
            refuse_pruned(alias, fork.key, owner_id)
    if found is None:
        return None
    if (found.origin_id, found.origin_seq) != (fork.origin.pk, fork.at):
        what = f"which is not a fork of run {fork.origin.pk} at row {fork.at}"
    elif (found.agent, found.input) != (fork.agent.name, fork.task):
        what = "a fork at that row with another agent or text"
    elif fork.session not in ("", found.session.key):
        what = f"a fork in session {found.session.key!r}, not in {fork.session!r}"
    else:
        return found
    raise RunStateError(f"Idempotency key {fork.key!r} belongs to run {found.pk}, {what}. Use a new key.")


def _append(store: DatabaseStore, state: SessionState, fork: _Fork, name: str) -> None:
    past = RunState(fork.origin.pk)  # of all the rows, whosever they are: only its calls mean something
    for start in range(0, len(fork.rows), CHUNK):
        batch = Batch(state)
        for row in fork.rows[start : start + CHUNK]:
            past.apply(original(row))
            _copy(batch, row)
        store.append(batch)
    batch = Batch(state)
    for fate in fates(store.alias, fork.origin, past, fork.at):
        _settle(batch, fate, fork)
    said = state.settled_messages()
    asks = past.stop_reason == "pause_turn" or (bool(said) and said[-1]["role"] == "user")
    if not asks and fork.text is None:
        raise RunStateError(
            _("Run %(run)s has nothing left to do at row %(seq)s: pass a text that says what.")
            % {"run": fork.origin.pk, "seq": fork.at}
        )
    _start(batch, fork, name)
    store.append(batch)


def _copy(batch: Batch, row: Row) -> None:
    before = row.payload.get(events.COPIED) or {}
    source = {
        "run": str(row.run_id),
        "seq": row.seq,
        "hash": row.hash,
        "at": before.get("at") or events.timestamp(row.created_at),
    }
    payload = {**row.payload, events.COPIED: source}
    batch.add(row.kind, payload, call_id=row.call_id, tool_name=row.tool_name, attempt=row.attempt)


def _settle(batch: Batch, fate: Fate, fork: _Fork) -> None:
    """Give a call that is open at the cut its one result."""
    call = fate.call
    if fate.result is not None:
        _copy(batch, fate.result)
        return
    content = in_doubt.unknown_text(call) if fate.outcome == "unknown" else NOT_EXECUTED
    facts = {"content": content, "is_error": True, "outcome": fate.outcome}
    if fate.open_in is not None:
        facts["open_in"] = str(fate.open_in)
    facts[events.COPIED] = {"run": str(fork.origin.pk), "seq": fork.at}
    batch.add(events.TOOL_RESULT, facts, call_id=call.id, tool_name=call.tool, attempt=call.attempt)


def _start(batch: Batch, fork: _Fork, name: str) -> None:
    origin = fork.origin
    mine = RunState(origin.pk)
    for row in fork.rows:
        if row.run_id == origin.pk:
            mine.apply(row)
    begun = first_row(fork.agent, fork.actor, fork.key, name)
    begun["origin"] = {
        "run": str(origin.pk),
        "seq": fork.at,
        "hash": fork.rows[-1].hash,
        "steps": mine.inherited + mine.step,
    }
    batch.add(events.RUN_STARTED, begun)
    if fork.text is not None:
        batch.add(events.USER, user_row(fork.text, fork.stored))
