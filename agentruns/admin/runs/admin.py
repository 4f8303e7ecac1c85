"""Runs in the console: the list, the page of a run, and the views below it."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from typing import Any, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.db.models import DecimalField, F, QuerySet, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from agentruns import journal, services
from agentruns.admin import base, filters, html, runs
from agentruns.conf import settings
from agentruns.models import Run

ACT = "runs.actions.act_on_selected"
ONLY = gettext_lazy("Only what was on the page is acted on: %(count)d.")
VERBS = ("resume", "pause", "cancel")
# Runs without a known price are compared by tokens, as if a token cost next to nothing.
COST = Coalesce("cost", F("tokens") * Value(Decimal("1e-15")), output_field=DecimalField())


def _link(url: str, text: str, title: str = "") -> SafeString:
    return format_html('<a href="{}"{}>{}</a>', url, format_html(' title="{}"', title) if title else "", text)


class RunList(base.LeanChangeList):
    """The list of runs, each with its waits or its outcome, by a fixed number of queries."""

    deferred = ("input", "output", "error")

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Select the rows, with short errors and answers, because a line shows the beginning of each."""
        return filters.with_texts(super().get_queryset(request, *args, **kwargs))

    def get_results(self, request: HttpRequest) -> None:
        """Fetch the runs of the page, mask them, and add the waits, the outcome, the review and the links."""
        super().get_results(request)
        masking, listing = journal.masking, cast("RunAdmin", self.model_admin)
        masks = masking.masks_of(self.result_list, size=masking.MOST_READ)
        self.result_list = [masks[run.session_id].run(run) for run in self.result_list]
        waits = services.runs.waiting.waits(settings.DATABASE, self.result_list, masks)
        for run in self.result_list:
            run.mask = masks[run.session_id]
            run.reviewed = runs.list.reviewed(getattr(run, "review", None))
            run.waits, run.came = waits.get(run.pk, []), runs.list.came(run, run.mask)
            run.links = listing.links(request, run)


