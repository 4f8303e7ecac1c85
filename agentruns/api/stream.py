"""The rows of a run as Server-Sent Events, while the journal grows.

All streams of a process, its listeners, share one poll, which works with any database and any server. When a
poll is due, one listener polls for all, and each listener sends the news to its own client: no extra thread
has to run, and without listeners there are no queries. Between two polls a stream holds no database
connection and, under ASGI, no thread. Rows of a session become visible in the order of their `seq`, so a
query for the rows after the last sent row misses no row.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import partial, reduce
from itertools import count
from operator import or_
from threading import BoundedSemaphore, Event, Lock, RLock
from typing import Any, NamedTuple
from uuid import UUID

from asgiref.sync import SyncToAsync, async_to_sync, sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth import SESSION_KEY, get_user, get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.handlers.asgi import ASGIRequest
from django.db import Error, connections
from django.db.models import Count, IntegerField, Max, Q, Sum
from django.db.models.functions import Now
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.module_loading import import_string
from ninja.errors import AuthenticationError

from agentruns.api.auth import entry_of, find_run, user_of
from agentruns.api.errors import MARK, Problem
from agentruns.api.routing import PAGE, router
from agentruns.api.schemas import AFTER, LastEventId, MessageOut, RunId, Seq
from agentruns.conf import settings
from agentruns.engine.drafts import AT_WORK, watch
from agentruns.exceptions import DurableRunNotFoundError, PermissionDeniedError
from agentruns.journal import events, masking, policy, read
from agentruns.models import ApiToken, Message, Run, SessionBearer, statuses
from agentruns.services import api_tokens
from agentruns.utils import carry, forks, json as canonical, redaction

AGAIN = 5  # seconds until a client with too many streams may try again
RETRY = 2_000  # milliseconds until a disconnected client connects again
NOTHING = ":\n"  # a comment
PING = ": ping\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "Content-Encoding": "identity",  # or GZipMiddleware would compress it
    "X-Accel-Buffering": "no",  # or nginx would hold it back
}
CONNECTIONS = 8  # of all listeners, at once
FORGOTTEN = 10.0  # seconds without a listener after which a run is polled no more
RENEWED = 5.0  # seconds between two notes to workers that somebody listens to a run
WAITS_FOR: dict[str, str] = {
    Run.Status.AWAITING_APPROVAL: "approval",
    Run.Status.WAITING: "event",
    Run.Status.ORPHANED: "verdict",
    Run.Status.PAUSED: "resume",
}
LISTENERS_EVERY = 1.5  # seconds between two looks at the listeners' tokens, users and sessions
GONE = ""  # of a listener whose token, user or session ended
MOST = 200  # rows that one poll reads for all listeners; if there are more, each listener reads its own pages

turns = BoundedSemaphore(CONNECTIONS)
logger = redaction.get_logger("agentruns.api.stream")


class Head(NamedTuple):
    """A run as of the last poll: its status, its session's last `seq`, its step and its reply's draft."""

    status: str
    seq: int
    step: int
    draft: str = ""


class Bearer(NamedTuple):
    """The credentials of a listener: the ids of a token and a user, a key of Django's sessions, or None."""

    token: UUID | None
    user: Any
    session: str | None


