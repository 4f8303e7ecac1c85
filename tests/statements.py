"""The statements of a thread as its drivers get them, on its connection and on the journal's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import OperationalError, connection, connections
from django.db.backends.signals import connection_created

from agentruns.engine import leases
from agentruns.journal.connection import own_alias

Around = Callable[[Callable[[], Any], Callable[[], Any]], Any]


class Forwarding:
    """Is as what it stands before, but for what a subclass does itself."""

    def __init__(self, real: Any, **own: Any) -> None:
        self.__dict__.update(own, real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)


class Driver(Forwarding):
    """A connection of psycopg or sqlite3 that has something done around its statements and commits."""

    def cursor(self, *args: Any, **options: Any) -> Cursor:
        return Cursor(self.real.cursor(*args, **options), driver=self)

    def commit(self) -> Any:
        return self.committing(self.real.commit, self.real.rollback)


class Cursor(Forwarding):
    """A cursor of such a connection."""

    def execute(self, sql: Any, params: Any = None) -> Any:
        about = {"connection": self.driver.django, "cursor": self}
        return self.driver.wrapper(self._execute, sql, params, False, about)

    def _execute(self, sql: Any, params: Any = None, *about: Any) -> Any:
        def run() -> Any:
            return self.real.execute(sql) if params is None else self.real.execute(sql, params)

        driver = self.driver.real
        is_alone = str(sql).startswith("WITH c AS MATERIALIZED")  # an append, a start or a claim
        if sql == "COMMIT" or (is_alone and getattr(driver, "autocommit", False) is True):
            return self.driver.committing(run, driver.rollback)
        return run()

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *error: object) -> None:
        self.real.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.real)


def _plain(execute: Callable[..., Any], *about: Any) -> Any:
    return execute(*about)


def _commit(commit: Callable[[], Any], undo: Callable[[], Any]) -> Any:
    return commit()


@contextmanager
def _before_the_drivers(wrapper: Callable[..., Any] = _plain, committing: Around = _commit) -> Iterator[None]:
    """Stand before each driver's connection that this thread has, or opens."""
    here = threading.get_ident()
    with ExitStack() as stack:

        def enter(one: Any) -> None:
            driver = one.connection = Driver(
                one.connection, django=one, wrapper=wrapper, committing=committing
            )
            stack.callback(leave, one, driver)

        def leave(one: Any, driver: Driver) -> None:
            if one.connection is driver:
                one.connection = driver.real

        def opened(**facts: Any) -> None:
            if threading.get_ident() == here:
                enter(facts["connection"])

        for alias in {connection.alias, own_alias(connection.alias)}:
            if connections[alias].connection is not None:
                enter(connections[alias])
        connection_created.connect(opened)
        stack.callback(connection_created.disconnect, opened)
        yield


def statement_wrapper(wrapper: Callable[..., Any]) -> Any:
    """Have a wrapper, as Django's `execute_wrapper` takes them, do each statement of this thread."""
    return _before_the_drivers(wrapper)


def at_each_commit(around: Around) -> Any:
    """Have `around`, given what commits and what undoes it, do each commit of this thread.

    That is a COMMIT, or an append that is a transaction of its own.
    """
    return _before_the_drivers(committing=around)


@contextmanager
def captured_statements() -> Iterator[list[str]]:
    """Collect the statements of this thread, but for those that a process makes by its clock."""
    statements: list[str] = []
    leases.forget_switches()
    leases.why_off("default", "agent", "")  # for the next seconds

    def keep(execute: Callable[..., Any], sql: Any, *about: Any) -> Any:
        statements.append(str(sql))
        return execute(sql, *about)

    with _before_the_drivers(keep):
        yield statements


@contextmanager
def broken_commit(nth: int, went_through: bool) -> Iterator[list[int]]:
    """Let the nth commit of this thread raise, although it went through or after it was undone."""
    left = [nth]

    def commit_or_break(commit: Callable[[], Any], undo: Callable[[], Any]) -> Any:
        left[0] -= 1
        if left[0] != 0:
            return commit()
        commit() if went_through else undo()
        raise OperationalError("the connection broke before the acknowledgement came")

    with at_each_commit(commit_or_break):
        yield left
