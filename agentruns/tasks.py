"""Celery: the doorbell as a message. It may be lost, doubled or late; what it is about is in the database.

A message is acknowledged as it arrives: recovery rests on leases. A broker that sends one again while the
first is still worked on (Redis after its visibility time-out) would only find the run leased.
"""

from __future__ import annotations

import mmap
import time
from typing import Any
from uuid import UUID

from celery import shared_task, signals

from agentruns.conf import settings
from agentruns.engine.worker import advance, block
from agentruns.exceptions import DurableConfigMismatchError
from agentruns.models import Run
from agentruns.services.sweep import sweep
from agentruns.utils.db import close_stale
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tasks")

# One byte that a worker shares with the processes it forks: a warm shutdown is told to the worker alone.
_stopping = mmap.mmap(-1, 1)


REST_SECONDS = 10.0
_resting_until = 0.0  # a client may try for seconds to reach a broker that is away: only one caller waits


class CeleryDispatcher:
    """Rings by a Celery message. While the broker is away nothing is sent, and the next sweep rings again."""

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
    """Drive a run until it ends or waits; one that cannot be claimed now is another's, or the sweep's."""
    alias = settings.DATABASE
    close_stale(alias)
    run = Run.objects.using(alias).runnable().filter(pk=run_id).first()
    if run is None:
        logger.info("Nothing to do run=%s", run_id)
        return
    try:
        advance(run, alias, should_stop=_is_stopping)
    except DurableConfigMismatchError:
        block(run, alias)
    except Exception:  # given back by now, and a sweep tries again; a retry of Celery's would be one too many
        logger.exception("Drive failed run=%s agent=%s", run.pk, run.agent)
    if _is_stopping():
        CeleryDispatcher().notify(run.pk)  # for the other workers; for none of them it is nothing to do


@shared_task(name="agentruns.sweep_runs", ignore_result=True)
def sweep_runs() -> dict[str, int]:
    """Do one sweep that rings for each run that can go on: a periodic task for Celery beat."""
    return sweep(name="celery", drives=False).as_dict()


def _is_stopping() -> bool:
    return _stopping[0] != 0


@signals.worker_shutting_down.connect
def _stop(**kwargs: Any) -> None:
    """Let the runs of this worker stop at their next boundary."""
    _stopping[0] = 1
