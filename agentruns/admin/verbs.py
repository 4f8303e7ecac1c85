"""What a person can do about a card: each verb's service, called with what its form holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.forms import Form
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from agentruns.admin.text import plain
from agentruns.exceptions import ApprovalStateError, JournalConflictError, RunStateError
from agentruns.models import Approval
from agentruns.services.approvals import answer, approve, deny, extend

CHANNEL = "console"
REFUSALS = (ApprovalStateError, RunStateError, JournalConflictError)


def logged(verb: str, form: Form) -> str:
    """Return what the admin's history keeps of a decision."""
    given = form.cleaned_data
    said: dict[str, str] = {
        "approve": _("Approved."),
        "edit": _("Approved with edited arguments."),
        "answer": _("Answered: %s") % plain(given.get("text", "")),
        "deny": _("Denied: %s") % plain(given.get("reason", "")),
        "extend": _("Extended by %s h.") % given.get("hours", ""),
    }
    return said[verb]


def decide(approval: Approval, user: Any, verb: str, digest: str, text: str) -> Approval:
    """Approve with a note, deny with a reason, or answer with a text. Errors as the services."""
    if verb == "approve":
        return approve(approval.pk, user, digest=digest, reason=text, channel=CHANNEL)
    service = {"deny": deny, "answer": answer}[verb]
    return service(approval.pk, user, text, digest=digest, channel=CHANNEL)


def _simple(verb: str) -> Callable[[Approval, Any, Any], Approval]:
    def act(approval: Approval, user: Any, form: Any) -> Approval:
        given = form.cleaned_data
        text = given["text"] if verb == "answer" else given["reason"]
        return decide(approval, user, verb, given["digest"], text)

    return act


def _edit(approval: Approval, user: Any, form: Any) -> Approval:
    digest, reason = form.cleaned_data["digest"], form.cleaned_data["reason"]
    return approve(approval.pk, user, digest=digest, arguments=form.arguments, reason=reason, channel=CHANNEL)


def _extend(approval: Approval, user: Any, form: Any) -> Approval:
    by = timedelta(hours=form.cleaned_data["hours"])
    digest, seen = form.cleaned_data["digest"], _moment(form.cleaned_data["seen"])
    if seen is None:
        raise ApprovalStateError(_("The page does not say which expiry it showed. Open it again."))
    return extend(approval.pk, user, by, digest=digest, seen=seen, channel=CHANNEL)


def _moment(text: str) -> datetime | None:
    try:
        return parse_datetime(text)
    except ValueError:  # of the right form, but no such day
        return None


VERBS: dict[str, Callable[[Approval, Any, Any], Approval]] = {
    "approve": _simple("approve"),
    "edit": _edit,
    "answer": _simple("answer"),
    "deny": _simple("deny"),
    "extend": _extend,
}
