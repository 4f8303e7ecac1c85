"""Runs in the console: the list, the page of a run, and the views below it."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import DecimalField, F, QuerySet, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns import journal, services
from agentruns.admin import runs
from agentruns.admin.base import LeanChangeList, ReadOnlyAdmin, UnframedPage, View
from agentruns.admin.filters import AgentFilter, RunStatusFilter, StartedFilter, is_uuid, matching
from agentruns.admin.html import EMPTY, age, run_badge, short_id, two_lines, visible
from agentruns.conf import settings
from agentruns.models import Approval, Run

if TYPE_CHECKING:
    from agentruns.services.waiting import Wait

VIEWS = (
    View("live", "runs.page.live_view"),
    View("row", "runs.audit.row_view", "rows/<int:seq>/"),
    View("content", "runs.audit.content_view", "rows/<int:seq>/content/", in_transaction=False),
    View("file", "runs.audit.file_view", "files/<str:sha256>/", in_transaction=False),
    View("erase", "runs.erasing.erase_view", "rows/<int:seq>/erase/"),
    View("resume", "runs.actions.resume_view", acts=True),
    View("pause", "runs.actions.pause_view", acts=True),
    View("cancel", "runs.actions.cancel_view", acts=True),
    View("adopt", "runs.limits.adopt_view", acts=True),
    View("verify", "runs.audit.verify_view", acts=True),
    View("export", "runs.audit.export_view", acts=True),
    View("again", "runs.history.again_view", acts=True),
    View("fork", "runs.history.fork_view", acts=True),
    View("at", "runs.history.at_view"),
    View("replay", "runs.history.replay_view", in_transaction=False),
    View("call", "runs.calls.call_view", "calls/<str:call_id>/"),
    View("resolve", "runs.calls.resolve_view", "calls/<str:call_id>/resolve/"),
    View("reveal", "runs.calls.reveal_view", "calls/<str:call_id>/reveal/"),
)
# Where no price is known tokens are compared, as if they cost next to nothing.
COST = Coalesce("cost", F("tokens") * Value(Decimal("1e-15")), output_field=DecimalField())


class RunList(LeanChangeList):
    """Runs, each with what it waits for: by as many queries, however many there are."""

    deferred = ("input", "output", "error")

    def get_results(self, request: HttpRequest) -> None:
        """Fetch the rows of the page, and say why each does not go on."""
        super().get_results(request)
        masking = journal.masking
        masks = masking.masks_of(self.result_list, size=masking.MOST_READ)
        for run in self.result_list:
            run.mask = masks[run.session_id]
        self.result_list = [run.mask.run(run) for run in self.result_list]
        found = services.waiting.waits(settings.DATABASE, self.result_list, masks)
        listing: Any = self.model_admin
        for run in self.result_list:
            run.why = runs.list.why(found.get(run.pk, []), lambda wait: listing.wait_url(request, wait))


def _selected(verb: str, description: Any) -> Any:
    def act(model_admin: RunAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, then act on what was listed."""
        return runs.bulk.act_on_selected(model_admin, request, verb)

    act.__name__ = f"{verb}_selected"
    return admin.action(act, description=description)


