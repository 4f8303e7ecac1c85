"""Runs as callers use them: start, run, resume, find. A caller who waits for a run drives it itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _

from agentruns import exceptions
from agentruns.agents import output
from agentruns.agents.agent import Agent, CommonOptions, PriorityName, get_agent
from agentruns.conf import settings
from agentruns.content import Input
from agentruns.engine import in_doubt, turns
from agentruns.engine.driver import Driver
from agentruns.engine.loop import drive, drive_run
from agentruns.engine.worker import advance, agent_for
from agentruns.exceptions import NotDurableError, RunStateError, SessionBusyError, UnknownAgentError
from agentruns.journal import events
from agentruns.journal.batch import Batch, SessionState, load
from agentruns.journal.connection import require_no_transaction
from agentruns.journal.store import MemoryStore, Store
from agentruns.models import Approval, Run, Session
from agentruns.models.run import RunQuerySet
from agentruns.models.statuses import ApprovalStatus, Orphan
from agentruns.services import permissions
from agentruns.services.runs import family
from agentruns.services.runs.requests import rendered, request_for, write_start
from agentruns.services.runs.submit import get_or_start, submit
from agentruns.services.runs.write import find_run, write
from agentruns.utils.db import readable, reading
from agentruns.utils.ids import secret


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run, or its present state.

    `messages` is in the provider's form. `pending` has the Approvals that wait for people, `orphans` the ids
    of calls in doubt. `error` is the reason why the run failed, or why it does not continue.
    """

    status: str
    output: Any = None  # text, or a value of the agent's output_type
    run_id: str | None = None
    session_key: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    error: str = ""


def start_run(
    agent: Agent | str,
    text: Input,
    session: Session | str,
    *,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
    not_before: datetime | None = None,
    priority: PriorityName | None = None,
    store: Store | None = None,
) -> Run:
    """Queue a run and return it; a worker drives it after the caller's transaction commits, or later.

    A new session and its runs belong to `owner`, or to `actor` if `owner` is None. They are in `scope`, or in
    the policy's scope if `scope` is None. `priority` replaces the agent's. A repeated call for the same task
    returns the same run while it is unfinished, and also later if it has the same `idempotency_key`. `store`
    is only checked: NotDurableError or MemoryStoreNotDurableError unless it is a durable store of
    AGENTRUNS_DATABASE. Raises SessionBusyError, SessionAccessDeniedError, QuotaExceededError,
    UnknownAgentError, and RunStateError if the key belongs to another task or session.
    """
    _require_durable(store)
    given: CommonOptions = {"actor": actor, "owner": owner, "scope": scope, "context": context}
    given |= {"idempotency_key": idempotency_key, "priority": priority}
    return get_or_start(agent, text, session or "", not_before=not_before, **given)


