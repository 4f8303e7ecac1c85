"""The health check, open to everybody; the workers' state is only for users with the permission `monitor`."""

from __future__ import annotations

from typing import Any

from django.db import Error, connections
from django.db.models import Min
from django.db.models.functions import Coalesce, Greatest
from django.http import HttpRequest

from agentruns.api import auth, schemas
from agentruns.api.errors import Problem
from agentruns.api.routing import router
from agentruns.conf import settings
from agentruns.journal import policy
from agentruns.models import ApiToken, Run
from agentruns.models.run import SERVED
from agentruns.services import permissions, sweep
from agentruns.services.runs.waiting import MOST, blocked, sweeper_seen


@router.get("/health", auth=None, response=schemas.Health, exclude_unset=True)
def health(request: HttpRequest) -> schemas.Health:
    """Check whether the database can be reached; 503 if not.

    Callers who may see all runs, by session or token, also get the state of the workers.
    """
    alias = settings.DATABASE
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        token = auth.token_of(request)
        user: Any = token.owner if token else getattr(request, "user", None)
        if auth.HEADER in request.headers and (token is None or ApiToken.Scope.RUNS_READ not in token.scopes):
            user = None  # with that header, Django's session is ignored
        elif token is None and user is not None and not auth.is_let_in(request):
            user = None
        if not policy.is_somebody(user) or not permissions.may(user, "monitor"):
            return schemas.Health(status="ok")
        runs: Any = policy.visible_runs(user)
        waiting = runs.runnable().filter(SERVED, status=Run.Status.QUEUED)
        since = Min(Greatest("updated_at", Coalesce("not_before", "updated_at")))
        return schemas.Health(
            status="ok",
            database=connections[alias].vendor,
            sweeper=sweep.sweeper(alias),
            sweeper_seen_at=sweeper_seen(alias),
            oldest_queued_at=waiting.aggregate(since=since)["since"],
            blocked_runs=runs.filter(blocked())[:MOST].count(),
        )
    except Error:
        raise Problem.named("unavailable", "The database cannot be reached.") from None