class RunAdmin(ReadOnlyAdmin):
    """One task given to one agent: where it stands, why, and what can be done."""

    list_display = ("short_id", "where", "who", "requester", "used")
    list_display_links = ("short_id",)
    list_filter = (RunStatusFilter, StartedFilter, AgentFilter)
    list_class = RunList
    ordering = ("-updated_at", "-id")
    search_fields = ("id",)
    search_help_text = gettext_lazy(
        "Beginning of a run's id, of a session key or of a requester's name; or a value of its context"
    )
    actions = (
        _selected("resume", gettext_lazy("Resume selected…")),
        _selected("pause", gettext_lazy("Pause selected…")),
        _selected("cancel", gettext_lazy("Cancel selected…")),
    )
    page_template = "agentruns/admin/run.html"
    live_interval = 2000  # milliseconds between two looks of an open page

    views = VIEWS

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the runs that the user may see, with their session."""
        return journal.policy.visible_runs(request.user).select_related("session")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find runs by id, session key, requester or context."""
        if search_term:
            queryset = queryset.filter(matching(search_term, self.get_queryset(request)))
        return queryset, False

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Return the actions that the user may take."""
        may, found = services.permissions.may, super().get_actions(request)
        return {name: found[name] for name in found if may(request.user, name.removesuffix("_selected"))}

    # The list

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list; a selection that did not come from it is refused."""
        if not all(map(is_uuid, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            self.message_user(request, _("Nothing was done: choose from the list."), messages.WARNING)
            return HttpResponseRedirect(request.get_full_path())
        return super().changelist_view(request, {"title": _("Runs"), **(extra_context or {})})

    @admin.display(description=gettext_lazy("run, age"), ordering="id")
    def short_id(self, run: Run) -> SafeString:
        """The beginning of the id, the whole of it as a tooltip; and how long ago the run was started."""
        name = format_html('<span class="ar-id" title="{}">{}</span>', run.pk, short_id(run.pk))
        return two_lines(name, age(run.created_at))

    @admin.display(description=gettext_lazy("status, what it waits for"), ordering="status")
    def where(self, run: Any) -> SafeString:
        """The status, what is known of the worker, and why the run does not go on."""
        parts = [part for part in (runs.list.heartbeat(run), run.why) if part]
        return two_lines(runs.list.status(run), format_html_join(". ", "{}", ((part,) for part in parts)))

    @admin.display(description=gettext_lazy("agent, session"), ordering="agent")
    def who(self, run: Run) -> SafeString:
        """The agent, and the caller's own key."""
        return two_lines(run.agent, visible(run.session.key))

    @admin.display(description=gettext_lazy("requester"), ordering="owner_name")
    def requester(self, run: Run) -> SafeString:
        """The user that the run was started for."""
        return visible(run.owner_name or EMPTY)

    @admin.display(description=gettext_lazy("steps, tokens, cost"), ordering=COST)
    def used(self, run: Run) -> SafeString:
        """The number of the model's replies, and their tokens and cost."""
        steps = ngettext("%(count)d step", "%(count)d steps", run.step) % {"count": run.step}
        parts = [part for part in (runs.list.tokens(run.usage), runs.list.cost(run.usage)) if part]
        return two_lines(steps, format_html_join(", ", "{}", ((part,) for part in parts)))

    # The page

    def page(self, request: HttpRequest, obj: Run, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the page of one run; where its journal cannot be read, what is known without it."""
        page = runs.page
        sections = (page.overview, runs.limits.limits, runs.history.lineage, runs.audit.buttons)
        try:
            # Before the rows are read: what comes in between is then new to the page, and not missed.
            shown: dict[str, Any] = {} if "live" in context else {"live": page.live(self, request, obj)}
            situation = runs.actions.situation(request, obj)
            for section in sections:
                shown |= section(self, request, situation)
        except runs.actions.UNREADABLE:
            found = runs.audit.finding(self, request, obj)
            if found.is_intact:
                raise
            return runs.audit.damaged_page(self, request, obj, found, status=status, **context)
        return self.render(
            request, obj, title=runs.list.task_title(obj), status=status, **{**shown, **context}
        )

    def render(self, request: HttpRequest, obj: Any, **context: Any) -> UnframedPage:
        """Render a page about a run, with what each of them says of it."""
        if obj is not None:
            about = {"run_id": str(obj.pk), "run_badge": run_badge(obj)}
            about["original"] = runs.list.task_title(obj)
            context = {**about, "run_url": self.url(request, "change", obj.pk), **context}
        return super().render(request, obj, **context)

    def wait_url(self, request: HttpRequest, wait: Wait) -> str:
        """Return where a person acts on what a run waits for, or ""."""
        if wait.approval_id is not None:
            return self.other_page(request, Approval, wait.approval_id)
        return self.url(request, "call", wait.run_id, wait.call_id) if wait.call_id else ""
