"""The doorbell, which wakes workers for a run that can go on. A lost ring delays the run until a sweep."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.utils.module_loading import import_string

from agentruns.conf import settings
from agentruns.journal.connection import separate_connection
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.wakeup")

CHANNEL = "agentruns"  # of PostgreSQL; each database has its own


class Dispatcher(Protocol):
    """The class that AGENTRUNS_DISPATCHER names; called after the commit, when nothing can be rolled back."""

    def notify(self, run_id: UUID) -> None:
        """Wake a worker for a run that can go on; an error is logged, and a sweep finds the run later."""


class SweepDispatcher:
    """The dispatcher that notifies nobody: the next sweep of `resume_runs` finds the run by itself."""

    def notify(self, run_id: UUID) -> None:
        """Do nothing: the next sweep finds the run."""


def notify_on_commit(alias: str, run_id: UUID) -> None:
    """Call the dispatcher, and on PostgreSQL ring the doorbell, once the transaction commits; log errors."""
    dispatcher: Dispatcher = import_string(settings.DISPATCHER)()

    def notify() -> None:  # not functools.partial: Django logs the name of what failed
        dispatcher.notify(run_id)

    connection = connections[alias]
    if connection.vendor == "postgresql" and connection.in_atomic_block:
        with connection.cursor() as cursor:
            cursor.execute(f"NOTIFY {CHANNEL}")  # rings at the commit
    transaction.on_commit(notify, using=alias, robust=True)


class Listener(AbstractContextManager["Listener"]):
    """A worker's listener for the doorbell, on a connection of its own that is in no transaction.

    PostgreSQL announces runs that can go on, while SQLite only shows that something was committed. If neither
    can be heard (`why_deaf`), every wait lasts its full time, and the sweeps find the runs.
    """

    def __init__(self, alias: str) -> None:
        self.why_deaf = ""
        self._alias = alias
        self._connection: Any = None
        self._version: int | None = None

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def listen(self) -> None:
        """Start to listen, and forget earlier rings; to be called right before a sweep."""
        if self.why_deaf:
            return
        try:
            if self._connection is None:
                connection = self._connection = separate_connection(self._alias)
                if connection is None or connection.vendor not in ("postgresql", "sqlite"):
                    self.why_deaf = "No doorbell on this database"
                elif connection.vendor == "postgresql":
                    # A pooler reports an invented number for the server process: so it can be recognised.
                    if self._ask("SELECT pg_backend_pid()") != connection.connection.info.backend_pid:
                        self.why_deaf = "No doorbell behind a pooler such as pgbouncer"
                    elif not callable(connection.connection.notifies):
                        self.why_deaf = "No doorbell with psycopg2"
                    else:
                        with connection.cursor() as cursor:
                            cursor.execute(f"LISTEN {CHANNEL}")
            if self.why_deaf:
                self._close()
            while self._connection is not None and self._hear(0):
                pass
        except (DatabaseError, InterfaceError) as error:
            self._lose(error)

    def rang(self, seconds: float) -> bool:
        """Wait at most `seconds` for the doorbell; return True if it rang or may have rung."""
        if self._connection is not None:
            try:
                return self._hear(seconds)
            except (DatabaseError, InterfaceError) as error:
                self._lose(error)
                time.sleep(seconds)
                return True  # it may have rung meanwhile
        time.sleep(seconds)
        return False

    def _hear(self, seconds: float) -> bool:
        if self._connection.vendor == "sqlite":
            time.sleep(seconds)
            version, self._version = self._version, self._ask("PRAGMA data_version")
            return version != self._version
        with self._connection.wrap_database_errors:
            return bool(list(self._connection.connection.notifies(timeout=seconds, stop_after=1)))

    def _ask(self, sql: str) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            return int(cursor.fetchone()[0])

    def _lose(self, error: Exception) -> None:
        logger.warning("The connection that listens for runs broke; it is made anew: %s", error)
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
