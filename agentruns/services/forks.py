"""Forks: a task continued from a row of its journal in a new session, or run again from the start."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Max
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, get_agent
from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.engine.wakeup import notify_on_commit
from agentruns.exceptions import RunStateError, SessionBusyError
from agentruns.journal import events, payloads
from agentruns.journal.copies import happened_at, original, task_of
from agentruns.journal.deciders import requester_ids, restore
from agentruns.journal.doubts import did_nothing
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, RunState, fold
from agentruns.journal.read import NAMING, definition_body, read_rows, rows_until
from agentruns.journal.store import Batch, DatabaseStore, SessionState
from agentruns.models import ContextValue, Message, Run, Session
from agentruns.services import api_tokens, permissions
from agentruns.services.control import agent_again
from agentruns.services.quotas import count_start, start_limit
from agentruns.services.rendering import kept, put_away, rendered, renders
from agentruns.services.sessions import Owner, checked_context
from agentruns.services.submit import (
    RunRequest,
    first_row,
    new_run,
    new_session,
    refuse_pruned,
    request_again,
    store_definition,
    submit,
    user_row,
)
from agentruns.services.write import find_run, lock_session, require_task
from agentruns.utils.bounds import NAME_LENGTH, check_name
from agentruns.utils.db import in_transaction
from agentruns.utils.ids import uuid7

NOT_EXECUTED = "Not executed in this fork."
CHUNK = 200  # rows of one INSERT: databases limit the values of a statement


def fork_run(
    run_id: UUID | str,
    at: int,
    *,
    text: str | None = None,
    agent: Agent | str | None = None,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    session: str | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a new run, in a new session, that continues from the row `at` of a run's journal.

    The rows up to there are copied. A call that was open there gets the result that it has by now; without a
    result it is settled as unknown if it has started, else as cancelled. The fork belongs to `owner`, else to
    the actor, else to the origin's owner, and has the origin's scope and context unless others are given.
    Raises RunStateError if there is no such row, if nothing is left to do and no `text` is given, or if the
    key belongs to another run; SessionBusyError if `session` exists; DurableRunNotFoundError,
    UnknownAgentError, PermissionDeniedError, QuotaExceededError, PayloadError.
    """
    whose: dict[str, Any] = {"actor": actor, "owner": owner, "scope": scope, "context": context}
    whose |= {"session": session, "idempotency_key": idempotency_key}
    return get_or_fork(run_id, at, text=text, agent=agent, **whose)[0]


