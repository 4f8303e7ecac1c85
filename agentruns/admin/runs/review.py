"""The review on a run's page: a rating, a note, and who sees to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import status_of
from agentruns.admin.forms import TypedField, area
from agentruns.admin.html import dated, plain, visible
from agentruns.admin.runs.actions import Situation
from agentruns.admin.runs.steps import mask_for
from agentruns.exceptions import AgentRunsError
from agentruns.models import Review, Run
from agentruns.services import permissions, reviews
from agentruns.utils.bounds import NAME_LENGTH, REASON_LENGTH

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin


class ReviewForm(forms.Form):
    """The whole review; `seen` says which one was shown."""

    seen = forms.DateTimeField(required=False, widget=forms.HiddenInput)
    rating = forms.TypedChoiceField(
        label=gettext_lazy("Rating"), coerce=int, choices=Review.Rating.choices, widget=forms.RadioSelect
    )
    assignee = forms.CharField(
        label=gettext_lazy("Assigned to (username)"), required=False, max_length=NAME_LENGTH
    )
    note = TypedField(
        label=gettext_lazy("Note, for colleagues; the agent never reads it"),
        required=False,
        max_length=REASON_LENGTH,
        widget=area(),
    )


def review(admin: RunAdmin, request: HttpRequest, situation: Situation) -> dict[str, Any]:
    """Return the review of a run, and the form for who may change it."""
    run = situation.run
    found = _review_of(run)
    is_stored, note = not found._state.adding, mask_for(run).said(found.note)
    shown = {
        "rating": found.get_rating_display() if found.rating else "",
        "assignee": visible(found.assignee_name),
        "note": visible(note),
        "author": visible(found.author_name) if is_stored else "",
        "at": dated(found.updated_at) if is_stored else "",
    }
    if not permissions.may(request.user, "review", run):
        return {"review": shown if is_stored else None}
    initial = {"rating": found.rating, "assignee": plain(found.assignee_name), "note": plain(note)}
    if is_stored:
        initial["seen"] = found.updated_at.isoformat()
    form = ReviewForm(initial=initial, auto_id="review_%s")
    return {"review": shown, "review_form": form, "review_url": admin.url(request, "review", run.pk)}


def _review_of(run: Run) -> Review:
    return getattr(run, "review", None) or Review(run_id=run.pk)


def review_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Store the review."""
    form = ReviewForm(request.POST, auto_id="review_%s")
    if not form.is_valid():
        return _refused(admin, request, run, form, 400, _("Nothing was saved. Correct the review below."))
    given, before = {**form.cleaned_data}, _review_of(run)
    if given["note"] == plain(mask_for(run).said(before.note)):  # what was hidden was not seen, and stays
        given["note"] = before.note
    if given["assignee"] == plain(before.assignee_name):
        given["assignee"] = before.assignee_name
    try:
        reviews.review_run(run.pk, request.user, **given)
    except (AgentRunsError, ValueError) as error:
        return _refused(admin, request, run, form, status_of(error), plain(error))
    admin.log_change(request, run, _("Reviewed."))
    admin.message_user(request, _("The review is saved."), messages.SUCCESS)
    return admin.back(request, run)


def _refused(
    admin: RunAdmin, request: HttpRequest, run: Run, form: ReviewForm, status: int, refusal: str
) -> HttpResponse:
    given: dict[str, Any] = {"status": status, "refusal": refusal}
    if permissions.may(request.user, "review", run):
        given["review_form"] = form
    return admin.page(request, run, **given)
