"""AGENTRUNS_REDACT: remove secrets from every text that is shown, exported or logged.

The journal, the model and the tools keep the true values. Log records also get the id of their run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from agentruns.conf import settings

FAILED = "[not shown: AGENTRUNS_REDACT failed]"


class Driven(NamedTuple):
    """The run a thread is working on, with the epoch of its lease or 0."""

    run_id: str = ""
    epoch: int = 0


NOTHING = Driven()

_driven: ContextVar[Driven] = ContextVar("agentruns_driven", default=NOTHING)

logger = logging.getLogger("agentruns.redaction")  # its records contain nothing to redact


def is_on() -> bool:
    """Return whether the project redacts anything."""
    return settings.REDACT is not None


def redact(text: str) -> str:
    """Return `text` redacted by the project's function; if that fails, the whole text is hidden."""
    return _made(text) if is_on() else text


def redacted(value: Any) -> Any:
    """Return a JSON value with all its texts, keys and integers redacted."""
    return _walk(value) if is_on() else value


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose records name their run and are redacted before any handler sees them."""
    made = logging.getLogger(name)
    if not any(isinstance(each, RedactingFilter) for each in made.filters):
        made.addFilter(RedactingFilter())
    return made


def driven() -> Driven:
    """Return the run this thread is working on."""
    return _driven.get()


@contextmanager
def bound(run_id: UUID | str, epoch: int = 0) -> Iterator[None]:
    """Attribute this thread's log records to a run."""
    token = _driven.set(Driven(str(run_id), epoch))
    try:
        yield
    finally:
        _driven.reset(token)


class RunFilter(logging.Filter):
    """Give records a `run_id` and `epoch`, unless they have their own: "" and 0 without a run."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        if not hasattr(record, "run_id"):
            record.run_id, record.epoch = driven()
        return True


class RedactingFilter(RunFilter):
    """Reduce a record to redacted text, without arguments and without an exception and its variables."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        super().filter(record)
        try:
            if not is_on():
                return True
        except ImproperlyConfigured:  # a tool tested without Django
            return True
        try:
            record.msg = redact(record.getMessage())
        except Exception:  # an argument that cannot be converted to text
            record.msg = FAILED
        record.args = ()
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True


def _walk(value: Any) -> Any:
    if isinstance(value, str):
        return _made(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if (shown := _made(str(value))) == str(value) else shown  # as a credit card number
    if isinstance(value, dict):
        return _walk_dict(value)
    if isinstance(value, list):
        return [_walk(item) for item in value]
    return tuple(_walk(item) for item in value) if isinstance(value, tuple) else value


def _walk_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, item in value.items():
        name = shown = _walk(key)
        count = 1
        while name in found:  # two secrets may be redacted to the same text; keep both entries
            count += 1
            name = f"{shown} ({count})"
        found[name] = _walk(item)
    return found


def _made(text: str) -> str:
    try:
        function: Callable[[str], object] | None = settings.redact
        made = text if function is None else function(text)
    except Exception as error:
        # Without the traceback and the error's text: either may quote the secret.
        logger.error("AGENTRUNS_REDACT failed with %s: the text is not shown.", type(error).__name__)
        return FAILED
    if not isinstance(made, str):
        logger.error("AGENTRUNS_REDACT returned %s, not str: the text is not shown.", type(made).__name__)
        return FAILED
    return made
