"""The journal's own database connection, which user code on the same thread cannot reach.

Handlers, predicates, model objects, notifiers and signal receivers share a thread, and with it Django's
connection, with the engine that runs them. What they leave there (an open transaction, autocommit off, a SET)
must not decide whether a row of the journal is committed. So a drive opens a second connection, under a name
that `django.db.connections` does not list.
"""

from __future__ import annotations

import copy
import math
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.exceptions import NotDurableError
from agentruns.utils.carry import carried, keep, restore, state_of
from agentruns.utils.db import is_of_test_case, uptime
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.connection")

_opened = threading.local()  # the names of the own connections of this thread, by alias
TRUSTED = 5.0  # seconds for which a connection that the server answered on is taken to be alive
_asked: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # driver's connection -> time of its last answer
OWN = " of the journal"  # suffix of the alias of a connection of the journal's own
IDLE = "agentruns_idle"  # attribute of the thread's connection: keeps the journal's between two drives
_wal: set[str] = set()  # the SQLite files known to be in WAL mode, which stays with the file


@contextmanager
def own_connection(alias: str) -> Iterator[None]:
    """Open the journal's own connection of this thread until the end of the outermost block.

    CONN_MAX_AGE keeps the connection for the next block, until Django's connection of the thread is closed.
    The block uses Django's connection inside a transaction, such as a TestCase's, and on SQLite in memory or
    without WAL mode, because there a second connection would see nothing or wait for the first.
    """
    names = _opened.__dict__
    if alias in names or connections[alias].in_atomic_block:
        yield
        return
    state, connection = state_of(alias), _taken(connections[alias])
    if connection is not None:
        connection.close_if_unusable_or_obsolete()
    if connection is None or connection.connection is None:
        connection = separate_connection(alias)
    if connection is None:
        yield
        return
    keep(connection, state)
    names[alias] = connection.alias
    connections[connection.alias] = connection
    try:
        with carried(alias, state):
            yield
    finally:
        del names[alias], connections[connection.alias]
        connection.close_if_unusable_or_obsolete()
        if connection.connection is not None:
            shared = connections[alias]
            if "close" not in shared.__dict__:  # the only way to notice `close_all` and the like
                close = shared.close

                def close_both() -> None:
                    if (idle := _taken(shared)) is not None:
                        idle.close()
                    close()

                shared.close = close_both  # type: ignore[method-assign]
            shared.__dict__[IDLE] = os.getpid(), connection


def _taken(shared: BaseDatabaseWrapper) -> BaseDatabaseWrapper | None:
    """Remove and return the idle connection kept on `shared`; None if there is none of this process."""
    pid, connection = shared.__dict__.pop(IDLE, (0, None))
    return connection if pid == os.getpid() else None


def separate_connection(alias: str) -> BaseDatabaseWrapper | None:
    """Build a second, unpooled connection; None for SQLite in memory or not in WAL mode."""
    shared: Any = connections[alias]
    if shared.vendor == "sqlite" and shared.is_in_memory_db():
        return None
    settings = copy.deepcopy(shared.settings_dict)
    settings["AUTOCOMMIT"] = True
    settings["OPTIONS"].pop("pool", None)  # a pooled connection may come from another thread's handler
    connection: BaseDatabaseWrapper = type(shared)(settings, alias + OWN)
    if connection.vendor != "sqlite":
        return connection
    file = str(settings["NAME"])
    if file not in _wal:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            if cursor.fetchone()[0] != "wal":
                connection.close()
                return None
        _wal.add(file)
    return connection


def own_alias(alias: str) -> str:
    """Look up the alias of this thread's own journal connection; `alias` itself outside `own_connection`."""
    name: str = _opened.__dict__.get(alias, alias)
    return name


def journal_alias(alias: str) -> str:
    """Choose the alias for reading: `alias` itself inside a transaction, else `own_alias(alias)`."""
    return alias if connections[alias].in_atomic_block else own_alias(alias)


