"""Whether this process can serve: open to everybody, so it tells nothing else."""

from __future__ import annotations

from django.db import Error, connections
from django.http import HttpRequest

from agentruns.api.errors import URN, Problem, documented
from agentruns.api.routing import router
from agentruns.api.schemas import Health
from agentruns.conf import settings


@router.get("/health", auth=None, response=Health, openapi_extra=documented(503))
def health(request: HttpRequest) -> Health:
    """Answer whether the database can be reached."""
    try:
        with connections[settings.DATABASE].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error:
        raise Problem(503, URN + "unavailable", "Unavailable", "The database cannot be reached.") from None
    return Health(status="ok")
