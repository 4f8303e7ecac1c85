"""The review on a run's page: a rating, a note, and an assignee."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin, mask_for, status_of
from agentruns.admin.forms import MomentField, reason_field
from agentruns.admin.html import bare, plain
from agentruns.admin.runs.actions import Situation
from agentruns.exceptions import AgentRunsError
from agentruns.models import Review, Run
from agentruns.services import permissions, reviews
from agentruns.utils.bounds import NAME_LENGTH


class ReviewForm(forms.Form):
    """The form of a whole review; `seen` is the time of the last change to the review that was shown."""

    seen = MomentField(required=False, widget=forms.HiddenInput)
    rating = forms.TypedChoiceField(
        label=gettext_lazy("Rating"), coerce=int, choices=Review.Rating.choices, widget=forms.RadioSelect
    )
    assignee = forms.CharField(
        label=gettext_lazy("Assigned to (username)"),
        required=False,
        max_length=NAME_LENGTH,
        widget=forms.TextInput({"list": "ar-people", "autocomplete": "off"}),
    )
    note = reason_field(gettext_lazy("Note, for colleagues; the agent never reads it"), required=False)


def review(admin: ReadOnlyAdmin, request: HttpRequest, situation: Situation) -> dict[str, Any]:
    """Build the context of a run's review, with the form if the user may change it."""
    run = situation.run
    review: Any = getattr(run, "review", None)
    note = mask_for(run).json(review.note) if review else ""
    context = {"review": review, "review_note": note}
    if not permissions.may(request.user, "review", run):
        return context
    initial: dict[str, Any] = {"note": bare(note), "rating": Review.Rating.NONE}
    if review:
        initial |= {"rating": review.rating, "assignee": bare(review.assignee_name)}
        initial |= {"seen": review.updated_at.isoformat()}
    form, thumbs = (ReviewForm(initial=initial, auto_id=auto_id) for auto_id in ("review_%s", ""))
    names = reviews.assignable(request.user, run)
    people = [name for name in names if bare(name) == name]  # others would come back changed
    return {**context, "review_form": form, "thumbs": thumbs, "people": people}


def review_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Store the review that was sent; if it is refused, show the page again with the reason."""
    form = ReviewForm(request.POST, auto_id="review_%s")
    status, refusal = 400, _("Nothing was saved. Correct the review below.")
    if form.is_valid():
        given, before = {**form.cleaned_data}, getattr(run, "review", None) or Review()
        if given["note"] == bare(mask_for(run).json(before.note)):  # unchanged: keep its hidden parts
            given["note"] = before.note
        if given["assignee"] == bare(before.assignee_name):
            given["assignee"] = before.assignee_name
        try:
            reviews.review_run(run.pk, request.user, **given)
        except (AgentRunsError, ValueError) as error:
            if not isinstance(error, AgentRunsError):  # the form has checked all other fields
                form.add_error("assignee", plain(error))
            status, refusal = status_of(error), plain(error)
        else:
            return admin.done(request, run, _("Reviewed."), _("The review is saved."))
    sent = {"review_form": form} if permissions.may(request.user, "review", run) else {}
    return admin.page(request, run, status=status, refusal=refusal, **sent)
