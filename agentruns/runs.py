"""Runs as callers know them: start, run, resume, find. Waiting for a run is driving it in this process."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _

from agentruns import outputs, people, recovery, transitions
from agentruns.agents import Agent, get_agent
from agentruns.clocks import readable
from agentruns.conf import settings
from agentruns.control import adopt_definition, cancel_run, pause_run, resolve_orphan
from agentruns.driver import Driver, require_no_transaction
from agentruns.engine import drive
from agentruns.exceptions import (
    MemoryStoreNotDurableError,
    NotDurableError,
    RunStateError,
    SessionBusyError,
    UnknownAgentError,
)
from agentruns.ids import uuid7
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.conversation import SessionState
from agentruns.journal.read import load
from agentruns.models import Approval, Run
from agentruns.querysets import RunQuerySet
from agentruns.retries import reading
from agentruns.starting import Order, place, write_start
from agentruns.stores import MemoryStore, Store
from agentruns.typing import RunResult
from agentruns.worker import advance, agent_for, drive_claimed

__all__ = [
    "adopt_definition",
    "cancel_run",
    "get_run",
    "list_runs",
    "pause_run",
    "resolve_orphan",
    "result_of",
    "resume_run",
    "run_agent",
    "start_run",
    "surface_orphans",
]


def start_run(
    agent: Agent | str,
    text: str,
    session: str,
    *,
    actor: Any = None,
    idempotency_key: str | None = None,
    store: Store | None = None,
) -> Run:
    """Queue a run and return it; a worker drives it after the caller's transaction commits.

    The same task asked for twice is the same run (docs: idempotency keys). Raises SessionBusyError,
    SessionAccessDeniedError, RunStateError for a key used for another task, NotDurableError.
    """
    _require_durable(store)
    order = Order(agent=get_agent(agent), text=text, session=session, actor=actor, key=idempotency_key or "")
    return place(order).run


def run_agent(
    agent: Agent | str,
    text: str,
    session: str | None = None,
    *,
    store: Store | None = None,
    actor: Any = None,
    idempotency_key: str | None = None,
) -> RunResult:
    """Run an agent in this process until the run ends or waits, and return what it came to.

    Without a session nothing is stored and no database is touched. With one, a call repeated after a
    crash goes on with the same run. Raises SessionBusyError, NotDurableError inside a transaction,
    MemoryStoreNotDurableError, DurableConfigMismatchError.
    """
    agent = get_agent(agent)
    if session is None:
        return _run_stateless(agent, text, actor)
    _require_durable(store)
    alias = settings.DATABASE
    require_no_transaction(alias)
    order = Order(agent=agent, text=text, session=session, actor=actor, key=idempotency_key or "")
    placed = place(order, leased=True)
    run, lease = placed.run, placed.lease
    if lease is not None:
        state = drive_claimed(run, agent, lease, store=store, state=placed.state)
        return reading(alias, lambda: result_of(run.pk, state))
    held = run.status == Run.Status.ORPHANED
    may_surface = people.may(actor, "agentruns.resume_run")
    # A repeated call never un-pauses, and tells the model of a call in doubt only for who may resume.
    if run.is_ended or run.status == Run.Status.PAUSED or (held and not may_surface):
        return result_of(run.pk)
    return _go_on(run, actor, drive=True, writes=held, surfaces=may_surface, store=store)


def resume_run(run_id: UUID | str, actor: Any = None, *, drive: bool = True) -> RunResult:
    """Let a run go on: unpause it, and tell the model of calls in doubt instead of holding them.

    Ends a back-off too. `drive=False` records and queues only. A run that waits for approval is returned as
    it is. Raises SessionBusyError when it is live elsewhere, RunStateError when it has ended,
    DurableConfigMismatchError, PermissionDeniedError.
    """
    run = transitions.find_run(run_id)
    people.require(actor, "agentruns.resume_run", run)
    return _go_on(run, actor, drive=drive, writes=True, surfaces=True)


def surface_orphans(run_id: UUID | str, actor: Any) -> Run:
    """Tell the model that the outcome of the calls held in doubt is unknown, and queue the run.

    A pause stays. Raises RunStateError when the run has ended, PermissionDeniedError.
    """
    run = transitions.find_run(run_id)
    people.require(actor, "agentruns.resume_run", run)
    return transitions.write(
        run.pk, lambda run, batch: _resume(run, batch, actor, unpauses=False), takes_lease=True
    )


def get_run(run_id: UUID | str) -> Run:
    """Return a run; DurableRunNotFoundError if there is none."""
    return transitions.find_run(run_id)


def list_runs(status: str | None = None, agent: str | None = None, owner: Any = None) -> RunQuerySet:
    """Return runs, newest updated first."""
    runs = Run.objects.using(settings.DATABASE).order_by("-updated_at", "-id")
    if status is not None:
        runs = runs.filter(status=status)
    if agent is not None:
        runs = runs.filter(agent=agent)
    if owner is not None:
        # A visitor has no id, and nobody's runs are not theirs.
        runs = runs.none() if owner.pk is None else runs.filter(owner_id=owner.pk)
    return runs


def result_of(run_id: UUID, state: SessionState | None = None) -> RunResult:
    """Return where a run stands; a `state` that is not the newest is read anew."""
    alias = settings.DATABASE
    run = Run.objects.using(alias).select_related("session").get(pk=run_id)
    if state is None or state.next_seq != run.session.next_seq:
        state = load(alias, run.session_id, run.pk)
    cards = Approval.objects.using(alias).pending().filter(run=run).order_by("requested_at")
    return RunResult(
        status=run.status,
        output=_output_of(run),
        run_id=str(run.pk),
        session_key=run.session.key,
        messages=state.settled_messages(),
        usage=run.usage,
        pending=[] if run.is_ended else list(cards),
        orphans=[call.id for call in state.run.open_calls() if call.orphan == "held"],
        error=run.error,
    )


def _output_of(run: Run) -> Any:
    """Return the output as a value of the agent's `output_type`, where this process knows the agent."""
    try:
        agent = get_agent(run.agent, run.version)
    except UnknownAgentError:
        return run.output
    return outputs.value_of(agent.output_type, run.output)


