"""The fixed words of the journal, also in SQL. Each equals its text in rows, columns, JSON and templates."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from django.db.models import Case, IntegerField, TextChoices, Value, When
from django.utils.translation import gettext_lazy as _


class Word(StrEnum):
    """A fixed word, which also looks like its text in an error or a terminal."""

    def __repr__(self) -> str:
        return repr(self.value)


class RunStatus(Word):
    """The status of a run. A folded run is ACTIVE if its stored status is queued or running."""

    ACTIVE = "active"
    QUEUED = "queued"
    RUNNING = "running"
    AWAITING_APPROVAL = "awaiting-approval"
    WAITING = "waiting"
    ORPHANED = "orphaned"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Priority(Word):
    """The priority of a run. Run.priority has its rank."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @classmethod
    def of(cls, rank: int) -> Priority:
        """Find the priority with this rank."""
        priorities: list[Priority] = [*cls]
        return priorities[min(max(rank, -1), 1) + 1]

    @property
    def rank(self) -> int:
        """The priority as a number: -1 for high, 0 for normal, 1 for low."""
        return [*Priority].index(self) - 1


class ApprovalStatus(TextChoices):
    """The status of an approval, with the label that people see."""

    PENDING = "pending", _("waiting")
    APPROVED = "approved", _("approved")
    DENIED = "denied", _("denied")
    ANSWERED = "answered", _("answered")
    EXPIRED = "expired", _("expired")
    CANCELLED = "cancelled", _("cancelled")
    CONSUMED = "consumed", _("approved, done")

    __repr__ = Word.__repr__


class GateVerdict(Word):
    """The gate's verdict on a call of a reply."""

    RUN = "run"
    ASK = "ask"
    REFUSE = "refuse"


class Outcome(Word):
    """The outcome of a call's only result."""

    OK = "ok"
    ERROR = "error"
    DENIED = "denied"
    ANSWERED = "answered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class Orphan(Word):
    """The treatment of a call in doubt, or the verdict that the call did not happen."""

    RETRY = "retry"
    RECONCILE = "reconcile"
    HELD = "held"
    SURFACED = "surfaced"
    NOT_OCCURRED = "not_occurred"


class DeliveryStatus(Word):
    """The outcome of a delivery. The first delivery of an event wins; a late one finds no wait any more."""

    DELIVERED = "delivered"
    EARLY = "early"
    DUPLICATE = "duplicate"
    LATE = "late"


class Verdict(Word):
    """The verdict on a call in doubt."""

    OCCURRED = "occurred"
    NOT_OCCURRED = "not_occurred"
    UNKNOWN = "unknown"


class Verb(Word):
    """The verb of a decision on an approval."""

    APPROVE = "approve"
    DENY = "deny"
    ANSWER = "answer"
    EXPIRE = "expire"


ENDED = (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)
UNFINISHED = tuple(status for status in RunStatus if status not in (RunStatus.ACTIVE, *ENDED))


class Constant(Value):
    """A constant in the SQL text itself, because a planner matches no parameter with a partial index."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[str | int, ...]]:
        """Format the value as an SQL literal."""
        return repr(self.value), ()


ACTIVE = [Constant("queued"), Constant("running")]
PENDING = Constant("pending")
# 0 is the riskiest, as in the queue's index.
RISK_RANK = Case(
    When(risk=Constant("high"), then=Constant(0)),
    When(risk=Constant("normal"), then=Constant(1)),
    default=Constant(2),
    output_field=IntegerField(),
)
