"""What calling, and asking after, a tool comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a handler returned, as JSON, and what had to be done to it.

    `flags`: `{"misfit": text}` when it does not fit the return annotation, `{"stringified": True}` when
    a part of it was not JSON and is stored as text.
    """

    content: Any
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Occurred:
    """The effect happened; `result` becomes the result of the call."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class NotOccurred:
    """The effect did not happen; the handler is entered again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The outside world could not say; a person decides."""

    reason: str = ""
