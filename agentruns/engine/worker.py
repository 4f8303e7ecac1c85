"""Claiming and driving a run, for the sweep, for a queue's task and for a caller who waits."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from django.db.models.functions import Now

from agentruns.agents.agent import Agent, definition_difference, get_agent
from agentruns.conf import settings
from agentruns.engine.leases import claim, is_draining, why_off
from agentruns.engine.loop import drive_run
from agentruns.exceptions import DurableConfigMismatchError, SwitchedOffError, UnknownAgentError
from agentruns.journal.connection import own_connection, require_no_transaction
from agentruns.journal.outbox import announce_blocked
from agentruns.journal.read import definition_body
from agentruns.models import Run
from agentruns.models.run import FAILED_DRIVE, TURN
from agentruns.utils.db import close_stale, database_now, in_transaction, readable
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.worker")


def agent_for(run: Run, alias: str) -> Agent:
    """Find the agent that a run was started with; raises SwitchedOffError if the agent is off.

    Raises DurableConfigMismatchError if the agent is missing or has another definition, and LookupError if
    the run's definition is not stored.
    """
    if off := why_off(alias, "agent", run.agent):
        raise SwitchedOffError(f"Run {run.pk} waits. {off}")
    try:
        agent = get_agent(run.agent, run.version)
    except UnknownAgentError as error:
        raise DurableConfigMismatchError(f"Run {run.pk} cannot go on here: {error}", ("agent",)) from error
    if agent.definition_hash == run.definition_id:
        return agent
    parts = tuple(definition_difference(definition_body(alias, run.definition_id), agent.definition()))
    raise DurableConfigMismatchError(
        f"Run {run.pk} was started with another definition of agent {run.agent!r} version {run.version}: "
        f"{', '.join(parts)} differ. Serve the old definition beside the new one under its own version.",
        parts,
    )


def advance(run: Run, alias: str, **options: Any) -> bool:
    """Claim a run and drive it until it ends, waits or is stopped; return whether the claim succeeded.

    `options` are those of `drive_run`. Raises NotDurableError inside a transaction, and the errors of
    `agent_for` and `drive_run`.
    """
    require_no_transaction(alias)
    agent = agent_for(run, alias)
    with own_connection(alias):
        if (lease := claim(alias, run.pk, run.agent)) is not None:
            drive_run(run, agent, lease, **options)
    return lease is not None


def answer(run_id: str, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Drive the run that a queue's message names; do nothing if the run cannot be claimed now.

    Errors of the drive are not raised: they are logged, or recorded by `block`.
    """
    alias = settings.DATABASE
    close_stale(alias)
    run = Run.objects.using(alias).runnable().select_related("session").filter(pk=run_id).first()
    if run is None:
        logger.info("Nothing to do run=%s", run_id)
        return
    try:
        advance(run, alias, should_stop=should_stop)
    except DurableConfigMismatchError:
        block(run, alias)
    except Exception:  # the run is released, and a sweep tries again; so no retry by the queue
        logger.exception("Drive failed run=%s agent=%s", run.pk, run.agent)


def block(run: Run, alias: str) -> int:
    """Record why this process cannot drive a run; return 1, or 0 if nothing was recorded."""
    try:
        agent_for(run, alias)
    except Exception as error:  # such as a stored definition that cannot be read: other runs go on
        rows = Run.objects.using(alias).filter(pk=run.pk, status=run.status, lease_epoch=run.lease_epoch)
        known = isinstance(error, DurableConfigMismatchError)
        why = str(error) if known else f"Its definition cannot be read: {type(error).__name__}."
        where = f"process {os.getpid()} on {socket.gethostname()}"
        reason = f"{why} (Found by {where}, {readable(database_now(alias))}.)"
        is_new = not run.blocked_reason or run.blocked_reason.startswith((FAILED_DRIVE, TURN))
        is_new = is_new and not isinstance(error, SwitchedOffError) and not is_draining(alias)

        def record() -> int:
            recorded = rows.update(blocked_reason=reason, blocked_at=Now())
            if recorded and is_new:  # workers that drain are old, and may not know newer definitions
                announce_blocked(alias, run)
            return recorded

        return in_transaction(alias, record)
    return 0
