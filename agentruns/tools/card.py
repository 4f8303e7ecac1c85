"""Texts about a call: one line for lists, notifications and logs, and what its tool says in time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from reprlib import Repr
from typing import Any

from agentruns.utils.characters import escaped
from agentruns.utils.db import always_rollback, is_in_test_case
from agentruns.utils.lanes import Lane
from agentruns.utils.redaction import MASK, redacted

__all__ = ["MASK", "call_text", "in_time", "one_line"]

PATIENCE = 2.0  # seconds for what all tools of a page say of their calls

_LIMIT = 200
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlong = 20
_SHORT.maxdict = _SHORT.maxlist = 3
_SHORT.maxlevel = 2
_lane = Lane("agentruns-card", 4)


def in_time(ask: Callable[[], None]) -> None:
    """Run the project's functions about calls beside a request, which waits no longer than PATIENCE.

    What `ask` finds it keeps one by one, as later ones may hang. It has connections of its own, except in a
    TestCase, whose rows these would not see.
    """
    if is_in_test_case():
        with always_rollback():
            ask()
        return
    with suppress(TimeoutError):
        _lane(partial(copy_context().run, ask), PATIENCE)


def one_line(text: str, limit: int = _LIMIT) -> str:
    """Return `text` on one line, with characters that hide or reorder text as escapes."""
    text = " ".join(escaped(text[: limit * 4]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def call_text(name: str, arguments: dict[str, Any], masked: Collection[str] = ()) -> str:
    """Return `name(a=1, b='x')`, shortened."""
    parts = [
        f"{key}={MASK if key in masked else _value(redacted(value))}" for key, value in arguments.items()
    ]
    return one_line(f"{name}({', '.join(parts)})")


def _value(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except Exception:
        return "…"
