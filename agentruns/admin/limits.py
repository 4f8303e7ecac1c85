"""What a run may use and how much of it is used, and the definition it goes by; on the page of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.translation import gettext as _

from agentruns.admin import advice, controls, paging
from agentruns.admin.drift import Drift, drift, told
from agentruns.admin.forms import AdoptForm, PauseForm
from agentruns.admin.listing import is_stalled
from agentruns.admin.meters import judgement, meters, unlimited
from agentruns.admin.overview import RunOverview
from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError, RunStateError
from agentruns.journal import events
from agentruns.journal.fold import fold
from agentruns.journal.read import run_rows
from agentruns.models import Run
from agentruns.models.definition import definition_body
from agentruns.services import permissions
from agentruns.services.control import adopt_definition
from agentruns.services.write import find_run, lock_session


class RunLimits(RunOverview):
    """Budgets, Pause, and another definition with Adopt, for the admin of runs."""

    def get_urls(self) -> list[URLPattern]:
        """Add the button's target."""
        view = self.admin_site.admin_view
        adopt = path("<str:object_id>/adopt/", view(self.adopt_view), name=self.name("adopt"))
        return [adopt, *super().get_urls()]

    def situation(self, request: HttpRequest, run: Run) -> advice.Situation:
        """Add what is known of a pause, and what this user may do about it."""
        user = request.user
        paused, requested = (False, None) if run.is_ended else controls.pause_of(settings.DATABASE, run)
        return replace(
            super().situation(request, run),
            is_paused=paused,
            pause_requested=requested,
            may_pause=user.has_perm("agentruns.pause_run") or permissions.owns(user, run),
            may_adopt=user.has_perm("agentruns.adopt_definition"),
        )

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the budgets, whether the worker is silent, the definition, and the buttons."""
        situation = self.situation(request, run)
        definition = definition_body(settings.DATABASE, run.definition_id)
        found = meters(definition, run.step, run.usage, _elapsed(run, definition))
        return {
            **super().sections(request, run),
            "stalled": is_stalled(run),
            "meters": found,
            "unlimited": unlimited(definition),
            "judgement": judgement(found, ended=run.is_ended, error=run.error),
            "pause": advice.pause(situation),
            "pause_url": self.url(request, "pause", run.pk),
            "pause_form": PauseForm(auto_id="pause_%s"),
            **({} if run.is_ended else self._definition(request, run, situation)),
        }

    def adopt_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Let the run go on under the definition that was shown, if it still is the one registered."""

        def act(run: Run) -> str:
            form = AdoptForm(request.POST)
            sent = form.cleaned_data if form.is_valid() else {}
            with transaction.atomic(using=settings.DATABASE):
                lock_session(settings.DATABASE, run.session_id)
                run = find_run(run.pk)
                found = drift(run, definition_body(settings.DATABASE, run.definition_id))
                action = advice.adopt(self.situation(request, run), found)
                if action.forbidden:
                    raise PermissionDeniedError(action.why_not)
                if action.why_not:
                    raise RunStateError(action.why_not)
                _require_as_shown(run, found, sent)
                run = adopt_definition(run.pk, request.user, reason=sent["reason"])
                if run.definition_id != sent["hash"]:  # registered while this was at work: undo
                    raise RunStateError(_another())
            return _("Adopted. The run goes by the definition of version %(version)s now.") % {
                "version": run.version
            }

        return self._act(request, object_id, act, _("Adopted another definition from the console."))

    def _definition(self, request: HttpRequest, run: Run, situation: advice.Situation) -> dict[str, Any]:
        found = drift(run, definition_body(settings.DATABASE, run.definition_id))
        seen = {"hash": found.hash, "seq": str(paging.last_seq(settings.DATABASE, run.pk))}
        return {
            "drift": found,
            "drift_told": told(run, found),
            "adopt": advice.adopt(situation, found),
            "adopt_url": self.url(request, "adopt", run.pk),
            "adopt_form": AdoptForm(initial=seen, auto_id="adopt_%s"),
        }


def _elapsed(run: Run, definition: dict[str, Any]) -> timedelta | None:
    """Return the time that counts for the deadline, where there is one: only the whole journal says it."""
    if not definition.get("deadline"):
        return None
    rows = run_rows(settings.DATABASE, run.pk)
    ends = [row.created_at for row in rows if row.kind in events.CLOSING and events.COPIED not in row.payload]
    until: datetime = ends[-1] if ends else timezone.now()
    return fold(run.pk, rows).elapsed(until)


def _require_as_shown(run: Run, found: Drift, sent: dict[str, Any]) -> None:
    if sent.get("hash") != found.hash:
        raise RunStateError(_another())
    if sent.get("seq") != paging.last_seq(settings.DATABASE, run.pk):
        raise RunStateError(_("The run moved on since you looked. This is how it is now."))


def _another() -> str:
    return _("Yet another definition is registered since you looked. This is how it is now.")
