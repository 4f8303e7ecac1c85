"""Emptying a test database although the journal refuses to be emptied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


class JournalFlushMixin:
    """For a TransactionTestCase outside pytest: `class Test(JournalFlushMixin, TransactionTestCase)`."""

    def _fixture_teardown(self) -> None:
        with ExitStack() as stack:
            for alias in self._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
                stack.enter_context(_lifted(alias))
            super()._fixture_teardown()  # type: ignore[misc]


@contextmanager
def flushable_journal() -> Iterator[None]:
    """Let `manage.py flush` and the end of a TransactionTestCase, which calls it, empty the journal."""
    from django.core.management.commands.flush import Command

    flush = Command.handle

    def handle(self: Command, **options: Any) -> str | None:
        with _lifted(options["database"]):
            return flush(self, **options)

    with patch.object(Command, "handle", handle):
        yield


@contextmanager
def _lifted(alias: str) -> Iterator[None]:
    from django.apps import apps
    from django.db import connections

    from agentruns.models.triggers import lifted

    with lifted(connections[alias]) if apps.is_installed("agentruns") else ExitStack():
        yield