class Poller:
    """The `Head` of each run with listeners, and the new rows that the last poll read."""

    FIRST_PAUSE = 0.5
    LONGEST_PAUSE = 2.0
    WRITING_PAUSE = 0.2
    CLAIM = 5.0

    def __init__(self) -> None:
        self._lock = Lock()
        self._heads: dict[UUID, Head | None] = {}
        self._asked: dict[UUID, float] = {}
        self._renewed: dict[UUID, float] = {}
        self._news: dict[UUID, tuple[int, int, list[events.Row]]] = {}  # after a row, up to a row, the rows
        self._heard: dict[Bearer, float] = {}
        self._credentials: dict[Bearer, str] = {}
        self._due = self._claimed = self._listeners_due = 0.0
        self._pause = self.FIRST_PAUSE

    def pause(self) -> float:
        """Compute the seconds until the next poll, at least 0.1."""
        return max(0.1, self._due - time.monotonic())  # another listener may be polling just now

    def claim(self) -> bool:
        """Claim the next poll, and return True: the caller must then poll for all listeners.

        Returns False if no poll is due, or if another caller claimed it less than CLAIM seconds ago.
        """
        now = time.monotonic()
        if now < max(self._due, self._claimed):
            return False
        self._claimed = now + self.CLAIM  # the caller may disconnect before its poll
        return True

    def head(self, run_id: UUID) -> Head | None:
        """Get the run's Head as of the last poll, None if unknown or gone, and keep the run being polled."""
        self._asked[run_id] = time.monotonic()
        return self._heads.get(run_id)

    def credentials(self, bearer: Bearer) -> str | None:
        """Get the state of a bearer as of the last look, GONE or a text; None if unknown. Keep looking at it.

        The text changes with the user's password, permissions and groups, and with the permissions of any
        group. Only the next ping notices what else changes.
        """
        self._heard[bearer] = time.monotonic()
        return self._credentials.get(bearer)

    def rows_between(self, run_id: UUID, after: int, last: int) -> list[events.Row] | None:
        """Get the run's rows after `after`, at least up to `last`; None if the last poll lacks some."""
        since, until, rows = self._news.get(run_id, (0, 0, []))
        return [row for row in rows if row.seq > after] if since <= after and last <= until else None

    def join(self, run_id: UUID) -> Head | None:
        """Poll one run for a new listener; return the run's Head, or None if the run is gone."""
        with self._lock:
            self._see([run_id])
            return self.head(run_id)

    def look(self, run_id: UUID) -> None:
        """If a poll is due, poll `run_id` and the other runs with listeners, and set the time of the next."""
        with self._lock:
            self.head(run_id)
            now = time.monotonic()
            if now < self._due:
                return
            self._asked = {run_id: at for run_id, at in [*self._asked.items()] if at > now - FORGOTTEN}
            for known in (self._heads, self._renewed):
                for run_id in known.keys() - self._asked.keys():
                    del known[run_id]
            before = dict(self._heads)
            self._see(list(self._asked))
            # Read the new rows of all runs whose session has more rows than before.
            changed = {
                run_id: (old.seq, head.seq)
                for run_id, old in before.items()
                if old and (head := self._heads.get(run_id)) and head.seq > old.seq
            }
            rows: list[events.Row] = []
            if changed:
                after = reduce(or_, (Q(run_id=run_id, seq__gt=seq) for run_id, (seq, _) in changed.items()))
                news = Message.objects.using(settings.DATABASE).filter(after).order_by("seq")
                rows = read.read_rows(news[: MOST + 1])
            self._news = {
                run_id: (*both, [row for row in rows if row.run_id == run_id])
                for run_id, both in (changed.items() if len(rows) <= MOST else ())
            }
            quiet = min(self._pause * 1.5, self.LONGEST_PAUSE)
            self._pause = self.FIRST_PAUSE if self._heads != before else quiet
            if any(head and head.draft for head in self._heads.values()):
                self._pause = min(self.WRITING_PAUSE, self.FIRST_PAUSE)
            if now >= self._listeners_due:
                self._see_listeners(now)
            self._due, self._claimed = time.monotonic() + self._pause, 0.0

    def _see_listeners(self, now: float) -> None:
        """Read the state of all bearers: one query each for tokens, users, groups' permissions, sessions."""
        self._heard = {bearer: at for bearer, at in [*self._heard.items()] if at > now - FORGOTTEN}
        heard = self._heard or [Bearer(None, None, None)]
        tokens, users, keys = ({*each} - {None} for each in zip(*heard, strict=True))
        valid = ApiToken.objects.using(settings.DATABASE).filter(api_tokens.VALID, pk__in=tokens)
        lasting = {None, *valid.values_list("pk", flat=True)} if tokens else {None}
        store = import_string(f"{django_settings.SESSION_ENGINE}.SessionStore")
        if keys and hasattr(store, "get_model_class"):  # each ping looks at those of other stores
            kept = store.get_model_class()._base_manager.filter(session_key__in=keys, expire_date__gt=Now())
            keys = {*kept.values_list("session_key", flat=True)}
        lasting |= keys
        model, people = get_user_model(), dict[Any, str]({None: "-"})
        held = {each.name for each in model._meta.many_to_many} & {"user_permissions", "groups"}
        counts: dict[str, Any] = {f"_ar_{name}": Count(name, distinct=True) for name in sorted(held)}
        for each in model._meta.many_to_many:
            if each.name in held and isinstance(each.related_model._meta.pk, IntegerField):
                counts[f"_ar_ids_{each.name}"] = Sum(each.name, distinct=True)  # one exchanged for another
        group = model._meta.get_field("groups").related_model if "groups" in held else None
        rights: dict[str, Any] = {}
        if users and (through := getattr(getattr(group, "permissions", None), "through", None)):
            rights = through._base_manager.aggregate(Count("pk"), Max("pk"))  # a new row has a higher key
        for user in model._base_manager.filter(pk__in=users).annotate(**counts) if users else ():
            facts = [getattr(user, name, "") for name in ("password", "is_superuser", *counts)]
            people[user.pk] = str([*facts, rights]) if user.is_active else GONE
        self._credentials = {
            bearer: people.get(bearer.user, GONE) if {bearer.token, bearer.session} <= lasting else GONE
            for bearer in self._heard
        }
        self._listeners_due = now + LISTENERS_EVERY

    def _see(self, run_ids: list[UUID]) -> None:
        """Read the Head of each run, and let workers know that somebody listens to the runs at work.

        Callers read rows only after this, so that they get the last row of a run that has ended.
        """
        runs = Run.objects.using(settings.DATABASE).filter(pk__in=run_ids)
        draft = ("draft__epoch", "draft__step", "draft__text")
        heads: dict[UUID, Head | None] = dict.fromkeys(run_ids)
        for run_id, status, seq, epoch, step, *drafted in runs.values_list(
            "pk", "status", "session__next_seq", "lease_epoch", "step", *draft
        ):
            is_drafted = status == Run.Status.RUNNING and drafted[:2] == [epoch, step]
            heads[run_id] = Head(status, seq - 1, step, drafted[2] if is_drafted else "")
        self._heads.update(heads)
        now = time.monotonic()
        at_work = [run_id for run_id, head in heads.items() if head and head.status in AT_WORK]
        if due := [run_id for run_id in at_work if now - self._renewed.get(run_id, -RENEWED) >= RENEWED]:
            self._renewed.update(dict.fromkeys(due, now))
            watch(due)  # lets workers know that somebody listens