def run_agent(
    agent: Agent | str,
    text: Input,
    session: Session | str | None = None,
    *,
    store: Store | None = None,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
    priority: PriorityName | None = None,
) -> RunResult:
    """Run an agent in this process until the run ends or waits, and return its result.

    Without a session nothing is stored, and `idempotency_key` and `store` are ignored. With a session, a call
    repeated after a crash continues the same run. Everything else is as in `start_run`. Raises
    NotDurableError inside a transaction if there is a session, or without a session if a tool always needs
    approval or waits for events; MemoryStoreNotDurableError, DurableConfigMismatchError.
    """
    agent = get_agent(agent)
    given: CommonOptions = {"actor": actor, "owner": owner, "scope": scope, "context": context}
    if session is None:
        request = request_for(agent, text, "", **given)
        if not request.text.strip():
            raise ValueError("The input is empty; say what the agent is to do.")
        request = rendered(request)
        chosen = request.rendered.get("tools", agent.tools)
        its_tools = [agent.tools[name] for name in chosen]
        waiting = [each.name for each in its_tools if each.awaits or each.only_waits or each.agent]
        if waiting:
            raise NotDurableError(
                f"Agent {agent.name!r} has tools that wait for events ({', '.join(waiting)}); "
                "a stateless run cannot wait. Pass a session."
            )
        asking = [name for name in chosen if agent.tools[name].requires_approval is True]
        if asking:
            raise NotDurableError(
                f"Agent {agent.name!r} has tools that always need approval ({', '.join(asking)}); in a "
                "stateless run nobody can be asked. Pass a session."
            )
        driver = Driver(agent, MemoryStore(), SessionState(request.run_id, request.run_id, secret()))
        driver.commit(lambda batch: write_start(batch, request))
        drive(driver)
        return _ended(agent, driver.state)
    _require_durable(store)
    alias = settings.DATABASE
    require_no_transaction(alias)
    given |= {"idempotency_key": idempotency_key, "priority": priority}
    submission = submit(request_for(agent, text, session, **given), leased=True)
    run, lease = submission.run, submission.lease
    if lease is not None:
        state = drive_run(run, agent, lease, store=store, state=submission.state)
        if state is not None and state.run.ended:  # an ended run needs no query
            return _ended(agent, state, run)
        return reading(alias, lambda: result_of(run.pk, state))
    if run.is_new:  # the agent's limit is reached, or this process drains: a worker drives it
        return result_of(run.pk)
    held = run.status == Run.Status.ORPHANED
    may_surface = permissions.may(actor, "resume", run)
    # A repeated call never unpauses; it surfaces a call in doubt only if the actor may resume the run.
    if run.is_ended or run.status == Run.Status.PAUSED or (held and not may_surface):
        return result_of(run.pk)
    return _go_on(run, actor, drive=True, writes=held, tell_model=may_surface, store=store)


def resume_run(run_id: UUID | str, actor: Any = None, *, drive: bool = True) -> RunResult:
    """Resume a run: unpause it, and tell the model that the outcome of its calls in doubt is unknown.

    Then drives the run in this process until it ends or waits, or with `drive=False` only queues it. Ends a
    back-off too. A run that waits for approval does not change. Raises SessionBusyError if another process
    drives the run, RunStateError if it has ended, NotDurableError if it would be driven inside a transaction,
    DurableConfigMismatchError, PermissionDeniedError.
    """
    run = permissions.require(actor, "resume", find_run(run_id))
    return _go_on(run, actor, drive=drive, writes=True, tell_model=True)


def surface_orphans(run_id: UUID | str, actor: Any) -> Run:
    """Tell the model that the outcome of each call in doubt is unknown; queue the run unless it is paused.

    The actor needs the permission to resume the run.
    """
    run = permissions.require(actor, "resume", find_run(run_id))
    return write(run.pk, lambda run, batch: _resume(run, batch, actor, unpauses=False), takes_lease=True)


def get_run(run_id: UUID | str) -> Run:
    """Find a run; raises DurableRunNotFoundError."""
    return find_run(run_id)


def list_runs(
    status: str | None = None,
    agent: str | None = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
) -> RunQuerySet:
    """Select runs, by searchable values of their `context` too, the last updated first; None selects all."""
    given = {"status": status, "agent": agent, "scope": scope}
    runs = Run.objects.using(settings.DATABASE).with_context(context).order_by("-updated_at", "-id")
    runs = runs.filter(**{name: value for name, value in given.items() if value is not None})
    if not events.is_program(owner):
        # AnonymousUser has no id, and does not own the program's runs.
        runs = runs.none() if owner.pk is None else runs.filter(owner_id=owner.pk)
    return runs


