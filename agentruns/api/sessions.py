"""The endpoint of sessions: a conversation, found by the caller's own key, with its runs."""

from __future__ import annotations

from django.http import HttpRequest

from agentruns.api.auth import find_session, user_of, visible_runs
from agentruns.api.errors import documented
from agentruns.api.pagination import page
from agentruns.api.routing import router
from agentruns.api.schemas import Cursor, RunOut, RunPage, SessionKey, SessionOut


@router.get("/sessions/{path:key}", response=SessionOut, openapi_extra=documented(400, 401, 403, 404, 422))
def get_session(request: HttpRequest, key: SessionKey, cursor: Cursor = None) -> SessionOut:
    """Return a session and its runs, the one changed last first; `cursor` is `next` of its runs.

    The key is percent-encoded and may hold slashes.
    """
    user = user_of(request)
    session = find_session(user, key)
    found, following = page(visible_runs(user).filter(session=session), "updated_at", cursor)
    runs = RunPage(items=[RunOut.of(run) for run in found], next=following)
    return SessionOut.of(session, runs)