poller = Poller()
forks.in_child(poller.__init__)  # type: ignore[misc]
forks.in_child(partial(turns.__init__, CONNECTIONS))  # type: ignore[misc]


class Entrance:
    """A stream's request as it was before authentication, kept to authenticate the request again."""

    def __init__(self, request: HttpRequest) -> None:
        self._kind = type(request)
        self._entry = entry_of(request)
        token: Any = getattr(request, "auth", None)
        user: Any = request.user
        if isinstance(token, ApiToken):
            self.bearer = Bearer(token.pk, token.owner_id, None)
        else:
            session: Any = getattr(request, "session", None)
            is_theirs = session is not None and session.get(SESSION_KEY) == str(user.pk)
            key = session.session_key if is_theirs else None
            self.bearer = Bearer(None, user.pk if isinstance(user, get_user_model()) else None, key)

    def recheck_auth(self) -> Any:
        """Authenticate the request again; return the user, read anew from the database.

        Raises AuthenticationError if no authenticator accepts the request, or if one fails. An error of the
        database is raised unchanged.
        """
        request: Any = self._kind.__new__(self._kind)
        request.__dict__.update(self._entry.before, **{MARK: self._entry})
        user, session = getattr(request, "user", None), getattr(request, "session", None)
        if user is not None and session is not None and session.get(SESSION_KEY) == str(user.pk):
            request.session = type(session)(session.session_key)
            request.user = get_user(request)
            # What a middleware noted on the user, such as a second factor.
            notes = {name: each for name, each in vars(copy.copy(user)).items() if not name.startswith("_")}
            request.user.__dict__.update(notes | vars(request.user) if request.user.is_authenticated else {})
        callbacks = self._entry.operation.auth_callbacks
        for authenticate in callbacks:
            try:
                accepted = authenticate(request)
                if inspect.isawaitable(accepted):  # on the server's own loop, to which its clients may belong
                    accepted = async_to_sync(asyncio.wait_for)(accepted, None)
            except Error:
                raise
            except Exception as error:  # a host's own `auth` may raise anything
                raise AuthenticationError from error
            if accepted:
                request.auth = accepted
                break
        else:
            if callbacks:
                raise AuthenticationError
        user, model = user_of(request), get_user_model()
        if isinstance(user, model):
            request.user = model._base_manager.filter(pk=user.pk).first() or AnonymousUser()
        return user_of(request)


