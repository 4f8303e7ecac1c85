"""Endpoints of runs. They record and queue; a worker drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseNotModified, StreamingHttpResponse
from django.utils.http import parse_etags
from ninja import Status

import agentruns
from agentruns.api import pagination
from agentruns.api.auth import channel_of, find_run, require_call, run_of_key, user_of, visible_runs
from agentruns.api.errors import Problem, documented, run_facts
from agentruns.api.idempotency import KEY, key_of, once
from agentruns.api.routing import router
from agentruns.api.schemas import (
    AFTER,
    At,
    CallId,
    CancelRun,
    Cursor,
    Key,
    MessageOut,
    MessagePage,
    OfAgent,
    OfRunStatus,
    OfSession,
    PauseRun,
    Resolve,
    ResumeRun,
    RowSeq,
    RunId,
    RunOut,
    RunPage,
    Seq,
    StartRun,
    legal,
    utc,
)
from agentruns.conf import settings
from agentruns.exceptions import RunStateError
from agentruns.journal.masking import sensitive_in
from agentruns.journal.read import run_rows
from agentruns.models import Message, Run
from agentruns.services import control
from agentruns.services import runs as services
from agentruns.services.history import record, state_at
from agentruns.services.runs import get_or_start
from agentruns.services.transfer import download, find_content, read_content
from agentruns.utils import json as canonical

REVALIDATED = "private, no-cache"  # the only answer that a client may keep, to ask again with its ETag
CONTROL = documented(400, 401, 403, 404, 409, 413, 422)
ONE = documented(401, 404)
ONE["responses"][304] = {"description": "Not modified"}
_BYTES = {"type": "string", "format": "binary"}
CONTENT = documented(401, 403, 404, 422, 500)
CONTENT["responses"][200] = {
    "description": "The bytes",
    "content": {kind: {"schema": _BYTES} for kind in ("text/plain", "application/json")},
}


@router.post("/runs", response={201: RunOut, 200: RunOut}, openapi_extra=CONTROL)
def start_run(request: HttpRequest, body: StartRun, key: Key | None = KEY) -> Status[RunOut]:
    """Queue a run (201), or return the one that the same request started before (200).

    The same `idempotency_key` is the same run for ever; the same agent and input in a session whose run has
    not ended is that run. 409 if the session is busy with another run or the key belongs to another task or
    session, 422 if there is no such agent, 404 if the session is somebody else's.
    """
    user, key = user_of(request), key_of(key, body)
    try:
        run, created = get_or_start(body.agent, body.input, body.session, actor=user, idempotency_key=key)
    except RunStateError as error:
        owned = run_of_key(user, key)
        raise Problem.of(error, **(run_facts(owned) if owned else {})) from error
    return Status(201 if created else 200, RunOut.of(run))


@router.get("/runs", response=RunPage, openapi_extra=documented(400, 401, 422))
def list_runs(
    request: HttpRequest,
    status: OfRunStatus = None,
    agent: OfAgent = None,
    session: OfSession = None,
    cursor: Cursor = None,
) -> RunPage:
    """List the runs you may see, the one that changed last first."""
    wanted = {"status": status, "agent": agent, "session__key": session}
    runs = visible_runs(user_of(request)).filter(
        **{name: value for name, value in wanted.items() if value is not None}
    )
    found, following = pagination.page(runs, "updated_at", cursor)
    return RunPage(items=[RunOut.of(run) for run in found], next=following)


@router.get("/runs/{run_id}", response=RunOut, openapi_extra=ONE)
def get_run(request: HttpRequest, response: HttpResponse, run_id: RunId) -> Any:
    """Return one run. Asked for with its `ETag` as `If-None-Match`: 304 while nothing has changed."""
    run = find_run(user_of(request), run_id)
    headers = {"ETag": tag_of(run), "Cache-Control": REVALIDATED}
    if is_known(request, headers["ETag"]):
        return HttpResponseNotModified(headers=headers)
    for name, value in headers.items():
        response[name] = value
    return RunOut.of(run)


@router.get("/runs/{run_id}/messages", response=MessagePage, openapi_extra=documented(401, 404, 422))
def list_messages(request: HttpRequest, run_id: RunId, after: Seq = AFTER) -> MessagePage:
    """Return the run's journal rows with a greater `seq` than `after`, in order."""
    run = find_run(user_of(request), run_id, "definition")
    rows = run_rows(settings.DATABASE, run.pk, after, limit=pagination.PAGE + 1)
    sensitive = sensitive_in(run)
    items = [MessageOut.of(row, run.session.key, sensitive) for row in rows[: pagination.PAGE]]
    return MessagePage(items=items, next=str(items[-1].seq) if len(rows) > pagination.PAGE else None)


