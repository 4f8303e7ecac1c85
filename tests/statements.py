"""The statements of a thread, on its connection and on the journal's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import connection, connections
from django.db.backends.signals import connection_created
from django.test.utils import CaptureQueriesContext

from agentruns.journal.connection import own_alias


@contextmanager
def on_each_connection(enter: Callable[[Any], Any]) -> Iterator[None]:
    """Enter a context for this thread's connection, for the journal's, and for each that it opens."""
    here = threading.get_ident()
    with ExitStack() as stack:
        for alias in {connection.alias, own_alias(connection.alias)}:
            stack.enter_context(enter(connections[alias]))

        def opened(**facts: Any) -> None:
            if threading.get_ident() == here and facts["connection"].alias.endswith("of the journal"):
                stack.enter_context(enter(facts["connection"]))

        connection_created.connect(opened)
        stack.callback(connection_created.disconnect, opened)
        yield


def statement_wrapper(wrapper: Callable[..., Any]) -> Any:
    """Install an execute wrapper on this thread's connection and on the journal's own."""
    return on_each_connection(lambda one: one.execute_wrapper(wrapper))


@contextmanager
def captured_statements() -> Iterator[list[str]]:
    """Collect the statements of this thread, connection by connection."""
    statements: list[str] = []

    @contextmanager
    def capture(one: Any) -> Iterator[None]:
        with CaptureQueriesContext(one) as captured:
            yield
        statements.extend(query["sql"] for query in captured.captured_queries)

    with on_each_connection(capture):
        yield statements
