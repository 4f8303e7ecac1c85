"""The list of runs: its columns, its search, and why each run does not go on."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns.admin import badges, waiting
from agentruns.admin.filters import AgentFilter, RunStatusFilter, StartedFilter
from agentruns.admin.readonly import LeanChangeList, ReadOnlyAdmin
from agentruns.admin.search import matching
from agentruns.admin.text import short_id, two_lines, visible
from agentruns.admin.times import EMPTY, age, exact
from agentruns.conf import settings
from agentruns.engine.budgets import TOKENS
from agentruns.models import Run

CENT = Decimal("0.01")
LEAST = Decimal("0.0001")


class RunList(LeanChangeList):
    """Runs, each with what it waits for: at most two queries more, however many there are."""

    deferred = ("input", "output", "error")

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

    list_display = ("short_id", "where", "who", "requester", "used")
    list_display_links = ("short_id",)
    list_filter = (RunStatusFilter, StartedFilter, AgentFilter)
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
        """The status, what is known of the worker, and why the run does not go on."""
        told = [part for part in (heartbeat(run), run.why) if part]
        return two_lines(status(run), format_html_join(". ", "{}", ((part,) for part in told)))

    @admin.display(description=gettext_lazy("agent, session"), ordering="agent")
    def who(self, run: Run) -> SafeString:
        """The agent, and the caller's own key."""
        return two_lines(run.agent, visible(run.session.key))

    @admin.display(description=gettext_lazy("requester"), ordering="owner_name")
    def requester(self, run: Run) -> SafeString:
        """Who the run was started for."""
        return visible(run.owner_name or EMPTY)

    @admin.display(description=gettext_lazy("steps, tokens, cost"))
    def used(self, run: Run) -> SafeString:
        """How many replies the model gave, what it read and wrote for them, and what that cost."""
        steps = ngettext("%(count)d step", "%(count)d steps", run.step) % {"count": run.step}
        parts = [part for part in (tokens(run.usage), cost(run.usage)) if part]
        return two_lines(steps, format_html_join(", ", "{}", ((part,) for part in parts)))

    def why(self, request: HttpRequest, reasons: list[waiting.Reason]) -> SafeString | str:
        """What a run waits for, on one line, with a way to the card of a call in doubt."""
        text = waiting.summary(reasons)
        url = self.reason_url(request, reasons[0]) if reasons and reasons[0].is_doubt else ""
        return format_html('<a href="{}">{}</a>', url, text) if url else text


def status(run: Run) -> SafeString:
    """Return the status of a run, and that it is stalled if its worker has fallen silent."""
    badge = badges.run(run)
    if not is_stalled(run):
        return badge
    return format_html('{} <span class="ar-badge ar-tone--bad">{}</span>', badge, _("stalled"))


def is_stalled(run: Run) -> bool:
    """Whether the run is to be running and no worker holds it."""
    return run.status == Run.Status.RUNNING and not waiting.is_live(run)


def heartbeat(run: Run) -> SafeString | str:
    """Return until when a worker holds the run, or since when none was heard of; "" if it has none."""
    until = run.lease_expires_at
    if run.status != Run.Status.RUNNING or until is None:
        return ""
    if not waiting.is_live(run):
        return format_html("{} {}", _("silent for"), age(until))
    clock = f"{timezone.localtime(until):%H:%M:%S}"
    moment = format_html('<time datetime="{}" title="{}">{}</time>', until.isoformat(), exact(until), clock)
    return format_html("{} {}", _("live until"), moment)


def tokens(usage: dict[str, Any]) -> SafeString | str:
    """Return how many tokens were read and written, what a budget counts, each kind as a tooltip."""
    kinds = {kind: usage[kind] for kind in TOKENS if usage.get(kind)}
    if not kinds:
        return ""
    each = ", ".join(f"{kind} {amount}" for kind, amount in kinds.items())
    text = _("%(count)s tokens") % {"count": short(sum(kinds.values()))}
    return format_html('<span title="{}">{}</span>', each, text)


def short(number: int) -> str:
    """Return 999, 12.3k or 4.5M."""
    for size, sign in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return number_format(number // (size // 10) / 10, 1) + sign
    return str(number)


def cost(usage: dict[str, Any]) -> SafeString | str:
    """Return what the replies cost by the project's prices, shortly, the exact amount as a tooltip."""
    given = usage.get("cost")
    try:
        amount = Decimal(str(given))
    except InvalidOperation:
        return visible(given or "")
    if not amount.is_finite() or amount.adjusted() > 15:
        return visible(given)
    text = number_format(amount.quantize(CENT if amount >= 1 else LEAST))
    text = _("cost %(amount)s") % {"amount": text if amount >= LEAST or not amount else f"< {LEAST}"}
    return format_html('<span title="{}">{}</span>', visible(given), text)
