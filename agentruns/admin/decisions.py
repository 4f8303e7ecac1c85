"""Who decided what about an approval, and when: for its card and for whoever came too late."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from agentruns.admin.journal import Card, card
from agentruns.admin.text import plain
from agentruns.admin.times import ago, exact
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.models import Approval, Message

VERBS = {"approve": ("approved", "consumed"), "deny": ("denied",)}


def made(alias: str, approval: Approval) -> list[Card]:
    """Return the decisions on a card, as the journal has them."""
    rows = [Row(*values) for values in _rows(alias, approval).values_list(*Row._fields)]
    upcast = [row._replace(payload=events.upcast(row.kind, row.payload)) for row in rows]
    return [card(row, whole=True) for row in upcast]


def already_given(alias: str, approval: Approval, user: Any) -> bool:
    """Whether `user` is among those who approved what the card says now."""
    if not approval.approved_count:
        return False
    given = [
        str((payload.get("actor") or {}).get("id"))
        for payload in _rows(alias, approval).values_list("payload", flat=True)
        if payload.get("verb") == "approve" and payload.get("digest") == approval.digest
    ]
    return str(user.pk) in given


def was_mine(approval: Approval, verb: str, user: Any, digest: str) -> bool:
    """Whether the decision that stands is the very one `user` sends again."""
    same = approval.decided_by_id == user.pk and approval.digest == digest
    return same and approval.status in VERBS[verb]


def done(approval: Approval, verb: str) -> str:
    """Return what a decision just recorded means."""
    if approval.status == Approval.Status.PENDING:
        return _("Your approval is recorded: %(given)d of %(required)d. It takes another person.") % {
            "given": approval.approved_count,
            "required": approval.required,
        }
    if verb == "approve":
        return _("Approved. A worker runs the call.")
    return _("Denied. The call is not run, and the model is told why.")


def outcome(approval: Approval) -> str:
    """Return who decided and when, and what became of it; "" while it is pending."""
    sentence = _OUTCOMES.get(approval.status)
    if sentence is None:
        return ""
    when = approval.decided_at
    told = {
        "name": plain(approval.decided_by_name or _("the program")),
        "when": exact(when),
        "ago": ago(when) if when else "",
    }
    return sentence() % told


def _rows(alias: str, approval: Approval) -> Any:
    rows = Message.objects.using(alias).filter(
        run_id=approval.run_id, call_id=approval.call_id, kind=events.APPROVAL_DECIDED
    )
    return rows.order_by("seq")


_OUTCOMES = {
    "approved": lambda: _("Approved by %(name)s on %(when)s (%(ago)s). A worker runs the call."),
    "consumed": lambda: _("Approved by %(name)s on %(when)s (%(ago)s). The call was started."),
    "denied": lambda: _("Denied by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "answered": lambda: _("Answered by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "expired": lambda: _("Nobody answered in time; it expired on %(when)s. The call is not run."),
    "cancelled": lambda: _("Cancelled: its run ended or went on without it. The call is not run."),
}
