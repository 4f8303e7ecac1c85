"""The errors that agentruns raises on purpose. Their texts name the object, its state and the next step."""

from __future__ import annotations

from datetime import datetime


class AgentRunsError(Exception):
    """Base class of every error of this package."""


class UnknownAgentError(AgentRunsError, LookupError):
    """Raised if no agent with the given name and version is registered in this process."""


class ContentError(AgentRunsError, ValueError):
    """Raised for an invalid block of an input, such as a file that is not of its declared type."""


class ContentTooLargeError(ContentError):
    """Raised if a file, or all files of an input together, are larger than allowed."""


class ContentTypeError(ContentError):
    """Raised for a file of a type that is not accepted."""


class NotDurableError(AgentRunsError):
    """Raised if an operation cannot be made durable, as in an open transaction or without a session."""


class MemoryStoreNotDurableError(NotDurableError):
    """Raised if a session is given together with a store that forgets everything when the process ends."""


class NotFoundError(AgentRunsError, LookupError):
    """Raised if an approval, token, call or user is missing or hidden, both with the same text."""


class DurableRunNotFoundError(NotFoundError):
    """Raised if a run does not exist or the actor may not see it; the text is the same in both cases."""


class DurableConfigMismatchError(AgentRunsError):
    """Raised if a run's agent is missing here, or differs from the definition that the run was started with.

    `parts` names the parts that differ. The run is unchanged, and can be resumed as before.
    """

    def __init__(self, message: str, parts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.parts = parts


class SwitchedOffError(DurableConfigMismatchError):
    """Raised if the run's agent is switched off; the run waits until the agent is switched on again."""


class SessionBusyError(AgentRunsError):
    """Raised if the session has another unfinished run, another process drives the run, or a race was lost.

    `run_id` names the run; it is None after a lost race. `lease_expires_at` is set if a process has its
    lease.
    """

    def __init__(
        self, message: str, run_id: str | None = None, lease_expires_at: datetime | None = None
    ) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.lease_expires_at = lease_expires_at


class JournalLockedError(SessionBusyError):
    """Raised if another transaction keeps a lock for too long; nothing was changed."""


class SessionAccessDeniedError(AgentRunsError):
    """Raised if a session does not exist or is not the actor's; a user gets the same text in both cases."""


class AmbiguousSessionError(AgentRunsError, LookupError):
    """Raised for a session key without a scope that several or only other scopes have: `scopes`."""

    def __init__(self, message: str, scopes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.scopes = scopes


class QuotaExceededError(AgentRunsError):
    """Raised if a user or visitor has used up an hour's runs and messages; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PermissionDeniedError(AgentRunsError):
    """Raised if the actor may see the object, but lacks the permission for this action."""


class RunStateError(AgentRunsError):
    """Raised if the state of a run, a session or an export does not allow the action.

    `run_id` names the run for a caller who did not name it, as if an idempotency key belongs to another task.
    """

    def __init__(self, message: str, run_id: str | None = None) -> None:
        super().__init__(message)
        self.run_id = run_id


class RenderingError(AgentRunsError):
    """Raised if an agent's function for its instructions or tools fails or returns an unusable value."""


class JournalUnreadableError(AgentRunsError, ValueError):
    """Raised if a session's journal is damaged; no action on its runs is possible until it is repaired."""


class ApprovalStateError(AgentRunsError):
    """Raised if an approval is no longer pending, or does not allow the decision, such as an invalid edit."""


class RuleStateError(AgentRunsError):
    """Raised if the status of a standing rule, or its tool as it is now, does not allow a change."""


class LeaseLostError(AgentRunsError):
    """Raised if this process has lost a run's lease, or the run ended; it must write no more rows."""


class JournalRewoundError(LeaseLostError):
    """Raised if the database lost rows of the run that a worker had seen committed; the run is paused."""


class JournalConflictError(AgentRunsError):
    """Raised if other rows were appended first. agentruns repeats the append, but not in your transaction."""


class BudgetExceededError(AgentRunsError):
    """Begins, by its name, the `error` of a run that failed because a budget is used up. Never raised."""


class PayloadError(AgentRunsError):
    """Raised if stored content that the journal refers to is missing, was altered or cannot be read."""


class ToolRefused(AgentRunsError):
    """Raised by a handler that did nothing, with the reason.

    Raise it before the effect, or if the outside world refused the effect. The model gets the reason, and
    learns that nothing happened.
    """


class ToolDurabilityError(AgentRunsError):
    """Raised by a handler that cannot tell whether its effect happened; the call is then in doubt.

    The model gets an error with this `kind` for each call whose outcome stays unknown.
    """

    kind = "tool-durability-error"