class RunAdmin(base.ReadOnlyAdmin):
    """The console's pages of runs: their state, the reasons for it, and possible actions."""

    list_display = ("task", "where", "who", "started", "used_tokens", "used_cost")
    list_display_links = ("task",)
    list_filter = filters.OF_RUNS
    change_list_template = "agentruns/admin/runs.html"
    list_class = RunList
    ordering = ("-updated_at",)  # no column's: the key, which Django adds, would mark one
    search_fields = ("id",)
    search_help_text = gettext_lazy(
        "Words of a task, an error or an answer, a session key, a requester, a value of the context, "
        "or the beginning of an id"
    )
    actions = (
        base.selected("resume", gettext_lazy("Resume selected…"), ACT, ONLY),
        base.selected("pause", gettext_lazy("Pause selected…"), ACT, ONLY),
        base.selected("cancel", gettext_lazy("Cancel selected…"), ACT, ONLY),
        base.selected("adopt", gettext_lazy("Adopt for selected…"), "runs.limits.adopt_selected", ONLY),
    )
    page_template = "agentruns/admin/run.html"

    views = (
        base.View("live", "runs.page.live_view"),
        base.View("watch", "runs.page.watch_view", acts=True),
        base.View("row", "runs.audit.row_view", "rows/<int:seq>/"),
        base.View("content", "runs.audit.content_view", "rows/<int:seq>/content/", in_transaction=False),
        base.View("file", "runs.audit.content_view", "files/<str:sha256>/", in_transaction=False),
        base.View("leave_out", "runs.history.leave_out_view", "rows/<int:seq>/leave-out/", acts=True),
        base.View("erase", "runs.audit.erase_view", "rows/<int:seq>/erase/"),
        *(base.View(verb, "runs.actions.press_view", options={"verb": verb}, acts=True) for verb in VERBS),
        base.View("adopt", "runs.limits.adopt_view", acts=True),
        base.View("raise", "runs.limits.raise_view", acts=True),
        base.View("reply", "runs.chat.reply_view", acts=True),
        base.View("review", "runs.page.review_view", acts=True),
        base.View("verify", "runs.audit.verify_view", acts=True),
        base.View("export", "runs.audit.export_view", acts=True),
        base.View("again", "runs.history.again_view", acts=True),
        base.View("fork", "runs.history.fork_view", acts=True),
        base.View("at", "runs.history.at_view"),
        base.View("replay", "runs.history.replay_view", in_transaction=False),
        base.View("call", "runs.calls.call_view", "calls/<str:call_id>/"),
        base.View("resolve", "runs.calls.resolve_view", "calls/<str:call_id>/resolve/"),
        base.View("reveal", "runs.calls.reveal_view", "calls/<str:call_id>/reveal/"),
        base.View("deliver", "runs.events.deliver_view", "calls/<str:call_id>/deliver/", acts=True),
        base.View("stop_waiting", "runs.events.stop_view", "calls/<str:call_id>/stop-waiting/", acts=True),
    )
    pages = (
        base.View("news", "base.news_view"),
        base.View("figures", "dashboard.figures_view", for_others=True),
        base.View("start", "runs.start.start_view"),
        base.View("costs", "dashboard.costs_view"),
        base.View("csv", "dashboard.csv_view", "costs.csv"),
        base.View("switches", "runs.switches.switches_view", for_others=True),
        base.View("in_doubt", "runs.calls.in_doubt_view", "in-doubt/"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Select the runs that the user may see, with their session and their review."""
        return journal.policy.visible_runs(request.user).select_related("session", "review")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find runs by task, error, answer, approvals' titles, session key, requester, context or id."""
        if search_term:
            rows = filters.with_texts(queryset.defer(*RunList.deferred), task_text="input")
            queryset = filters.searched(request, rows, search_term, partial(filters.run_texts, request.user))
        return queryset, False

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Find the list's actions that the user may use; `action_location` is an argument of Django 6.1."""
        place = {} if action_location is None else {"action_location": action_location}
        may, actions = services.permissions.may, super().get_actions(request, **place)
        return {name: actions[name] for name in actions if may(request.user, name.removesuffix("_selected"))}

    # The list

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list of runs, with a link to start one if the user may."""
        may_start = services.runs.starting.agents_of(request.user)
        context = {"start_url": self.url(request, "start") if may_start else ""}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    @admin.display(description=gettext_lazy("task"))
    def task(self, run: Run) -> SafeString:
        """Show the first line of the task; below it the error, the answer, or the reason for a wait."""
        return html.two_lines(runs.list.task_title(run), runs.list.second(run))

    @admin.display(description=gettext_lazy("status"), ordering="status")
    def where(self, run: Any) -> SafeString:
        """Show the status; below it the link to a person's next action, and the review."""
        parts = ((part,) for part in (run.links["act"], run.reviewed) if part)
        return html.two_lines(runs.list.status(run), format_html_join(". ", "{}", parts))

    @admin.display(description=gettext_lazy("agent, session"), ordering="agent")
    def who(self, run: Any) -> SafeString:
        """Show agent and session, each with a link to its runs."""
        return html.two_lines(run.links["agent"], run.links["session"])

    @admin.display(description=gettext_lazy("started, requester"), ordering="id")
    def started(self, run: Any) -> SafeString:
        """Show the time since the start, and the user whom the run was started for."""
        return html.two_lines(html.age(run.created_at), run.links["requester"])

    @admin.display(description=gettext_lazy("tokens"), ordering="-tokens")
    def used_tokens(self, run: Run) -> SafeString:
        """Show the tokens of all replies, and the number of replies."""
        steps = ngettext("%(count)d step", "%(count)d steps", run.step) % {"count": run.step}
        return html.two_lines(runs.list.tokens(run.usage) or html.EMPTY, steps)

    @admin.display(description=gettext_lazy("cost"), ordering=COST.desc())
    def used_cost(self, run: Run) -> SafeString | str:
        """Show the cost of all replies; "-" if it is unknown."""
        return runs.list.cost(run.usage) or html.EMPTY

    def links(self, request: HttpRequest, run: Any) -> dict[str, SafeString]:
        """Build the links in a row: to the next action, agent, session and requester."""
        wait = next((wait for wait in run.waits if runs.list.wait_url(self, request, wait)), None)
        verb, act = ("decide", _("Decide")) if wait and wait.approval_id else ("resolve", _("Give a verdict"))
        if wait and not services.permissions.may(request.user, verb):
            act = _("Look at it")
        name, key = html.person(run.owner_name), run.session.key
        return {
            "act": _link(runs.list.wait_url(self, request, wait), act) if wait else SafeString(),
            "agent": _link("?" + urlencode({"agent": run.agent}), html.plain(run.agent)),
            "session": _link(f"?session={run.session_id}", html.visible(key), html.plain(key)),
            "requester": _link("?" + urlencode({"requester": run.owner_id}), name) if run.owner_id else name,
        }

    # The page

    def page(self, request: HttpRequest, obj: Run, **context: Any) -> HttpResponse:
        """Render the page of one run; if its journal cannot be read, render what is known without it."""
        try:
            # Before the rows are read, so that rows written meanwhile count as new to the page.
            parts: dict[str, Any] = {} if "live" in context else {"live": runs.page.live(self, request, obj)}
            situation = runs.limits.situation(request, obj)
            for section in (runs.page.overview, runs.limits.limits, runs.history.lineage, runs.page.review):
                parts |= section(self, request, situation)
        except journal.read.UNREADABLE:
            checked = runs.audit.finding(request, obj)
            if checked["is_intact"]:
                raise
            return runs.audit.damaged_page(self, request, obj, checked, **context)
        return self.render(request, obj, title=runs.list.task_title(obj), **{**parts, **context})

    def render(self, request: HttpRequest, obj: Any, **context: Any) -> base.UnframedPage:
        """Render a page about a run, with the parts that all such pages have."""
        if obj is not None:
            about = {"run_id": str(obj.pk), "run_badge": html.status_badge(obj)}
            about["original"] = runs.list.task_title(obj)
            context = {**about, "run_url": self.url(request, "change", obj.pk), **context}
        return super().render(request, obj, **context)

    def log_change(self, request: HttpRequest, obj: Run, message: Any) -> Any:
        """Mask the message, and log it in the history, which everybody who may see the run can read."""
        return super().log_change(request, obj, base.mask_for(obj).json(message))
