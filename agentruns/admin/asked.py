"""What surrounds a call that people are asked about: the reply it came in, its siblings, its own history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.journal import OUTCOMES
from agentruns.admin.text import plain, visible
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.fold import text_of
from agentruns.models import Approval, Message

HISTORY = (
    events.APPROVAL_DECIDED,
    events.APPROVAL_EXTENDED,
    events.TOOL_STARTED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
)


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another call of the same reply and where it stands; `pending` if its card waits for a decision."""

    tool: SafeString
    title: SafeString
    state: str
    pending: bool = False


@dataclass(slots=True)
class Asked:
    """What the journal says around one approval."""

    history: list[Row] = field(default_factory=list)
    requested: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    proposed: dict[str, Any] = field(default_factory=dict)
    siblings: list[Sibling] = field(default_factory=list)

    @property
    def preview(self) -> Any:
        """What the tool's preview showed of the arguments that the card has now."""
        edits = [row.payload for row in self.history if row.kind == events.APPROVAL_DECIDED]
        edits = [payload for payload in edits if "arguments" in payload]
        return (edits[-1] if edits else self.requested).get("preview")

    @property
    def only_answers(self) -> bool:
        """Whether it is a question: answered, never executed."""
        return bool(self.requested.get("only_answers"))


def asked(alias: str, approval: Approval) -> Asked:
    """Read what surrounds an approval: a constant number of queries."""
    rows = _rows(alias, approval.run_id, call_id=approval.call_id)
    found = Asked([row for row in rows if row.kind in HISTORY])
    requested = next((row for row in rows if row.kind == events.APPROVAL_REQUESTED), None)
    if requested is None:
        return found
    found.requested = requested.payload
    replies = _query(alias, approval.run_id, kind=events.ASSISTANT, seq__lt=requested.seq)
    for row in map(_read, replies.order_by("-seq").values_list(*Row._fields)[:1]):
        found.said = text_of(row.payload.get("content", []))
        calls = {str(call.get("id")): call for call in row.payload.get("calls", [])}
        found.proposed = calls.pop(approval.call_id, {}).get("arguments", {})
        found.siblings = _siblings(alias, approval, calls)
    return found


def _siblings(alias: str, approval: Approval, calls: dict[str, dict[str, Any]]) -> list[Sibling]:
    if not calls:
        return []
    states: dict[str, str] = {}
    for row in _rows(alias, approval.run_id, call_id__in=list(calls)):
        states[row.call_id] = _state(row, states.get(row.call_id, ""))
    cards = Approval.objects.using(alias).filter(run_id=approval.run_id, call_id__in=list(calls))
    approvals = {card.call_id: card for card in cards.defer("arguments", "why")}
    return [
        _sibling(call, states.get(call_id, str(_("has not run yet"))), approvals.get(call_id))
        for call_id, call in calls.items()
    ]


def _sibling(call: dict[str, Any], state: str, card: Approval | None) -> Sibling:
    tool = visible(call.get("tool", ""))
    if card is None:
        return Sibling(tool, visible(""), state)
    pending = card.status == Approval.Status.PENDING
    return Sibling(tool, visible(card.title), str(_("waits for a decision")) if pending else state, pending)


def _state(row: Row, before: str) -> str:
    if row.kind == events.TOOL_RESULT:
        outcome = row.payload.get("outcome")
        return str(OUTCOMES[outcome][0]) if outcome in OUTCOMES else plain(outcome)
    return str(_STATES.get(row.kind, before))


def _query(alias: str, run_id: UUID, **lookups: Any) -> Any:
    return Message.objects.using(alias).filter(run_id=run_id, **lookups)


def _rows(alias: str, run_id: UUID, **lookups: Any) -> list[Row]:
    found = _query(alias, run_id, **lookups).order_by("seq").values_list(*Row._fields)
    return [_read(values) for values in found]


def _read(values: tuple[Any, ...]) -> Row:
    row = Row(*values)
    return row._replace(payload=events.upcast(row.kind, row.payload))


_STATES = {
    events.TOOL_STARTED: gettext_lazy("is at work"),
    events.ORPHAN_FOUND: gettext_lazy("is in doubt: it may have happened"),
    events.APPROVAL_DECIDED: gettext_lazy("is decided, and has not run yet"),
}
