"""Who decided what about an approval, and when: for its card and for whoever came too late."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.text import plain
from agentruns.admin.times import ago, exact
from agentruns.journal import events
from agentruns.models import Approval, Message
from agentruns.tools import to_jsonable

# What an approval is, or becomes by itself, after each verb.
_STATUSES = {
    "approve": ("approved", "consumed"),
    "edit": ("approved", "consumed"),
    "answer": ("answered",),
    "deny": ("denied",),
}


def was_mine(alias: str, approval: Approval, verb: str, user: Any, form: Any) -> bool:
    """Whether the decision that stands is the very one `user` sends again."""
    if approval.decided_by_id != user.pk or approval.status not in _STATUSES.get(verb, ()):
        return False
    rows = Message.objects.using(alias).filter(
        run_id=approval.run_id, call_id=approval.call_id, kind=events.APPROVAL_DECIDED
    )
    row = rows.order_by("-seq").first()
    if row is None:
        return False
    stands, sent = row.payload, form.cleaned_data
    if verb == "edit":
        return bool(stands.get("edited") == to_jsonable(form.arguments)[0])
    if verb == "answer":
        return bool(stands.get("text") == sent["text"])
    same_reason = stands.get("reason", "") == sent["reason"]
    return same_reason and "arguments" not in stands and approval.digest == sent["digest"]


def done(approval: Approval, verb: str) -> str:
    """Return what a decision just recorded means."""
    if verb == "extend":
        return _("Extended. It expires on %(when)s.") % {"when": exact(approval.expires_at)}
    if approval.status == Approval.Status.PENDING:
        return _("Your approval is recorded: %(given)d of %(required)d. It takes another person.") % {
            "given": approval.approved_count,
            "required": approval.required,
        }
    if verb in ("approve", "edit"):
        return str(_WAITS.get(approval.run.status, _("Approved. A worker runs the call.")))
    if verb == "answer":
        return _("Answered. The call is not run, and the model gets your text.")
    return _("Denied. The call is not run, and the model is told why.")


def outcome(approval: Approval) -> str:
    """Return who decided and when, and what became of it; "" while it is pending."""
    sentence = _OUTCOMES.get(approval.status)
    if sentence is None:
        return ""
    when = approval.decided_at
    if approval.status == Approval.Status.EXPIRED:
        when = approval.expires_at
        if approval.approved_count:
            sentence = _not_enough
    if approval.status == Approval.Status.APPROVED and approval.run.status in _WAITS:
        sentence = _approved_and_waits
    told = {
        "name": plain(approval.decided_by_name or _("the program")),
        "when": exact(when),
        "ago": ago(when) if when else "",
    }
    return sentence() % told


_WAITS: dict[str, Any] = {
    "paused": gettext_lazy("Approved. The call runs when somebody resumes the run, which is paused."),
    "orphaned": gettext_lazy(
        "Approved. The call runs when somebody has said what became of a call in doubt."
    ),
}
_OUTCOMES = {
    "approved": lambda: _("Approved by %(name)s on %(when)s (%(ago)s). A worker runs the call."),
    "consumed": lambda: _("Approved by %(name)s on %(when)s (%(ago)s). The call was started."),
    "denied": lambda: _("Denied by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "answered": lambda: _("Answered by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "expired": lambda: _("Nobody answered in time; it expired on %(when)s. The call is not run."),
    "cancelled": lambda: _("Cancelled: its run ended or went on without it. The call is not run."),
}


def _not_enough() -> str:
    return _("Not enough people approved in time; it expired on %(when)s. The call is not run.")


def _approved_and_waits() -> str:
    return _("Approved by %(name)s on %(when)s (%(ago)s). The call runs when a person lets its run go on.")