@router.get("/runs/{run_id}/messages/{seq}/content", openapi_extra=CONTENT)
def get_content(request: HttpRequest, run_id: RunId, seq: RowSeq) -> StreamingHttpResponse:
    """Stream the content that a row holds only the beginning of (`payload.stored`), as it was stored.

    404 if the row is not there or holds its content itself; 403 without agentruns.reveal_arguments if it may
    hold sensitive values; 500 if the file is missing or was altered.
    """
    user = user_of(request)
    content = find_content(find_run(user, run_id, "definition"), seq)
    return download(request, content, read_content(content, user))


@router.get("/runs/{run_id}/state", response=dict[str, Any], openapi_extra=documented(401, 404, 409, 422))
def get_state(request: HttpRequest, run_id: RunId, at: At = None) -> dict[str, Any]:
    """Return the run's state right after the row `at`, or its current one. 409 if it has no such row."""
    run = find_run(user_of(request), run_id, "definition")
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk)
    seq = at if at is not None else rows.latest("seq").seq
    state: dict[str, Any] = legal(record(state_at(run.pk, seq), sensitive_in(run)))
    return state


@router.post("/runs/{run_id}/resume", response=RunOut, openapi_extra=CONTROL)
def resume_run(
    request: HttpRequest,
    response: HttpResponse,
    run_id: RunId,
    body: ResumeRun | None = None,
    key: Key | None = KEY,
) -> Any:
    """Let a run go on: unpause it, and tell the model about calls in doubt. A worker drives it."""

    def act(run: Run, user: Any) -> object:
        return services.resume_run(run.pk, user, drive=False)

    return once(request, response, key, body, lambda: _change(request, run_id, act))


@router.post("/runs/{run_id}/cancel", response=RunOut, openapi_extra=CONTROL)
def cancel_run(
    request: HttpRequest,
    response: HttpResponse,
    run_id: RunId,
    body: CancelRun | None = None,
    key: Key | None = KEY,
) -> Any:
    """Ask a run to stop: at once if nobody drives it, else before its next tool starts."""

    def act(run: Run, user: Any) -> object:
        return control.cancel_run(run.pk, user, reason=body.reason if body else "")

    return once(request, response, key, body, lambda: _change(request, run_id, act))


@router.post("/runs/{run_id}/pause", response=RunOut, openapi_extra=CONTROL)
def pause_run(
    request: HttpRequest,
    response: HttpResponse,
    run_id: RunId,
    body: PauseRun | None = None,
    key: Key | None = KEY,
) -> Any:
    """Ask a run to wait until it is resumed: at once if nobody drives it, else before its next tool."""

    def act(run: Run, user: Any) -> object:
        return control.pause_run(run.pk, user, reason=body.reason if body else "")

    return once(request, response, key, body, lambda: _change(request, run_id, act))


@router.post("/runs/{run_id}/orphans/{call_id}/resolve", response=RunOut, openapi_extra=CONTROL)
def resolve_orphan(
    request: HttpRequest,
    response: HttpResponse,
    run_id: RunId,
    call_id: CallId,
    body: Resolve,
    key: Key | None = KEY,
) -> Any:
    """Record the verdict on a call in doubt.

    `occurred` stores `result` as its result, `not_occurred` lets it run again, `unknown` tells the model.
    409, with who and when, if it is not in doubt or the evidence says otherwise.
    """

    def act(run: Run, user: Any) -> object:
        require_call(run, call_id)
        given = {"result": body.result, "evidence": body.evidence, "channel": channel_of(request)}
        return control.resolve_orphan(run.pk, call_id, body.verdict, user, **given)

    return once(request, response, key, body, lambda: _change(request, run_id, act, call_id))


def _change(
    request: HttpRequest, run_id: str, act: Callable[[Run, Any], object], call_id: str = ""
) -> RunOut:
    user = user_of(request)
    run = find_run(user, run_id)
    try:
        act(run, user)
    except RunStateError as error:
        raise Problem.of(error, **run_facts(find_run(user, run_id), call_id)) from error
    return RunOut.of(find_run(user, run_id))


def tag_of(run: Run) -> str:
    """Return the ETag of a run, read together with its session: weak, as it is not made of the body."""
    # The lease, the back-off and `blocked_reason` change without a row of the journal.
    moments = (run.lease_expires_at, run.not_before, run.updated_at)
    about = [
        agentruns.__version__,
        str(run.pk),
        run.session.next_seq - 1,
        run.status,
        run.lease_epoch,
        run.attempts,
        run.blocked_reason,
        *(moment and utc(moment) for moment in moments),
    ]
    return f'W/"{canonical.digest(about)[:32]}"'


def is_known(request: HttpRequest, tag: str) -> bool:
    """Return whether the client has the version of `tag` already."""
    known = parse_etags(request.headers.get("If-None-Match", ""))
    return "*" in known or tag.removeprefix("W/") in {each.removeprefix("W/") for each in known}
