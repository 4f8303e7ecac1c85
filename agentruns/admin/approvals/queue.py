"""The order of the queue, the approvals that are a user's to decide, and the next one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import F, QuerySet
from django.http import HttpRequest, QueryDict
from django.utils.translation import gettext_lazy as _

from agentruns.admin.filters import KnownValues
from agentruns.models import Approval
from agentruns.models.querysets import PENDING, RISK_RANK
from agentruns.services import permissions

# What is riskier first, then what expires sooner, then who waits longer.
URGENT_FIRST = (F("risk_rank").asc(), F("expires_at").asc(nulls_last=True), "requested_at", "id")
NEWEST_FIRST = ("-requested_at", "-id")
LOOKED_AT = 200  # cards of the queue among which the next one is looked for


def ranked(approvals: QuerySet[Any]) -> QuerySet[Any]:
    """Return approvals with `risk_rank`, 0 for the riskiest."""
    found: QuerySet[Any] = approvals.annotate(risk_rank=RISK_RANK)
    return found


class MineFilter(KnownValues):
    """Approvals that the user can decide: allowed to, not decided by them yet, and in time."""

    title = _("whose turn")
    parameter_name = "mine"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return what can be chosen."""
        return [("yes", _("mine to decide"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the approvals that wait for this user."""
        if self.value() != "yes":
            return super().queryset(request, queryset)
        return permissions.decidable_by(request.user, queryset.filter(status=PENDING).order_by(*URGENT_FIRST))


class Queue:
    """The pending cards of the list a user came from, in its order and under its filters."""

    def __init__(self, model_admin: Any, request: HttpRequest) -> None:
        self.user = request.user
        listed = _listed(model_admin, request, request.GET.get("_changelist_filters", ""))
        pending = listed.filter(status=PENDING)
        self.keys: list[UUID] = list(pending.values_list("pk", flat=True)[:LOOKED_AT])

    def neighbours(self, approval: Approval) -> tuple[UUID | None, UUID | None]:
        """Return the cards before and after one."""
        if approval.pk not in self.keys:
            return None, self.keys[0] if self.keys else None
        place = self.keys.index(approval.pk)
        before = self.keys[place - 1] if place else None
        return before, self.keys[place + 1] if place + 1 < len(self.keys) else None

    def after(self, approval: Approval) -> UUID | None:
        """Return the next card this user can decide: after the one just decided, else from the start."""
        keys = list(self._round(approval.pk))
        approvals = Approval.objects.using(approval._state.db).pending().select_related("run")
        waiting = {one.pk: one for one in approvals.filter(pk__in=keys).defer(*permissions.HEAVY)}
        mine = {one.pk for one in permissions.decidable(self.user, list(waiting.values()))}
        return next((key for key in keys if key in mine), None)

    def _round(self, key: UUID) -> Iterator[UUID]:
        place = self.keys.index(key) + 1 if key in self.keys else 0
        yield from self.keys[place:]
        yield from (other for other in self.keys[:place] if other != key)


def _listed(model_admin: Any, request: HttpRequest, filters: str) -> QuerySet[Any]:
    """Return the rows of a list, those of all its pages, in its order."""
    if not filters:  # the list as it opens, without the cost of what its filters offer
        found: QuerySet[Any] = model_admin.get_queryset(request).order_by(*URGENT_FIRST)
        return found
    query = QueryDict(filters, mutable=True)
    query.pop("p", None)
    listing = copy.copy(request)
    listing.GET = query  # type: ignore[assignment]
    try:
        listed: QuerySet[Any] = model_admin.get_changelist_instance(listing).get_queryset(listing)
    except IncorrectLookupParameters:  # not from a list of ours
        return _listed(model_admin, request, "")
    return listed