@router.get("/runs/{run_id}/events")
def stream_events(
    request: HttpRequest, run_id: RunId, after: Seq = AFTER, last_event_id: LastEventId = None
) -> StreamingHttpResponse:
    """Stream the run's journal rows, present and future, as Server-Sent Events until the run has ended.

    `id` is the row's `seq`, `event` its kind, and `data` the row as in /messages. To continue after a row,
    send the header `Last-Event-ID`, or `after` if your client cannot send the header. While the model writes
    a reply, `draft` events hold its whole text so far; the next row replaces the draft. A `waits_for` event
    says that the run waits for people (`approval`, `verdict` or `resume`) or for an `event`, or with null
    that it no longer waits. The last event is `end`: close the stream then. If a stream stops without `end`,
    request it again.
    """
    user = user_of(request)
    run = find_run(user, run_id)
    place = _place(request, user, run.pk)
    after = after if last_event_id is None else last_event_id
    feed = Feed(Entrance(request), user, run.pk, after, place.over)
    body = _asynchronous(feed) if isinstance(request, ASGIRequest) else _synchronous(feed)
    response = StreamingHttpResponse(body, headers=HEADERS)
    # The server closes a response however its stream ends.
    response._resource_closers.append(place.close)  # type: ignore[attr-defined]
    return response


def _place(request: HttpRequest, user: Any, run_id: UUID) -> Place:
    try:
        visits = isinstance(user, SessionBearer)
        whose = user.session_id if visits else user.pk  # all visitors of one session share a limit
        schema, most = carry.schema_of(settings.DATABASE), policy.limits_of(user, None).streams
        # Each tenant's schema has users with the same keys.
        return places.take((schema, whose) if schema else whose, run_id, most, visits=visits)
    except Problem:
        entry_of(request).headers[429] = {"Retry-After": str(AGAIN)}
        raise


