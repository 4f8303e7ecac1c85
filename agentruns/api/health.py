"""The health check: open to everybody, with details only for people who may see all runs."""

from __future__ import annotations

from typing import Any

from django.db import Error, connections
from django.db.models import Max
from django.http import HttpRequest

from agentruns.api.auth import HEADER, token_of
from agentruns.api.errors import URN, Problem, documented
from agentruns.api.routing import router
from agentruns.api.schemas import Health
from agentruns.conf import settings
from agentruns.models import ApiToken, Control, Run
from agentruns.services.sweep import sweeper


@router.get("/health", auth=None, response=Health, exclude_unset=True, openapi_extra=documented(503))
def health(request: HttpRequest) -> Health:
    """Answer whether the database can be reached.

    Who may see all runs, by session or token, is also told how the workers get on.
    """
    try:
        with connections[settings.DATABASE].cursor() as cursor:
            cursor.execute("SELECT 1")
        return _details(settings.DATABASE) if _may_see(request) else Health(status="ok")
    except Error:
        raise Problem(503, URN + "unavailable", "Unavailable", "The database cannot be reached.") from None


def _may_see(request: HttpRequest) -> bool:
    token = token_of(request)
    if HEADER in request.headers and (token is None or ApiToken.Scope.RUNS_READ not in token.scopes):
        return False  # with that header no session counts, as everywhere
    user: Any = token.owner if token else getattr(request, "user", None)
    return bool(user and user.is_active and user.has_perm("agentruns.view_run"))


def _details(alias: str) -> Health:
    waiting = Run.objects.using(alias).runnable().filter(status=Run.Status.QUEUED)
    return Health(
        status="ok",
        database=connections[alias].vendor,
        sweeper=sweeper(alias),
        sweeper_seen_at=Control.objects.using(alias).sweepers().aggregate(seen=Max("seen_at"))["seen"],
        oldest_queued_at=waiting.order_by("updated_at").values_list("updated_at", flat=True).first(),
    )
