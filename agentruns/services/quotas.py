"""Quotas: how many runs and messages one user, or the visitors of one session, may start in an hour."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from django.db.models import Case, F, Q, Value, When
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent
from agentruns.exceptions import QuotaExceededError
from agentruns.journal.policy import limits_of
from agentruns.models import SessionBearer, StartCount
from agentruns.utils.db import database_now

HOUR = timedelta(hours=1)


def start_limit(actor: Any, agent: Agent) -> int | None:
    """Find how many runs a user or visitor may start in an hour; None for no limit and for the program."""
    is_counted = isinstance(actor, SessionBearer) or getattr(actor, "pk", None) is not None
    return limits_of(actor, agent).runs if is_counted else None


def count_start(alias: str, actor: Any, limit: int | None) -> None:
    """Count a run or message that a user or visitor with a `limit` starts, in its transaction.

    The starts of all agents count; an hour begins with its first start. Raises QuotaExceededError.
    """
    if limit is None:
        return
    user_id = actor.actor_id if isinstance(actor, SessionBearer) else str(actor.pk)
    now = database_now(alias)
    counts = StartCount.objects.using(alias)
    counts.bulk_create([StartCount(user_id=user_id, since=now, count=0)], ignore_conflicts=True)
    is_over = Q(since__lte=now - HOUR)
    # The condition is judged on the locked row, so that of two racing starts at the limit one passes.
    counted = limit > 0 and counts.filter(is_over | Q(count__lt=limit), user_id=user_id).update(
        since=Case(When(is_over, then=Value(now)), default=F("since")),
        count=Case(When(is_over, then=Value(1)), default=F("count") + 1),
    )
    if counted:
        return
    since = counts.values_list("since", flat=True).get(user_id=user_id)
    seconds = max(1, math.ceil((since + HOUR - now).total_seconds()))
    text = _("%(name)s may start %(limit)s runs in an hour. Start the next one in %(seconds)s s.")
    facts = {"name": actor.get_username(), "limit": limit, "seconds": seconds}
    raise QuotaExceededError(text % facts, seconds)
