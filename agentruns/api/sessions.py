"""The endpoints of sessions: lists, a session by the caller's own key, its runs and its conversation."""

from __future__ import annotations

from functools import partial

from django.db.models import Exists, OuterRef
from django.http import HttpRequest

from agentruns.api import auth, routing, schemas
from agentruns.api.routing import UPLOAD, GivenKey, blocks_of, key_of, page, router
from agentruns.api.runs import Started, started
from agentruns.api.schemas import AFTER, Cursor, OfScope, RunOut, SendMessage, Seq, SessionKey, SessionOut
from agentruns.conf import settings
from agentruns.journal import copies, masking, read
from agentruns.models import ApiToken, Message
from agentruns.services import permissions
from agentruns.services.runs import starting


@router.get("/sessions", response=schemas.SessionPage)
def list_sessions(request: HttpRequest, scope: OfScope = None, cursor: Cursor = None) -> schemas.SessionPage:
    """List the sessions with a run that you may see, in the order of the last change of their last run.

    Leaves out the sessions of child runs.
    """
    user = auth.user_of(request)
    runs = auth.visible_runs(user)
    if scope is not None:
        runs = runs.filter(scope=scope)
    # Ids of runs increase in the order of their start.
    later = runs.filter(session_id=OuterRef("session_id"), pk__gt=OuterRef("pk"))
    last_runs, following = page(runs.filter(~Exists(later.order_by()), parent=None), "updated_at", cursor)
    titled = permissions.titled(user, {run.session_id for run in last_runs})
    auth.hide_owners(user, (run.session for run in last_runs))
    return schemas.SessionPage(items=schemas.ListedSession.all(last_runs, titled), next=following)


@router.get("/sessions/{path:key}/messages", response=schemas.Conversation)
def list_conversation(
    request: HttpRequest, key: SessionKey, scope: OfScope = None, after: Seq = AFTER
) -> schemas.Conversation:
    """List a session's conversation: tasks, messages, replies, and why runs failed or were cancelled.

    The reasons are only for readers who may view all runs.

    In order, only rows whose `seq` is greater than `after`, of runs that you may see. A page may be short or
    empty although there is a `next`. 404 and 409 as for the session.
    """
    user = auth.user_of(request)
    runs = auth.visible_runs(user).filter(session=auth.find_session(user, key, scope))
    rows = Message.objects.using(settings.DATABASE).filter(run__in=runs.order_by(), kind__in=copies.SAID)
    found = read.read_rows(rows.filter(seq__gt=after).order_by("seq")[: routing.PAGE + 1])
    of_rows = {run.pk: run for run in runs.filter(pk__in={row.run_id for row in found})}
    mask = masking.mask_of(next(iter(of_rows.values()))) if of_rows else masking.Mask()
    shows_all = {pk: permissions.reads_all(user, run) for pk, run in of_rows.items()}
    said = (schemas.SaidOut.of(row, mask, shows_all.get(row.run_id, False)) for row in found[: routing.PAGE])
    following = str(found[routing.PAGE - 1].seq) if len(found) > routing.PAGE else None
    return schemas.Conversation(items=[each for each in said if each is not None], next=following)


@router.get("/sessions/{path:key}", response=SessionOut)
def get_session(
    request: HttpRequest, key: SessionKey, scope: OfScope = None, cursor: Cursor = None
) -> SessionOut:
    """Get a session with a page of its runs, the last changed first; `cursor` is the `next` of these runs.

    The key is percent-encoded and may hold slashes. 409, with the `scopes`, if you may see sessions with this
    key in several scopes and give no `scope`.
    """
    user = auth.user_of(request)
    session = auth.find_session(user, key, scope)
    page_runs, following = page(auth.visible_runs(user).filter(session=session), "updated_at", cursor)
    runs = schemas.RunPage(items=RunOut.all(auth.readable(user, run) for run in page_runs), next=following)
    first = auth.visible_runs(user).filter(session=session).first()
    auth.hide_owners(user, [session])
    if not permissions.titled(user, {session.pk}):
        session.title = ""
    return SessionOut.of(session, masking.mask_of(first) if first else masking.Mask(), runs)


@router.post("/sessions/{path:key}/messages", response={201: RunOut, 200: RunOut})
def send_message(
    request: HttpRequest, key: SessionKey, body: SendMessage = UPLOAD, idempotency_key: GivenKey = None
) -> Started:
    """Send a message to a session (201); the same `idempotency_key` is the same message (200).

    The unfinished run reads the message before it ends; if there is none, the message is the task of a new
    run. 409 if the unfinished run is another agent's, is being cancelled or has 32 unread messages; 403 if
    you may not write in the session, 404 if you may not see it, 429 if your quota is used up.
    """
    user = auth.user_of(request)
    session = auth.find_session(user, key, body.scope)
    given = (session, blocks_of(request, body.content), body.agent, key_of(idempotency_key, body))
    acts_for = auth.has_token_scope(request, ApiToken.Scope.RUNS_ACT_FOR.value)
    return started(request, partial(starting.send_message, user, *given, acts_for=acts_for))
