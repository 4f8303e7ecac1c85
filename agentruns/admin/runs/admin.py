"""Runs in the console: the list, the page of a run, and the views below it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns.admin.base import ReadOnlyAdmin, View
from agentruns.admin.filters import AgentFilter, RunStatusFilter, StartedFilter, is_uuid, matching
from agentruns.admin.html import EMPTY, age, short_id, two_lines, visible
from agentruns.admin.runs import actions, audit, bulk, calls, history, limits, page, steps
from agentruns.admin.runs import list as listing
from agentruns.models import Approval, Run
from agentruns.services.waiting import Wait

VIEWS = (
    View("live", page.live_view),
    View("row", audit.row_view, "rows/<int:seq>/"),
    View("content", audit.content_view, "rows/<int:seq>/content/", in_transaction=False),
    View("resume", actions.resume_view, acts=True),
    View("pause", actions.pause_view, acts=True),
    View("cancel", actions.cancel_view, acts=True),
    View("adopt", limits.adopt_view, acts=True),
    View("verify", audit.verify_view, acts=True),
    View("export", audit.export_view, acts=True),
    View("again", history.again_view, acts=True),
    View("fork", history.fork_view, acts=True),
    View("at", history.at_view),
    View("replay", history.replay_view, in_transaction=False),
    View("call", calls.call_view, "calls/<str:call_id>/"),
    View("resolve", calls.resolve_view, "calls/<str:call_id>/resolve/"),
    View("reveal", calls.reveal_view, "calls/<str:call_id>/reveal/"),
)
# What the page of a run shows, one after the other.
SECTIONS = (page.overview, page.drawn, limits.limits, steps.called, history.lineage, audit.buttons)


class RunAdmin(ReadOnlyAdmin):
    """One task given to one agent: where it stands, why, and what can be done."""

    list_display = ("short_id", "where", "who", "requester", "used")
    list_display_links = ("short_id",)
    list_filter = (RunStatusFilter, StartedFilter, AgentFilter)
    list_class = listing.RunList
    ordering = ("-updated_at", "-id")
    search_fields = ("id",)
    search_help_text = gettext_lazy("Beginning of a run's id, of a session key or of a requester's name")
    actions = ("resume_selected", "pause_selected", "cancel_selected")
    page_template = "agentruns/admin/run.html"
    live_interval = 2000  # milliseconds between two looks of an open page

    views = VIEWS
    sections = SECTIONS

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return runs with their session."""
        return super().get_queryset(request).select_related("session")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find runs by id, session key or requester."""
        return (queryset.filter(matching(search_term)) if search_term else queryset), False

    def has_resume_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may resume runs."""
        return request.user.has_perm("agentruns.resume_run")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may pause runs."""
        return request.user.has_perm("agentruns.pause_run")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may cancel runs."""
        return request.user.has_perm("agentruns.cancel_run")

    # The list

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list; a selection that did not come from it is refused."""
        if not all(map(is_uuid, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            self.message_user(request, _("Nothing was done: choose from the list."), messages.WARNING)
            return HttpResponseRedirect(request.get_full_path())
        return super().changelist_view(request, {"title": _("Runs"), **(extra_context or {})})

    @admin.action(permissions=["resume"], description=gettext_lazy("Resume selected…"))
    def resume_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, then resume what was listed."""
        return bulk.act_on_selected(self, request, "resume")

    @admin.action(permissions=["pause"], description=gettext_lazy("Pause selected…"))
    def pause_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, then pause what was listed."""
        return bulk.act_on_selected(self, request, "pause")

    @admin.action(permissions=["cancel"], description=gettext_lazy("Cancel selected…"))
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, then cancel what was listed."""
        return bulk.act_on_selected(self, request, "cancel")

    @admin.display(description=gettext_lazy("run, age"), ordering="id")
    def short_id(self, run: Run) -> SafeString:
        """The beginning of the id, the whole of it as a tooltip; and how long ago the run was started."""
        name = format_html('<span class="ar-id" title="{}">{}</span>', run.pk, short_id(run.pk))
        return two_lines(name, age(run.created_at))

    @admin.display(description=gettext_lazy("status, what it waits for"), ordering="status")
    def where(self, run: Any) -> SafeString:
        """The status, what is known of the worker, and why the run does not go on."""
        parts = [part for part in (listing.heartbeat(run), run.why) if part]
        return two_lines(listing.status(run), format_html_join(". ", "{}", ((part,) for part in parts)))

    @admin.display(description=gettext_lazy("agent, session"), ordering="agent")
    def who(self, run: Run) -> SafeString:
        """The agent, and the caller's own key."""
        return two_lines(run.agent, visible(run.session.key))

    @admin.display(description=gettext_lazy("requester"), ordering="owner_name")
    def requester(self, run: Run) -> SafeString:
        """The user that the run was started for."""
        return visible(run.owner_name or EMPTY)

    @admin.display(description=gettext_lazy("steps, tokens, cost"))
    def used(self, run: Run) -> SafeString:
        """The number of the model's replies, and their tokens and cost."""
        steps = ngettext("%(count)d step", "%(count)d steps", run.step) % {"count": run.step}
        parts = [part for part in (listing.tokens(run.usage), listing.cost(run.usage)) if part]
        return two_lines(steps, format_html_join(", ", "{}", ((part,) for part in parts)))

    # The page

    def page(self, request: HttpRequest, obj: Run, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one run; where its journal cannot be read, what is known without it."""
        try:
            # Before the rows are read: what comes in between is then new to the page, and not missed.
            shown: dict[str, Any] = {} if "live" in context else {"live": page.live(self, request, obj)}
            situation = actions.situation(request, obj)
            for section in self.sections:
                shown |= section(self, request, situation)
        except actions.UNREADABLE:
            found = audit.finding(self, request, obj)
            if found.is_intact:
                raise
            return audit.damaged_page(self, request, obj, found, status=status, **context)
        return self.render(request, obj, title=page.title(obj), status=status, **{**shown, **context})

    def wait_url(self, request: HttpRequest, wait: Wait) -> str:
        """Return where a person acts on what a run waits for, or ""."""
        if wait.approval_id is not None:
            return self.other_page(request, Approval, wait.approval_id)
        return self.url(request, "call", wait.run_id, wait.call_id) if wait.call_id else ""
