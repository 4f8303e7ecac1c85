"""The endpoints of runs. They record requests and queue runs, which a worker drives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse, HttpResponseNotModified, StreamingHttpResponse
from django.utils.crypto import salted_hmac
from django.utils.http import parse_etags
from ninja import Status
from ninja.params.functions import Body
from pydantic import Field

import agentruns
from agentruns.api import auth, routing, schemas
from agentruns.api.errors import Problem, run_facts
from agentruns.api.routing import UPLOAD, GivenKey, blocks_of, key_of, once, page, router
from agentruns.api.schemas import AFTER, CancelRun, EraseRow, PauseRun, ResumeRun, RowSeq, RunId, RunOut, Seq
from agentruns.conf import settings
from agentruns.engine import turns
from agentruns.exceptions import DurableRunNotFoundError, NotFoundError, RunStateError
from agentruns.journal import masking, outsiders, read
from agentruns.models import ApiToken, Message, Run, kinds
from agentruns.services import history, permissions, transfer
from agentruns.services.data.erasure import erase_payload
from agentruns.services.runs import control, lifecycle as services, starting
from agentruns.utils import bounds, clock, json as canonical

REVALIDATED = "private, no-cache"  # a client may store this answer, but must revalidate it by its ETag
# The columns of a run that change its answer
TAGGED = attrgetter("session.next_seq", "status", "lease_epoch", "attempts", "blocked_reason", "shows_all")
MOMENTS = attrgetter("lease_expires_at", "not_before", "updated_at")
# Not "or null" in the schema, or generated clients would send a null for a missing body.
ABSENT: Any = Body(None)
COST = r"^[0-9]{1,12}(\.[0-9]{1,12})?$"
Cost = Annotated[str, Field(pattern=COST), schemas.must(Decimal, "must be positive")]
Started = Status[RunOut]
STATE = "run seq agent version status step output calls.id calls.tool calls.arguments calls.outcome"  # public


@router.post("/runs", response={201: RunOut, 200: RunOut})
def start_run(request: HttpRequest, body: schemas.StartRun = UPLOAD, key: GivenKey = None) -> Started:
    """Queue a run (201), or return the run that the same request started before (200).

    The same `idempotency_key` always returns the same run. The same agent and input return the unfinished run
    of the session. 403 if you may not start the agent, or not for this `owner`, `scope` or `context`; 409 if
    the session has another unfinished run, or the key belongs to another task or session; 422 if there is no
    such agent; 404 if the session is another user's; 429 if your quota is used up.
    """
    user, text = auth.user_of(request), blocks_of(request, body.input)
    _require_act_for(request, body)
    given = body.model_dump(exclude={"idempotency_key", "input"})
    start = partial(starting.start_run, user, text=text, idempotency_key=key_of(key, body), **given)
    return started(request, start, owner=body.owner)


@router.post("/runs/{run_id}/fork", response={201: RunOut, 200: RunOut})
def fork_run(request: HttpRequest, run_id: RunId, body: schemas.ForkRun, key: GivenKey = None) -> Started:
    """Fork a run: queue a new run that continues from row `at` (201), or return the run of this key (200).

    The new run is yours, in a new session with a copy of the rows up to `at`. Open calls are settled, and no
    effect is repeated. 409 if there is no such row, if nothing is left to do and `text` is missing, if the
    session exists, or if the key belongs to another run; 403, 422 and 429 as for a start.
    """
    user = auth.user_of(request)
    origin = auth.find_run(user, run_id)
    _require_act_for(request, body)
    fork = partial(starting.fork_run, user, origin.pk, idempotency_key=key_of(key, body), **body.given)
    return started(request, fork, owner=body.owner, origin=origin)


def _require_act_for(request: HttpRequest, body: schemas.Behalf) -> None:
    """Raise Problem (403) if the token may not give the body's owner or scope."""
    if body.owner is not None or body.scope is not None:
        auth.require_token_scope(request, ApiToken.Scope.RUNS_ACT_FOR.value)


