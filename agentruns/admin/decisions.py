"""Who decided what about an approval, and when: for its card and for whoever came too late."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from agentruns.admin.text import plain
from agentruns.admin.times import ago, exact
from agentruns.models import Approval

VERBS = {
    "approve": ("approved", "consumed"),
    "edit": ("approved", "consumed"),
    "answer": ("answered",),
    "deny": ("denied",),
}


def was_mine(approval: Approval, verb: str, user: Any, digest: str) -> bool:
    """Whether the decision that stands is the very one `user` sends again."""
    # An edit gave the card another digest than the one that was sent.
    same = approval.decided_by_id == user.pk and (verb == "edit" or approval.digest == digest)
    return same and approval.status in VERBS.get(verb, ())


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
        return _("Approved. A worker runs the call.")
    if verb == "answer":
        return _("Answered. The call is not run, and the model gets your text.")
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


_OUTCOMES = {
    "approved": lambda: _("Approved by %(name)s on %(when)s (%(ago)s). A worker runs the call."),
    "consumed": lambda: _("Approved by %(name)s on %(when)s (%(ago)s). The call was started."),
    "denied": lambda: _("Denied by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "answered": lambda: _("Answered by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "expired": lambda: _("Nobody answered in time; it expired on %(when)s. The call is not run."),
    "cancelled": lambda: _("Cancelled: its run ended or went on without it. The call is not run."),
}
