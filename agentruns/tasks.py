"""Celery: workers notified by messages. One may be lost, doubled or late; the database has the truth.

A message is acknowledged as it arrives, because recovery rests on leases. If a broker delivers one again
while the run is still driven (Redis after its visibility time-out), the run is found leased.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from typing import Any
from uuid import UUID

from celery import shared_task, signals
from django.db import DatabaseError, InterfaceError, connections

from agentruns.conf import settings
from agentruns.engine.leases import request_at_start
from agentruns.engine.worker import answer
from agentruns.services.sweep import sweep

# One byte that a worker shares with the processes it forks: only the worker hears of a warm shutdown.
_stopping = mmap.mmap(-1, 1)


REST_SECONDS = 10.0
_resting_until = 0.0  # a client may try for seconds to reach a broker that is down: only one caller waits


class CeleryDispatcher:
    """Notifies by a Celery message. While the broker is down none is sent; the next sweep notifies again."""

    def notify(self, run_id: UUID) -> None:
        """Send the message; dropped where tasks run at once, in the process that sends them."""
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
    """Drive a run until it ends or waits; do nothing if it cannot be claimed now."""
    answer(run_id, _is_stopping)
    if _is_stopping():
        CeleryDispatcher().notify(UUID(run_id))  # for the other workers


@shared_task(name="agentruns.sweep_runs", ignore_result=True)
def sweep_runs() -> dict[str, int]:
    """Sweep once and notify a worker for each run that can go on: a periodic task for Celery beat."""
    return sweep(name="celery", drives=False).as_dict()


def _is_stopping() -> bool:
    return _stopping[0] != 0


@signals.worker_init.connect
def _start(**kwargs: Any) -> None:
    """Find the last request to drain, for all processes of this worker: it is for workers before it."""
    with suppress(DatabaseError, InterfaceError):  # then the first run that one of them is given finds it
        request_at_start(settings.DATABASE)
    connections[settings.DATABASE].close()


@signals.worker_shutting_down.connect
def _stop(**kwargs: Any) -> None:
    """Let the runs of this worker stop at their next boundary."""
    _stopping[0] = 1
