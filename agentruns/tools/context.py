"""The context a handler receives, and the outcomes it and `reconcile` return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """One call of one tool, as its handler, gate and reconcile function see it.

    `idempotency_key` is the same for every attempt of this call and different for every other call.
    The engine sets the three private callables; without them, as in a unit test, the methods do nothing.
    """

    run_id: str
    call_id: str
    tool_name: str
    idempotency_key: str
    session_key: str | None = None
    attempt: int = 1
    actor: Any = None
    approved_by: tuple[str, ...] = ()
    _is_cancelled: Callable[[], bool] | None = field(default=None, repr=False, compare=False)
    _heartbeat: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    _progress: Callable[[str], object] | None = field(default=None, repr=False, compare=False)

    def is_cancelled(self) -> bool:
        """Return whether the run was cancelled or taken over, so that a long handler can stop early."""
        return self._is_cancelled() if self._is_cancelled is not None else False

    def heartbeat(self) -> None:
        """Tell the engine that a long handler is still alive."""
        if self._heartbeat is not None:
            self._heartbeat()

    def progress(self, text: str) -> None:
        """Report how far a long handler has got."""
        if self._progress is not None:
            self._progress(text)
        else:
            logger.info("%s %s: %s", self.tool_name, self.call_id, text)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A handler's result as JSON, with flags for what the conversion changed.

    `flags`: `{"misfit": text}` if it does not fit the return annotation, `{"stringified": True}` if a
    part of it was not JSON and is stored as text.
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
    """The outside world cannot tell; a person decides."""

    reason: str = ""
