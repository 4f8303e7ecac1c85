"""The journal's own database connection, which user code on the same thread cannot reach.

Handlers, predicates, model objects, notifiers and signal receivers share a thread, and with it Django's
connection, with the engine that runs them. What they leave there (an open transaction, autocommit off, a SET)
must not decide whether a row of the journal is committed. So a drive opens a second connection, under a name
that `django.db.connections` does not list.
"""

from __future__ import annotations

import copy
import math
import select
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.conf import settings
from agentruns.exceptions import NotDurableError
from agentruns.utils import forks
from agentruns.utils.carry import State, carried, keep, restore, state_of
from agentruns.utils.db import is_of_test_case, is_worker, uptime
from agentruns.utils.forks import in_child
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.connection")

_opened = threading.local()  # the `Own` of this thread by alias
PATIENCE = 5.0  # seconds that a thread waits for a connection of the pool
TRUSTED = 5.0  # seconds for which a connection that the server answered on is taken to be alive
_asked: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # driver's connection -> time of its last answer
OWN = " of the journal"  # suffix of the alias of a connection of the journal's own
STATE = "agentruns_state"  # attribute of a pooled connection: the state that is kept on it
_wal: set[str] = set()  # the SQLite files known to be in WAL mode, which stays with the file


class Pool:
    """The journal's own connections of this process to one database, which its threads borrow.

    At most AGENTRUNS_CONNECTIONS are lent at once. A thread gives its connection back before it waits.
    """

    def __init__(self) -> None:
        self.users = 0  # threads inside `own_connection`
        self._lent = 0
        self._idle: list[BaseDatabaseWrapper] = []
        self._condition = threading.Condition()

    def take(self, alias: str) -> BaseDatabaseWrapper | None:
        """Borrow a connection, or wait for a free one; None if the database allows no second connection.

        After PATIENCE seconds, opens one more than permitted: its borrowers may be waiting for this thread.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._lent < settings.CONNECTIONS, PATIENCE):
                logger.warning("No connection of the journal is free in %s s; one more is opened.", PATIENCE)
            self._lent += 1
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None and (connection := separate_connection(alias)) is not None:
                connection.inc_thread_sharing()
            return connection
        finally:
            if connection is None:
                self.give(None)

    def give(self, connection: BaseDatabaseWrapper | None) -> None:
        """Take a connection back from a thread; None stands for a connection that could not be opened."""
        with self._condition:
            self._lent -= 1
            if connection is not None:
                self._idle.append(connection)
            self._condition.notify()

    def enter(self) -> None:
        """Count a thread that uses the pool; the first closes idle connections that are broken or too old."""
        with self._condition:
            self.users += 1
            for connection in self._idle if self.users == 1 else ():
                connection.close_if_unusable_or_obsolete()

    def leave(self) -> bool:
        """Count a thread less; the last closes what CONN_MAX_AGE does not keep. Return if any is left."""
        with self._condition:
            self.users -= 1
            if not self.users:
                for connection in self._idle:
                    connection.close_if_unusable_or_obsolete()
                self._idle = [each for each in self._idle if each.connection is not None]
            return bool(self._idle)

    def close(self) -> None:
        """Close the idle connections, unless a thread uses the pool."""
        with self._condition:
            while self._idle and not self.users:
                self._idle.pop().close()


_pools: defaultdict[str, Pool] = defaultdict(Pool)


def _after_fork() -> None:
    for own in _opened.__dict__.values():  # of a thread that forks inside a tool
        if own.connection is not None:
            forks.keep(own.connection)  # the sockets are the parent's
            del connections[own.name]
            own.connection = None
    for pool in _pools.values():
        forks.keep(pool._idle)
        pool.__init__()  # type: ignore[misc]  # a thread's `close_both` or `Own` may have it


in_child(_after_fork)


class Own:
    """A thread's use of a journal connection, borrowed from `pool`, or opened if there is no pool."""

    def __init__(self, alias: str, state: State, pool: Pool | None) -> None:
        self.alias, self.state, self.pool = alias, state, pool
        self.name = alias + OWN
        self.connection: BaseDatabaseWrapper | None = None

    def use(self) -> bool:
        """Take a connection as alias `name`, unless there is one; False if the database allows no second."""
        if self.connection is None:
            take = self.pool.take if self.pool else separate_connection
            if (connection := take(self.alias)) is None:
                return False
            self.connection = connections[self.name] = connection
            if connection.__dict__.get(STATE, self) is not self.state:
                connection.__dict__[STATE] = self.state
                keep(connection, self.state)
        return True

    def give_back(self) -> None:
        """Return the connection to the pool, or close it if there is no pool; do nothing in a transaction."""
        connection = self.connection
        if connection is None or connection.in_atomic_block:
            return
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()
        del connections[self.name]
        self.connection = None
        if self.pool:
            self.pool.give(connection)
        else:
            connection.close()


