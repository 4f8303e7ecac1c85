"""Short retried transactions, reads on a fresh connection, and the database's clock."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from django.db import DataError, IntegrityError, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, ExpressionWrapper, Model, QuerySet, Value
from django.db.models.deletion import Collector
from django.db.models.functions import Now
from django.db.models.sql import DeleteQuery, Query

from agentruns.exceptions import JournalConflictError, JournalLockedError

T = TypeVar("T")

_worker = threading.local()
TRIES = 12
LOCK_SECONDS = 5
LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's code for a wait that `lock_timeout` ended
ABORTED = "25P02"  # for a statement after the one that broke its transaction
CONFLICTS = ("40P01", "40001", LOCK_NOT_AVAILABLE)  # a deadlock, a serialization failure
LOCK_TIMEOUT = (
    "set_config('lock_timeout', CASE current_setting('lock_timeout') WHEN '0'"
    f" THEN '{LOCK_SECONDS}s' ELSE current_setting('lock_timeout') END, true)"
)
LOCKED = (
    f"Another transaction has locked this part of the journal for over {LOCK_SECONDS} s; its process may "
    "hang. Nothing was changed. Try again; if that does not help, end that transaction (pg_blocking_pids "
    "names its process)."
)
RACES = (JournalConflictError, IntegrityError, OperationalError)
# Refused by a driver or by SQLite, which give no SQLSTATE.
_TOO_LARGE = re.compile("number of parameters must be|too many SQL variables|string or blob too big")


def in_transaction(alias: str, action: Callable[[], T]) -> T:
    """Run `action` in a new transaction, or in a savepoint of the caller's open one, and return its result.

    A new transaction is repeated after JournalConflictError, IntegrityError and OperationalError, such as a
    deadlock or a busy database. It is tried at most TRIES times, with growing random pauses, and at READ
    COMMITTED from the second time on. In a transaction of the caller the error is raised at once. Raises
    JournalLockedError without a repetition if PostgreSQL's `lock_timeout` ends a wait (`short_lock_waits`).
    """
    for attempt in range(1, TRIES + 1):
        try:
            with transaction.atomic(using=alias):
                if attempt > 1:
                    read_committed(alias)
                with short_lock_waits(alias):
                    return action()
        except RACES as error:
            if sqlstate(error) == LOCK_NOT_AVAILABLE:
                raise JournalLockedError(LOCKED) from error
            if connections[alias].in_atomic_block or attempt == TRIES:
                raise
            time.sleep(random.uniform(0, min(0.01 * 2**attempt, 0.5)))  # noqa: S311 - spreads load
    raise AssertionError("unreachable")


def delete_rows(rows: QuerySet[Any]) -> int:
    """Delete rows of this app, and what refers to the rows, without a signal about rows of this app.

    A receiver of the project would work inside the journal's transaction. Rows of the project that refer to
    the deleted rows are deleted by Django, with signals. Returns the number of deleted `rows`. Raises
    ProtectedError or RestrictedError, as Django does, before anything is deleted.
    """
    using, deleted = rows.db, Counter[type[Model]]()
    collector = Collector(using=using)
    collector.collect(rows.order_by())
    collector.sort()
    app = rows.model._meta.app_label
    ours = {model: collector.data.pop(model) for model in [*collector.data] if model._meta.app_label == app}
    whole = [each for each in collector.fast_deletes if each.model._meta.app_label == app]
    collector.fast_deletes = [each for each in collector.fast_deletes if each not in whole]
    collector.delete()
    for each in whole:
        deleted[each.model] += each._raw_delete(using) or 0  # None if no row can match
    for model, instances in ours.items():
        deleted[model] += DeleteQuery(model).delete_batch([instance.pk for instance in instances], using)
    return deleted[rows.model]


def cannot_pass(error: BaseException) -> bool:
    """Check whether a database would always refuse a statement, because of its values or its size."""
    is_wrong = isinstance(error, DataError) or sqlstate(error).startswith(("22", "54"))
    return is_wrong or bool(_TOO_LARGE.search(str(error)))


def sqlstate(error: BaseException) -> str:
    """Find PostgreSQL's code of an error, or SQLite's name of it; "" if there is neither."""
    cause = error.__cause__
    return str(getattr(cause, "sqlstate", None) or getattr(cause, "sqlite_errorname", None) or "")


def is_conflict(error: BaseException) -> bool:
    """Check whether others stood in a statement's way, so that a new transaction may succeed."""
    return sqlstate(error).startswith((*CONFLICTS, "SQLITE_BUSY", "SQLITE_LOCKED"))