def result_of(run_id: UUID, state: SessionState | None = None) -> RunResult:
    """Build the result of a run so far; read its state from the journal if `state` is not the newest."""
    alias = settings.DATABASE
    run = find_run(run_id)
    if state is None or state.next_seq != run.session.next_seq:
        state = load(alias, run.session_id, run.pk)
    statuses = {call.approval.status for call in state.run.calls.values() if call.approval}
    cards = Approval.objects.using(alias).pending().filter(run=run).order_by("requested_at")
    held = [call for call in state.run.open_calls() if call.orphan == Orphan.HELD]
    error, value = run.error, run.output
    if not error and run.status == Run.Status.ORPHANED:
        calls = ", ".join(f"{call.tool} ({call.id})" for call in held)
        error = f"Nobody knows whether {calls} happened: resolve_orphan or resume_run goes on."
    elif not error and run.status in (Run.Status.PAUSED, Run.Status.QUEUED):
        turn = turns.reasons(alias, [run]).get(run.pk, "") if turns.limit_of(run.agent) else ""
        error = run.blocked_reason or turn or state.run.failure
    with suppress(UnknownAgentError):  # only a process that has the agent knows its `output_type`
        value = output.value_of(get_agent(run.agent, run.version).output_type, run.output)
    return RunResult(
        status=run.status,
        output=value,
        run_id=str(run.pk),
        session_key=run.session.key,
        messages=state.conversation.settled_messages(),
        usage=run.usage,
        pending=list(cards) if ApprovalStatus.PENDING in statuses else [],
        orphans=[call.id for call in held],
        error=error,
    )


def _go_on(
    run: Run, actor: Any, *, drive: bool, writes: bool, tell_model: bool, store: Store | None = None
) -> RunResult:
    alias = settings.DATABASE
    if run.status in (Run.Status.AWAITING_APPROVAL, Run.Status.WAITING):
        return result_of(run.pk)
    if drive and not run.is_ended:
        require_no_transaction(alias)
        agent_for(run, alias)
    if writes:
        run = write(run.pk, lambda run, batch: _resume(run, batch, actor), takes_lease=True)
        family.follow(run.pk)
    if drive and not run.is_ended and not advance(run, alias, store=store, caller=actor, asked=tell_model):
        _refuse_live(find_run(run.pk))
    return reading(alias, lambda: result_of(run.pk))


def _resume(run: Run, batch: Batch, actor: Any, *, unpauses: bool = True) -> None:
    state = batch.state.run
    if run.is_ended:
        text = _("Run %(run)s has ended (%(status)s); it cannot be resumed. Start a new run for a new task.")
        raise RunStateError(text % {"run": run.pk, "status": run.get_status_display()})
    if not batch.epoch:
        _refuse_live(run)
    # A run whose journal could not be read was paused without a row.
    held = state.paused or state.pause_requested or run.status == Run.Status.PAUSED
    batch.resume(events.actor_ref(actor), "asked to go on", unpause=unpauses and bool(held))
    for call in state.open_calls():
        if call.is_open and call.attempt > 0 and not call.orphan and not call.is_pending:
            in_doubt.orphan(batch, call, tell_model=True, actor=actor)
        elif call.is_open and call.orphan == Orphan.HELD:
            in_doubt.surface(batch, call, actor)


def _refuse_live(run: Run) -> None:
    if run.status != Run.Status.RUNNING or run.lease_expires_at is None:
        return
    text = _(
        "Run %(run)s is live in another process until %(time)s at least. Wait for it, or cancel it; if "
        "that process died, the run can be taken over then."
    )
    facts = {"run": run.pk, "time": readable(run.lease_expires_at)}
    raise SessionBusyError(text % facts, str(run.pk), run.lease_expires_at)


def _require_durable(store: Store | None) -> None:
    alias = getattr(store, "alias", settings.DATABASE)
    if alias != settings.DATABASE:
        raise NotDurableError(
            f"The store writes to database {alias!r}, but sessions and runs live in AGENTRUNS_DATABASE = "
            f"{settings.DATABASE!r}. Use that one, or leave the store out."
        )
    if store is not None and not store.durable:
        raise exceptions.MemoryStoreNotDurableError(
            "A session was given together with a store that forgets everything when the process ends. "
            "Leave the store out to use the database, or leave the session out to run statelessly."
        )


def _ended(agent: Agent, state: SessionState, run: Run | None = None) -> RunResult:
    return RunResult(
        status=state.run.status,
        output=output.value_of(agent.output_type, state.run.output),
        run_id=str(run.pk) if run else None,
        session_key=run.session.key if run else None,
        messages=state.conversation.settled_messages(),
        usage=state.run.usage,
        error=state.run.error,
    )
