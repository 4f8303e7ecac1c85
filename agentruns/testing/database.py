"""The test database: a clock that stands still until a test moves it, and a flush of the journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from django.apps import apps
from django.db import connections
from django.db.models.functions import Now
from django.utils import timezone

_current: list[DatabaseClock] = []


class DatabaseClock:
    """The frozen time, in this process, of leases, back-offs, approvals and deadlines."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def forward(self, time: timedelta = timedelta(), **parts: float) -> None:
        """Move the clock forward by a timedelta, or as `forward(minutes=5)`; ValueError for a move back."""
        time += timedelta(**parts)
        if time < timedelta():
            raise ValueError("The clock of a database never goes back.")
        self.now += time

    def move_to(self, moment: datetime) -> None:
        """Move the clock to a millisecond after `moment`, or one millisecond on if `moment` has passed."""
        # Not to the moment itself: SQLite compares texts, where 12:00:00 is less than 12:00:00.000000.
        self.now = max(self.now, moment) + timedelta(milliseconds=1)


@contextmanager
def frozen_clock() -> Iterator[DatabaseClock]:
    """Freeze the time of `Now()`, `timezone.now()`, the engine and new ids during the block.

    Only the yielded clock moves this time. Direct calls of `datetime.now()` and other processes are not
    affected. A nested `frozen_clock` yields the clock of the outer block.
    """
    if _current:
        yield _current[-1]
        return
    from agentruns.engine import leases
    from agentruns.journal import store
    from agentruns.utils import clock as journal_clock, ids

    clock = DatabaseClock()

    def sql(connection: Any, seconds: float = 0) -> tuple[str, list[Any]]:
        moment = clock.now + timedelta(seconds=seconds)
        cast = "::timestamptz" if connection.vendor == "postgresql" else ""
        return f"(%s{cast})", [connection.ops.adapt_datetimefield_value(moment)]

    def as_sql(self: Now, compiler: Any, connection: Any, **context: Any) -> tuple[str, list[Any]]:
        return sql(connection)

    patches: list[tuple[Any, str, Any]] = [
        *((Now, name, as_sql) for name in {"as_sql", *vars(Now)} if name.startswith("as_")),
        (store, "clock", sql),
        (timezone, "now", lambda: clock.now),
        (journal_clock, "now", lambda alias: clock.now),
        (ids, "_last", (0, 0)),  # ids begin with their time, by which the console filters by day
        (ids, "time", SimpleNamespace(time_ns=lambda: int(clock.now.timestamp() * 1_000_000_000))),
        (leases, "_at_start", {}),  # forget stamps by the real clock
    ]
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value, create=True))
        _current.append(clock)
        stack.callback(_current.clear)
        yield clock


class JournalFlushMixin:
    """A mixin that lets the flush after a test empty the journal; put it before TransactionTestCase."""

    def _fixture_teardown(self) -> None:
        with ExitStack() as stack:
            for alias in self._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
                stack.enter_context(_lifted(alias))
            super()._fixture_teardown()  # type: ignore[misc]


@contextmanager
def flushable_journal() -> Iterator[None]:
    """Let `manage.py flush`, which ends each TransactionTestCase, empty the journal during the block."""
    from django.core.management.commands.flush import Command

    flush = Command.handle

    def handle(self: Command, **options: Any) -> str | None:
        with _lifted(options["database"]):
            return flush(self, **options)

    with patch.object(Command, "handle", handle):
        yield


@contextmanager
def _lifted(alias: str) -> Iterator[None]:
    if not apps.is_installed("agentruns"):
        yield
        return
    from agentruns.journal import batch, timeline
    from agentruns.models.triggers import lifted

    batch.seen_committed.clear()  # the flush is no loss of committed rows
    timeline.positions.clear()
    with lifted(connections[alias]):
        yield