@contextmanager
def own_connection(alias: str, *, pooled: bool = True) -> Iterator[None]:
    """Let this thread use connections of the journal's own until the end of the outermost block.

    The block borrows them from the process's pool. CONN_MAX_AGE keeps them open after the block, at most
    until a thread that used the pool closes Django's connection. Without `pooled`, the block opens and closes
    its own connection. Django's connection is used inside a transaction, such as a TestCase's, and on SQLite
    in memory or without WAL mode: there a second connection would see nothing or wait for the first.
    """
    owns = _opened.__dict__
    if alias in owns or connections[alias].in_atomic_block:
        yield
        return
    pool = _pools[alias] if pooled else None
    own = Own(alias, state_of(alias), pool)
    if pool:
        pool.enter()
    try:
        if not own.use():
            yield
            return
        owns[alias] = own
        with carried(alias, own.state):
            yield
    finally:
        owns.pop(alias, None)
        if own.connection is not None and own.connection.settings_dict["CONN_MAX_AGE"]:
            own.connection.close_if_unusable_or_obsolete()
        own.give_back()
        if pool and pool.leave():
            shared = connections[alias]
            if "close" not in shared.__dict__:  # the only way to notice `close_all` and the like
                close = shared.close

                def close_both() -> None:
                    pool.close()
                    close()

                shared.close = close_both  # type: ignore[method-assign]


def rest(alias: str) -> None:
    """Return this thread's journal connection before the thread waits for a model or for other threads.

    If the process drives several runs, a worker's thread also closes its connections outside transactions.
    The only user of a pool that lends several keeps its connection.
    """
    is_alone = _pools[alias].users < 2
    if (own := _opened.__dict__.get(alias)) and not (is_alone and settings.CONNECTIONS > 1):
        own.give_back()
    if not is_alone and is_worker():
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                connection.close()


def separate_connection(alias: str) -> BaseDatabaseWrapper | None:
    """Build a second, unpooled connection; None for SQLite in memory or not in WAL mode."""
    shared: Any = connections[alias]
    if shared.vendor == "sqlite" and shared.is_in_memory_db():
        return None
    options = copy.deepcopy(shared.settings_dict)
    options["AUTOCOMMIT"] = True
    options["OPTIONS"].pop("pool", None)  # a pooled connection may come from another thread's handler
    connection: BaseDatabaseWrapper = type(shared)(options, alias + OWN)
    if connection.vendor != "sqlite":
        return connection
    file = str(options["NAME"])
    if file not in _wal:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            if cursor.fetchone()[0] != "wal":
                connection.close()
                return None
        _wal.add(file)
    return connection


def own_alias(alias: str) -> str:
    """Take a journal connection for this thread, and return its alias; `alias` outside `own_connection`."""
    own: Own | None = _opened.__dict__.get(alias)
    if own is None:
        return alias
    own.use()
    return own.name


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
    # Without opening a connection: a thread that drives a run may need no other than the journal's.
    is_open, begins = connection.connection is not None, connection.settings_dict["AUTOCOMMIT"]
    commits = connection.autocommit if is_open else begins
    if not connection.in_atomic_block and not commits:
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