def require_no_transaction(alias: str) -> None:
    """Raise NotDurableError if autocommit is off, or a transaction other than a TestCase's is open."""
    connection = connections[alias]
    if has_foreign_blocks(connection):
        raise NotDurableError(
            f"A run cannot be driven inside transaction.atomic() on {alias!r}: a journal row that can "
            "still be rolled back protects nothing. Call agent.start() here and let a worker drive it, "
            "or call agent.run() outside the transaction (see ATOMIC_REQUESTS, non_atomic_requests)."
        )
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise NotDurableError(
            f"Database {alias!r} has autocommit off, so nothing the journal writes is kept until somebody "
            "commits. Turn AUTOCOMMIT on for it."
        )
    if _is_inside(connection):
        raise NotDurableError(
            f"A transaction that Django did not begin is open on {alias!r}: what it locks, the journal would "
            "wait for. End it before the run is driven."
        )


def mend_connection(alias: str) -> None:
    """Close the thread's connection if user code left a transaction open, to roll that transaction back.

    Sets what the drive's connections carry again, such as a tenant, because user code may have changed it.
    """
    # Under an open transaction the journal's own connection could wait for locks of this very thread.
    connection = connections[alias]
    left = [block for block in connection.atomic_blocks if not is_of_test_case(block)]
    if not left and not _is_inside(connection):
        restore(alias)
        return
    logger.error("A handler or another function left a transaction open on %r; it is rolled back.", alias)
    connection.in_atomic_block = False
    connection.atomic_blocks, connection.savepoint_ids = [], []
    connection.needs_rollback = connection.closed_in_transaction = False
    connection.run_on_commit = []
    connection.close()


def replace_broken(alias: str) -> None:
    """Close the thread's connection if the server has dropped it, as it may while a model answers.

    Does nothing in a transaction or on SQLite. The check costs a round trip, so it is made in two cases only.
    The server has sent something, perhaps its farewell; or the last successful check is `TRUSTED` seconds
    old, and a firewall may have dropped the connection.
    """
    connection = connections[alias]
    raw = connection.connection
    if raw is None or connection.in_atomic_block or connection.vendor == "sqlite":
        return
    if uptime() - _asked.get(raw, -math.inf) < TRUSTED:
        news = select.poll()
        news.register(raw.fileno(), select.POLLIN)
        if not news.poll(0):
            return
    if connection.is_usable():
        _asked[raw] = uptime()
    else:
        connection.close()


@contextmanager
def acknowledged(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Raise OperationalError if PostgreSQL stopped waiting for its synchronous replica in this block.

    Cancelling a commit that waits for the replica does not undo the commit: the server reports success and a
    warning, and a failover would still lose the commit.
    """
    if connection.vendor != "postgresql":
        yield
        return
    connection.ensure_connection()
    raw, warnings = connection.connection, list[str]()

    def hear(notice: Any) -> None:
        if notice.source_function == "SyncRepWaitForLSN":  # the message itself is in the server's language
            warnings.append(f"{notice.message_primary}: {notice.message_detail}")

    raw.add_notice_handler(hear)
    try:
        yield
    finally:
        raw.remove_notice_handler(hear)
    if warnings:
        raise OperationalError(f"A commit is on no replica yet: {warnings[0]}")


def has_foreign_blocks(connection: BaseDatabaseWrapper) -> bool:
    """Check whether an `atomic` block is open that does not belong to a test case."""
    return not all(is_of_test_case(block) for block in connection.atomic_blocks)


def _is_inside(connection: BaseDatabaseWrapper) -> bool:
    """Check whether a transaction is open, or begins with the next query, outside of any `atomic` block.

    Returns True, too, if the raw connection was closed without Django. Returns False inside an `atomic`
    block, or if there is no connection yet.
    """
    raw = connection.connection
    if connection.in_atomic_block or raw is None:
        return False
    if not connection.autocommit:
        return True
    try:
        if connection.vendor == "sqlite":
            return bool(raw.in_transaction)
        return bool(raw.closed) or raw.info.transaction_status in (1, 2, 3)  # libpq: active, in one, failed
    except Exception:  # user code closed the raw connection, and Django would go on using it
        return True
