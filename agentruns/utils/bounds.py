"""Limits of the data of a run. Each is checked where a value arrives, so that stored values can be read."""

from __future__ import annotations

from typing import Any

from agentruns.utils import json as canonical

MAX_DEPTH = 64  # levels of objects and lists in the input of a call, its edit, and a body of the API
MAX_RESULT_DEPTH = 100  # the same of a result; a deeper part becomes text
MAX_ROW_DEPTH = 128  # the same of a journal row; far below what Python's recursion limit bears
MAX_CALLS = 64  # calls taken from one reply
MAX_APPROVALS = 1_000  # people that one call can need
ANSWER_BYTES = 50 * 2**20  # of an MCP server
LEAST_SENT = 1_000  # characters of a result in a request, with the note about what is left out
TEXT_LENGTH = 100_000  # characters of a task and of a result that a person types, in the console and the API
REASON_LENGTH = 2_000  # characters of a reason, a note, and evidence
NAME_LENGTH = 200  # characters of a session's or an idempotency key, of `approvers`, of a person's name
EVENT_LENGTH = 2**20  # characters of an event's payload as JSON
OWN_EVENTS = "agentruns."  # beginning of the names of events that only this package delivers


def check_name(what: str, name: str) -> None:
    """Check a name or key by `is_name`; `what` describes it in the error.

    Raises TypeError if it is no text, and ValueError if it is too long or not printable.
    """
    if not isinstance(name, str):
        raise TypeError(f"The {what} must be a text, not {name!r}.")
    # Databases disagree about these: what one stores another refuses, or cuts.
    if not is_name(name):
        raise ValueError(
            f"The {what} must be at most {NAME_LENGTH} printable characters, not {len(name)}: {name[:50]!r}."
        )


def is_name(text: str) -> bool:
    """Check whether a text is printable and at most NAME_LENGTH long, so that every database can store it."""
    return len(text) <= NAME_LENGTH and text.isprintable()


def said(value: Any) -> str:
    """Convert a context value to the text by which a search finds it; "" if the value cannot be searched.

    Searchable are short, printable texts, numbers and booleans.
    """
    if not isinstance(value, str | int | float):  # a bool is an int
        return ""
    text = value if isinstance(value, str) else canonical.dumps(value)
    return text if is_name(text) else ""


def is_deeper(value: Any, levels: int) -> bool:
    """Check whether objects and lists are nested more than `levels` deep; true for a circular value."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(levels):
        if not level:
            return False
        insides = [each.values() if isinstance(each, dict) else each for each in level]
        found = [inner for inside in insides for inner in inside if isinstance(inner, _CONTAINERS)]
        level = list({id(each): each for each in found}.values())
    return bool(level)


_CONTAINERS = (dict, list, tuple)
