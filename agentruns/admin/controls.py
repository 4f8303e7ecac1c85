"""The buttons of a run: each records what a person wants; workers carry it out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from agentruns.admin import advice, paging
from agentruns.admin.calls import CallPages
from agentruns.admin.forms import CancelForm, PauseForm, ResumeForm
from agentruns.admin.text import plain
from agentruns.conf import settings
from agentruns.exceptions import (
    JournalConflictError,
    PermissionDeniedError,
    RunStateError,
    SessionBusyError,
)
from agentruns.journal import events
from agentruns.models import Message, Run
from agentruns.services.control import cancel_run, pause_run
from agentruns.services.runs import resume_run
from agentruns.services.write import find_run, lock_session

REFUSALS = (RunStateError, SessionBusyError, JournalConflictError)


class RunControls(CallPages):
    """The targets of a run's buttons, for the admin of runs."""

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons' targets."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/resume/", view(self.resume_view), name=self.name("resume")),
            path("<str:object_id>/pause/", view(self.pause_view), name=self.name("pause")),
            path("<str:object_id>/cancel/", view(self.cancel_view), name=self.name("cancel")),
            *super().get_urls(),
        ]

    def resume_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Let the run go on, if it still is what the page showed. Records and queues; a worker drives."""

        def act(run: Run) -> str:
            form = ResumeForm(request.POST)
            with transaction.atomic(using=settings.DATABASE):
                lock_session(settings.DATABASE, run.session_id)
                run = find_run(run.pk)
                seen = form.cleaned_data["seq"] if form.is_valid() else None
                if seen != paging.last_seq(settings.DATABASE, run.pk):
                    raise RunStateError(_("The run moved on since you looked. This is how it is now."))
                action = advice.resume(self.situation(request, run))
                if action.forbidden:
                    raise PermissionDeniedError(action.why_not)
                if action.why_not:
                    raise RunStateError(action.why_not)
                resume_run(run.pk, request.user, drive=False)
            return _("Resumed. A worker takes it up.")

        return self._act(request, object_id, act, _("Resumed from the console."))

    def pause_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Pause the run, or ask its worker to. Like a cancel it counts whatever happened meanwhile."""

        def act(run: Run) -> str:
            form = PauseForm(request.POST)
            if not form.is_valid():
                raise RunStateError(" ".join(map(str, form.errors.get("reason", []))))
            action = advice.pause(self.situation(request, run))
            if action.forbidden:
                raise PermissionDeniedError(action.why_not)
            if action.why_not:
                raise RunStateError(action.why_not)
            run = pause_run(run.pk, request.user, reason=form.cleaned_data["reason"])
            if pause_of(settings.DATABASE, run)[0]:
                return _("Paused. It goes on when somebody resumes it.")
            return _("Pause requested. The worker pauses it before its next tool starts.")

        return self._act(request, object_id, act, _("Pause asked for from the console."))

    def cancel_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Cancel the run, or ask its worker to stop."""

        def act(run: Run) -> str:
            form = CancelForm(request.POST)
            if not form.is_valid():
                raise RunStateError(" ".join(map(str, form.errors.get("reason", []))))
            run = cancel_run(run.pk, request.user, reason=form.cleaned_data["reason"])
            if run.is_ended:
                return _("Cancelled.")
            return _("Cancel requested. The worker stops before its next tool starts.")

        return self._act(request, object_id, act, _("Cancel asked for from the console."))

    def _act(
        self, request: HttpRequest, object_id: str, act: Callable[[Run], str], logged: str
    ) -> HttpResponse:
        run = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, run)
        try:
            done = act(run)
        except PermissionDeniedError as error:
            return self._refused(request, object_id, 403, error)
        except REFUSALS as error:
            return self._refused(request, object_id, 409, error)
        self.log_change(request, run, logged)
        self.message_user(request, done, messages.SUCCESS)
        return self.back(request, run)

    def _refused(self, request: HttpRequest, object_id: str, status: int, error: Exception) -> HttpResponse:
        run = self.find(request, object_id)
        text = _("Nothing was changed. %(why)s") % {"why": plain(error)}
        return self.page(request, run, status=status, refusal=text)


def pause_of(alias: str, run: Run) -> tuple[bool, tuple[str, datetime] | None]:
    """Return whether a run is paused, and who asked when for a pause that its worker still owes."""
    kinds = (events.RUN_PAUSE_REQUESTED, events.RUN_PAUSED, events.RUN_RESUMED)
    rows = Message.objects.using(alias).own().filter(run_id=run.pk, kind__in=kinds).order_by("-seq")
    for kind, payload, at in rows.values_list("kind", "payload", "created_at"):
        if events.COPIED in payload or (kind == events.RUN_RESUMED and not payload.get("unpause")):
            continue
        if kind == events.RUN_PAUSE_REQUESTED:
            return False, (plain((payload.get("actor") or events.PROGRAM)["name"]), at)
        return kind == events.RUN_PAUSED, None
    return False, None
