"""What a handler returned after its worker lost the run: evidence, never a second result."""

from __future__ import annotations

import random
import time
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from agentruns import telemetry
from agentruns.driver import Driver
from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.calls import Call
from agentruns.payloads import Offload
from agentruns.redaction import get_logger

logger = get_logger("agentruns.executor")

TRIES = 20


def offload_of(driver: Driver, call: Call) -> Offload | None:
    """Return what puts a large result of the call's attempt away, once; None for a stateless run."""
    if driver.lease is None:
        return None
    return Offload(f"{driver.lease.session_id}/{call.id}-{call.attempt}")


def store_late_result(
    driver: Driver, call: Call, facts: dict[str, Any], offload: Offload | None = None
) -> None:
    """Append a `late_result` service row, also to a run that has ended; log it where even that fails.

    `offload` is the one that the result was to be put away with, if it got so far.
    """
    lease = driver.lease
    if lease is None:
        return
    offload = offload or offload_of(driver, call)
    for _ in range(TRIES):
        try:
            batch = Batch(driver.store.load(lease.session_id, lease.run_id))
            batch.add(
                events.LATE_RESULT,
                {**facts, "worker_epoch": lease.epoch},
                call_id=call.id,
                tool_name=call.tool,
                attempt=call.attempt,
                offload=offload,
            )
            driver.store.append(batch, closed=True)
            telemetry.stored(batch, lease.alias)
            return
        except (JournalConflictError, OperationalError):  # others were quicker, or the database is busy
            time.sleep(random.uniform(0, 0.05))  # noqa: S311 - spreads load
        except (DatabaseError, InterfaceError):
            break
    logger.error(
        "Late result not stored run=%s call=%s tool=%s: %r",
        lease.run_id, call.id, call.tool, facts, exc_info=True,
    )  # fmt: skip
