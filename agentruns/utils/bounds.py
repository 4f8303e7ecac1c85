"""Bounds of what a run may hold, each checked where a value comes in: what is stored can be read."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64  # levels of objects and lists in the input of a call, its edit, and a body of the API
MAX_RESULT_DEPTH = 100  # the same of a result; what lies deeper is kept as text
MAX_ROW_DEPTH = 128  # the same of a journal row; far below what Python's recursion limit bears
MAX_CALLS = 64  # calls taken from one reply
MAX_APPROVALS = 1_000  # people that one call can need
NAME_LENGTH = 200  # characters of a session's or an idempotency key, of `approvers`, of a person's name


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether objects and lists are nested more than `levels` deep; true for a circular value."""
    level = _containers([value])
    for _ in range(levels):
        if not level:
            return False
        level = [inner for each in level for inner in _containers(each)]
        level = list({id(each): each for each in level}.values())
    return bool(level)


def _containers(container: Any) -> list[Any]:
    inside = container.values() if isinstance(container, dict) else container
    return [each for each in inside if isinstance(each, dict | list | tuple)]
