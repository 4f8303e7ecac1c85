"""The approval of a call, folded from its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from agentruns.journal import events
from agentruns.journal.events import Actor
from agentruns.models.statuses import ApprovalStatus
from agentruns.utils import json as canonical


@dataclass(slots=True)
class CallApproval:
    """The approval of a call, folded from its rows; `status` equals that of the Approval row."""

    id: UUID
    digest: str  # of the call's arguments
    title: str
    why: str = ""
    asked: str = ""  # why it was asked at first
    holds: Any = None  # what the tool's `holds` returned; None if it failed
    held: str = ""  # keyed digest of that; "" if it failed, or if the tool had no `holds`
    is_held_anew: bool = False  # people may look at a page with another value
    renewed: UUID | None = None  # the id that its next start consumes, if the start before was rolled back
    requested_at: datetime | None = None
    lifetime: timedelta | None = None  # that it had at first; None: it never expires
    required: int = 1
    approvers: str = ""
    risk: str = "normal"
    expires_at: datetime | None = None
    remind_at: datetime | None = None  # None: never, or people were reminded already
    escalate_at: datetime | None = None
    escalate_to: str = ""
    only_answers: bool = False  # a question: there is nothing to execute
    settles: list[str] = field(default_factory=list)  # calls in doubt that it shows
    status: str = ApprovalStatus.PENDING
    given: list[str] = field(default_factory=list)  # ids of the users who approved this digest
    names: list[str] = field(default_factory=list)
    channels: dict[str, str] = field(default_factory=dict)  # id of a user -> channel of the last approval
    by: dict[str, str] = field(default_factory=dict)  # id of a user -> id of the person in the user's name
    editor: str = ""  # id of the user who gave the arguments that it shows; "" if the model did
    actor: Actor | None = None
    reason: str = ""
    text: str = ""
    decided_at: datetime | None = None
    rule: str = ""  # id of the standing rule, if a rule decided last

    @property
    def shown(self) -> str:
        """The digest that people see and send back: of the arguments, and of what the approval relies on."""
        return canonical.digest([self.digest, self.held]) if self.held else self.digest

    @property
    def due_at(self) -> datetime | None:
        """The time of the next reminder or escalation; None if there is none."""
        return min(filter(None, (self.remind_at, self.escalate_at)), default=None)

    def void(self, payload: events.ApprovalVoided) -> None:
        """Take back approvals, as a row of this payload says: the card waits again."""
        given = zip(self.given, self.names, strict=True)
        kept = [(key, name) for key, name in given if key not in payload["voided"]]
        self.given, self.names = [key for key, _ in kept], [name for _, name in kept]
        self.by = {key: person for key, person in self.by.items() if key in self.given}
        self.status, self.actor = ApprovalStatus.PENDING, None
        self.reason, self.decided_at = "", None
        self.why = payload.get("asks") or self.why
        self.expires_at = events.moment(payload.get("expires_at")) or self.expires_at
        self.risk = payload.get("risk", self.risk)
        self.approvers = payload.get("approvers", self.approvers)
        self.required = payload.get("required", self.required)
        if "held" in payload:
            self.holds, self.held, self.is_held_anew = payload.get("holds"), payload["held"], True
        if "renews" in payload:
            self.renewed = UUID(payload["renews"])
