"""One-line descriptions of a call, for lists, notifications and logs."""

from __future__ import annotations

from collections.abc import Collection
from reprlib import Repr
from typing import Any

from agentruns.utils.characters import escaped
from agentruns.utils.redaction import MASK, redacted

__all__ = ["MASK", "call_text", "one_line"]

_LIMIT = 200
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlong = 20
_SHORT.maxdict = _SHORT.maxlist = 3
_SHORT.maxlevel = 2


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
