"""Texts about a call: one line for lists, notifications and logs, and the tool's own texts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from reprlib import Repr
from typing import Any

from agentruns.utils import json as canonical
from agentruns.utils.characters import escaped
from agentruns.utils.db import always_rollback, is_in_test_case
from agentruns.utils.lanes import Lane
from agentruns.utils.redaction import MASK, redacted

__all__ = ["MASK", "call_text", "in_time", "members_text", "one_line", "value_text"]

PATIENCE = 2.0  # seconds for the texts of all tools about the calls on a page

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlong = 20
_SHORT.maxdict = _SHORT.maxlist = 3
_SHORT.maxlevel = 2
_lane = Lane("agentruns-card", 4)


def in_time(ask: Callable[[], None]) -> None:
    """Run `ask`, which calls functions of the project, in another thread; wait at most PATIENCE seconds.

    `ask` must store each result as soon as it has one, because a later function may hang. In a TestCase it
    runs in this thread, without a limit, because the connections of other threads would not see the test's
    rows.
    """
    if is_in_test_case():
        with always_rollback():
            ask()
        return
    with suppress(TimeoutError):
        _lane(partial(copy_context().run, ask), PATIENCE)


def one_line(text: str, limit: int = 200) -> str:
    """Put `text` on one line of at most `limit` characters; escape characters that hide or reorder text."""
    text = " ".join(escaped(text[: limit * 4]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Format a call as `name(a=1, b='x', c=***)`, shortened and redacted; the caller masks arguments."""
    parts = [f"{key}={value_text(redacted(value))}" for key, value in arguments.items()]
    return one_line(f"{name}({', '.join(parts)})")


def members_text(value: Any) -> str:
    """Format a JSON value as `status = paid, total = 20.00`; "" for None."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {members_text(each)}" for name, each in value.items())
    return value if isinstance(value, str) else "" if value is None else canonical.dumps(value)


def value_text(value: Any) -> str:
    """Shorten a value to a few dozen characters, as Python writes it; a mask stays as it is."""
    try:
        return MASK if value == MASK else _SHORT.repr(value)
    except Exception:
        return "…"
