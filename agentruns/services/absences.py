"""Absences of people, in which a delegate gets their notices as well. A delegate gets no rights."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events, policy
from agentruns.models import Absence
from agentruns.services import permissions
from agentruns.utils import clock


def plan_absence(
    person: Any, delegate: Any, begins_at: datetime, ends_at: datetime, actor: Any = None
) -> Absence:
    """Let `delegate` get the notices of `person` as well, from `begins_at` until `ends_at`.

    Users plan their own absences, and those of others with the permission `agentruns.plan_absence`. Raises
    PermissionDeniedError, and ValueError if the absence ends before it begins or is over, or if the delegate
    is the person or may not decide approvals.
    """
    if not may_plan(actor, person):
        raise PermissionDeniedError(permissions.why_not(actor, "plan_absence"))
    if not begins_at < ends_at or ends_at <= clock.now(settings.DATABASE):
        raise ValueError(_("An absence ends after it begins, and is not over yet."))
    # The same error for a user of another tenant, so that nobody finds out names of users here.
    scopes = {policy.ask("scope", None, user) for user in (person, delegate)}
    is_near = not permissions.narrows("visible") or len(scopes) == 1
    if delegate in (None, person) or not is_near or not permissions.may(delegate, "decide"):
        raise ValueError(_("The delegate has to be another person who may decide approvals."))
    absence = Absence(person_id=person.pk, delegate_id=delegate.pk, begins_at=begins_at, ends_at=ends_at)
    absence.created_by_id = (events.actor_ref(actor) or events.PROGRAM)["id"]
    return Absence.objects.using(settings.DATABASE).bulk_create([absence])[0]


def end_absence(absence_id: UUID | str, actor: Any = None) -> bool:
    """End an absence now; return False if it is over, or if the actor may not plan it."""
    ids = [row.pk for *_people, row, may_end in planned(actor) if may_end and str(row.pk) == str(absence_id)]
    running = Absence.objects.using(settings.DATABASE).filter(pk__in=ids, ends_at__gt=Now())
    return running.update(ends_at=Now()) == 1


def planned(actor: Any) -> list[tuple[Any, Any, Absence, bool]]:
    """List the person, the delegate and whether the actor may end it, of each absence that is not over.

    Leaves out absences that the actor may not plan, except those in which the actor is the delegate.
    """
    who = (events.actor_ref(actor) or events.PROGRAM)["id"]
    rows = list(Absence.objects.using(settings.DATABASE).filter(ends_at__gt=Now()).order_by("begins_at"))
    keys = {key for row in rows for key in (row.person_id, row.delegate_id)}
    people = {str(user.pk): user for user in get_user_model()._default_manager.filter(pk__in=keys)}
    named = [(people.get(row.person_id), people.get(row.delegate_id), row) for row in rows]
    each = [(*line, may_plan(actor, line[0])) for line in named]
    return [line for line in each if line[3] or line[2].delegate_id == who]


def may_plan(actor: Any, person: Any) -> bool:
    """Check whether an actor may plan absences of a person; True for the actor's own."""
    return person is not None and (actor == person or permissions.may(actor, "plan_absence", person))