class Places:
    """The open event streams of this process by user; limited, as each occupies a WSGI server's thread."""

    def __init__(self) -> None:
        self._open: dict[Any, dict[int, tuple[UUID, Event]]] = {}  # oldest first
        self._numbers = count()
        self._lock = RLock()  # garbage collection in `take` may call `give_back`

    def take(self, key: Any, run_id: UUID, most: int | None, *, visits: bool = False) -> Place:
        """Register one more stream of the user `key`; return its place. None for `most` is no limit.

        The last fifth of the process's streams is not for visitors (`visits`), who would lock users out.

        If the user has `most` open streams, ends the oldest of this run, because a disconnected client
        returns before the server notices, and browsers never try again after a 429. Raises Problem (429) if
        all these streams are of other runs.
        """
        number, over, cap = next(self._numbers), Event(), settings.API_STREAMS
        cap -= cap // 5 if visits else 0
        with self._lock:
            mine = self._open.get(key, {})
            is_full = sum(map(len, self._open.values())) >= cap
            if is_full or (most is not None and len(mine) >= most):
                same = next((one for one, (of, _over) in tuple(mine.items()) if of == run_id), None)
                if same is None:
                    detail = (
                        f"You may have {most} streams open at once, not more. Close one, or poll /messages."
                    )
                    if is_full:
                        detail = f"This process has {cap} streams open, not more for you. Poll /messages."
                    raise Problem.named("streams", detail, retry_after=AGAIN)
                mine.pop(same)[1].set()
            self._open.setdefault(key, mine)[number] = run_id, over
        return Place(self, key, number, over)

    def give_back(self, key: Any, number: int) -> None:
        """Remove a stream from a user's open streams; do nothing if a newer stream has replaced it."""
        with self._lock:
            mine = self._open.get(key, {})
            mine.pop(number, None)
            if not mine:
                self._open.pop(key, None)


class Place:
    """A stream's place among a user's open streams, freed once: by `close` or by garbage collection."""

    def __init__(self, places: Places, key: Any, number: int, over: Event) -> None:
        self.over = over  # set when a newer stream of the same run has taken the place
        self._end = weakref.finalize(self, places.give_back, key, number)

    def close(self) -> None:
        """Free this stream's place among the user's open streams, if it is not free yet."""
        self._end()


places = Places()


class Feed:
    """The state of one listener between polls: which rows, draft and wait were sent already."""

    def __init__(self, entrance: Entrance, user: Any, run_id: UUID, after: int, over: Event) -> None:
        self.over = over
        self._state = carry.state_of(settings.DATABASE)
        # In a schema or a policy of their own, others may not see the rows of this listener.
        self._poller = poller if self._state is None else Poller()
        self._entrance = entrance
        self._user = user
        self._run_id = run_id
        self._after = after
        self._seen = -1  # `seq` of the session's last row when the run's rows were all read
        self._is_behind = self._claims = False
        self._draft = ""
        self._waits_for: str | None = None
        self._mask: masking.Mask | None = None
        self._bearer, self._known = entrance.bearer, self._poller.credentials(entrance.bearer)
        self._ping_at = time.monotonic() + settings.API_PING_SECONDS

    def asks(self) -> bool:
        """Check whether `poll` must be called now: for news, for a ping, or to poll for all listeners.

        Claims the poll for all listeners if it is due.
        """
        head = self._poller.head(self._run_id) if self._seen >= 0 else None
        self._claims = head is not None and self._poller.claim()
        return self._claims or head is None or head.seq != self._seen or self._is_due()

    def poll(self) -> str:
        """Poll the database, and format the new events as text, "" if there are none.

        Sets `over` if the run has ended, the user may no longer see it, or the database fails. Closes the
        connections of this thread.
        """
        try:
            with carry.carried(settings.DATABASE, self._state):
                # Before any other query: no thread holds a connection while it waits for the poller's lock.
                if self._claims:
                    self._poller.look(self._run_id)
                head = self._poller.head(self._run_id) if self._seen >= 0 else None
                if head is None and not self._claims:
                    head = self._poller.join(self._run_id)
                if head is None:
                    raise DurableRunNotFoundError(f"There is no run {self._run_id}.")
                ping = ""
                if self._is_due():
                    self._user = self._entrance.recheck_auth()
                    find_run(self._user, str(self._run_id))
                    self._known = self._poller.credentials(self._bearer)
                    self._ping_at = time.monotonic() + settings.API_PING_SECONDS
                    ping = PING
                text = ping + (self._rows(head) if head.seq != self._seen else "")
                if self._is_behind:
                    return text
                if head.status in statuses.ENDED:
                    self.over.set()
                    return text + _note("end", status=head.status)
                return text + self._live(head)
        except (AuthenticationError, DurableRunNotFoundError, PermissionDeniedError):
            logger.info("The stream of run=%s ends: its listener may no longer see it", self._run_id)
        except Error as error:
            logger.warning("The stream of run=%s ends and can be requested again: %s", self._run_id, error)
        finally:
            _let_go_of_connections()
        self.over.set()
        return ""

    def pass_on(self) -> str:
        """Format a changed draft or wait that another listener's poll read; "" if none. Makes no query."""
        head = self._poller.head(self._run_id)
        return self._live(head) if head is not None else ""

    def _is_due(self) -> bool:
        """Check whether to authenticate again: for a ping, or because the last look at the bearer differs."""
        state = self._poller.credentials(self._bearer)
        self._known = state if self._known is None and state != GONE else self._known
        return state != self._known or time.monotonic() >= self._ping_at

    def pause(self) -> float:
        """Compute the seconds until the next poll; 0 if more rows may be ready."""
        if self._is_behind:
            return 0.0
        return min(self._poller.pause(), max(self._poller.FIRST_PAUSE, self._ping_at - time.monotonic()))

    def _rows(self, head: Head) -> str:
        """Format the new rows: those that the last poll read, or else a page from the database.

        Raises DurableRunNotFoundError if the user may no longer see the run.
        """
        run = find_run(self._user, str(self._run_id))
        rows = self._poller.rows_between(self._run_id, max(self._after, self._seen), head.seq)
        if rows is None:
            rows = read.run_rows(settings.DATABASE, self._run_id, self._after, limit=PAGE)
        self._is_behind = len(rows) >= PAGE
        if not self._is_behind:
            self._seen = head.seq
        if not rows:
            return ""
        if self._mask is None or any(row.kind in read.NAMING for row in rows):
            self._mask = masking.mask_of(run)  # from now on, the mask learns from the rows that it masks
        shown = (MessageOut.of(row, run, self._mask) for row in rows)
        text = "".join(f"id: {one.seq}\n{_note(one.kind, **one.model_dump(mode='json'))}" for one in shown)
        self._after, self._draft = rows[-1].seq, ""
        return text

    def _live(self, head: Head) -> str:
        """Format a changed `waits_for` and a changed draft as events; "" if rows after `head` were sent."""
        if self._after > head.seq:  # the rows sent are newer than the head
            return ""
        text = ""
        if (waits_for := WAITS_FOR.get(head.status)) != self._waits_for:
            self._waits_for = waits_for
            text = _note("waits_for", run=str(self._run_id), status=head.status, waits_for=waits_for)
        if head.draft and head.draft != self._draft:
            self._draft = head.draft
            text += _note("draft", run=str(self._run_id), step=head.step, text=canonical.legal(head.draft))
        return text


