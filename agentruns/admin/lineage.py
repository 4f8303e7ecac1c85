"""Where a run comes from and what came of it: running again, and forks."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import badges
from agentruns.admin.advice import Action, missing
from agentruns.admin.forms import TypedField
from agentruns.admin.overview import RunOverview
from agentruns.admin.text import plain, short_id, visible
from agentruns.admin.times import age
from agentruns.agents.agent import registered
from agentruns.conf import settings
from agentruns.exceptions import (
    JournalConflictError,
    PayloadError,
    PermissionDeniedError,
    RunStateError,
    SessionBusyError,
    UnknownAgentError,
)
from agentruns.models import Run
from agentruns.services import permissions
from agentruns.services.control import agent_again
from agentruns.services.forks import PERMISSION, fork_run, run_again
from agentruns.utils.ids import uuid7

MOST = 20  # derived runs on the page
TEXT_LENGTH = 100_000
# ValueError: a key that no page of ours sends.
REFUSALS = (
    RunStateError,
    SessionBusyError,
    JournalConflictError,
    UnknownAgentError,
    PayloadError,
    ValueError,
)


class AgainForm(forms.Form):
    """Run again; the key makes a double click one run."""

    key = forms.CharField(max_length=64, widget=forms.HiddenInput)


class ForkForm(AgainForm):
    """Go on from a row, perhaps with another text or agent."""

    at = forms.IntegerField(min_value=1, widget=forms.HiddenInput)
    text = TypedField(
        label=gettext_lazy("What the agent is told then (optional where something is left to do)"),
        required=False,
        max_length=TEXT_LENGTH,
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 3}),
    )
    agent = forms.ChoiceField(label=gettext_lazy("Agent"), required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = sorted({agent.name for agent in registered()})
        same: list[tuple[str, Any]] = [("", _("the same"))]
        self.fields["agent"].choices = same + [(name, plain(name)) for name in names]  # type: ignore[attr-defined]


class RunLineage(RunOverview):
    """Run again, Fork, and what a run comes from, for the admin of runs."""

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons' targets."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/again/", view(self.again_view), name=self.name("again")),
            path("<str:object_id>/fork/", view(self.fork_view), name=self.name("fork")),
            *super().get_urls(),
        ]

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the origin, the runs derived from this one, and the button."""
        alias = settings.DATABASE
        derived = Run.objects.using(alias).filter(origin_id=run.pk).select_related("session")
        newest = list(derived.order_by("-id")[: MOST + 1])
        return {
            **super().sections(request, run),
            "origin": self._origin(request, run),
            "derived": [self._line(request, one) for one in newest[:MOST]],
            "derived_more": len(newest) > MOST,
            "again": self._again(request, run) if run.is_ended else None,
            "again_url": self.url(request, "again", run.pk),
            "again_form": AgainForm(initial={"key": str(uuid7())}, auto_id="again_%s"),
        }

    def again_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Queue a new run of the same task, and go to its page."""
        run = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, run)
        form = AgainForm(request.POST)
        key = form.cleaned_data["key"] if form.is_valid() else ""
        try:
            new = run_again(run.pk, request.user, idempotency_key=key)
        except PermissionDeniedError as error:
            return self._refused(request, object_id, 403, error)
        except REFUSALS as error:
            return self._refused(request, object_id, 409, error)
        logged = _("Ran again from the console: run %(run)s.") % {"run": new.pk}
        said = _("Started again as run %(run)s. A worker takes it up.") % {"run": short_id(new.pk)}
        return self._made(request, run, new, logged, said)

    def fork_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Queue a run that goes on from a row of this one, and go to its page."""
        run = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, run)
        form = ForkForm(request.POST, auto_id="fork_%s")
        if not form.is_valid():
            return self.fork_refused(request, run, form, 400, _("Correct the form below."))
        given = form.cleaned_data
        try:
            new = fork_run(
                run.pk,
                given["at"],
                text=given["text"] or None,
                agent=given["agent"] or None,
                actor=request.user,
                idempotency_key=given["key"],
            )
        except PermissionDeniedError as error:
            return self.fork_refused(request, run, form, 403, plain(error))
        except REFUSALS as error:
            return self.fork_refused(request, run, form, 409, plain(error))
        logged = _("Forked at row %(seq)s from the console: run %(run)s.") % {
            "seq": given["at"],
            "run": new.pk,
        }
        said = _("Forked at row %(seq)s as run %(run)s. A worker takes it up.") % {
            "seq": given["at"],
            "run": short_id(new.pk),
        }
        return self._made(request, run, new, logged, said)

    def fork_refused(
        self, request: HttpRequest, run: Run, form: ForkForm, status: int, why: str
    ) -> HttpResponse:
        """Show the form again where it stands, with why nothing was done."""
        raise NotImplementedError

    def may_fork(self, request: HttpRequest, run: Run) -> bool:
        """Whether this user may run the run again, or fork it."""
        return request.user.has_perm(PERMISSION) or permissions.owns(request.user, run)

    def _made(self, request: HttpRequest, run: Run, new: Run, logged: str, said: str) -> HttpResponse:
        self.log_change(request, run, logged)
        self.message_user(request, said, messages.SUCCESS)
        return self.back(request, new)

    def _again(self, request: HttpRequest, run: Run) -> Action:
        effect = [
            _("A new run of the same task is queued in the same session, linked to this one."),
            _("Its model sees what was done before. What it asks for again is done again."),
        ]
        if not self.may_fork(request, run):
            return Action(effect, missing(PERMISSION), forbidden=True)
        try:
            agent = agent_again(run)
        except UnknownAgentError:
            name = plain(run.agent)
            return Action(effect, _("Agent %(agent)s is not known in this process.") % {"agent": name})
        if agent.version != run.version:
            text = _("Version %(old)s is not registered any more; it runs under version %(new)s.")
            effect.append(text % {"old": plain(run.version), "new": plain(agent.version)})
        return Action(effect)

    def _origin(self, request: HttpRequest, run: Run) -> dict[str, Any] | None:
        if run.origin_id is None:
            return None
        runs = Run.objects.using(settings.DATABASE).select_related("session")
        origin = runs.filter(pk=run.origin_id).first()
        found: dict[str, Any] = {"run": str(run.origin_id), "seq": run.origin_seq}
        if origin is not None:
            found |= self._line(request, origin)
            if run.origin_seq is not None:
                found["at_url"] = self.url(request, "at", origin.pk, seq=run.origin_seq)
        return found

    def _line(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        return {
            "run": str(run.pk),
            "short": short_id(run.pk),
            "badge": badges.run(run),
            "session": visible(run.session.key),
            "age": age(run.created_at),
            "at": run.origin_seq,
            "url": self.url(request, "change", run.pk),
        }