@contextmanager
def short_lock_waits(alias: str) -> Iterator[None]:
    """Limit waits for a lock to LOCK_SECONDS, because the process that has the lock may be frozen.

    Keeps a `lock_timeout` that is set already, even a longer one. In a savepoint the limit ends with the
    block, otherwise with the transaction. Only for PostgreSQL, because SQLite has a `timeout` of its own.
    """
    connection = connections[alias]
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT current_setting('lock_timeout'), {LOCK_TIMEOUT}")
        before = cursor.fetchone()[0]
    yield  # after an error the rollback restores the setting
    if len(connection.savepoint_ids) > 0:
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])


def read_committed(alias: str) -> None:
    """Set a transaction just opened to READ COMMITTED, so that it sees rows committed while it waits.

    A project may have a stricter level as its default. There, a heartbeat would make the waiting transaction
    fail. Does nothing inside a transaction of the caller, and on SQLite.
    """
    connection = connections[alias]
    if connection.vendor == "postgresql" and len(connection.atomic_blocks) == 1:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


@contextmanager
def working(works: bool = True) -> Iterator[None]:
    """Mark this thread as a worker's, all of whose connections `rest` may close, or as no such thread."""
    before, _worker.works = is_worker(), works
    try:
        yield
    finally:
        _worker.works = before


def is_worker() -> bool:
    """Check whether this thread is marked as a worker's by `working`."""
    return bool(getattr(_worker, "works", False))


def is_of_test_case(block: object) -> bool:
    """Check whether an `atomic` block is a TestCase's own, whose rows no other connection sees."""
    return bool(getattr(block, "_from_testcase", False))


def is_in_test_case() -> bool:
    """Check whether a TestCase's own transaction is open in this thread."""
    blocks = (block for one in connections.all(initialized_only=True) for block in one.atomic_blocks)
    return any(map(is_of_test_case, blocks))


@contextmanager
def always_rollback() -> Iterator[None]:
    """Undo the block's changes in all transactions that are open, and keep those usable after an error.

    Does not undo changes on a connection without an open transaction.
    """
    inside = [one.alias for one in connections.all(initialized_only=True) if one.in_atomic_block]
    with ExitStack() as blocks:
        for alias in inside:
            if not transaction.get_rollback(using=alias):
                blocks.enter_context(transaction.atomic(using=alias))
                blocks.callback(transaction.set_rollback, True, using=alias)
        yield


def reading(alias: str, read: Callable[[], T]) -> T:
    """Call `read` and return its result.

    If `read` raises OperationalError or InterfaceError outside a transaction, closes the connection if it is
    broken, and calls `read` once more.
    """
    try:
        return read()
    except (OperationalError, InterfaceError):
        if connections[alias].in_atomic_block:
            raise
        close_stale(alias)
        return read()


def close_stale(alias: str) -> None:
    """Close a broken connection outside a transaction, so that the next query opens another."""
    connection = connections[alias]
    # Not because of its age: with CONN_MAX_AGE = 0 each step would reconnect. And not inside a TestCase's
    # own transaction, which would be lost with it.
    if connection.errors_occurred and not connection.in_atomic_block:
        connection.close_if_unusable_or_obsolete()


def uptime() -> float:
    """Read the seconds of a clock that, if possible, runs during suspend, so that sleep ages a lease."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def later(seconds: float) -> ExpressionWrapper[Any]:
    """Build the SQL expression for the time by the database's clock plus `seconds`."""
    return ExpressionWrapper(Now() + Value(timedelta(seconds=seconds)), output_field=DateTimeField())


def as_id(connection: BaseDatabaseWrapper, value: UUID) -> UUID | str:
    """Convert an id to a parameter for raw SQL: the hexadecimal text for a database without a UUID type."""
    return value if connection.features.has_native_uuid_field else value.hex


def database_now(alias: str) -> datetime:
    """Query the time of the database's clock."""
    query = Query(None)  # without a table
    query.add_annotation(Now(), "now")
    now: datetime = next(iter(query.get_compiler(using=alias).results_iter()))[0]
    return now


def readable(moment: datetime) -> str:
    """Format a time as text: in UTC, to the second."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
