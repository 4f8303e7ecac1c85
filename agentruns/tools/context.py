"""The context of a run or a call for the functions of a project, and the verdicts of `reconcile`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from agentruns.exceptions import LeaseLostError
from agentruns.utils.bounds import check_name
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tools")

LONGEST_WAIT = timedelta(days=3650)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRun:
    """The members of a run that every context has. `actor` is the user who started the run."""

    run_id: str
    session_key: str | None = None
    scope: str = ""
    context: dict[str, Any] = field(default_factory=dict)
    actor: Any = None
    _user: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def user(self) -> Any:
        """The user who owns the run, or None if no user does; raises NotFoundError if the user is gone."""
        return self._user() if self._user is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext(OfRun):
    """A run that is about to start, for the functions `instructions` and `tools_for` of its agent."""

    agent: str
    version: str = "1"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext(OfRun):
    """One call of a tool, for its handler, its `requires_approval` and its `reconcile`.

    `idempotency_key` is the same for every attempt of this call, and different for every other call. For
    `requires_approval`, which runs before the call is recorded, it is "" and `attempt` is 0. The engine sets
    the private callables. Without them, as in a unit test, the lease always holds and nothing is cancelled.
    """

    call_id: str
    tool_name: str
    idempotency_key: str
    attempt: int = 1
    approved_by: tuple[str, ...] = ()
    _is_cancelled: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    _heartbeat: Callable[[], object] = field(default=lambda: None, repr=False, compare=False)
    _result: Callable[[str], str] = field(default=lambda id: "", repr=False, compare=False)
    _covers: Callable[..., bool] = field(default=lambda extend=False: True, repr=False, compare=False)

    def is_cancelled(self) -> bool:
        """Check whether a handler should stop: its run is cancelled or taken over, or its time is over."""
        return self._is_cancelled()

    def heartbeat(self) -> None:
        """Report that a long handler is alive; allow its lease to be extended for AGENTRUNS_TOOL_TIMEOUT."""
        self._heartbeat()

    def require_lease(self) -> None:
        """Raise LeaseLostError if another worker may have the run, or if this call was given up.

        Extends the lease first if necessary. Call this right before a late effect.
        """
        if not self._covers(extend=True):
            text = "the lease is over, and another worker may have the run. Stop before you act."
            raise LeaseLostError(f"Call {self.call_id} of run {self.run_id}: {text}")

    def _look(self) -> None:
        if not self._covers():
            raise NotEntered(self.call_id)

    def progress(self, text: str) -> None:
        """Log the progress of a long handler, by the logger agentruns.tools; nothing is stored or shown."""
        logger.info("%s %s: %s", self.tool_name, self.call_id, text)


class NotEntered(Exception):
    """Raised right before a handler's first instruction if the lease is over or the call was given up."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A handler's result as JSON, with flags about the conversion.

    `flags`: `{"misfit": text}` if the result does not fit the return annotation, `{"stringified": True}` if a
    part of it was not JSON and is stored as text, `{"stored": [files]}` if the content is blocks.
    """

    content: Any
    flags: dict[str, Any] = field(default_factory=dict)
    pending: Pending | None = None  # then there is no content yet


@dataclass(frozen=True, slots=True)
class Pending:
    """The return value of a handler whose call gets its result later, with the event of this key.

    `key` is None for the call's idempotency key. Without a `timeout` the call waits until the event comes.
    Raises TypeError and ValueError for values that no event can have.
    """

    key: str | None = None
    timeout: timedelta | None = None
    _name: str = field(default="", repr=False)  # of the event, if the tool's call names it
    _until: datetime | None = field(default=None, repr=False)
    _every: float | None = field(default=None, repr=False)  # seconds until the server's task is polled

    def __post_init__(self) -> None:
        check_name("name of an event", self._name)
        if self.key is not None:
            check_name("key of Pending", self.key)
        if self.key == "":
            raise ValueError("The key of Pending is empty. Leave it out to wait under the idempotency key.")
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(f"The timeout of Pending must be a timedelta, not {self.timeout!r}.")
        if self.timeout is not None and not timedelta() < self.timeout <= LONGEST_WAIT:
            raise ValueError("The timeout of Pending must be positive and at most ten years.")


@dataclass(frozen=True, slots=True)
class Occurred:
    """The verdict that the effect happened; `result` becomes the result of the call."""

    result: Any = None
    _stored: list[dict[str, Any]] | None = field(default=None, repr=False, compare=False)  # files of blocks


@dataclass(frozen=True, slots=True)
class NotOccurred:
    """The verdict that the effect did not happen; the handler is entered again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The verdict that nobody can tell whether the effect happened; a person decides."""

    reason: str = ""