def started(
    request: HttpRequest, start: Callable[[], Run], *, owner: str | None = None, origin: Run | None = None
) -> Started:
    """Start or find a run by calling `start`, and build the answer: 201 for a new run, else 200.

    A RunStateError becomes a Problem with the facts of the run in the way, or if the user may not see that
    run, of `origin`. `owner` is for whom the user acts, as in `shown`.
    """
    user = auth.user_of(request)
    try:
        run = start()
        return Status(201 if run.is_new else 200, RunOut.of(auth.shown(user, run, owner)))
    except RunStateError as error:
        # Describe the run that is in the way, if the user may see it.
        named = auth.visible_runs(user).filter(pk=error.run_id).first() if error.run_id else None
        against = named or origin
        raise Problem.of(error, **(run_facts(user, against) if against else {})) from error


@router.get("/runs", response=schemas.RunPage)
def list_runs(
    request: HttpRequest,
    status: schemas.OfRunStatus = None,
    agent: schemas.OfAgent = None,
    session: schemas.OfSession = None,
    parent: schemas.OfParent = None,
    scope: schemas.OfScope = None,
    context: schemas.OfContext = None,
    cursor: schemas.Cursor = None,
) -> schemas.RunPage:
    """List the runs that you may see, the last changed first. A page may be short or empty."""
    wanted: dict[str, Any] = {"status": status, "agent": agent, "session__key": session, "scope": scope}
    wanted["parent_id"] = parent
    user, given = auth.user_of(request), {name: each for name, each in wanted.items() if each is not None}
    runs = auth.visible_runs(user).filter(**given)
    name, _, value = (context or "").partition(":")
    if context is not None:
        runs = runs.filter(pk__in=Run.objects.with_context({name: value}))
    page_runs, following = page(runs, "updated_at", cursor)
    later = turns.reasons(settings.DATABASE, page_runs)
    for run in page_runs:
        run.blocked_reason = later.get(run.pk, run.blocked_reason)
    items = RunOut.all(auth.readable(user, run) for run in page_runs)
    if context is not None:  # a match must not reveal a masked value
        items = [run for run in items if bounds.said(run.context.get(name)) == value]
        following = following if items else None  # nor may the number of pages
    return schemas.RunPage(items=items, next=following)


@router.get("/runs/{run_id}", response=RunOut)
def get_run(request: HttpRequest, response: HttpResponse, run_id: RunId) -> Any:
    """Get one run. With its `ETag` as `If-None-Match`, the answer is 304 while nothing has changed."""
    run = auth.find_run(auth.user_of(request), run_id)
    run.blocked_reason = turns.reasons(settings.DATABASE, [run]).get(run.pk, run.blocked_reason)
    # `seq` is not enough, because lease, back-off and `blocked_reason` change without a row of the journal.
    moments = (moment and clock.utc(moment) for moment in MOMENTS(run))
    about = [agentruns.__version__, str(run.pk), *TAGGED(run), *moments]
    tag = salted_hmac("agentruns.tag", canonical.dumps(about), algorithm="sha256").hexdigest()[:32]
    headers = {"ETag": f'W/"{tag}"', "Cache-Control": REVALIDATED}
    known = {each.removeprefix("W/") for each in parse_etags(request.headers.get("If-None-Match", ""))}
    if {"*", headers["ETag"].removeprefix("W/")} & known:
        return HttpResponseNotModified(headers=headers)
    for name, value in headers.items():
        response[name] = value
    readers = [*outsiders.read_by(settings.DATABASE, run)] if run.shows_all else None
    return RunOut.of(run).model_copy(update={"untrusted": readers})


@router.get("/runs/{run_id}/messages", response=schemas.MessagePage)
def list_messages(request: HttpRequest, run_id: RunId, after: Seq = AFTER) -> schemas.MessagePage:
    """List the run's journal rows whose `seq` is greater than `after`, in order."""
    run = auth.find_run(auth.user_of(request), run_id)
    rows = read.run_rows(settings.DATABASE, run.pk, after, limit=routing.PAGE + 1)
    mask = masking.mask_of(run)
    items = [schemas.MessageOut.of(row, run, mask) for row in rows[: routing.PAGE]]
    return schemas.MessagePage(items=items, next=str(items[-1].seq) if len(rows) > routing.PAGE else None)


