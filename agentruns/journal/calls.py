"""A tool call and its approval card, as the fold knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from agentruns import canonical


@dataclass(slots=True)
class Card:
    """What the journal says of one approval; `status` equals the Approval row's."""

    id: UUID
    digest: str
    title: str
    required: int = 1
    approvers: str = ""
    risk: str = "normal"
    expires_at: datetime | None = None
    only_answers: bool = False  # a question: there is nothing to execute
    status: str = "pending"
    given: list[str] = field(default_factory=list)  # ids of the users who approved this digest
    names: list[str] = field(default_factory=list)
    actor: dict[str, str] | None = None
    reason: str = ""
    text: str = ""
    decided_at: datetime | None = None


@dataclass(slots=True)
class Call:
    """One `tool_use` of the last reply."""

    id: str
    provider_id: str
    tool: str
    step: int
    ordinal: int
    arguments: dict[str, Any]
    digest: str
    parallel: bool = False
    verdict: str = "run"
    edited: bool = False
    card: Card | None = None
    attempt: int = 0
    started_at: datetime | None = None
    timeout: float | None = None  # seconds its tool gave that attempt
    declares: str = ""  # what its tool declared when it started: that judges an orphan
    returned_late: bool = False  # without an error, after its worker had lost the run
    orphan: str = ""  # held | retry | reconcile | surfaced | not_occurred
    outcome: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the call has no result yet."""
        return not self.outcome

    @property
    def is_started(self) -> bool:
        """Whether an effect may have happened: the outcome is unknown until a result is stored."""
        if self.declares == "transactional":
            return False
        if self.orphan == "not_occurred" and not self.returned_late:
            return False
        return self.is_open and self.attempt > 0

    @property
    def is_contradicted(self) -> bool:
        """Whether it is to run again because it did not happen, and its handler has returned after all."""
        return self.orphan == "not_occurred" and self.returned_late

    @property
    def is_waiting(self) -> bool:
        """Whether a person has to act before the engine can."""
        if self.orphan == "held":
            return True
        if self.verdict != "ask":
            return False
        return self.card is None or self.card.status == "pending"

    @property
    def decision(self) -> str:
        """Return "denied", "answered" or "expired" when that is what people, or time, said; else ""."""
        if self.card is not None and self.card.status in ("denied", "answered", "expired"):
            return self.card.status
        return ""

    def idempotency_key(self, run_id: UUID) -> str:
        """Return the key an outside system dedupes on: one per call, whatever the attempt."""
        return canonical.digest([str(run_id), self.step, self.ordinal, self.tool, self.digest])