def get_or_fork(
    run_id: UUID | str,
    at: int,
    *,
    text: str | None = None,
    agent: Agent | str | None = None,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    session: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[Run, bool]:
    """Make a fork, or find the fork of an earlier call; tell if it is new. Raises as `fork_run`."""
    permissions.require_somebody(actor)
    origin = find_run(run_id)
    permissions.require(actor, "fork", origin)
    permissions.require_visible(actor, origin)  # the owner of a fork reads all of its history
    permissions.require_whole(actor, origin, at)
    if text is not None and not text.strip():
        raise ValueError(_("The text is empty; say what the agent is to do, or leave it out."))
    rows, whose = rows_until(settings.DATABASE, origin, at), Owner.of(actor if owner is None else owner)
    session_id, run_id = uuid7(), uuid7()
    suffix = f" (fork {run_id.hex[-8:]})"
    request = RunRequest(
        agent=get_agent(agent) if agent is not None else agent_again(origin),
        text=task_of(rows) if text is None else text,
        session=session or origin.session.key[: NAME_LENGTH - len(suffix)] + suffix,
        names_session=bool(session),
        scope=origin.scope if scope is None else scope,
        actor=actor,
        owner=Owner.of_row(origin) if whose.id is None else whose,
        context=origin.context if context is None else checked_context(context),
        key=idempotency_key or "",
        session_id=session_id,
        run_id=run_id,
    )
    named = {"session": request.session, "scope": request.scope, "idempotency key": request.key}
    for what, value in named.items():
        check_name(what, value)
    fork = _Fork(origin, rows, request, has_text=text is not None, has_context=context is not None)
    with permissions.discreet(actor):
        fork.render()
        fork.put_away(settings.DATABASE, session_id)
        run = in_transaction(settings.DATABASE, lambda: _write(settings.DATABASE, fork))
    return run, run.pk == run_id


def run_again(
    run_id: UUID | str,
    actor: Any = None,
    *,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a new run of an ended run's task, in its session and for its owner, and return it.

    The model sees the earlier run. The new run has that run's context unless another is given. Raises
    RunStateError if the run has not ended, SessionBusyError, DurableRunNotFoundError, UnknownAgentError,
    PermissionDeniedError.
    """
    run = find_run(run_id)
    permissions.require(actor, "fork", run)
    if not run.is_ended:
        text = _("Run %(run)s is %(status)s: it goes on by itself. Cancel it first, or fork it.")
        raise RunStateError(text % {"run": run.pk, "status": run.get_status_display()})
    changes: dict[str, Any] = {} if context is None else {"context": checked_context(context)}
    asked = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, kind=events.USER).order_by("seq")
    changes["text"] = task_of(read_rows(asked))
    request = request_again(run, agent_again(run), actor, key=idempotency_key or "", again=run, **changes)
    return submit(request).run


class Effect(NamedTuple):
    """A call that happened, or may have; `is_final`: a second call would have a second effect."""

    call_id: str
    tool: str
    arguments: dict[str, Any]
    at: datetime
    is_final: bool


def effects(alias: str, run: Run, after: int = 0) -> list[Effect]:
    """List the effects of a run after row `after`, which a fork from that row may repeat."""
    rows = Message.objects.using(alias).filter(run_id=run.pk, seq__gt=after)
    rows = rows.filter(kind__in=(events.ASSISTANT, events.TOOL_STARTED, events.TOOL_RESULT))
    asked: dict[str, dict[str, Any]] = {}
    found: dict[str, Effect] = {}
    for row in read_rows(rows.order_by("seq")):
        payload, call_id = row.payload, row.call_id
        if row.kind == events.ASSISTANT:
            asked |= {call["id"]: call["arguments"] for call in payload["calls"]}
        elif row.kind == events.TOOL_STARTED:
            if call_id in asked and payload["declares"] != "safe_to_retry":
                is_final, at = payload["declares"] != "transactional", happened_at(payload, row.created_at)
                found[call_id] = Effect(call_id, row.tool_name, asked[call_id], at, is_final)
        elif "edited" in payload and call_id in found:
            found[call_id] = found[call_id]._replace(arguments=payload["edited"])
        elif did_nothing(payload):
            found.pop(call_id, None)
    return list(found.values())


class Fate(NamedTuple):
    """The end that a call, open at the cut, gets in a fork: a copied `result`, or an `outcome`."""

    call: Call
    outcome: str
    result: Row | None = None
    open_in: UUID | None = None  # the run that may yet execute it


def fates(alias: str, run: Run, state: RunState, at: int) -> list[Fate]:
    """Decide the outcome in a fork of each call that is open at row `at`, from the rows written until now."""
    calls, home = state.open_calls(), run
    if not calls:
        return []
    messages = Message.objects.using(alias)
    replies = messages.filter(run_id=run.pk, kind=events.ASSISTANT, seq__lte=at)
    seq = replies.aggregate(last=Max("seq"))["last"] or 0
    while home.origin_seq is not None and seq <= home.origin_seq:  # the last reply is only a copy there
        origin = Run.objects.using(alias).filter(pk__in=[home.origin_id]).first()
        if origin is None:  # pruned, and with it the outcome of the calls
            return [Fate(call, "unknown") for call in calls]
        home = origin
    results, now = {}, deepcopy(state)
    after = messages.filter(run_id=home.pk, seq__gt=at, call_id__in=[call.id for call in calls])
    for row in read_rows(after.order_by("seq")):
        now.apply(row)
        if row.kind == events.TOOL_RESULT:
            results[row.call_id] = row
    if _was_held(alias, home):
        for call in now.open_calls():
            call.may_be_lost = True
    settled: list[Fate] = []
    for call in (now.calls[each.id] for each in calls):
        result = results.get(call.id)
        # The origin may have committed the effect of a transactional tool, or may yet.
        in_flight = call.declares == "transactional" and call.is_open and call.orphan != "not_occurred"
        # In an import even calls that had not started when it was exported are unknown.
        if result is not None and (call.attempt or call.outcome == "unknown"):
            settled.append(Fate(call, call.outcome, result))
        elif call.may_have_happened or in_flight:
            settled.append(Fate(call, "unknown"))
        else:
            settled.append(Fate(call, "cancelled", open_in=home.pk if call.is_open else None))
    return settled


def _was_held(alias: str, run: Run) -> bool:
    """Check whether a run was ever held because rows of its journal were or may be lost."""
    rows = Message.objects.using(alias).filter(run_id=run.pk, kind=events.RUN_PAUSED)
    return any(row.payload.get("restored") for row in rows)


@dataclass(slots=True)
class _Fork:
    """The rows to be forked, read before the transaction, and the request for the new run."""

    origin: Run
    rows: list[Row]
    request: RunRequest  # without a text of its own, its task is the last one before the cut
    has_text: bool
    has_context: bool  # else the context is the origin's

    @property
    def at(self) -> int:
        return self.rows[-1].seq

    @property
    def mine(self) -> RunState:
        """The state of the origin at the cut."""
        return fold(self.origin.pk, self.rows)

    def render(self) -> None:
        """Reuse the origin's instructions and tools for the same agent, unless erased; make missing ones."""
        agent = self.request.agent
        if not renders(agent) or _made_before(settings.DATABASE, self) is not None:
            return
        gone = any(row.is_erased and row.kind in NAMING and row.run_id == self.origin.pk for row in self.rows)
        made: dict[str, Any] = {}
        if agent.name == self.origin.agent and not gone:
            mine = self.mine
            made = kept(agent, mine, definition_body(settings.DATABASE, mine.definition))
        self.request = rendered(replace(self.request, rendered=made), origin=self.origin)

    def put_away(self, alias: str, session_id: UUID) -> None:
        """Store long texts in files before any transaction; in a caller's they stay in their rows."""
        text, stored = self.request.text, None
        if self.has_text and payloads.may_be_large(text) and not connections[alias].in_atomic_block:
            stored = payloads.put(f"{session_id}/input", text)
        made = put_away(self.request.rendered, session_id)
        self.request = replace(self.request, stored=stored, rendered=made)

    def read_again(self, alias: str) -> None:
        """Read erasures since the first reading; RunStateError if the task is gone, or SessionBusyError."""
        self.origin = restore(find_run(self.origin.pk))
        gone = Message.objects.using(alias).filter(session_id=self.origin.session_id, content__isnull=True)
        if gone.filter(seq__lte=self.at).count() != sum(row.is_erased for row in self.rows):
            if self.request.rendered or (self.has_context and self.request.context):  # may repeat it
                text = _("Rows of run %(run)s were erased just now; try again.")
                raise SessionBusyError(text % {"run": self.origin.pk})
            self.rows = rows_until(alias, self.origin, self.at)
        if not self.has_context:
            self.request = replace(self.request, context=self.origin.context)
        if not self.has_text:
            require_task(self.origin, self.rows)


def _write(alias: str, fork: _Fork) -> Run:
    found = _made_before(alias, fork)
    if found is not None:
        return found
    # Locked, because the files of a fork would be deleted if its origin were pruned meanwhile.
    lock_session(alias, fork.origin.session_id)
    fork.read_again(alias)
    request, agent = fork.request, fork.request.agent
    session = new_session(request)
    Session.objects.using(alias).bulk_create([session], ignore_conflicts=True)
    if not Session.objects.using(alias).filter(pk=session.pk).exists():
        raise SessionBusyError(f"There is a session {session.key!r} already; a fork needs a new one.")
    api_tokens.require_requester(agent, session)
    count_start(alias, request.actor, start_limit(request.actor, agent))
    store_definition(alias, agent)
    run = new_run(session, request, origin_id=fork.origin.pk, origin_seq=fork.at)
    # DO NOTHING, so that losing a race for the key leaves the caller's transaction usable.
    Run.objects.using(alias).bulk_create([run], ignore_conflicts=True)
    if not Run.objects.using(alias).filter(pk=run.pk).exists():
        Session.objects.using(alias).filter(pk=session.pk).delete()
        found = _made_before(alias, fork)
        if found is None:
            raise SessionBusyError(f"Idempotency key {request.key!r} was taken by another run; try again.")
        return found
    ContextValue.objects.using(alias).bulk_create(ContextValue.of(run, agent.definition()))
    _append(DatabaseStore(alias), SessionState(session.pk, run.pk, session.secret), fork)
    notify_on_commit(alias, run.pk)
    return find_run(run.pk)


def _made_before(alias: str, fork: _Fork) -> Run | None:
    """Find the fork that this call, or an earlier call with the same key, has made already."""
    runs, request = Run.objects.using(alias).select_related("session"), fork.request
    found = runs.filter(pk=request.run_id).first()
    if found is None and request.key:
        same = runs.filter(owner_id=request.owner.id, scope=request.scope, idempotency_key=request.key)
        found = same.first()
        if found is None:
            refuse_pruned(alias, request.key, request.owner.id, request.scope)
    if found is None:
        return None
    task = (request.agent.name, request.text, request.context)
    if (found.origin_id, found.origin_seq) != (fork.origin.pk, fork.at):
        what = f"which is not a fork of run {fork.origin.pk} at row {fork.at}"
    elif (found.agent, found.input, found.context) != task:
        what = "a fork at that row with another agent, text or context"
    elif request.names_session and request.session != found.session.key:
        what = f"a fork in session {found.session.key!r}, not in {request.session!r}"
    else:
        return found
    raise RunStateError(
        f"Idempotency key {request.key!r} belongs to run {found.pk}, {what}. Use a new key.", str(found.pk)
    )


def _append(store: DatabaseStore, state: SessionState, fork: _Fork) -> None:
    past = RunState(fork.origin.pk)  # folds the rows of all runs; only its calls are meaningful
    for start in range(0, len(fork.rows), CHUNK):
        batch = Batch(state)
        for row in fork.rows[start : start + CHUNK]:
            past.apply(original(row))
            _copy(batch, row)
        store.append(batch)
    batch = Batch(state)
    for call, outcome, result, open_in in fates(store.alias, fork.origin, past, fork.at):
        if result is not None:
            _copy(batch, result)
            continue
        content = in_doubt.unknown_text(call) if outcome == "unknown" else NOT_EXECUTED
        facts = {"content": content, "is_error": True, "outcome": outcome}
        if open_in is not None:
            facts["open_in"] = str(open_in)
        facts[events.COPIED] = {"run": str(fork.origin.pk), "seq": fork.at}
        batch.add(events.TOOL_RESULT, facts, call_id=call.id, tool_name=call.tool, attempt=call.attempt)
    said = state.conversation.settled_messages()
    asks = past.stop_reason == "pause_turn" or (bool(said) and said[-1]["role"] == "user")
    if not asks and not fork.has_text:
        text = _("Run %(run)s has nothing left to do at row %(seq)s: say in a text what to do.")
        raise RunStateError(text % {"run": fork.origin.pk, "seq": fork.at})
    origin, mine, request = fork.origin, fork.mine, fork.request
    begun = first_row(request)
    begun["requesters"] = requester_ids(request.owner.id, getattr(request.actor, "pk", None), origin=origin)
    steps = mine.inherited + mine.step
    begun["origin"] = {"run": str(origin.pk), "seq": fork.at, "hash": fork.rows[-1].hash, "steps": steps}
    if mine.restored_at or _was_held(settings.DATABASE, origin):
        begun["origin"]["restored"] = True
    batch.add(events.RUN_STARTED, begun)
    if fork.has_text:
        batch.add(events.USER, user_row(request))
    store.append(batch)


def _copy(batch: Batch, row: Row) -> None:
    before = row.payload.get(events.COPIED) or {}
    source: events.Copied = {
        "run": str(row.run_id),
        "seq": row.seq,
        "hash": row.hash,
        "at": before.get("at") or events.timestamp(row.created_at),
    }
    batch.copy(row, source)
