"""The journal of a run as it grows, as Server-Sent Events.

A stream polls: this works with any database and any server, and holds neither a connection nor, under ASGI, a
thread between two polls. Rows of a session become visible in the order of their `seq`, so a query for those
after the last one sent misses none.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from typing import Any
from uuid import UUID

from asgiref.sync import SyncToAsync, async_to_sync, sync_to_async
from django.contrib.auth import SESSION_KEY, get_user, get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.handlers.asgi import ASGIRequest
from django.db import Error, connections
from django.http import HttpRequest, StreamingHttpResponse
from ninja.decorators import decorate_view
from ninja.errors import AuthenticationError

from agentruns.api.auth import find_run, user_of, visible_runs
from agentruns.api.errors import documented
from agentruns.api.pagination import PAGE
from agentruns.api.routing import router
from agentruns.api.schemas import AFTER, LastEventId, MessageOut, RunId, Seq
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError
from agentruns.journal.masking import sensitive_in
from agentruns.journal.read import run_rows
from agentruns.models.querysets import ENDED
from agentruns.utils.redaction import get_logger

RETRY = 2_000  # milliseconds until a client that was cut off comes back
NOTHING = ":\n"  # a comment
PING = ": ping\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "Content-Encoding": "identity",  # or GZipMiddleware would compress it
    "X-Accel-Buffering": "no",  # or nginx would hold it back
}
_ENTRANCE = "_agentruns_entrance"

_JSON = {"type": "string", "contentMediaType": "application/json"}
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "description": "`seq` of the row; `end` has none"},
        "event": {"type": "string", "description": "kind of the row, or `end`"},
        "data": {**_JSON, "description": "the row as /messages has it; of `end` the run's status"},
    },
}
STREAM = documented(401, 404, 422)
STREAM["responses"][200] = {
    "description": "The rows, one event each, until the run has ended",
    "content": {
        "text/event-stream": {
            "schema": EVENT,  # before OpenAPI 3.2 it describes each event
            "example": f"retry: {RETRY}\n\n"
            'id: 1\nevent: run_started\ndata: {"seq": 1, "kind": "run_started"}\n\n'
            ': ping\n\nevent: end\ndata: {"status": "completed"}\n\n',
        }
    },
}

logger = get_logger("agentruns.api.stream")


class Entrance:
    """A request before its authentication, which a long stream repeats, in any mount of the router."""

    def __init__(self, operation: Any, request: HttpRequest) -> None:
        self._operation = operation
        self._kind = type(request)
        self._facts = dict(request.__dict__)  # before authentication

    def recheck_auth(self) -> Any:
        """Return the user, read anew, or raise AuthenticationError, as for a new request."""
        request = self._kind.__new__(self._kind)
        request.__dict__.update(self._facts)
        user, session = getattr(request, "user", None), getattr(request, "session", None)
        if user is not None and session is not None and session.get(SESSION_KEY) == str(user.pk):
            request.session = type(session)(session.session_key)
            request.user = get_user(request)
        self._authenticate(request)
        user, model = user_of(request), get_user_model()
        if isinstance(user, model):
            request.user = model._base_manager.filter(pk=user.pk).first() or AnonymousUser()
        return user_of(request)

    def _authenticate(self, request: HttpRequest) -> None:
        """Raise AuthenticationError unless one of the operation's auth callbacks accepts the request."""
        for authenticate in self._operation.auth_callbacks:
            try:
                found = authenticate(request)
                if inspect.isawaitable(found):
                    found = async_to_sync(_awaited)(found)
            except Error:
                raise
            except Exception as error:  # a host's own may raise anything
                raise AuthenticationError from error
            if found:
                return
        raise AuthenticationError


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _entered(run: Callable[..., Any]) -> Callable[..., Any]:
    operation = inspect.unwrap(run).__self__

    @wraps(run)
    def entering(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        setattr(request, _ENTRANCE, Entrance(operation, request))
        return run(request, *args, **kwargs)

    return entering


@router.get("/runs/{run_id}/events", openapi_extra=STREAM)
@decorate_view(_entered)
def stream_events(
    request: HttpRequest,
    run_id: RunId,
    after: Seq = AFTER,
    last_event_id: LastEventId = None,
) -> StreamingHttpResponse:
    """Send the run's journal rows as Server-Sent Events, those to come as well, until the run has ended.

    `id` is the row's `seq`, `event` its kind, `data` what /messages gives of it. The header `Last-Event-ID`,
    or `after` for those who cannot send it, goes on right after that row. The last event is `end`: close
    then. A stream that stops without it can be asked for again.
    """
    user = user_of(request)
    run = find_run(user, run_id)
    feed = Feed(getattr(request, _ENTRANCE), user, run.pk, after if last_event_id is None else last_event_id)
    body = _asynchronous(feed) if isinstance(request, ASGIRequest) else _synchronous(feed)
    return StreamingHttpResponse(body, headers=HEADERS)


class Feed:
    """The rows that one listener has not had yet, from poll to poll."""

    FIRST_PAUSE = 0.5
    LONGEST_PAUSE = 2.0

    def __init__(self, entrance: Entrance, user: Any, run_id: UUID, after: int) -> None:
        self.is_over = False
        self._entrance = entrance
        self._user = user
        self._run_id = run_id
        self._after = after
        self._pause = self.FIRST_PAUSE
        self._ping_at = time.monotonic() + settings.API_PING_SECONDS

    def poll(self) -> str:
        """Return the text of new events, or ""; no connection of this thread stays open."""
        try:
            return self._ping() + self._news()
        except (AuthenticationError, DurableRunNotFoundError):
            logger.info("The stream of run=%s ends: its listener may no longer see it", self._run_id)
        except Error as error:
            logger.warning("The stream of run=%s ends and can be requested again: %s", self._run_id, error)
        finally:
            _let_go_of_connections()
        self.is_over = True
        return ""

    def pause(self) -> float:
        """Return how many seconds to wait until the next poll."""
        return min(self._pause, max(self.FIRST_PAUSE, self._ping_at - time.monotonic()))

    def _ping(self) -> str:
        if time.monotonic() < self._ping_at:
            return ""
        self._user = self._entrance.recheck_auth()
        self._ping_at = time.monotonic() + settings.API_PING_SECONDS
        return PING

    def _news(self) -> str:
        # The status is read first: if the run has ended by then, its closing row is among the rows.
        status = visible_runs(self._user).filter(pk=self._run_id).values_list("status", flat=True).first()
        if status is None:
            raise DurableRunNotFoundError(f"There is no run {self._run_id}.")
        rows = run_rows(settings.DATABASE, self._run_id, self._after, limit=PAGE)
        text = ""
        if rows:
            run = find_run(self._user, str(self._run_id), "definition")
            sensitive = sensitive_in(run)
            text = "".join(_event(MessageOut.of(row, run.session.key, sensitive)) for row in rows)
            self._after, self._pause = rows[-1].seq, self.FIRST_PAUSE
        else:
            self._pause = min(self._pause * 1.5, self.LONGEST_PAUSE)
        if len(rows) == PAGE:
            self._pause = 0.0
        elif status in ENDED:
            self.is_over = True
            text += f"event: end\ndata: {json.dumps({'status': status})}\n\n"
        return text


def _event(message: MessageOut) -> str:
    data = json.dumps(message.model_dump(mode="json"))
    return f"id: {message.seq}\nevent: {message.kind}\ndata: {data}\n\n"


def _synchronous(feed: Feed) -> Iterator[str]:
    yield f"retry: {RETRY}\n\n"
    while not feed.is_over:
        # A WSGI server learns only by writing that its client is gone.
        yield feed.poll() or NOTHING
        if not feed.is_over:
            time.sleep(feed.pause())


async def _asynchronous(feed: Feed) -> AsyncIterator[str]:
    yield f"retry: {RETRY}\n\n"
    while not feed.is_over:
        text = await sync_to_async(feed.poll)()
        _let_go_of_the_thread()
        if text:
            yield text
        if not feed.is_over:
            await asyncio.sleep(feed.pause())


def _let_go_of_connections() -> None:
    # Also those of the view and the middleware; a test case keeps those with an open transaction.
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def _let_go_of_the_thread() -> None:
    # Django keeps a request's thread until its response is complete. The thread ends when nothing refers to
    # its executor any more; the next poll gets another one.
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        SyncToAsync.context_to_thread_executor.pop(context, None)
