"""Filters of the lists. Each asks the admin's own queryset, so the journal's database is the one read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from agentruns.admin.text import plain
from agentruns.models import Approval, Run

NEEDS_A_PERSON = (Run.Status.AWAITING_APPROVAL, Run.Status.ORPHANED, Run.Status.PAUSED)


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
    """By status, and all at once that wait for a person."""

    title = _("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return what can be chosen."""
        return [("person", _("waits for a person")), *Run.Status.choices]

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the runs chosen."""
        if value == "person":
            return queryset.filter(status__in=NEEDS_A_PERSON)
        return super().chosen(queryset, value)


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
        return queryset if value == "all" else super().chosen(queryset, value)


class NameFilter(KnownValues):
    """By a name that occurs in the rows."""

    lookup = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names that occur."""
        rows = model_admin.get_queryset(request).order_by(self.lookup)
        return [(name, plain(name)) for name in rows.values_list(self.lookup, flat=True).distinct()]

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the rows of the name chosen."""
        return queryset.filter(**{self.lookup: value})


class AgentFilter(NameFilter):
    title = _("agent")
    parameter_name = "agent"
    lookup = "agent"


class ApprovalAgentFilter(AgentFilter):
    lookup = "run__agent"


class ToolFilter(NameFilter):
    title = _("tool")
    parameter_name = "tool"
    lookup = "tool_name"
