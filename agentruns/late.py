"""What a handler returned after its worker lost the run: evidence, never a second result."""

from __future__ import annotations

import random
import time
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from agentruns.driver import Driver
from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.calls import Call
from agentruns.redaction import get_logger

logger = get_logger("agentruns.executor")

TRIES = 20


def store_late_result(driver: Driver, call: Call, facts: dict[str, Any]) -> None:
    """Append a `late_result` service row, also to a run that has ended; log it where even that fails."""
    lease = driver.lease
    if lease is None:
        return
    for _ in range(TRIES):
        try:
            batch = Batch(driver.store.load(lease.session_id, lease.run_id))
            batch.add(
                events.LATE_RESULT,
                {**facts, "worker_epoch": lease.epoch},
                call_id=call.id,
                tool_name=call.tool,
                attempt=call.attempt,
            )
            driver.store.append(batch, closed=True)
            return
        except (JournalConflictError, OperationalError):  # others were quicker, or the database is busy
            time.sleep(random.uniform(0, 0.05))  # noqa: S311 - spreads load
        except (DatabaseError, InterfaceError):
            break
    logger.error(
        "Late result not stored run=%s call=%s tool=%s: %r",
        lease.run_id, call.id, call.tool, facts, exc_info=True,
    )  # fmt: skip
