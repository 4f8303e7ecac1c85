"""Reviews of runs: a rating, a note and an assignee. They are no part of the journal."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import PermissionsMixin
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import RunStateError
from agentruns.journal.events import actor_ref
from agentruns.journal.policy import visible_runs
from agentruns.models import Review, Run
from agentruns.services import permissions
from agentruns.services.rules import stop_after
from agentruns.services.runs.sessions import Owner
from agentruns.services.runs.write import find_run
from agentruns.utils import clock
from agentruns.utils.bounds import REASON_LENGTH

OFFERED = 20  # people who are offered as assignees
BACKEND = "django.contrib.auth.backends.ModelBackend"


def review_run(
    run_id: UUID | str,
    actor: Any,
    *,
    rating: int = Review.Rating.NONE,
    note: str = "",
    assignee: str = "",
    seen: datetime | None = None,
) -> Review:
    """Replace a run's review, or create it if `seen` is None; return the review.

    A bad rating stops the standing rules that approved calls of the run. `seen` is the time of the last
    change that the actor saw. `assignee` is a username; "" stands for nobody.
    Raises RunStateError if somebody else changed or created the review meanwhile; ValueError for an unknown
    rating, a long note, or an assignee who may not see the run. Raises as `permissions.require`.
    """
    run = find_run(run_id)
    permissions.require_visible(actor, run)
    permissions.require(actor, "review", run)
    if rating not in Review.Rating.values or len(note) > REASON_LENGTH:
        raise ValueError(f"A rating is -1, 0 or 1, and a note has at most {REASON_LENGTH} characters.")
    author, whose = Owner.of(actor), Owner()
    if assignee:
        users = get_user_model()
        try:
            person = users._default_manager.get_by_natural_key(assignee)
        except (users.DoesNotExist, ValueError):
            person = None
        # The same error in both cases, so that nobody finds out names of users here.
        if not visible_runs(person).filter(pk=run.pk).exists():
            raise ValueError(_("No user of this name may see the run."))
        whose = Owner.of(person)
    columns = {"rating": rating, "note": note, "updated_at": clock.now(settings.DATABASE)}
    columns |= {"assignee_id": whose.id, "assignee_name": whose.name, "author_id": author.id}
    columns["author_name"] = (actor_ref(actor) or {"name": ""})["name"]
    reviews = Review.objects.using(settings.DATABASE)
    is_done = False
    if seen is None:
        with suppress(IntegrityError), transaction.atomic(using=reviews.db):  # somebody else was first
            reviews.bulk_create([Review(run_id=run.pk, **columns)])
            is_done = True
    else:
        is_done = bool(reviews.filter(pk=run.pk, updated_at=seen).update(**columns))
    if not is_done:
        text = _("Somebody else changed the review of run %(run)s meanwhile. Look at it again.")
        raise RunStateError(text % {"run": run.pk}, str(run.pk))
    if rating == Review.Rating.BAD:
        stop_after(run.pk)
    return reviews.get(pk=run.pk)


def assignable(actor: Any, run: Run) -> list[str]:
    """List usernames of possible assignees of a run: the actor first, then at most `OFFERED` others.

    The others have the permission to view runs. If the project's policy overrides `visible`, everyone who may
    not see this run is left out.
    """
    users: Any = get_user_model()
    people = [actor]
    if issubclass(users, PermissionsMixin) and hasattr(users._default_manager, "with_perm"):
        viewers = users._default_manager.with_perm("agentruns.view_run", backend=BACKEND)
        people += viewers.exclude(pk=actor.pk).order_by(users.USERNAME_FIELD)[:OFFERED]
    if permissions.hides(actor):
        people = [person for person in people if visible_runs(person).filter(pk=run.pk).exists()]
    return [person.get_username() for person in people]
