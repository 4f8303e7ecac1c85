"""What a handler is told about the call it serves."""

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
    The three private callables are the engine's; without them the methods do nothing, as in a unit test.
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
        """Tell the engine that a long handler is alive."""
        if self._heartbeat is not None:
            self._heartbeat()

    def progress(self, text: str) -> None:
        """Say how far a long handler is."""
        if self._progress is not None:
            self._progress(text)
        else:
            logger.info("%s %s: %s", self.tool_name, self.call_id, text)
