"""Short transactions that lose a race against others are simply tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import IntegrityError, OperationalError, connections, transaction

from agentruns.exceptions import JournalConflictError

T = TypeVar("T")

TRIES = 12
RACES = (JournalConflictError, IntegrityError, OperationalError)


def in_transaction(alias: str, action: Callable[[], T]) -> T:
    """Return what `action` returns, run in a transaction of its own or in the caller's.

    Outside of one, serialization failures, deadlocks, a busy database and conflicts are retried with
    growing, jittered pauses; inside one the caller's transaction is what has to be retried.
    """
    for attempt in range(1, TRIES + 1):
        try:
            with transaction.atomic(using=alias):
                return action()
        except RACES:
            if connections[alias].in_atomic_block or attempt == TRIES:
                raise
            time.sleep(random.uniform(0, min(0.01 * 2**attempt, 0.5)))  # noqa: S311 - spreads load
    raise AssertionError("unreachable")
