"""The verbs of a decision: form and service of each, and the texts about its outcome."""

from __future__ import annotations

from typing import Any

from django.forms import Form
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import CHANNEL
from agentruns.admin.forms import AnswerForm, DecideForm, ExtendForm
from agentruns.admin.html import ago, exact, plain
from agentruns.models import Approval
from agentruns.services.approvals import answer, approve, deny
from agentruns.tools.questions import choices_of


def form_of(verb: str, approval: Approval, data: Any = None) -> Form:
    """Build the form of a verb other than edit, whose form the card builds because it knows the masks."""
    forms: dict[str, type[Form]] = {"answer": AnswerForm, "extend": ExtendForm}
    return forms.get(verb, DecideForm)(data, **form_options(verb, approval))


def form_options(verb: str, approval: Approval) -> dict[str, Any]:
    """Build the options of a verb's form: the approval as the page shows it."""
    expires = approval.expires_at
    initial = {"digest": approval.digest, "seen": expires.isoformat() if expires else ""}
    more: dict[str, dict[str, Any]] = {
        "deny": {"needs": True},
        "answer": {"choices": choices_of(approval.arguments)},
    }
    return {"initial": initial, "auto_id": f"{verb}_%s", **more.get(verb, {})}


def decide(
    approval: Approval, user: Any, verb: str, digest: str, text: str, arguments: Any = None
) -> Approval:
    """Approve with a note, perhaps edited, deny with a reason, or answer. Raises as the services."""
    if verb in ("approve", "edit"):
        return approve(approval.pk, user, digest=digest, arguments=arguments, reason=text, channel=CHANNEL)
    service = {"deny": deny, "answer": answer}[verb]
    return service(approval.pk, user, text, digest=digest, channel=CHANNEL)


def done(approval: Approval, verb: str) -> str:
    """Describe the effect of a decision just recorded."""
    if verb == "extend":
        return _("Extended. It expires on %(when)s.") % {"when": exact(approval.expires_at)}
    if approval.status == Approval.Status.PENDING:
        text = _(
            "Your approval is recorded: %(given)d of %(required)d. Another person has to approve it, too."
        )
        return text % {"given": approval.approved_count, "required": approval.required}
    if verb in ("approve", "edit"):
        return str(_WAITS.get(approval.run.status, _("Approved. A worker runs the call.")))
    if verb == "answer":
        return _("Answered. The call is not run, and the model gets your text.")
    return _("Denied. The call is not run, and the model is told why.")


def outcome(approval: Approval) -> str:
    """Describe who decided, when, and what became of the call; "" while the approval is pending."""
    sentence = _OUTCOMES.get(approval.status)
    if sentence is None:
        return ""
    when = approval.decided_at
    if approval.status == Approval.Status.EXPIRED:
        when = approval.expires_at
        if approval.approved_count:
            sentence = _NOT_ENOUGH
    if approval.status == Approval.Status.APPROVED and approval.run.status in _WAITS:
        sentence = _APPROVED_AND_WAITS
    return str(sentence) % {
        "name": plain(approval.decided_by_name or _("the program")),
        "when": exact(when),
        "ago": ago(when) if when else "",
    }


_WAITS: dict[str, Any] = {
    "paused": gettext_lazy("Approved. The call runs when somebody resumes the run, which is paused."),
    "orphaned": gettext_lazy("Approved. The call runs when somebody says what became of a call in doubt."),
}
_OUTCOMES: dict[str, Any] = {
    "approved": gettext_lazy("Approved by %(name)s on %(when)s (%(ago)s). A worker runs the call."),
    "consumed": gettext_lazy("Approved by %(name)s on %(when)s (%(ago)s). The call was started."),
    "denied": gettext_lazy("Denied by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "answered": gettext_lazy("Answered by %(name)s on %(when)s (%(ago)s). The call is not run."),
    "expired": gettext_lazy("Nobody answered in time; it expired on %(when)s. The call is not run."),
    "cancelled": gettext_lazy("Cancelled: its run ended or went on without it. The call is not run."),
}
_NOT_ENOUGH = gettext_lazy("Not enough people approved in time; it expired on %(when)s. The call is not run.")
_APPROVED_AND_WAITS = gettext_lazy(
    "Approved by %(name)s on %(when)s (%(ago)s). The call runs when a person lets its run go on."
)
