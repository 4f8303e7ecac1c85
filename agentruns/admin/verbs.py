"""What a person can do about a card: each verb's service, called with what its form holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.forms import Form
from django.utils.translation import gettext as _

from agentruns.admin.text import plain
from agentruns.approvals import answer, approve, deny, extend
from agentruns.exceptions import ApprovalStateError, JournalConflictError, RunStateError
from agentruns.models import Approval

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


def _approve(approval: Approval, user: Any, form: Any) -> Approval:
    return approve(approval.pk, user, digest=form.cleaned_data["digest"], reason=form.cleaned_data["reason"])


def _edit(approval: Approval, user: Any, form: Any) -> Approval:
    given = form.cleaned_data
    return approve(
        approval.pk, user, digest=given["digest"], arguments=form.arguments, reason=given["reason"]
    )


def _answer(approval: Approval, user: Any, form: Any) -> Approval:
    return answer(approval.pk, user, form.cleaned_data["text"], digest=form.cleaned_data["digest"])


def _deny(approval: Approval, user: Any, form: Any) -> Approval:
    return deny(approval.pk, user, form.cleaned_data["reason"], digest=form.cleaned_data["digest"])


def _extend(approval: Approval, user: Any, form: Any) -> Approval:
    by = timedelta(hours=form.cleaned_data["hours"])
    return extend(approval.pk, user, by, digest=form.cleaned_data["digest"])


VERBS: dict[str, Callable[[Approval, Any, Any], Approval]] = {
    "approve": _approve,
    "edit": _edit,
    "answer": _answer,
    "deny": _deny,
    "extend": _extend,
}
