"""Deciding several approvals on one page: those selected in the list, or all that one reply waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.forms import Form
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.approvals.card import ApprovalCard, asked
from agentruns.admin.approvals.decide import decide, done, no_password, outcome
from agentruns.admin.forms import BulkApproveForm, BulkDenyForm, TypedField, area
from agentruns.admin.html import plain, risk_badge, run_badge, visible
from agentruns.exceptions import AgentRunsError
from agentruns.models import Approval, Run
from agentruns.services import reauth
from agentruns.utils.bounds import REASON_LENGTH

if TYPE_CHECKING:
    from agentruns.admin.approvals.admin import ApprovalAdmin

MOST = 100  # what one page can show and one person can look at
FORMS: dict[str, type[Form]] = {"approve": BulkApproveForm, "deny": BulkDenyForm}
TITLES = {
    "approve": gettext_lazy("Approve these calls?"),
    "deny": gettext_lazy("Deny these calls?"),
}
LATER = "later"
WORDS = {
    "approve": gettext_lazy("Approve"),
    "deny": gettext_lazy("Deny"),
    "answer": gettext_lazy("Answer instead"),
    LATER: gettext_lazy("Not now"),
}


Line = dict[str, Any]  # one approval of the selection: as it will be decided, or as it was


class RowForm(forms.Form):
    """The decision on one of the calls of a reply."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    verb = forms.ChoiceField(label=gettext_lazy("Decision"), widget=forms.RadioSelect, initial=LATER)
    text = TypedField(
        label=gettext_lazy("Reason or answer, told to the model"),
        max_length=REASON_LENGTH,
        required=False,
        widget=area(2),
    )

    def __init__(self, one: ApprovalCard, sent: Any) -> None:
        key = str(one.approval.pk)  # one that was not on the page that was sent is still to be decided
        data = sent if f"{key}-digest" in sent else None
        super().__init__(data, prefix=key, initial={"digest": one.approval.digest})
        left_out = {"approve"} if one.only_answers or one.why_not_approve else set()
        verbs: list[tuple[str, Any]] = [(verb, word) for verb, word in WORDS.items() if verb not in left_out]
        if one.only_answers:
            verbs = [(verb, _("Answer") if verb == "answer" else word) for verb, word in verbs]
        self.fields["verb"].choices = verbs  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        """Require the text that the model reads."""
        given = self.cleaned_data
        if given.get("verb") in ("deny", "answer") and not given.get("text", "").strip():
            self.add_error("text", _("The model is told this: a denial or an answer needs it."))
        return given


# Those selected in the list


def decide_selected(admin: ApprovalAdmin, request: HttpRequest, verb: str) -> HttpResponse | None:
    """Ask, then decide on the ids that were on the page, whatever else "select all" may mean."""
    approvals = _chosen(admin, request)
    if len(approvals) > MOST:
        text = _("Choose at most %(most)d: nobody looks at more on one page.") % {"most": MOST}
        admin.message_user(request, text, messages.WARNING)
        return None
    if request.POST.get("select_across") == "1" and "confirmed" not in request.POST:
        text = _("Only what was on the page is decided: %(count)d.") % {"count": len(approvals)}
        admin.message_user(request, text, messages.WARNING)
    if "confirmed" not in request.POST:
        return _confirm(admin, request, verb, approvals, FORMS[verb]())
    form = FORMS[verb](request.POST)
    if not form.is_valid():
        return _confirm(admin, request, verb, approvals, form, status=400)
    if verb == "approve" and (why := no_password(request, approvals)):
        return _confirm(admin, request, verb, approvals, form, status=403, refusal=why)
    reason = form.cleaned_data["reason"]
    # Sessions in one order for everybody: two bulk decisions in transactions never wait for each other.
    in_order = sorted(admin.cards(request, approvals), key=lambda one: one.approval.run.session_id)
    decided = {one.approval.pk: _decided(admin, request, verb, one, reason) for one in in_order}
    lines = [decided[approval.pk] for approval in approvals]
    return _show(admin, request, verb, lines, outcome=True)


