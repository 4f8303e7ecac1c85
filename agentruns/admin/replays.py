"""The replay of a run in the console: compared with today's agent, or a model asked again, side by side."""

from __future__ import annotations

from typing import Any

from django import forms
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import badges
from agentruns.admin.advice import missing
from agentruns.admin.overview import RunOverview
from agentruns.admin.text import body, plain, pretty, visible
from agentruns.exceptions import AgentRunsError
from agentruns.models import Run
from agentruns.services.history import OWN, ReplayReport, replay_run
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.admin")

PERMISSION = "agentruns.replay_run"
MOST_ASKED = 10  # replies of a model in one request of a browser
LONGEST = 4_000


class ReplayForm(forms.Form):
    """What the recorded run is compared with."""

    who = forms.ChoiceField(
        label=gettext_lazy("Compare the recorded run with"),
        widget=forms.RadioSelect,
        initial="code",
        choices=[
            ("code", gettext_lazy("what its agent would send now; no model is asked")),
            (OWN, gettext_lazy("what the model of its agent, as it is now, decides")),
            ("model", gettext_lazy("what another model decides:")),
        ],
    )
    model = forms.CharField(label=gettext_lazy("Name of the model"), required=False, max_length=100)

    def clean(self) -> dict[str, Any]:
        """Require a name where one is meant."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("who") == "model" and not cleaned.get("model"):
            self.add_error("model", _("Name the model to ask."))
        return cleaned


class RunReplays(RunOverview):
    """The page of replays, for the admin of runs."""

    replay_template = "agentruns/admin/replay.html"

    def get_urls(self) -> list[URLPattern]:
        """Add the page."""
        view: Any = self.admin_site.admin_view(self.replay_view)
        # A model may take minutes, and no transaction may be open so long.
        view._non_atomic_requests = {*connections}
        return [path("<str:object_id>/replay/", view, name=self.name("replay")), *super().get_urls()]

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the way to the page."""
        return {**super().sections(request, run), "replay_url": self.url(request, "replay", run.pk)}

    def replay_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the form; a POST goes through the run again. Nothing is executed or stored."""
        run = self.find(request, object_id)
        if request.method != "POST":
            return self._replay_page(request, run, ReplayForm())
        form = ReplayForm(request.POST)
        if not form.is_valid():
            return self._replay_page(request, run, form, status=400, refusal=_("Correct the form below."))
        who = form.cleaned_data["who"]
        model = {"code": None, OWN: OWN}.get(who, form.cleaned_data["model"])
        if model is not None and not request.user.has_perm(PERMISSION):
            return self._replay_page(request, run, form, status=403, refusal=missing(PERMISSION))
        try:
            report = replay_run(run.pk, model=model, limit=MOST_ASKED if model else None)
        except AgentRunsError as error:  # also what a provider says
            text = _("The replay stopped. %(why)s") % {"why": plain(error)}
            return self._replay_page(request, run, form, status=409, refusal=text)
        except Exception as error:
            if model is None:
                raise
            logger.warning("Replay failed run=%s model=%s", run.pk, model, exc_info=True)
            text = _("The model failed: %(why)s") % {"why": plain(f"{type(error).__name__}: {error}")}
            return self._replay_page(request, run, form, status=409, refusal=text)
        if model is not None:
            self.log_change(request, run, _("Asked %s what it would have done.") % plain(report.model))
        return self._replay_page(request, run, form, report=report)

    def _replay_page(
        self,
        request: HttpRequest,
        run: Run,
        form: ReplayForm,
        *,
        status: int = 200,
        refusal: str = "",
        report: ReplayReport | None = None,
    ) -> HttpResponse:
        may = request.user.has_perm(PERMISSION)
        context = {
            "refusal": refusal,
            "run_url": self.url(request, "change", run.pk),
            "run_badge": badges.run(run),
            "run_id": str(run.pk),
            "form": form,
            "why_no_model": "" if may else missing(PERMISSION),
            "replay_url": self.url(request, "replay", run.pk),
            "report": self._report(request, run, report) if report else None,
        }
        names = {"agent": plain(run.agent), "session": plain(run.session.key)}
        title = _("Replay of %(agent)s in %(session)s") % names
        return self.render(request, run, title=title, status=status, template=self.replay_template, **context)

    def _report(self, request: HttpRequest, run: Run, report: ReplayReport) -> dict[str, Any]:
        record = report.record()
        found = record["difference"]
        return {
            "is_equal": report.is_equal,
            "model": visible(report.model) if report.model else "",
            "notes": [visible(note) for note in record["notes"]],
            "steps": [
                {
                    "seq": str(step["seq"]),
                    "url": self.url(request, "at", run.pk, seq=step["seq"]),
                    "number": step["step"] + 1,
                    "sides": [
                        (label, body(label, _told(said), LONGEST))
                        for label, said in ((_("Then"), step["then"]), (_("Now"), step["now"]))
                        if said is not None
                    ],
                }
                for step in record["steps"]
            ],
            "difference": None
            if found is None
            else {
                "seq": str(found["seq"]),
                "url": self.url(request, "at", run.pk, seq=found["seq"]),
                "path": visible(found["path"]),
                "then": body(_("Then"), _text(found["then"]), LONGEST),
                "now": body(_("Now"), _text(found["now"]), LONGEST),
            },
        }


def _told(said: dict[str, Any]) -> str:
    lines = [said["text"]] if said["text"] else []
    lines += [f"{call['name']}({pretty(call['input'])})" for call in said["calls"]]
    return "\n".join(lines) or _("nothing (%(stop)s)") % {"stop": said["stop_reason"]}


def _text(value: Any) -> str:
    if value is None:
        return _("nothing")
    return value if isinstance(value, str) else pretty(value)
