"""Short transactions that are retried, reads on a fresh connection, and the database's clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from django.db import IntegrityError, InterfaceError, OperationalError, connections, transaction
from django.db.models import DateTimeField, ExpressionWrapper, Value
from django.db.models.functions import Now
from django.db.models.sql import Query

from agentruns.exceptions import JournalConflictError

T = TypeVar("T")

TRIES = 12
RACES = (JournalConflictError, IntegrityError, OperationalError)


def in_transaction(alias: str, action: Callable[[], T]) -> T:
    """Return what `action` returns, run in a transaction of its own or in the caller's.

    Outside of one, serialization failures, deadlocks, a busy database and conflicts are retried with
    growing, jittered pauses and at READ COMMITTED; inside one the caller's transaction is what has to be
    retried.
    """
    for attempt in range(1, TRIES + 1):
        try:
            with transaction.atomic(using=alias):
                if attempt > 1:
                    read_committed(alias)
                return action()
        except RACES:
            if connections[alias].in_atomic_block or attempt == TRIES:
                raise
            time.sleep(random.uniform(0, min(0.01 * 2**attempt, 0.5)))  # noqa: S311 - spreads load
    raise AssertionError("unreachable")


def read_committed(alias: str) -> None:
    """Let the transaction just opened see what is committed while it waits for its locks.

    At a stricter level, which a project may have as its default, every heartbeat in between would fail it.
    A transaction that somebody else opened is left as it is.
    """
    connection = connections[alias]
    if connection.vendor == "postgresql" and len(connection.atomic_blocks) == 1:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


@contextmanager
def always_rollback() -> Iterator[None]:
    """Undo what the block does to databases whose transaction is open, and whatever broke that transaction.

    For code of the project that is to read only, run inside somebody's transaction (ATOMIC_REQUESTS).
    """
    inside = [one.alias for one in connections.all(initialized_only=True) if one.in_atomic_block]
    with ExitStack() as blocks:
        for alias in inside:
            if not transaction.get_rollback(using=alias):
                blocks.enter_context(transaction.atomic(using=alias))
                blocks.callback(transaction.set_rollback, True, using=alias)
        yield


def reading(alias: str, read: Callable[[], T]) -> T:
    """Return what `read` returns, on a new connection where the old one broke since it was last used."""
    try:
        return read()
    except (OperationalError, InterfaceError):
        if connections[alias].in_atomic_block:
            raise
        close_stale(alias)
        return read()


def close_stale(alias: str) -> None:
    """Drop a connection that broke, so that the next query opens another."""
    connection = connections[alias]
    # Not for its age: with CONN_MAX_AGE = 0 each step would connect anew. And not inside a TestCase's own
    # transaction, which would go with it.
    if connection.errors_occurred and not connection.in_atomic_block:
        connection.close_if_unusable_or_obsolete()


def uptime() -> float:
    """Return seconds on a clock that counts suspend, so that a laptop's sleep ages a lease."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def later(seconds: float) -> ExpressionWrapper[Any]:
    """Return the database's clock plus `seconds`."""
    return ExpressionWrapper(Now() + Value(timedelta(seconds=seconds)), output_field=DateTimeField())


def database_now(alias: str) -> datetime:
    """Return what time it is by the database's clock."""
    query = Query(None)  # a question to no table
    query.add_annotation(Now(), "now")
    row = next(iter(query.get_compiler(using=alias).results_iter()))
    now: datetime = row[0]
    return now


def readable(moment: datetime) -> str:
    """Return a time as a text has it: in UTC, to the second."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
