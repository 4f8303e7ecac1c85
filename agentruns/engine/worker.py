"""Claim one run and drive it: what the sweep, a Celery task and a caller who waits all do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, InterfaceError

from agentruns.agents.agent import Agent, definition_difference, get_agent
from agentruns.engine import leases
from agentruns.engine.driver import Driver, require_no_transaction
from agentruns.engine.leases import Lease, claim
from agentruns.engine.loop import backoff, drive
from agentruns.exceptions import DurableConfigMismatchError, LeaseLostError, UnknownAgentError
from agentruns.journal.conversation import SessionState
from agentruns.journal.store import DatabaseStore, Store
from agentruns.models import Run, Session
from agentruns.models.definition import definition_body
from agentruns.utils.db import in_transaction, reading
from agentruns.utils.redaction import bound, get_logger

logger = get_logger("agentruns.worker")


def agent_for(run: Run, alias: str) -> Agent:
    """Return the registered agent a run was started with.

    Raises DurableConfigMismatchError with the parts that differ; the run is left as it is.
    """
    try:
        agent = get_agent(run.agent, run.version)
    except UnknownAgentError as error:
        raise DurableConfigMismatchError(f"Run {run.pk} cannot go on here: {error}", ("agent",)) from error
    if agent.definition_hash == run.definition_id:
        return agent
    stored = definition_body(alias, run.definition_id)
    parts = tuple(definition_difference(stored, agent.definition()))
    raise DurableConfigMismatchError(
        f"Run {run.pk} was started with another definition of agent {run.agent!r} version {run.version}: "
        f"{', '.join(parts)} differ. Serve the old definition beside the new one under its own version.",
        parts,
    )


def advance(
    run: Run,
    alias: str,
    *,
    store: Store | None = None,
    caller: Any = None,
    asked: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Claim a run and drive it until it ends, waits or is stopped; return whether it could be claimed.

    Raises what the drive raised, after the lease was given back, and DurableConfigMismatchError.
    """
    require_no_transaction(alias)
    agent = agent_for(run, alias)
    lease = claim(alias, run.pk)
    if lease is None:
        return False
    drive_claimed(run, agent, lease, store=store, caller=caller, asked=asked, should_stop=should_stop)
    return True


def block(run: Run, alias: str) -> int:
    """Say why a run is not claimed here; it costs no attempt, and a process that serves it may claim it.

    Returns how many runs that was.
    """
    try:
        agent_for(run, alias)
    except DurableConfigMismatchError as error:
        rows = Run.objects.using(alias).filter(pk=run.pk, status=run.status, lease_epoch=run.lease_epoch)
        reason = str(error)
        return in_transaction(alias, lambda: rows.update(blocked_reason=reason))
    return 0


def drive_claimed(
    run: Run,
    agent: Agent,
    lease: Lease,
    *,
    store: Store | None = None,
    caller: Any = None,
    asked: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    state: SessionState | None = None,
) -> SessionState | None:
    """Drive a run whose lease this process holds, and return what it knows of the session at the end.

    `state` is where the session stands, if whoever took the lease has just written that.
    None if another process goes on: a lease lost on the way is logged.
    """
    with bound(lease.run_id, lease.epoch):
        driver = _driver(run, agent, lease, store or DatabaseStore(lease.alias), should_stop, state)
        if driver is None:
            return None
        try:
            drive(driver, caller=caller, asked=asked)
        except LeaseLostError as error:
            logger.warning("Lease lost run=%s epoch=%s: %s", run.pk, lease.epoch, error)
            return None
        return driver.state


def _driver(
    run: Run,
    agent: Agent,
    lease: Lease,
    store: Store,
    should_stop: Callable[[], bool],
    state: SessionState | None,
) -> Driver | None:
    """Return the driver of a run just claimed; None if it goes on under another definition by now."""
    try:
        state, session_key = (state, run.session.key) if state else _read(store, lease)
    except BaseException:
        with suppress(DatabaseError, InterfaceError):  # an unreachable database frees it by expiry
            # Not at once again: a journal that cannot be read stays so until somebody mends it.
            lease.release(failed=True, delay=backoff(lease.attempts, None))
        raise
    if state.run.definition != agent.definition_hash:  # staff had it adopt another one just before the claim
        logger.info("Released run=%s: it goes on under definition %s", run.pk, state.run.definition)
        lease.release()
        return None
    drains = leases.DrainCheck(lease.alias)
    return Driver(
        agent,
        store,
        state,
        lease=lease,
        session_key=session_key,
        should_stop=lambda: should_stop() or drains(),
    )


def _read(store: Store, lease: Lease) -> tuple[SessionState, str]:
    """Return the state of a run just claimed, and its session's key."""

    def read() -> tuple[SessionState, str]:
        keys = Session.objects.using(lease.alias).values_list("key", flat=True)
        return store.load(lease.session_id, lease.run_id), keys.get(pk=lease.session_id)

    return reading(lease.alias, read)
