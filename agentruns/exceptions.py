"""Every error agentruns raises on purpose. Texts name the object, its state and the next step."""

from __future__ import annotations

from datetime import datetime


class AgentRunsError(Exception):
    """Base class of every error of this package."""


class UnknownAgentError(AgentRunsError, LookupError):
    """No agent of that name and version is registered in this process."""


class ContentError(AgentRunsError, ValueError):
    """A block of an input is none, or not what it says it is."""


class ContentTooLargeError(ContentError):
    """A file, or all of an input's files together, are larger than they may be."""


class ContentTypeError(ContentError):
    """A file is of a type that is not taken."""


class NotDurableError(AgentRunsError):
    """A durable operation was asked for where nothing can be made durable."""


class MemoryStoreNotDurableError(NotDurableError):
    """A session was given a store that forgets everything when the process ends."""


class NotFoundError(AgentRunsError, LookupError):
    """There is no such approval, token or call, or it is not the caller's; both read the same."""


class DurableRunNotFoundError(NotFoundError):
    """There is no such run, or it is not the caller's; both read the same."""


class DurableConfigMismatchError(AgentRunsError):
    """The registered agent differs from the definition the run was started with.

    `parts` lists what differs; the run is left exactly as resumable as before.
    """

    def __init__(self, message: str, parts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.parts = parts


class SwitchedOffError(DurableConfigMismatchError):
    """The agent of the run is switched off; the run waits until it is switched on again."""


class SessionBusyError(AgentRunsError):
    """The session has an unfinished run, or the run is live in another process.

    `run_id` names it; `lease_expires_at` is set when a live process holds it.
    """

    def __init__(
        self, message: str, run_id: str | None = None, lease_expires_at: datetime | None = None
    ) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.lease_expires_at = lease_expires_at


class JournalLockedError(SessionBusyError):
    """Another transaction keeps a lock for too long; nothing was changed."""


class SessionAccessDeniedError(AgentRunsError):
    """The session belongs to somebody else; a user is told the same as of a session not found."""


class AmbiguousSessionError(AgentRunsError, LookupError):
    """A session's key was given without a scope, and several scopes have it; `scopes` names them."""

    def __init__(self, message: str, scopes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.scopes = scopes


class QuotaExceededError(AgentRunsError):
    """The user has started as many runs as they may for now; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PermissionDeniedError(AgentRunsError):
    """The actor may see the object but may not do this to it."""


class RunStateError(AgentRunsError):
    """The run's state does not allow what was asked; `run_id` names it where the caller may not know it."""

    def __init__(self, message: str, run_id: str | None = None) -> None:
        super().__init__(message)
        self.run_id = run_id


class RenderingError(AgentRunsError):
    """A function that makes instructions or a choice of tools failed; its own words are not repeated."""


class JournalUnreadableError(AgentRunsError, ValueError):
    """The journal of a session is damaged, so nothing can be done with its runs until it is mended."""


class ApprovalStateError(AgentRunsError):
    """The approval was decided, expired, cancelled or changed since it was seen."""


class LeaseLostError(AgentRunsError):
    """Another process took this run over, or the run ended; this process may write no more of it."""


class JournalRewoundError(LeaseLostError):
    """The database has lost rows of the run that a worker had seen committed; the run is held for staff."""


class JournalConflictError(AgentRunsError):
    """Other rows were appended first. Internal: always re-read and retried."""


class BudgetExceededError(AgentRunsError):
    """A budget of the run is used up; named in the error of a run that failed by it."""


class PayloadError(AgentRunsError):
    """A stored content that the journal refers to is missing or was altered."""


class ToolRefused(AgentRunsError):
    """A tool did nothing, and says why.

    Raised by a handler before its effect, or when the outside world refused it. The model gets an error that
    says that nothing happened.
    """


class ToolDurabilityError(AgentRunsError):
    """The outcome of a tool call is not known: it may have happened zero or one times.

    Raised by a handler that cannot tell whether its effect happened. The model sees `kind` for any call in
    doubt.
    """

    kind = "tool-durability-error"
