"""The verbs of decisions: the form and the service of each verb, and the texts about its outcome."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.forms import Form
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.base import CHANNEL
from agentruns.admin.forms import AnswerForm, DecideForm, ExtendForm
from agentruns.admin.html import ago, exact, plain
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.models import Approval, Message
from agentruns.models.statuses import Verb
from agentruns.services.approvals.decisions import answer, approve, deny, extend
from agentruns.tools import builtin, to_jsonable

EDIT, EXTEND = "edit", "extend"  # the console's own verbs
# The statuses of an approval after each verb, with those that follow automatically.
DONE = Approval.Status
APPROVED = (DONE.APPROVED, DONE.CONSUMED)
STATUSES = {Verb.APPROVE: APPROVED, EDIT: APPROVED, Verb.ANSWER: (DONE.ANSWERED,), Verb.DENY: (DONE.DENIED,)}
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
    "held": gettext_lazy(
        "Approved by %(name)s on %(when)s (%(ago)s). The call runs when a person lets its run go on."
    ),
    "not-enough": gettext_lazy(
        "Not enough people approved in time; it expired on %(when)s. The call is not run."
    ),
}


def form_of(verb: str, approval: Approval, data: Any = None) -> Form:
    """Build the form of any verb except edit; the card builds that form, because the card knows the masks."""
    forms: dict[str, type[Form]] = {Verb.ANSWER: AnswerForm, EXTEND: ExtendForm}
    return forms.get(verb, DecideForm)(data, **form_options(verb, approval))


def form_options(verb: str, approval: Approval) -> dict[str, Any]:
    """Build the options of a verb's form, with the digest and the expiry that the page shows."""
    expires = approval.expires_at
    initial = {"digest": approval.digest, "seen": expires.isoformat() if expires else ""}
    options: dict[str, Any] = {"initial": initial, "auto_id": f"{verb}_%s"}
    if verb == Verb.ANSWER:
        options["choices"] = builtin.choices_of(approval.arguments)
    return {**options, "needs": True} if verb == Verb.DENY else options


def decide(approval: Approval, user: Any, verb: str, given: dict[str, Any], edited: Any = None) -> Approval:
    """Approve (with `edited` arguments, if given), deny, answer or extend an approval.

    `given` has the values of the verb's form. Raises the errors of the service for the verb.
    """
    options: dict[str, Any] = {"digest": given["digest"], "channel": CHANNEL}
    if verb == EXTEND:
        return extend(approval.pk, user, timedelta(hours=given["hours"]), seen=given["seen"], **options)
    if verb == Verb.DENY:
        return deny(approval.pk, user, given["reason"], **options)
    if verb == Verb.ANSWER:
        return answer(approval.pk, user, given["text"], **options)
    return approve(approval.pk, user, arguments=edited, reason=given["reason"], **options)


def is_same(approval: Approval, user: Any, verb: str, form: Any) -> bool:
    """Check whether the form repeats the decision that `user` made last; always False for "extend"."""
    if approval.decided_by_id != user.pk or approval.status not in STATUSES.get(verb, ()):
        return False
    rows = Message.objects.using(settings.DATABASE).filter(
        run_id=approval.run_id, call_id=approval.call_id, kind=events.APPROVAL_DECIDED
    )
    stands, sent = rows.latest("seq").payload, form.cleaned_data
    if verb == EDIT:
        return bool(stands.get("edited") == to_jsonable(form.arguments)[0])
    if verb == Verb.ANSWER:
        return bool(stands.get("text") == sent["text"])
    same_reason = stands.get("reason", "") == sent["reason"]
    return same_reason and "arguments" not in stands and approval.digest == sent["digest"]


def log_text(verb: str, given: dict[str, Any]) -> str:
    """Describe a decision for the admin's history."""
    if verb == EXTEND:
        return str(_("Extended by %s h.") % given["hours"])
    if verb == Verb.ANSWER:
        return _("Answered: %s") % plain(given["text"])
    if verb == Verb.DENY:
        return _("Denied: %s") % plain(given["reason"])
    return _("Approved.") if verb == Verb.APPROVE else _("Approved with edited arguments.")


def done(approval: Approval, verb: str) -> str:
    """Describe the effect of a verb that was just carried out, such as "deny" or "extend"."""
    if verb == EXTEND:
        return _("Extended. It expires on %(when)s.") % {"when": exact(approval.expires_at)}
    if approval.status == Approval.Status.PENDING:
        text = _(
            "Your approval is recorded: %(given)d of %(required)d. Another person has to approve it, too."
        )
        return text % {"given": approval.approved_count, "required": approval.required}
    if verb in (Verb.APPROVE, EDIT):
        return str(_WAITS.get(approval.run.status, _("Approved. A worker runs the call.")))
    if verb == Verb.ANSWER:
        return _("Answered. The call is not run, and the model gets your text.")
    return _("Denied. The call is not run, and the model is told why.")


def outcome(approval: Approval) -> str:
    """Describe who decided, when, and what became of the call; "" while the approval is pending."""
    how, when = str(approval.status), approval.decided_at
    if how == Approval.Status.EXPIRED:
        how, when = "not-enough" if approval.approved_count else how, approval.expires_at
    elif how == Approval.Status.APPROVED and approval.run.status in _WAITS:
        how = "held"
    name = plain(approval.decided_by_name or _("the program"))
    return str(_OUTCOMES.get(how, "")) % {"name": name, "when": exact(when), "ago": ago(when)}
