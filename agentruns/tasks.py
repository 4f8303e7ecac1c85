"""Celery: messages that wake workers. A message may be lost, doubled or late, because the database decides.

A message is acknowledged as it arrives, because recovery relies on leases. If a broker delivers a message
again while a worker still drives the run (Redis after its visibility time-out), the lease refuses the claim.
"""

from __future__ import annotations

import mmap
import time
from contextlib import nullcontext, suppress
from typing import Any
from uuid import UUID

from celery import shared_task, signals
from django.db import DatabaseError, InterfaceError, connections

from agentruns.conf import settings
from agentruns.engine.leases import request_at_start
from agentruns.engine.worker import answer
from agentruns.services.sweep import sweep
from agentruns.utils.db import working

# One byte that a worker shares with the processes it forks, because only the worker gets the signal to stop.
_stopping = mmap.mmap(-1, 1)


REST_SECONDS = 10.0
_resting_until = 0.0  # when the broker is down, only one caller waits for seconds to reach it


class CeleryDispatcher:
    """The dispatcher that sends Celery messages. After a failure it sends none for ten seconds."""

    def notify(self, run_id: UUID) -> None:
        """Send a message that the run can continue, unless Celery would run the task in this process.

        Raises the error if the message cannot be sent, and then sends none for ten seconds.
        """
        global _resting_until
        if advance_run.app.conf.task_always_eager:
            return  # no model and no tool ever runs inside a web request
        if time.monotonic() < _resting_until:
            return
        try:
            advance_run.apply_async((str(run_id),), retry=False, ignore_result=True)
        except Exception:
            _resting_until = time.monotonic() + REST_SECONDS
            raise


@shared_task(name="agentruns.advance_run", acks_late=False, ignore_result=True)
def advance_run(run_id: str) -> None:
    """Drive a run until it ends or waits, or this worker stops; do nothing if the run cannot be claimed."""
    with nullcontext() if advance_run.request.is_eager else working():
        answer(run_id, lambda: bool(_stopping[0]))
    if _stopping[0]:
        CeleryDispatcher().notify(UUID(run_id))  # so that another worker continues the run


@shared_task(name="agentruns.sweep_runs", ignore_result=True)
def sweep_runs() -> dict[str, int]:
    """Sweep once, and notify a worker of each run that can continue; return the counts. For Celery beat."""
    return sweep(name="celery", drives=False).as_dict()


@signals.worker_init.connect
def _start(**kwargs: Any) -> None:
    """Note the last request to drain, so that this worker and its processes obey later requests only."""
    with suppress(DatabaseError, InterfaceError):  # then a process reads it at its first run
        request_at_start(settings.DATABASE)
    connections[settings.DATABASE].close()


@signals.worker_shutting_down.connect
def _stop(**kwargs: Any) -> None:
    """Make the runs of this worker stop at their next boundary, because Celery shuts the worker down."""
    _stopping[0] = 1
