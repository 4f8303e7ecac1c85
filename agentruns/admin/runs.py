"""Runs in the console: the list, the page with its journal, and the buttons Resume and Cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns import people, transitions
from agentruns.admin import advice, badges, facts, paging, waiting
from agentruns.admin.calls import CallPages
from agentruns.admin.filters import AgentFilter, RunStatusFilter
from agentruns.admin.forms import CancelForm, ResumeForm
from agentruns.admin.journal import Card, card
from agentruns.admin.readonly import READING, LeanChangeList
from agentruns.admin.search import matching
from agentruns.admin.text import plain, pretty, short_id, two_lines, visible
from agentruns.admin.times import age
from agentruns.conf import settings
from agentruns.exceptions import (
    JournalConflictError,
    PermissionDeniedError,
    RunStateError,
    SessionBusyError,
)
from agentruns.journal.read import run_rows
from agentruns.masking import masked, sensitive_of
from agentruns.models import Approval, Run
from agentruns.runs import cancel_run, resume_run

LARGEST = 2**63
REFUSALS = (RunStateError, SessionBusyError, JournalConflictError)


class RunList(LeanChangeList):
    """Runs, each with what it waits for: at most two queries more, however many there are."""

    deferred = ("input", "output", "error", "usage")

    def get_results(self, request: HttpRequest) -> None:
        """Fetch the rows of the page, and say why each does not go on."""
        super().get_results(request)
        self.result_list = list(self.result_list)
        found = waiting.reasons(settings.DATABASE, self.result_list)
        runs: Any = self.model_admin
        for run in self.result_list:
            run.why = runs.why(request, found.get(run.pk, []))


class RunAdmin(CallPages):
    """One task given to one agent: where it stands, why, and what can be done."""

    list_display = ("short_id", "where", "who", "requester", "step")
    list_display_links = ("short_id",)
    list_filter = (RunStatusFilter, AgentFilter)
    list_class = RunList
    ordering = ("-updated_at", "-id")
    search_fields = ("id",)
    search_help_text = gettext_lazy("Beginning of a run's id, of a session key or of a requester's name")
    page_template = "agentruns/admin/run.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return runs with their session."""
        return super().get_queryset(request).select_related("session")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find runs by id, session key or requester."""
        return (queryset.filter(matching(search_term)) if search_term else queryset), False

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons' targets and the page of one journal row."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/resume/", view(self.resume_view), name=self.name("resume")),
            path("<str:object_id>/cancel/", view(self.cancel_view), name=self.name("cancel")),
            path("<str:object_id>/rows/<int:seq>/", view(self.row_view), name=self.name("row")),
            *super().get_urls(),
        ]

    # The list

    @admin.display(description=gettext_lazy("run, age"), ordering="id")
    def short_id(self, run: Run) -> SafeString:
        """The beginning of the id, the whole of it as a tooltip; and how long ago the run was started."""
        name = format_html('<span class="ar-id" title="{}">{}</span>', run.pk, short_id(run.pk))
        return two_lines(name, age(run.created_at))

    @admin.display(description=gettext_lazy("status, what it waits for"), ordering="status")
    def where(self, run: Any) -> SafeString:
        """The status, and why the run does not go on."""
        return two_lines(badges.run(run), run.why)

    @admin.display(description=gettext_lazy("agent, session"), ordering="agent")
    def who(self, run: Run) -> SafeString:
        """The agent, and the caller's own key."""
        return two_lines(run.agent, visible(run.session.key))

    @admin.display(description=gettext_lazy("requester"), ordering="owner_name")
    def requester(self, run: Run) -> SafeString:
        """Who the run was started for."""
        return visible(run.owner_name or "-")

    def why(self, request: HttpRequest, reasons: list[waiting.Reason]) -> SafeString | str:
        """What a run waits for, on one line, with a way to the card of a call in doubt."""
        text = waiting.summary(reasons)
        url = self.reason_url(request, reasons[0]) if reasons and reasons[0].is_doubt else ""
        return format_html('<a href="{}">{}</a>', url, text) if url else text

    # The page

    def page(self, request: HttpRequest, obj: Run, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one run."""
        situation = self.situation(request, obj)
        rows = paging.page(settings.DATABASE, obj.pk, _after(request))
        title = _("%(agent)s in %(session)s") % {"agent": obj.agent, "session": plain(obj.session.key)}
        sections = {
            "run_id": str(obj.pk),
            "badge": badges.run(obj),
            "headline": advice.headline(situation),
            "notes": advice.notes(situation),
            "reasons": self._linked(request, situation.reasons),
            "uncleared": self._linked(request, waiting.uncleared(settings.DATABASE, obj)),
            "doubt": bool(situation.doubts),
            "resume": advice.resume(situation),
            "resume_url": self.url(request, "resume", obj.pk),
            "resume_form": ResumeForm(initial={"seq": str(paging.last_seq(settings.DATABASE, obj.pk))}),
            "cancel": advice.cancel(situation),
            "cancel_url": self.url(request, "cancel", obj.pk),
            "cancel_form": CancelForm(auto_id="cancel_%s"),
            "facts": facts.of_run(obj),
            "bodies": facts.texts_of_run(obj),
            "approvals": self._approvals(request, obj),
            "journal": rows,
            "last_shown": rows.rows[-1].seq if rows.rows else 0,
            "cards": self._cards(request, obj, rows),
        }
        return self.render(request, obj, title=title, status=status, **{**sections, **context})

    def situation(self, request: HttpRequest, run: Run) -> advice.Situation:
        """Return what is known of the run now, and what this user may do about it."""
        alias, user = settings.DATABASE, request.user
        return advice.Situation(
            run=run,
            reasons=waiting.reasons(alias, [run]).get(run.pk, []),
            cancel_requested=None if run.is_ended else waiting.cancel_request(alias, run),
            sweeper_seen=waiting.sweeper_seen(alias) if run.status in ("queued", "running") else None,
            may_resume=user.has_perm("agentruns.resume_run"),
            may_cancel=user.has_perm("agentruns.cancel_run") or people.owns(user, run),
        )

    def row_view(self, request: HttpRequest, object_id: str, seq: int) -> HttpResponse:
        """Return one journal row in full, as plain text."""
        run = self.find(request, object_id)
        found = run_rows(settings.DATABASE, run.pk, seq - 1, 1) if seq < LARGEST else []
        row = found[0] if found else None
        if row is None or row.seq != seq:
            raise Http404(_("Run %(run)s has no row %(seq)s.") % {"run": run.pk, "seq": seq})
        shown = masked(row, sensitive_of(run.definition.body))
        text = pretty({name: value for name, value in shown._asdict().items() if value is not None})
        return HttpResponse(
            plain(text),
            content_type="text/plain; charset=utf-8",
            headers={"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'"},
        )

    def reason_url(self, request: HttpRequest, reason: waiting.Reason) -> str:
        """Return where a person acts on what a run waits for, or ""."""
        if reason.approval is not None:
            return self.other_page(request, Approval, reason.approval)
        return self.url(request, "call", reason.run, reason.call) if reason.call else ""

    def _linked(self, request: HttpRequest, reasons: list[waiting.Reason]) -> list[tuple[Any, str]]:
        return [(reason, self.reason_url(request, reason)) for reason in reasons]

    def _approvals(self, request: HttpRequest, run: Run) -> list[dict[str, Any]]:
        approvals = Approval.objects.using(settings.DATABASE).filter(run_id=run.pk).defer("arguments")
        return [
            {
                "title": visible(approval.title),
                "badge": badges.approval(approval),
                "by": visible(approval.decided_by_name or "-"),
                "asked": age(approval.requested_at),
                "url": self.other_page(request, Approval, approval.pk),
            }
            for approval in approvals.order_by("requested_at")
        ]

    def _cards(self, request: HttpRequest, run: Run, rows: paging.Page) -> list[tuple[Card, str]]:
        sensitive = sensitive_of(run.definition.body)
        cards = [card(masked(row, sensitive)) for row in rows.rows]
        return [
            (one, self.other_page(request, Approval, one.approval) if one.approval else "") for one in cards
        ]

    # The buttons

    def resume_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Let the run go on, if it still is what the page showed. Records and queues; a worker drives."""

        def act(run: Run) -> str:
            form = ResumeForm(request.POST)
            with transaction.atomic(using=settings.DATABASE):
                transitions.lock_session(settings.DATABASE, run.session_id)
                run = transitions.find_run(run.pk)
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
        if request.method in READING:
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


def _after(request: HttpRequest) -> int | None:
    after = request.GET.get("after", "")
    return int(after) if after.isascii() and after.isdigit() and len(after) < 19 else None
