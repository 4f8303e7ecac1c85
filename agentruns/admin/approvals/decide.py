"""Deciding one approval: the form and the service of each verb, and what to say about the outcome."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import salted_hmac
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import CHANNEL, status_of
from agentruns.admin.forms import AnswerForm, DecideForm, ExtendForm
from agentruns.admin.html import ago, exact, plain
from agentruns.conf import settings
from agentruns.engine.gate import DENIED
from agentruns.engine.in_doubt import EXPIRED
from agentruns.exceptions import AgentRunsError, ApprovalStateError, PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.conversation import EDITED
from agentruns.journal.deciders import why_not_decide
from agentruns.models import Approval, Message
from agentruns.services import permissions
from agentruns.services.approvals import answer, approve, deny, extend
from agentruns.tools import to_jsonable
from agentruns.tools.questions import choices_of
from agentruns.utils import json as canonical

if TYPE_CHECKING:
    from agentruns.admin.approvals.admin import ApprovalAdmin

WARNED_SALT = "agentruns.admin.approvals.warned"
WARNED = gettext_lazy(
    "Nothing was decided yet. With these arguments the tool's preview warns:{}"
    " If you mean it, approve with these arguments again."
)
FORMS: dict[str, type[Form]] = {
    "approve": DecideForm,
    "answer": AnswerForm,
    "deny": DecideForm,
    "extend": ExtendForm,
}


def decide_view(admin: ApprovalAdmin, request: HttpRequest, approval: Approval, verb: str) -> HttpResponse:
    """Record what was decided on what was shown. Records only; a worker executes."""
    form: Any
    revealed = False
    if verb == "edit":
        revealed = "revealed" in request.POST and permissions.may_reveal(request.user, approval)
        [one] = admin.cards(request, [approval], revealed=revealed)
        form = one.edit_form(request.POST)
    else:
        form = form_of(verb, approval, request.POST)
    if form is None:
        error = ApprovalStateError(_("It cannot be edited here."))
        return _refused(admin, request, approval, error)
    name = "decide" if verb in ("approve", "deny") else verb
    sent: dict[str, Any] = {f"{name}_form": form, "denying": verb == "deny"}
    if not form.is_valid():
        text = _("Nothing was decided. Correct the form below.")
        if verb == "deny" and not request.POST.get("reason", "").strip():
            text = _("Nothing was decided yet. Say why, and press Deny again.")
        return admin.page(request, approval, status=400, revealed=revealed, refusal=text, **sent)
    may = verb == "edit" and one.pending and not why_not_decide(request.user, approval, verb="edit")
    if may and (warnings := one.warned_of(form.arguments)):  # nobody else has the tool's preview asked
        seen = [str(approval.pk), str(request.user.pk), to_jsonable(form.arguments)[0], *map(str, warnings)]
        # Keyed: among the arguments are hidden ones, which nobody is to find by trying.
        mark = salted_hmac(WARNED_SALT, canonical.dumps(seen), algorithm="sha256").hexdigest()
        if request.POST.get("warned") != mark:
            text = format_html(str(WARNED), format_html_join("", " {}.", ((each,) for each in warnings)))
            sent["warned"] = mark
            return admin.page(request, approval, status=400, revealed=revealed, refusal=text, **sent)
    if verb in ("approve", "edit") and (why := no_password(request, [approval])):
        return admin.page(request, approval, status=403, revealed=revealed, refusal=why, **sent)
    queue = admin.queue(request)  # before it is decided: afterwards it has no place in the queue
    try:
        approval = _record(verb, approval, request.user, form)
    except PermissionDeniedError as error:
        return _refused(admin, request, approval, error)
    except AgentRunsError as error:
        again = admin.find(request, approval.pk)
        if _was_mine(again, verb, request.user, form):  # a double click
            admin.message_user(request, outcome(again), messages.INFO)
            return admin.back(request, again)
        return _refused(admin, request, approval, error, revealed=revealed, **sent)
    admin.log_change(request, approval, _logged(verb, form))
    admin.tell(request, approval, done(approval, verb))
    if verb == "extend":
        return admin.back(request, approval)
    return admin.onward(request, approval, queue)


def no_password(request: HttpRequest, approvals: Iterable[Approval]) -> str:
    """Return why these are not approved before the user's password is given with the request, or ""."""
    if not any(permissions.needs_password(request, approval) for approval in approvals):
        return ""
    password = request.POST.get("password", "")
    if not password:
        return _("Nothing was decided. The risk is high: give your password, too.")
    if not permissions.confirm_password(request, password):
        return _("Nothing was decided. That is not your password.")
    return ""


