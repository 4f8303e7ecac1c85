"""Resuming, pausing or cancelling several runs: a page lists exactly these, then each is done by itself."""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

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

LIVE = "live"  # a running run is stopped however far it has come since the page was shown

logger = get_logger("agentruns.admin.runs.bulk")
Line = dict[str, Any]  # one run of the selection, with its coming effect or its outcome


def act_on_selected(admin: ReadOnlyAdmin, request: HttpRequest, name: str, runs: list[Run]) -> HttpResponse:
    """Ask for confirmation, then act on the runs that were on the page, even for "select all"."""
    bulk = _Bulk(admin, request, name)
    return bulk.answer(runs) if "confirmed" in request.POST else bulk.ask(runs, bulk.form())


class _Bulk:
    """One verb for several runs, in one request."""

    def __init__(self, runs_admin: ReadOnlyAdmin, request: HttpRequest, name: str) -> None:
        self.admin, self.request, self.name, self.verb = runs_admin, request, name, actions.VERBS[name]
        self.form = CancelForm if self.verb.stops else Form

    def ask(self, runs: list[Run], form: Form, *, status: int = 200) -> HttpResponse:
        """Show the effect on each run."""
        lines = []
        for run in runs:
            action = self.verb.advice(actions.situation(self.request, run))
            seen = LIVE if self.verb.stops and is_live(run) else _last_seq(run)
            lines.append(self._line(run, effect=action.effect, why_not=action.why_not, seen=seen))
        return self._show(lines, form, status=status)

    def answer(self, runs: list[Run]) -> HttpResponse:
        """Act on each run, and show each outcome."""
        form = self.form(self.request.POST)
        if not form.is_valid():
            return self.ask(runs, form, status=400)
        reason = form.cleaned_data.get("reason", "")
        # Sessions in one order for everybody: two bulk actions (ATOMIC_REQUESTS) never wait for each other.
        in_order = sorted(runs, key=lambda run: run.session_id)
        done = {run.pk: self._done(run, reason) for run in in_order}
        return self._show([done[run.pk] for run in runs])

    def _done(self, run: Run, reason: str) -> Line:
        """Act on one run; a refusal is shown beside it and stops no other run."""
        seen = self.request.POST.get(f"seen-{run.pk}", "")
        if not seen:  # was left out when the person looked
            why_not = self.verb.advice(actions.situation(self.request, run)).why_not
            return self._line(run, why_not=why_not or _("It was not on the page."))

        def act() -> str:
            lock_session(settings.DATABASE, run.session_id)
            now = self._again(run)
            if seen != _last_seq(now) and not (self.verb.stops and seen == LIVE):
                raise RunStateError(_("It moved on since you looked. Look at it again."))
            actions.require(self.verb.advice(actions.situation(self.request, now)))
            return actions.act(self.name, now, self.request.user, reason)

        try:
            done = in_transaction(settings.DATABASE, act)
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

    def _again(self, run: Run) -> Run:
        """Read the run anew; a run that is gone is returned as it was, so that a service refuses it."""
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
            "button": self.verb.button % {"count": count},
        }
        title = _("Outcome of each") if form is None else str(self.verb.title)
        template = "agentruns/admin/run_bulk.html"
        return self.admin.render(self.request, None, title=title, status=status, template=template, **context)


def _last_seq(run: Run) -> str:
    """Find the last row of the run's session, where only this unfinished run can add rows."""
    return str(run.session.next_seq - 1)
