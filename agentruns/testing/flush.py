"""Emptying a test database although the journal refuses to be emptied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from django.db import connections

from agentruns.journal.triggers import lifted


def flush_with_triggers_lifted(case: Any, flush: Callable[[Any], None]) -> None:
    """Call `flush(case)` with the journal's triggers off in every database of the test case."""
    with ExitStack() as stack:
        for alias in case._databases_names(include_mirrors=False):
            stack.enter_context(lifted(connections[alias]))
        flush(case)


class JournalFlushMixin:
    """For a TransactionTestCase outside pytest: `class Test(JournalFlushMixin, TransactionTestCase)`."""

    def _fixture_teardown(self) -> None:
        flush_with_triggers_lifted(self, lambda case: super()._fixture_teardown())  # type: ignore[misc]
