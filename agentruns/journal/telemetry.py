"""What listens to runs, named by AGENTRUNS_TELEMETRY; an error of it is logged and never touches a run.

A listener is told ids, names, numbers and kinds of errors, and nothing of what was said, asked or returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

from django.db import connections, transaction
from django.utils.module_loading import import_string

from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.utils.redaction import bound, driven, get_logger

logger = get_logger("agentruns.telemetry")

T = TypeVar("T")
Facts = dict[str, Any]

_made: dict[str, Listener | None] = {}  # by dotted path
_making = threading.Lock()
_complained: set[str] = set()


class Listener(Protocol):
    """What AGENTRUNS_TELEMETRY names: a class, or a function that returns one, called without arguments."""

    def span(self, name: str, facts: Facts) -> AbstractContextManager[object]:
        """Surround a "drive", a "model" request or a "tool" call; at its end `facts` holds more."""

    def event(self, name: str, facts: Facts) -> None:
        """Hear of what has happened and is committed."""

    def carried(self) -> AbstractContextManager[object]:
        """Return what makes another thread, that enters it, part of the span open in this one."""


class span:
    """Something of a run that takes time; the block adds what it learns to what `with` gives it.

    `facts` is called only when somebody listens.
    """

    __slots__ = ("_facts", "_name", "_open")

    def __init__(self, name: str, facts: Callable[[], Facts]) -> None:
        self._name = name
        self._facts = facts
        self._open: AbstractContextManager[object] | None = None

    def __enter__(self) -> Facts:
        told: Facts = {}
        heard = listener()
        if heard is not None:
            self._open = _guarded(self._begin, heard, told)
        return told

    def __exit__(self, *exc_info: Any) -> None:
        if self._open is not None:
            _guarded(self._open.__exit__, *exc_info)

    def _begin(self, heard: Listener, told: Facts) -> AbstractContextManager[object]:
        told.update(self._facts())
        surrounding = heard.span(self._name, told)
        surrounding.__enter__()
        return surrounding


class carried:
    """Makes the thread that enters it part of what the thread that made it does."""

    __slots__ = ("_driven", "_entered", "_open")

    def __init__(self) -> None:
        heard = listener()
        self._open = None if heard is None else _guarded(heard.carried)
        self._driven = bound(*driven())
        self._entered = False

    def __enter__(self) -> None:
        self._driven.__enter__()
        if self._open is not None:
            self._entered = _guarded(self._enter) is True

    def __exit__(self, *exc_info: Any) -> None:
        if self._open is not None and self._entered:
            _guarded(self._open.__exit__, *exc_info)
        self._driven.__exit__(None, None, None)

    def _enter(self) -> bool:
        if self._open is not None:
            self._open.__enter__()
        return True


def event(name: str, facts: Facts) -> None:
    """Tell of something that has happened."""
    heard = listener()
    if heard is not None:
        _guarded(heard.event, name, facts)


def stored(batch: Batch, alias: str | None) -> None:
    """Tell of rows just appended, once they are committed; `alias` is None for a stateless run."""
    heard = listener()
    if heard is not None:
        _guarded(_when_committed, heard, batch, alias)


def listener() -> Listener | None:
    """Return who listens in this process, made at the first question; None if nobody does."""
    path = settings.TELEMETRY
    if not path:
        return None
    if path not in _made:
        with _making:
            if path not in _made:
                _made[path] = _guarded(_make, path)
    return _made[path]


def _make(path: str) -> Listener:
    made: Listener = import_string(path)()
    return made


def _guarded(act: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return act(*arguments)
    except Exception as error:
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        if kind not in _complained:  # it may fail at every step of every run
            _complained.add(kind)
            logger.exception("AGENTRUNS_TELEMETRY failed; the run goes on. Said once per kind of error.")
        return None


def _when_committed(heard: Listener, batch: Batch, alias: str | None) -> None:
    happened = list(_happened(batch))
    if not happened:
        return
    tell = partial(_tell, heard, happened)
    if alias is not None and connections[alias].in_atomic_block:
        transaction.on_commit(tell, using=alias, robust=True)
    else:
        tell()


def _tell(heard: Listener, happened: list[tuple[str, Facts]]) -> None:
    for name, facts in happened:
        _guarded(heard.event, name, facts)


def _happened(batch: Batch) -> Iterator[tuple[str, Facts]]:
    """Yield what rows mean to a listener, and of their payloads only the words that are our own."""
    run = batch.state.run
    for row in batch.rows:
        told, payload = _TOLD.get(row.kind), row.payload
        if told is None or events.COPIED in payload:
            continue
        facts: Facts = {"run_id": str(row.run_id), "agent": run.agent, "epoch": row.epoch}
        if row.tool_name:
            facts["tool"] = row.tool_name
        name, keys = told
        facts |= {key: payload[key] for key in keys if key in payload}
        if row.kind == events.APPROVAL_DECIDED and "edited" in payload:
            facts["verb"] = "edit"
        if row.kind in events.CLOSING:
            facts["status"] = events.CLOSING[row.kind]
        yield name, facts


_TOLD: dict[str, tuple[str, tuple[str, ...]]] = {
    events.APPROVAL_DECIDED: ("decision", ("verb",)),
    events.ORPHAN_FOUND: ("orphan", ("action", "declares")),
    events.ORPHAN_RESOLVED: ("verdict", ("verdict",)),
    events.LATE_RESULT: ("late_result", ()),
    **dict.fromkeys(events.CLOSING, ("ended", ())),
}
