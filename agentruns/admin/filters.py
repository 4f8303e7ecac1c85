"""Filters of the lists. Each asks the admin's own queryset, so the journal's database is the one read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG, PAGE_VAR, ChangeList
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from agentruns.admin.names import names
from agentruns.admin.search import first_id
from agentruns.admin.text import plain
from agentruns.engine.leases import FREE
from agentruns.models import Approval, Run
from agentruns.models.querysets import PENDING

NEEDS_A_PERSON = (Run.Status.AWAITING_APPROVAL, Run.Status.ORPHANED, Run.Status.PAUSED)
STALLED = Q(status=Run.Status.RUNNING) & FREE
LATELY = timedelta(hours=24)
SKEW = timedelta(days=1)  # between the clock an id was made by and the one of its row


class KnownValues(admin.SimpleListFilter):
    """Finds nothing for a value that was not offered: it came from a URL and may be anything."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows chosen."""
        value = self.value()
        if not value:
            return queryset
        known = value in [str(offered) for offered, _title in self.lookup_choices]
        return self.chosen(queryset, value) if known else queryset.none()

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the rows of a value that was offered."""
        return queryset.filter(status=value)


class RunStatusFilter(KnownValues):
    """By status, and by what matters first: who waits for a person, who stalled, who failed lately."""

    title = _("status")
    parameter_name = "status"
    template = "agentruns/admin/filter_chips.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return what can be chosen."""
        special = [
            ("person", _("needs a person")),
            ("stalled", _("stalled")),
            ("failed-lately", _("failed in the last 24 hours")),
        ]
        return [*special, *Run.Status.choices]

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the runs chosen."""
        if value == "person":
            return queryset.filter(status__in=NEEDS_A_PERSON)
        if value == "stalled":
            return queryset.filter(STALLED)
        if value == "failed-lately":
            return queryset.filter(failed_lately())
        return super().chosen(queryset, value)


def failed_lately() -> Q:
    """Return what finds the runs that failed in the last 24 hours."""
    return Q(status=Run.Status.FAILED, updated_at__gte=timezone.now() - LATELY)


class StartedFilter(admin.ListFilter):
    """By the days between which a run was started, in the time zone that is shown."""

    title = _("day of the start")
    template = "agentruns/admin/filter_days.html"
    first, last = "started_from", "started_to"

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        for name in (self.first, self.last):
            value = params.pop(name, [""])[-1].strip()
            if value:
                self.used_parameters[name] = value
        mine = (self.first, self.last, PAGE_VAR, ERROR_FLAG)
        self.others = [
            (name, value) for name, values in request.GET.lists() if name not in mine for value in values
        ]

    def expected_parameters(self) -> list[str | None]:
        """Return the parameters of the URL that are this filter's."""
        return [self.first, self.last]

    def has_output(self) -> bool:
        """Whether there is something to choose: always."""
        return True

    def values(self) -> dict[str, str]:
        """Return the days chosen, as a form shows them."""
        return {name: plain(self._chosen(name)) for name in (self.first, self.last)}

    def _chosen(self, name: str) -> str:
        return str(self.used_parameters.get(name, ""))

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        """Yield the links to what is asked for often."""
        today = timezone.localdate()
        for title, days in ((_("Any day"), None), (_("Today"), 0), (_("Past 7 days"), 6)):
            chosen = {} if days is None else {self.first: (today - timedelta(days=days)).isoformat()}
            yield {
                "selected": self.used_parameters == chosen,
                "query_string": changelist.get_query_string(chosen, [self.first, self.last]),
                "display": title,
            }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the runs started on these days; none where a day makes no sense."""
        try:
            if first := self._chosen(self.first):
                start = _midnight(date.fromisoformat(first))
                queryset = queryset.filter(created_at__gte=start, id__gte=first_id(start - SKEW))
            if last := self._chosen(self.last):
                end = _midnight(date.fromisoformat(last) + timedelta(days=1))
                queryset = queryset.filter(created_at__lt=end, id__lt=first_id(end + SKEW))
        except (ValueError, OverflowError):
            return queryset.none()
        return queryset


def _midnight(day: date) -> datetime:
    return timezone.make_aware(datetime.combine(day, time.min))


class ApprovalStatusFilter(KnownValues):
    """By status; what is pending is shown without asking."""

    title = _("status")
    parameter_name = "status"
    default = Approval.Status.PENDING.value

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return what can be chosen."""
        return [*Approval.Status.choices, ("all", _("All"))]

    def value(self) -> str:
        """Return what was chosen, or "pending"."""
        return super().value() or self.default

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        """Yield the links; the default needs no parameter."""
        for value, title in self.lookup_choices:
            changed = {} if value == self.default else {self.parameter_name: value}
            removed = [self.parameter_name] if value == self.default else []
            yield {
                "selected": self.value() == value,
                "query_string": changelist.get_query_string(changed, removed),
                "display": title,
            }

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the approvals chosen."""
        if value == self.default:
            return queryset.filter(status=PENDING)
        return queryset if value == "all" else super().chosen(queryset, value)


class NameFilter(KnownValues):
    """By a name that occurs in the rows of a model."""

    model: type[Model] = Run
    field = ""
    lookup = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names that occur."""
        alias = model_admin.get_queryset(request).db
        return [(name, plain(name)) for name in names(alias, self.model, self.field)]

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the rows of the name chosen."""
        return queryset.filter(**{self.lookup: value})


class AgentFilter(NameFilter):
    title = _("agent")
    parameter_name = "agent"
    field = lookup = "agent"


class ApprovalAgentFilter(AgentFilter):
    lookup = "run__agent"


class ToolFilter(NameFilter):
    title = _("tool")
    parameter_name = "tool"
    model = Approval
    field = lookup = "tool_name"
