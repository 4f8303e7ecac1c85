"""The context of a run or a call for the functions of a project, and the outcomes of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentruns.exceptions import LeaseLostError
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRun:
    """A run as every context tells of it: `actor` is who started it."""

    run_id: str
    session_key: str | None = None
    scope: str = ""
    context: dict[str, Any] = field(default_factory=dict)
    actor: Any = None
    _user: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def user(self) -> Any:
        """The Django user whose run it is, read on first use; None for the program. NotFoundError if gone."""
        return self._user() if self._user is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext(OfRun):
    """A run that is about to start, as the functions `instructions` and `tools_for` of its agent see it."""

    agent: str
    version: str = "1"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext(OfRun):
    """One call of one tool, as its handler, gate and reconcile function see it.

    `idempotency_key` is the same for every attempt of this call and different for every other call.
    The engine sets the private callables; without them, as in a unit test, the methods do nothing.
    """

    call_id: str
    tool_name: str
    idempotency_key: str
    attempt: int = 1
    approved_by: tuple[str, ...] = ()
    _is_cancelled: Callable[[], bool] | None = field(default=None, repr=False, compare=False)
    _heartbeat: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    _progress: Callable[[str], object] | None = field(default=None, repr=False, compare=False)
    _covers: Callable[..., bool] = field(default=lambda extend=False: True, repr=False, compare=False)

    def is_cancelled(self) -> bool:
        """Check whether the run was cancelled or taken over, so that a long handler can stop early."""
        return self._is_cancelled() if self._is_cancelled is not None else False

    def heartbeat(self) -> None:
        """Tell the engine that a long handler is still alive."""
        if self._heartbeat is not None:
            self._heartbeat()

    def require_lease(self) -> None:
        """Raise LeaseLostError if another worker may have the run: for right before a late effect."""
        if not self._covers(extend=True):
            text = "the lease is over, and another worker may have the run. Stop before you act."
            raise LeaseLostError(f"Call {self.call_id} of run {self.run_id}: {text}")

    def _look(self) -> None:
        if not self._covers():
            raise NotEntered(self.call_id)

    def progress(self, text: str) -> None:
        """Report how far a long handler has got."""
        if self._progress is not None:
            self._progress(text)
        else:
            logger.info("%s %s: %s", self.tool_name, self.call_id, text)


class NotEntered(Exception):
    """The lease was over, or nobody waited any more, right before the handler's first instruction."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A handler's result as JSON, with flags for what the conversion changed.

    `flags`: `{"misfit": text}` if it does not fit the return annotation, `{"stringified": True}` if a
    part of it was not JSON and is stored as text, `{"stored": [files]}` if the content is blocks.
    """

    content: Any
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Occurred:
    """The effect happened; `result` becomes the result of the call."""

    result: Any = None
    _stored: list[dict[str, Any]] | None = field(default=None, repr=False, compare=False)  # files of blocks


@dataclass(frozen=True, slots=True)
class NotOccurred:
    """The effect did not happen; the handler is entered again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The outside world cannot tell; a person decides."""

    reason: str = ""
