"""The list of runs: its columns, its search, and why each run does not go on."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy

from agentruns.admin import badges, waiting
from agentruns.admin.filters import AgentFilter, RunStatusFilter
from agentruns.admin.readonly import LeanChangeList, ReadOnlyAdmin
from agentruns.admin.search import matching
from agentruns.admin.text import short_id, two_lines, visible
from agentruns.admin.times import age
from agentruns.conf import settings
from agentruns.models import Run


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


class RunListing(ReadOnlyAdmin):
    """The list of runs, for the admin of runs."""

    list_display = ("short_id", "where", "who", "requester", "step")
    list_display_links = ("short_id",)
    list_filter = (RunStatusFilter, AgentFilter)
    list_class = RunList
    ordering = ("-updated_at", "-id")
    search_fields = ("id",)
    search_help_text = gettext_lazy("Beginning of a run's id, of a session key or of a requester's name")

    def reason_url(self, request: HttpRequest, reason: waiting.Reason) -> str:
        """Return where a person acts on what a run waits for, or ""."""
        raise NotImplementedError

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return runs with their session."""
        return super().get_queryset(request).select_related("session")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find runs by id, session key or requester."""
        return (queryset.filter(matching(search_term)) if search_term else queryset), False

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