@router.get("/runs/{run_id}/messages/{seq}/content")
def get_content(request: HttpRequest, run_id: RunId, seq: RowSeq) -> StreamingHttpResponse:
    """Download the whole content of a row that holds only its beginning (`payload.stored`), as it was stored.

    404 if there is no such row, or if the row holds the whole content; 403 if the content may hold sensitive
    values and you lack agentruns.reveal_arguments; 500 if the file is missing or was altered.
    """
    return _download(request, transfer.find_content(auth.find_run(auth.user_of(request), run_id), seq))


@router.get("/runs/{run_id}/files/{sha256}")
def get_file(request: HttpRequest, run_id: RunId, sha256: schemas.Sha256) -> StreamingHttpResponse:
    """Download a picture or document by the `sha256` in a row's block; browsers show pictures inline.

    404 if no row of the run names the file; 403 if the file may hold sensitive values and you lack
    agentruns.reveal_arguments; 500 if the file is missing or was altered.
    """
    return _download(request, transfer.find_file(auth.find_run(auth.user_of(request), run_id), sha256))


def _download(request: HttpRequest, content: transfer.Content) -> StreamingHttpResponse:
    """Build a content's response; raises DurableRunNotFoundError if the row hides it from the reader."""
    run, seq = content.run, content.stored.seq
    (row,) = read.run_rows(settings.DATABASE, run.pk, seq - 1, limit=1)
    if not run.shows_all and "stored" not in kinds.public(row.kind, row.payload, row.tool_name):
        raise DurableRunNotFoundError(f"You may not read the content of row {seq} of run {run.pk}.")
    chunks = transfer.read_content(content, auth.user_of(request), auth.channel_of(request))
    return transfer.download(request, chunks, content.headers)


@router.get("/runs/{run_id}/state", response=dict[str, Any])
def get_state(request: HttpRequest, run_id: RunId, at: schemas.At = None) -> dict[str, Any]:
    """Compute the run's state right after row `at`, or its current state. 409 if the run has no such row.

    Without agentruns.view_run some members are null, and calls have only id, tool, arguments and outcome.
    """
    run = auth.find_run(auth.user_of(request), run_id)
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk)
    seq = at if at is not None else rows.latest("seq").seq
    state: dict[str, Any] = schemas.legal(history.record(history.state_at(run.pk, seq), masking.mask_of(run)))
    return state if run.shows_all else {**dict.fromkeys(state), **canonical.select(state, STATE.split())}


@router.post("/runs/{run_id}/resume", response=RunOut)
def resume_run(request: HttpRequest, run_id: RunId, body: ResumeRun = ABSENT, key: GivenKey = None) -> Any:
    """Resume a run: end its pause, and tell the model that calls in doubt are unknown. A worker drives it."""
    return _change(request, run_id, "resume", partial(services.resume_run, drive=False), key, body)


@router.post("/runs/{run_id}/cancel", response=RunOut)
def cancel_run(request: HttpRequest, run_id: RunId, body: CancelRun = ABSENT, key: GivenKey = None) -> Any:
    """Cancel a run: at once if no worker drives the run, else before its next tool starts."""
    return _change(request, run_id, "cancel", control.cancel_run, key, body)


@router.post("/runs/{run_id}/pause", response=RunOut)
def pause_run(request: HttpRequest, run_id: RunId, body: PauseRun = ABSENT, key: GivenKey = None) -> Any:
    """Pause a run until it is resumed: at once if no worker drives the run, else before its next tool starts.

    A reply in progress is stopped; `/resume` requests the reply again.
    """
    return _change(request, run_id, "pause", control.pause_run, key, body)


