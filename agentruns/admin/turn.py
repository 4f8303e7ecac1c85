"""All calls of one reply that wait for people, decided on one page with one button."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import badges, decisions, queue
from agentruns.admin.card import Decidable, decidable, sections
from agentruns.admin.deciding import DecidingAdmin
from agentruns.admin.forms import REASON_LENGTH, TypedField
from agentruns.admin.text import plain, visible
from agentruns.admin.verbs import REFUSALS, decide
from agentruns.exceptions import PermissionDeniedError
from agentruns.models import Approval, Run

LATER = "later"
WORDS = {
    "approve": gettext_lazy("Approve"),
    "deny": gettext_lazy("Deny"),
    "answer": gettext_lazy("Answer instead"),
    LATER: gettext_lazy("Not now"),
}


class RowForm(forms.Form):
    """What is decided about one of the calls."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    verb = forms.ChoiceField(label=gettext_lazy("Decision"), widget=forms.RadioSelect, initial=LATER)
    text = TypedField(
        label=gettext_lazy("Reason or answer, told to the model"),
        max_length=REASON_LENGTH,
        required=False,
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 2}),
    )

    def __init__(self, one: Decidable, data: Any = None) -> None:
        super().__init__(data, prefix=str(one.approval.pk), initial={"digest": one.approval.digest})
        left_out = {"approve"} if one.asked.only_answers or one.why_not_approve else set()
        verbs: list[tuple[str, Any]] = [(verb, word) for verb, word in WORDS.items() if verb not in left_out]
        if one.asked.only_answers:
            verbs = [(verb, _("Answer") if verb == "answer" else word) for verb, word in verbs]
        self.fields["verb"].choices = verbs  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        """Require the text that the model is told."""
        given = self.cleaned_data
        if given.get("verb") in ("deny", "answer") and not given.get("text", "").strip():
            self.add_error("text", _("The model is told this: a denial or an answer needs it."))
        return given


class TurnPage(DecidingAdmin):
    """The page of a reply, for the admin of approvals."""

    def turn_view(self, request: HttpRequest, run_id: str) -> HttpResponse:
        """Show the calls of a run that wait; decide those that were chosen, each by itself."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        cards = [decidable(request.user, approval) for approval in self._waiting(request, run_id)]
        rows = [(one, None if one.why_not else _form(one, request)) for one in cards]
        if request.method != "POST":
            return self._turn(request, run_id, rows)
        chosen = [(one, form) for one, form in rows if form is not None and form.is_bound]
        # Each of them, so that each says what it misses.
        if not all(list(map(RowForm.is_valid, (form for _one, form in chosen)))):
            refusal = _("Nothing was decided. Correct what is marked below.")
            return self._turn(request, run_id, rows, status=400, refusal=refusal)
        self._tell_lost(request, run_id, [one.approval.pk for one in cards])
        cards_in_order = queue.Queue(self, request)
        decided = [one for one, form in chosen if self._decide_row(request, one.approval, form.cleaned_data)]
        if any(True for _approval in self._waiting(request, run_id)) or not decided:
            return HttpResponseRedirect(self.url(request, "turn", run_id))
        return self.onward(request, decided[-1].approval, cards_in_order)

    def _waiting(self, request: HttpRequest, run_id: str) -> Any:
        try:
            key = UUID(run_id)
        except ValueError:
            raise Http404(_("There is no run %(id)s.") % {"id": plain(run_id)}) from None
        approvals = self.get_queryset(request).filter(run_id=key, status=Approval.Status.PENDING)
        return approvals.order_by("requested_at", "id")

    def _tell_lost(self, request: HttpRequest, run_id: str, waiting: list[UUID]) -> None:
        """Say who decided what of the calls that were on the page and do not wait any more."""
        approvals = self.get_queryset(request).filter(run_id=run_id).exclude(pk__in=waiting)
        for approval in approvals.exclude(status=Approval.Status.PENDING):
            if request.POST.get(f"{approval.pk}-verb", LATER) != LATER:
                why = _("Your decision was not recorded. %(why)s") % {"why": decisions.outcome(approval)}
                self.tell(request, approval, why, messages.WARNING)

    def _decide_row(self, request: HttpRequest, approval: Approval, given: dict[str, Any]) -> bool:
        """Decide one call and say what became of it; one that is refused stops no other."""
        verb, digest, text = given["verb"], given["digest"], given["text"]
        if verb == LATER:
            return False
        try:
            approval = decide(approval, request.user, verb, digest, text)
        except (PermissionDeniedError, *REFUSALS) as error:
            self.tell(request, approval, _("Not recorded: %s") % plain(error), messages.WARNING)
            return False
        self.log_change(request, approval, str(WORDS[verb]))
        self.tell(request, approval, decisions.done(approval, verb))
        return True

    def _turn(
        self,
        request: HttpRequest,
        run_id: str,
        rows: list[tuple[Decidable, RowForm | None]],
        *,
        status: int = 200,
        **context: Any,
    ) -> HttpResponse:
        if not rows:
            self.message_user(request, _("Nothing of this run waits for a decision."), messages.INFO)
            return HttpResponseRedirect(self.url(request, "changelist"))
        run = rows[0][0].approval.run
        shown = {
            "rows": [self._row(request, one, form) for one, form in rows],
            "said": visible(rows[0][0].asked.said),
            "decidable": any(form for _one, form in rows),
            "run_id": str(run.pk),
            "run_url": self.other_page(request, Run, run.pk),
            "run_badge": badges.run(run),
            "turn_url": self.url(request, "turn", run_id),
            "list_url": self.url(request, "changelist"),
        }
        title = _("%(agent)s asks for %(count)d decisions") % {"agent": run.agent, "count": len(rows)}
        template = "agentruns/admin/turn.html"
        return self.render(request, run, title=title, status=status, template=template, **shown, **context)

    def _row(self, request: HttpRequest, one: Decidable, form: RowForm | None) -> dict[str, Any]:
        url = self.url(request, "change", one.approval.pk)
        return {
            **sections(one, self.get_queryset(request)),
            "title": plain(one.approval.title),
            "url": url,
            "form": form,
            "why_not": one.why_not,
        }


def _form(one: Decidable, request: HttpRequest) -> RowForm:
    """Return the form of a call; one that was not on the page that was sent is still to be decided."""
    was_shown = f"{one.approval.pk}-digest" in request.POST
    return RowForm(one, request.POST if was_shown else None)