def _note(name: str, /, **data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _synchronous(feed: Feed) -> Iterator[str]:
    _let_go_of_connections()
    yield f"retry: {RETRY}\n\n"
    while not feed.over.is_set():
        # Always yield a text, because only a failed write tells a WSGI server that the client is gone.
        if feed.asks():
            with turns:
                text = feed.poll()
        else:
            text = feed.pass_on()
        yield text or NOTHING
        feed.over.wait(feed.pause())


async def _asynchronous(feed: Feed) -> AsyncIterator[str]:
    await sync_to_async(_let_go_of_connections)()
    yield f"retry: {RETRY}\n\n"
    while not feed.over.is_set():
        if feed.asks():
            while not turns.acquire(blocking=False):
                await asyncio.sleep(0.01)
            try:
                text = await sync_to_async(feed.poll)()
            finally:
                turns.release()
                # Django keeps a request's thread until its response is complete. Without a reference to its
                # executor the thread ends, and the next poll gets another thread.
                if (context := SyncToAsync.thread_sensitive_context.get(None)) is not None:
                    SyncToAsync.context_to_thread_executor.pop(context, None)
        else:
            text = feed.pass_on()
        if text:
            yield text
        if not feed.over.is_set():
            await asyncio.sleep(feed.pause())


def _let_go_of_connections() -> None:
    # Also the connections of view and middleware, but not those on which a test case has a transaction open.
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()