class RaiseBudget(schemas.Keyed):
    max_steps: int | None = Field(None, ge=1, lt=2**31, description="replies of the model, in all")
    token_budget: int | None = Field(None, ge=1, lt=2**63, description="tokens, in all")
    cost_budget: Cost | None = Field(None, description="in the currency of the prices, as text")
    deadline: float | None = Field(
        None, ge=1, lt=10**9, description="seconds, without the time of waiting for people"
    )
    reason: schemas.Reason = ""


@router.post("/runs/{run_id}/raise-budget", response=RunOut)
def raise_budget(request: HttpRequest, run_id: RunId, body: RaiseBudget, key: GivenKey = None) -> Any:
    """Raise the budgets of a run. A run that is paused because a budget is used up goes on.

    The limits that you send replace the present ones. 409 if a limit is not higher than what the run has used
    and may use now, if the run has no such budget, or if you send none.
    """

    def act(run_id: UUID, actor: Any, deadline: float | None, **given: Any) -> object:
        limit = timedelta(seconds=deadline) if deadline else None
        return control.raise_budget(run_id, actor, deadline=limit, **given)

    return _change(request, run_id, "raise_budget", act, key, body)


@router.post("/runs/{run_id}/orphans/{call_id}/resolve", response=RunOut)
def resolve_orphan(
    request: HttpRequest, run_id: RunId, call_id: schemas.CallId, body: schemas.Resolve, key: GivenKey = None
) -> Any:
    """Record your verdict on a call in doubt.

    `occurred` stores `result` as the call's result; `not_occurred` lets the call run again; `unknown` gives
    the model an error. 409, with person and time, if the call is not in doubt or evidence contradicts you.
    """

    def act(run_id: UUID, actor: Any, **given: Any) -> object:
        rows = Message.objects.using(settings.DATABASE).filter(run_id=run_id, call_id=call_id)
        if not call_id.isprintable() or not rows.exclude(call_id="").exists():
            raise NotFoundError(f"Run {run_id} has no call {call_id[: auth.SHOWN]}.")
        channel = auth.channel_of(request)
        return control.resolve_orphan(run_id, call_id, actor=actor, channel=channel, **given)

    return _change(request, run_id, "resolve", act, key, body, call_id)


@router.post("/runs/{run_id}/rows/{seq}/erase", response=RunOut)
def erase_row(request: HttpRequest, run_id: RunId, seq: RowSeq, body: EraseRow, key: GivenKey = None) -> Any:
    """Destroy the content of a row for good, also in every row, copy and file that repeats the content.

    The row stays with its facts, such as who acted and when. 409 if there is no such row, or if a run that
    reads the row has not ended. Backups, exports and texts sent earlier are not changed.
    """
    return _change(request, run_id, "erase", partial(erase_payload, seq=seq), key, body)


@router.post("/runs/{run_id}/rows/{seq}/leave-out", response=RunOut)
def leave_out(
    request: HttpRequest, run_id: RunId, seq: RowSeq, body: schemas.LeaveOut = ABSENT, key: GivenKey = None
) -> Any:
    """Leave a reply, a result or a message out of later requests to the model; the journal keeps the row.

    A run that is paused because its provider refuses the conversation goes on. 409 if the session has no such
    row, or if a worker drives the run: pause or cancel the run first.
    """
    return _change(request, run_id, "resume", partial(control.leave_out, seq=seq), key, body)


def _change(
    request: HttpRequest,
    run_id: str,
    action: str,
    act: Callable[..., object],
    key: GivenKey,
    body: schemas.Keyed | None,
    call_id: str = "",
) -> Any:
    user = auth.user_of(request)

    def change() -> RunOut:
        run = auth.find_run(user, run_id)
        try:
            act(run.pk, actor=user, **(body.given if body else {}))
        except RunStateError as error:
            raise Problem.of(error, **run_facts(user, auth.find_run(user, run_id), call_id)) from error
        return RunOut.of(auth.find_run(user, run_id))

    def again() -> RunOut:
        run = auth.find_run(user, run_id)
        permissions.require(user, action, run)
        return RunOut.of(run)

    return once(request, key, body, change, again)
