"""Resume, pause or cancel several runs: first a page that lists exactly these, then each by itself."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import DatabaseError
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from agentruns.admin.base import ReadOnlyAdmin
from agentruns.admin.forms import CancelForm
from agentruns.admin.html import plain
from agentruns.admin.runs import actions
from agentruns.admin.runs.list import status as badge_of
from agentruns.admin.runs.list import task_title
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, RunStateError, SessionBusyError
from agentruns.models import Run
from agentruns.services.waiting import is_live
from agentruns.services.write import lock_session
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import get_logger

MOST = 100  # what one page can show and one person can look at
LIVE = "live"  # seen at work: it is to be stopped however far it has come since

logger = get_logger("agentruns.admin.runs.bulk")


TITLES = {
    "resume": gettext_lazy("Resume these runs?"),
    "pause": gettext_lazy("Pause these runs?"),
    "cancel": gettext_lazy("Cancel these runs?"),
}
BUTTONS = {
    "resume": ngettext_lazy("Resume this run", "Resume these %(count)d runs", "count"),
    "pause": ngettext_lazy("Pause this run", "Pause these %(count)d runs", "count"),
    "cancel": ngettext_lazy("Cancel this run", "Cancel these %(count)d runs", "count"),
}
Line = dict[str, Any]  # one run of the selection: what will become of it, or became of it


def act_on_selected(admin: ReadOnlyAdmin, request: HttpRequest, name: str) -> HttpResponse | None:
    """Ask, then act on the ids that were on the page, whatever else "select all" may mean."""
    keys = list(dict.fromkeys(UUID(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)))
    if len(keys) > MOST:
        text = _("Choose at most %(most)d: nobody can check more on one page.") % {"most": MOST}
        admin.message_user(request, text, messages.WARNING)
        return None
    found = admin.get_queryset(request).in_bulk(keys)
    runs, bulk = [found[key] for key in keys if key in found], _Bulk(admin, request, name)
    if "confirmed" in request.POST:
        return bulk.answer(runs)
    if request.POST.get("select_across") == "1":
        text = _("Only what was on the page is acted on: %(count)d.") % {"count": len(runs)}
        admin.message_user(request, text, messages.WARNING)
    return bulk.ask(runs, bulk.form())


class _Bulk:
    """One verb for several runs, in one request."""

    def __init__(self, runs_admin: ReadOnlyAdmin, request: HttpRequest, name: str) -> None:
        self.admin, self.request, self.name, self.verb = runs_admin, request, name, actions.VERBS[name]
        self.form = CancelForm if self.verb.stops else Form

    def ask(self, runs: list[Run], form: Form, *, status: int = 200) -> HttpResponse:
        """Show what will happen to each."""
        return self._show([self._planned(run) for run in runs], form, status=status)

    def answer(self, runs: list[Run]) -> HttpResponse:
        """Do it, and show what became of each."""
        form = self.form(self.request.POST)
        if not form.is_valid():
            return self.ask(runs, form, status=400)
        reason = form.cleaned_data.get("reason", "")
        # Sessions in one order for everybody: two bulk actions (ATOMIC_REQUESTS) never wait for each other.
        in_order = sorted(runs, key=lambda run: run.session_id)
        done = {run.pk: self._done(run, reason) for run in in_order}
        return self._show([done[run.pk] for run in runs])

    def _planned(self, run: Run) -> Line:
        action = self.verb.advice(actions.situation(self.request, run))
        seen = LIVE if self.verb.stops and is_live(run) else _last_seq(run)
        return self._line(run, effect=action.effect, why_not=action.why_not, seen=seen)

    def _done(self, run: Run, reason: str) -> Line:
        """Act on one; a refusal is shown beside it and stops no other."""
        seen = self.request.POST.get(f"seen-{run.pk}", "")
        if not seen:  # was left out when the person looked
            why_not = self.verb.advice(actions.situation(self.request, run)).why_not
            return self._line(run, why_not=why_not or _("It was not on the page."))
        try:
            done = in_transaction(settings.DATABASE, lambda: self._act(run, seen, reason))
        except (RunStateError, SessionBusyError) as error:
            return self._line(self._again(run), why_not=plain(error))
        except AgentRunsError as error:
            return self._line(self._again(run), why_not=plain(error), refused=True)
        except DatabaseError:
            logger.exception("Bulk %s failed run=%s", self.name, run.pk)
            why = _("The database failed; the log says how. Nothing was changed about this run.")
            return self._line(run, why_not=why, refused=True)
        self.admin.log_change(self.request, run, f"{self.verb.logged} {plain(reason)}".strip())
        return self._line(self._again(run), done=done)

    def _act(self, run: Run, seen: str, reason: str) -> str:
        lock_session(settings.DATABASE, run.session_id)
        run = self._again(run)
        if seen != _last_seq(run) and not (self.verb.stops and seen == LIVE):
            raise RunStateError(_("It moved on since you looked. Look at it again."))
        actions.require(self.verb.advice(actions.situation(self.request, run)))
        return self.verb.act(run, self.request.user, reason)

    def _again(self, run: Run) -> Run:
        """Return the run as it is now; where it is gone as it was, so that a service says so."""
        return self.admin.get_queryset(self.request).filter(pk=run.pk).first() or run

    def _line(self, run: Run, **values: Any) -> Line:
        return {"run": run, "title": task_title(run), "badge": badge_of(run), **values}

    def _show(self, lines: list[Line], form: Form | None = None, *, status: int = 200) -> HttpResponse:
        count = sum(not line.get("why_not") for line in lines)
        context = {
            "verb": self.name,
            "lines": lines,
            "form": form,
            "outcome": form is None,
            "count": count,
            "left_out": len(lines) - count,
            "button": BUTTONS[self.name] % {"count": count},
        }
        title = _("Outcome of each") if form is None else str(TITLES[self.name])
        template = "agentruns/admin/run_bulk.html"
        return self.admin.render(self.request, None, title=title, status=status, template=template, **context)


def _last_seq(run: Run) -> str:
    """Return the last row of the run's session: an unfinished run is the only one that goes on there."""
    return str(run.session.next_seq - 1)
