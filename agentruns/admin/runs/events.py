"""The events that a run waits for, on the run's page, and the buttons Deliver and Stop waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin, mask_for
from agentruns.admin.forms import ValueField
from agentruns.admin.runs import actions
from agentruns.admin.runs.list import words
from agentruns.conf import settings
from agentruns.exceptions import RunStateError
from agentruns.journal.fold import Call
from agentruns.journal.policy import Occurrence, visible_runs
from agentruns.models import Event, Run, statuses
from agentruns.models.event import CHILD
from agentruns.services import events, permissions
from agentruns.services.runs import waiting
from agentruns.services.runs.waiting import Wait
from agentruns.utils.bounds import MAX_DEPTH, is_deeper

UNCLAIMED = 5  # events that a wait shows at most
OVER = gettext_lazy("The call does not wait for its event any more. This is how the run is now.")


class DeliverForm(forms.Form):
    """The form of an event's payload: any JSON, which the model gets as the result of the waiting call."""

    payload = ValueField(
        label=gettext_lazy("What happened, as JSON: the result of the call, told to the model"),
        required=False,
        initial=forms.fields.InvalidJSONInput(),  # "", which None is not
        help_text=gettext_lazy('For example {"status": "paid"}, or "paid" with its quotes. It may be empty.'),
        widget=forms.Textarea({"rows": 3, "class": "ar-json", "spellcheck": "false", "dir": "ltr"}),
    )

    def clean_payload(self) -> Any:
        """Refuse what the API refuses: NaN, Infinity, and what is nested too deeply."""
        value = self.cleaned_data["payload"]
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            raise forms.ValidationError(_("This is not JSON.")) from None
        if is_deeper(value, MAX_DEPTH):
            raise forms.ValidationError(_("It is nested too deeply."))
        return value


def awaited(request: HttpRequest, run: Run, sent: Mapping[str, DeliverForm] = {}) -> dict[str, Any]:
    """Build the context of a run's waits for events; `sent` has the refused form of a call.

    A wait has no form for who may not deliver the event, as if only this package delivers it. Beside the form
    stand the newest events of the same name that nobody waits for: one of them may have a wrong key. The wait
    for a child run has the run, if the user may see it.
    """
    lines, user = [], request.user
    its_waits = waiting.events_of(settings.DATABASE, [run])[run.pk]
    is_parent = any(wait.event == CHILD for wait in its_waits)
    listed = visible_runs(user).filter(parent_id=run.pk) if is_parent else ()
    children = {str(child.pk): child for child in listed}
    for wait in its_waits:
        masked, event = wait.masked(mask_for(run)), Occurrence(run.scope, wait.event, wait.text)
        line: dict[str, Any] = {"wait": masked, "words": words(masked), "form": None}
        line["child"] = children.get(wait.text)
        if not wait.is_own and permissions.may(user, "deliver", event):
            line["form"] = sent.get(wait.call_id) or DeliverForm(auto_id=f"{wait.call_id}_%s")
            line["others"] = unclaimed(user, run, wait.event)
        is_for_people = wait.event != CHILD  # who gives up a child run cancels it
        lines.append({**line, "may_stop": is_for_people and permissions.may(user, "resolve", run)})
    return {"awaited": lines}


def unclaimed(user: Any, run: Run, name: str) -> list[Event]:
    """List the newest events of a name that nobody waits for, and that this user may deliver to a run."""
    others = Event.objects.using(settings.DATABASE).filter(scope=run.scope, name=name)
    return [
        other
        for other in others.filter(run=None, delivered_at__isnull=False).order_by("-delivered_at")[:UNCLAIMED]
        if permissions.may(user, "deliver", Occurrence(run.scope, other.name, other.key))
    ]


def settling(user: Any, run: Run, call: Call) -> dict[str, Any]:
    """Build the context of a call in doubt that an event under its idempotency key settles."""
    door = ""
    with suppress(NoReverseMatch):  # the project does not serve the API at its own address
        door = f"POST {reverse('agentruns:deliver_event', kwargs={'name': call.awaits, 'key': call.key})}"
    return {"awaits": call.awaits, "door": door, "others": unclaimed(user, run, call.awaits)}


def deliver_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Deliver the event that a call waits for; show the run's page again if the payload is no JSON."""
    form = DeliverForm(request.POST, auto_id=f"{call_id}_%s")
    waits = awaited(request, run, {call_id: form})
    if not form.is_valid() and any(line["form"] is form for line in waits["awaited"]):
        refusal = _("Nothing was delivered. Correct the form below.")
        return admin.page(request, run, status=400, refusal=refusal, **waits)

    def deliver(wait: Wait) -> str:
        payload, user = form.cleaned_data.get("payload"), request.user
        try:
            done = events.deliver_event(wait.event, wait.text, payload, actor=user, scope=run.scope)
        except ValueError as error:  # of an event of our own, or of a long payload
            raise RunStateError(str(error)) from error
        if done.status != statuses.DeliveryStatus.DELIVERED:
            raise RunStateError(str(OVER))
        return _("Delivered. A worker goes on with the run.")

    return _end_wait(admin, request, run, call_id, deliver, _("Delivered an event from the console."))


def stop_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """End the wait of a call at once, as its time limit would."""

    def stop(wait: Wait) -> str:
        if wait.event == CHILD:
            raise RunStateError(_("Only the program ends this wait."))
        events.stop_waiting(run.pk, call_id, request.user)
        return _("The wait is over. A worker goes on with the run.")

    return _end_wait(admin, request, run, call_id, stop, _("Ended a wait from the console."))


def _end_wait(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str, end: Callable[[Wait], str], log: str
) -> HttpResponse:
    """Find the wait of a call in the locked session, and call `end`, which asks for the permission."""

    def do(run: Run) -> str:
        for wait in waiting.events_of(settings.DATABASE, [run])[run.pk]:
            if wait.call_id == call_id:
                return end(wait)
        raise RunStateError(str(OVER))

    return actions.press(admin, request, run, do, log)
