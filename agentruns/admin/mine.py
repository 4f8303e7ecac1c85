"""Which cards wait for a user, asked of the database: very many of them are not read to find one's own.

It is what `agentruns.services.permissions` says of a card; a project's rule is asked there, card by card.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet
from django.utils import timezone

from agentruns.conf import settings
from agentruns.models import Approval
from agentruns.services import permissions

DECIDES = "agentruns.decide_approval"
HEAVY = ("arguments", "why", "run__input", "run__output", "run__error", "run__usage")
GIVEN = ("pk", "run_id", "call_id", "approved_count")
PARTLY = Q(approved_count__gt=0)
MOST = 1000  # cards that a project's rule is asked about, or of which is known who approved them already


def mine(user: Any, pending: QuerySet[Any]) -> QuerySet[Any]:
    """Return those of the pending approvals that a user can decide now."""
    found = open_to(user, pending)
    if settings.can_decide is not None:
        return found.filter(pk__in=[card.pk for card in allowed(user, found)])
    return found.exclude(pk__in=given(user, found))


def open_to(user: Any, pending: QuerySet[Any]) -> QuerySet[Any]:
    """Return those that are in time, and for this user by what their columns say."""
    if not permissions.may(user, DECIDES):
        return pending.none()
    found = Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
    if not getattr(user, "is_superuser", False):
        held: set[str] = getattr(user, "get_all_permissions", set)()
        names = {"", *held, *(name.rpartition(".")[2] for name in held)}
        found &= Q(approvers__in=names | permissions.groups_of(user))
    return pending.filter(found if settings.REQUESTER_MAY_APPROVE else found & ~Q(run__owner_id=user.pk))


def given(user: Any, found: QuerySet[Any]) -> set[UUID]:
    """Return those that this user approved already, and others have not yet."""
    rows: Any = found.filter(PARTLY).values_list(*GIVEN, named=True)
    return permissions.already_given(user, list(rows[:MOST]))


def allowed(user: Any, found: QuerySet[Any]) -> list[Approval]:
    """Return those of the first that the project's rule lets this user decide."""
    return permissions.decidable(user, list(found.select_related("run").defer(*HEAVY)[:MOST]))
