"""Telemetry: the listener that AGENTRUNS_TELEMETRY names; its errors are logged and never reach a run.

The listener receives ids, names, numbers and kinds of errors, but no text of a person, a model or a tool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from django.db import connections, transaction
from django.utils.module_loading import import_string

from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.events import Row
from agentruns.utils.forks import renewed
from agentruns.utils.redaction import bound, driven, get_logger, secrets

logger = get_logger("agentruns.telemetry")

T = TypeVar("T")
Facts = dict[str, Any]

EVENT_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    kind: kind.telemetry for kind in events.KINDS.values() if kind.telemetry
}

_made: dict[str, Listener | None] = {}  # by dotted path
_making = renewed(threading.Lock())
_complained: set[str] = set()


class Listener(Protocol):
    """The object that AGENTRUNS_TELEMETRY names: a class or a factory, called without arguments."""

    def span(self, name: str, facts: Facts) -> AbstractContextManager[object]:
        """Build a context manager for a "drive", "model" request or "tool" call; `facts` grows inside."""

    def event(self, name: str, facts: Facts) -> None:
        """Receive an event that has happened and is committed."""

    def carried(self) -> AbstractContextManager[object]:
        """Build a context manager in which another thread works within the current span of this thread."""


@contextmanager
def span(name: str, facts: Callable[[], Facts]) -> Iterator[Facts]:
    """Report a part of a run as a span of time; yield a dict to which the block adds attributes.

    `facts` is called only if there is a listener.
    """
    attributes: Facts = {}
    active = listener()

    def begin(active: Listener) -> AbstractContextManager[object]:
        attributes.update(facts())
        return _entered(active.span(name, attributes))

    with ExitStack() as stack:
        if active is not None and (begun := _guarded(begin, active)) is not None:
            stack.push(lambda *exc_info: _guarded(begun.__exit__, *exc_info) and None)
        yield attributes


def carried() -> AbstractContextManager[None]:
    """Build a context manager that adds the entering thread to the span of the thread that built it."""
    active = listener()
    opened = None if active is None else _guarded(active.carried)
    logged = bound(*driven(), secrets())

    @contextmanager
    def carry() -> Iterator[None]:
        with logged, ExitStack() as stack:
            if opened is not None and _guarded(_entered, opened) is not None:
                stack.push(lambda *exc_info: _guarded(opened.__exit__, *exc_info) and None)
            yield

    return carry()


def event(name: str, facts: Facts) -> None:
    """Report an event that has no row in the journal; do nothing without a listener."""
    if (active := listener()) is not None:
        _guarded(active.event, name, facts)


def stored(batch: Batch, alias: str | None) -> None:
    """Report the events of a stored batch once, after its commit; `alias` is None for a stateless run."""
    if (active := listener()) is None or batch.quiet:
        return
    reports = [report for row in batch.rows if (report := _guarded(_report, row, batch.state.run.agent))]
    if not reports:
        return

    def report_all() -> None:
        if batch.reported:  # the append raised an error after this, and then the rows were found stored
            return
        batch.reported = True
        for name, facts in reports:
            _guarded(active.event, name, facts)

    if alias is not None and connections[alias].in_atomic_block:
        transaction.on_commit(report_all, using=alias, robust=True)
    else:
        _guarded(report_all)


def listener() -> Listener | None:
    """Find this process's listener, built at first use; None if no listener is set or building it failed."""
    if not (path := settings.TELEMETRY):
        return None
    if path not in _made:
        with _making:
            if path not in _made:
                _made[path] = _guarded(lambda path: import_string(path)(), path)
    return _made[path]


def _entered(manager: AbstractContextManager[object]) -> AbstractContextManager[object]:
    manager.__enter__()
    return manager


def _guarded(act: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return act(*arguments)
    except Exception as error:
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        if kind not in _complained:  # it may fail at every step of every run
            _complained.add(kind)
            logger.exception("AGENTRUNS_TELEMETRY failed; the run goes on. Logged once per kind of error.")
        return None


def _report(row: Row, agent: str) -> tuple[str, Facts] | None:
    """Build the event of a row, without free text; None for a copied row and for a kind without an event."""
    if row.kind not in EVENT_ATTRIBUTES or events.COPIED in row.payload:
        return None
    name, *keys = EVENT_ATTRIBUTES[row.kind]
    facts: Facts = {"run_id": str(row.run_id), "agent": agent, "epoch": row.epoch}
    if row.tool_name:
        facts["tool"] = row.tool_name
    facts |= {key: row.payload[key] for key in keys if key in row.payload}
    if row.kind == events.APPROVAL_DECIDED and "edited" in row.payload:
        facts["verb"] = "edit"
    if row.kind in events.CLOSING:
        facts["status"] = events.CLOSING[row.kind]
    return name, facts