def _chosen(admin: ApprovalAdmin, request: HttpRequest) -> list[Approval]:
    keys = [UUID(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    found = admin.get_queryset(request).in_bulk(keys[: MOST + 1])
    return [found[key] for key in dict.fromkeys(keys) if key in found]


def _confirm(
    admin: ApprovalAdmin,
    request: HttpRequest,
    verb: str,
    approvals: list[Approval],
    form: Form,
    *,
    status: int = 200,
    refusal: str = "",
) -> HttpResponse:
    cards = admin.cards(request, approvals)
    lines = [_line(admin, request, one, why_not=_why_not(one, verb)) for one in cards]
    wants_password = verb == "approve" and any(reauth.is_needed(request, one) for one in approvals)
    return _show(
        admin, request, verb, lines, status=status, form=form, refusal=refusal, wants_password=wants_password
    )


def _decided(admin: ApprovalAdmin, request: HttpRequest, verb: str, one: ApprovalCard, reason: str) -> Line:
    """Decide one; a refusal is shown beside it and stops no other."""
    approval, digest = one.approval, request.POST.get(f"digest-{one.approval.pk}")
    if digest is None:  # was skipped when the person looked
        return _line(admin, request, one, why_not=_why_not(one, verb) or _("It was not on the page."))
    try:
        approval = decide(approval, request.user, verb, digest, reason)
    except AgentRunsError as error:
        again = admin.find(request, approval.pk)
        return _line(admin, request, one, why_not=outcome(again) or plain(error))
    logged = _("Approved in bulk.") if verb == "approve" else _("Denied: %s") % plain(reason)
    admin.log_change(request, approval, logged)
    return _line(admin, request, one, done=done(approval, verb))


def _line(
    admin: ApprovalAdmin, request: HttpRequest, one: ApprovalCard, *, why_not: str = "", done: str = ""
) -> Line:
    approval = one.approval
    return {
        "key": str(approval.pk),
        "digest": approval.digest,
        "title": visible(one.face.title),
        "url": admin.url(request, "change", approval.pk),
        "risk": risk_badge(approval),
        "requester": visible(approval.run.owner_name or _("the program")),
        "arguments": one.shown(approval.arguments),
        "why_not": why_not,
        "done": done,
    }


def _show(
    admin: ApprovalAdmin,
    request: HttpRequest,
    verb: str,
    lines: list[Line],
    *,
    status: int = 200,
    outcome: bool = False,
    form: Form | None = None,
    **more: Any,
) -> HttpResponse:
    context = {
        **more,
        "verb": verb,
        "lines": lines,
        "form": form,
        "outcome": outcome,
        "count": sum(not line["why_not"] for line in lines),
        "action_url": request.get_full_path(),
        "list_url": request.get_full_path(),
    }
    title = str(_("What became of each") if outcome else TITLES[verb])
    template = "agentruns/admin/bulk.html"
    return admin.render(request, None, title=title, status=status, template=template, **context)


def _why_not(one: ApprovalCard, verb: str) -> str:
    """Return why one of the selection is left out, or ""."""
    if not one.pending:
        return outcome(one.approval)
    if verb == "approve" and one.only_answers:
        return _("A question is answered, not approved.")
    return one.why_not or (one.why_not_approve if verb == "approve" else "")


# All that one reply waits for


def turn_view(admin: ApprovalAdmin, request: HttpRequest, run_id: str) -> HttpResponse:
    """Show the calls of a run that wait; decide those that were chosen, each by itself."""
    cards = admin.cards(request, _waiting(admin, request, run_id))
    rows = [(one, None if one.why_not else RowForm(one, request.POST)) for one in cards]
    if request.method != "POST":
        return _turn(admin, request, run_id, rows)
    chosen = [(one, form) for one, form in rows if form is not None and form.is_bound]
    # Each of them, so that each says what it misses.
    if not all(list(map(RowForm.is_valid, (form for _one, form in chosen)))):
        refusal = _("Nothing was decided. Correct what is marked below.")
        return _turn(admin, request, run_id, rows, status=400, refusal=refusal)
    approved = [one.approval for one, form in chosen if form.cleaned_data["verb"] == "approve"]
    if why := no_password(request, approved):
        return _turn(admin, request, run_id, rows, status=403, refusal=why)
    _tell_lost(admin, request, run_id, [one.approval.pk for one in cards])
    queue = admin.queue(request)
    decided = [one for one, form in chosen if _decide_row(admin, request, one.approval, form.cleaned_data)]
    if any(True for _approval in _waiting(admin, request, run_id)) or not decided:
        return HttpResponseRedirect(admin.url(request, "turn", run_id))
    return admin.onward(request, decided[-1].approval, queue)


def _waiting(admin: ApprovalAdmin, request: HttpRequest, run_id: str) -> Any:
    try:
        key = UUID(run_id)
    except ValueError:
        raise Http404(_("There is no run %(id)s.") % {"id": plain(run_id)}) from None
    approvals = admin.get_queryset(request).filter(run_id=key, status=Approval.Status.PENDING)
    return approvals.order_by("requested_at", "id")


def _tell_lost(admin: ApprovalAdmin, request: HttpRequest, run_id: str, waiting: list[UUID]) -> None:
    """Say who decided what of the calls that were on the page and do not wait any more."""
    approvals = admin.get_queryset(request).filter(run_id=run_id).exclude(pk__in=waiting)
    for approval in approvals.exclude(status=Approval.Status.PENDING):
        if request.POST.get(f"{approval.pk}-verb", LATER) != LATER:
            why = _("Your decision was not recorded. %(why)s") % {"why": outcome(approval)}
            admin.tell(request, approval, why, messages.WARNING)


def _decide_row(
    admin: ApprovalAdmin, request: HttpRequest, approval: Approval, given: dict[str, Any]
) -> bool:
    """Decide one call and say what became of it; one that is refused stops no other."""
    verb, digest, text = given["verb"], given["digest"], given["text"]
    if verb == LATER:
        return False
    try:
        approval = decide(approval, request.user, verb, digest, text)
    except AgentRunsError as error:
        admin.tell(request, approval, _("Not recorded: %s") % plain(error), messages.WARNING)
        return False
    admin.log_change(request, approval, str(WORDS[verb]))
    admin.tell(request, approval, done(approval, verb))
    return True


def _turn(
    admin: ApprovalAdmin,
    request: HttpRequest,
    run_id: str,
    rows: list[tuple[ApprovalCard, RowForm | None]],
    *,
    status: int = 200,
    **context: Any,
) -> HttpResponse:
    if not rows:
        admin.message_user(request, _("Nothing of this run waits for a decision."), messages.INFO)
        return HttpResponseRedirect(admin.url(request, "changelist"))
    run = rows[0][0].approval.run
    page = {
        "rows": [
            {
                **asked(one),
                "title": plain(one.face.title),
                "url": admin.url(request, "change", one.approval.pk),
                "form": form,
                "why_not": one.why_not,
            }
            for one, form in rows
        ],
        "said": rows[0][0].said,
        "decidable": any(form for _one, form in rows),
        "wants_password": any(form and reauth.is_needed(request, one.approval) for one, form in rows),
        "run_id": str(run.pk),
        "run_url": admin.other_page(request, Run, run.pk),
        "run_badge": run_badge(run),
        "turn_url": admin.url(request, "turn", run_id),
        "list_url": admin.url(request, "changelist"),
    }
    title = _("%(agent)s asks for %(count)d decisions") % {"agent": run.agent, "count": len(rows)}
    template = "agentruns/admin/turn.html"
    return admin.render(request, run, title=title, status=status, template=template, **page, **context)