def _go_on(
    run: Run, actor: Any, *, drive: bool, writes: bool, surfaces: bool, store: Store | None = None
) -> RunResult:
    alias = settings.DATABASE
    if run.status == Run.Status.AWAITING_APPROVAL:
        return result_of(run.pk)
    if drive and not run.is_ended:
        require_no_transaction(alias)
        agent_for(run, alias)
    if writes:
        run = transitions.write(run.pk, lambda run, batch: _resume(run, batch, actor), takes_lease=True)
    if drive and not run.is_ended and not advance(run, alias, store=store, caller=actor, asked=surfaces):
        _refuse_live(transitions.find_run(run.pk))
    return reading(alias, lambda: result_of(run.pk))


def _resume(run: Run, batch: Batch, actor: Any, *, unpauses: bool = True) -> None:
    state = batch.state.run
    if run.is_ended:
        raise RunStateError(
            _("Run %(run)s has ended (%(status)s); it cannot be resumed. Start a new run for a new task.")
            % {"run": run.pk, "status": run.get_status_display()}
        )
    if not batch.epoch:
        _refuse_live(run)
    batch.unpaused = unpauses and bool(state.paused or state.pause_requested)
    payload = {"actor": events.actor_ref(actor), "epoch": batch.epoch, "reason": "asked to go on"}
    batch.add(events.RUN_RESUMED, {**payload, "unpause": batch.unpaused})
    for call in state.open_calls():
        if not call.is_open:
            continue
        if call.attempt > 0 and not call.orphan:
            recovery.orphan(batch, call, surfaces=True, actor=actor)
        elif call.orphan == "held":
            recovery.surface(batch, call, actor)


def _refuse_live(run: Run) -> None:
    if run.status != Run.Status.RUNNING or run.lease_expires_at is None:
        return
    raise SessionBusyError(
        _(
            "Run %(run)s is live in another process until %(time)s at least. Wait for it, or cancel it; if "
            "that process died, the run can be taken over then."
        )
        % {"run": run.pk, "time": readable(run.lease_expires_at)},
        str(run.pk),
        run.lease_expires_at,
    )


def _require_durable(store: Store | None) -> None:
    alias = getattr(store, "alias", settings.DATABASE)
    if alias != settings.DATABASE:
        raise NotDurableError(
            f"The store writes to database {alias!r}, but sessions and runs live in AGENTRUNS_DATABASE = "
            f"{settings.DATABASE!r}. Use that one, or leave the store out."
        )
    if store is not None and not store.durable:
        raise MemoryStoreNotDurableError(
            "A session was given together with a store that forgets everything when the process ends. "
            "Leave the store out to use the database, or leave the session out to run statelessly."
        )


def _run_stateless(agent: Agent, text: str, actor: Any) -> RunResult:
    if not text.strip():
        raise ValueError("The input is empty; say what the agent is to do.")
    asking = [tool.name for tool in agent.tools.values() if tool.requires_approval is True]
    if asking:
        raise NotDurableError(
            f"Agent {agent.name!r} has tools that always need approval ({', '.join(asking)}); in a "
            "stateless run nobody can be asked. Pass a session."
        )
    run_id = uuid7()
    state = SessionState(run_id, run_id)
    driver = Driver(agent, MemoryStore(), state)
    driver.commit(lambda batch: write_start(batch, Order(agent=agent, text=text, session="", actor=actor)))
    drive(driver)
    return RunResult(
        status=driver.run.status,
        output=outputs.value_of(agent.output_type, driver.run.output),
        messages=driver.state.settled_messages(),
        usage=driver.run.usage,
        error=driver.run.error,
    )