def form_of(verb: str, approval: Approval, data: Any = None) -> Form:
    """Return the form of a verb; that of an edit is the card's, which knows what it masks."""
    return FORMS[verb](data, **form_options(verb, approval))


def form_options(verb: str, approval: Approval) -> dict[str, Any]:
    """Return what the form of a verb says about the approval that is shown."""
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
    """Approve with a note, perhaps edited, deny with a reason, or answer. Errors as the services."""
    if verb in ("approve", "edit"):
        return approve(approval.pk, user, digest=digest, arguments=arguments, reason=text, channel=CHANNEL)
    service = {"deny": deny, "answer": answer}[verb]
    return service(approval.pk, user, text, digest=digest, channel=CHANNEL)


def _was_mine(approval: Approval, verb: str, user: Any, form: Any) -> bool:
    """Return whether the decision that stands is the very one `user` sends again."""
    if approval.decided_by_id != user.pk or approval.status not in _STATUSES.get(verb, ()):
        return False
    rows = Message.objects.using(settings.DATABASE).filter(
        run_id=approval.run_id, call_id=approval.call_id, kind=events.APPROVAL_DECIDED
    )
    stands, sent = rows.latest("seq").payload, form.cleaned_data
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
    """Return who decided and when, and what became of it; "" while it is pending."""
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


def model_reads() -> dict[str, str]:
    """Return the text that the model reads after a verb, where it is known beforehand."""
    return {
        "edit": EDITED.format(arguments=_("(the arguments)")),
        "deny": DENIED.format(reason=_("(your reason)")),
        "expire": EXPIRED,
    }


def _record(verb: str, approval: Approval, user: Any, form: Any) -> Approval:
    given = form.cleaned_data
    if verb == "extend":
        by, digest = timedelta(hours=given["hours"]), given["digest"]
        return extend(approval.pk, user, by, digest=digest, seen=given["seen"], channel=CHANNEL)
    text = given["text" if verb == "answer" else "reason"]
    return decide(approval, user, verb, given["digest"], text, form.arguments if verb == "edit" else None)


def _refused(
    admin: ApprovalAdmin, request: HttpRequest, approval: Approval, error: AgentRunsError, **context: Any
) -> HttpResponse:
    approval, status = admin.find(request, approval.pk), status_of(error)
    why, pending = plain(error), approval.status == Approval.Status.PENDING
    if status == 409 and not pending:
        why = outcome(approval)
    elif status == 409 and approval.digest != request.POST.get("digest"):
        why = _("Its arguments were edited since you looked. This is what it asks now.")
        context = {}
    text = _("Your decision was not recorded. %(why)s") % {"why": why}
    return admin.page(request, approval, status=status, refusal=text, **(context if pending else {}))


def _logged(verb: str, form: Form) -> str:
    """Return what the admin's history keeps of a decision."""
    given = form.cleaned_data
    texts: dict[str, str] = {
        "approve": _("Approved."),
        "edit": _("Approved with edited arguments."),
        "answer": _("Answered: %s") % plain(given.get("text", "")),
        "deny": _("Denied: %s") % plain(given.get("reason", "")),
        "extend": _("Extended by %s h.") % given.get("hours", ""),
    }
    return texts[verb]


# The statuses of an approval after each verb, those included that follow by themselves.
_STATUSES = {
    "approve": ("approved", "consumed"),
    "edit": ("approved", "consumed"),
    "answer": ("answered",),
    "deny": ("denied",),
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
