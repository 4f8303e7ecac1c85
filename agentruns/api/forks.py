"""The endpoint of forks. It records and queues; a worker drives."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Status

from agentruns.api.auth import find_run, run_of_key, user_of
from agentruns.api.errors import Problem, documented, run_facts
from agentruns.api.idempotency import KEY, key_of
from agentruns.api.routing import router
from agentruns.api.schemas import ForkRun, Key, RunId, RunOut
from agentruns.exceptions import RunStateError
from agentruns.services import forks as services


@router.post(
    "/runs/{run_id}/fork",
    response={201: RunOut, 200: RunOut},
    openapi_extra=documented(400, 401, 403, 404, 409, 413, 422),
)
def fork_run(request: HttpRequest, run_id: RunId, body: ForkRun, key: Key | None = KEY) -> Status[RunOut]:
    """Queue a run of yours that goes on from the row `at` (201), or return that of the same key (200).

    It gets a session of its own with a copy of the rows up to there; calls open there are settled, and no
    effect is repeated. 409 if there is no such row, if nothing is left to do there and no `text` says what,
    if the session exists or the key belongs to another run; 422 if there is no such agent.
    """
    user = user_of(request)
    origin = find_run(user, run_id)
    key = key_of(key, body)
    known = run_of_key(user, key)
    try:
        fork = services.fork_run(origin.pk, actor=user, **{**body.model_dump(), "idempotency_key": key})
    except RunStateError as error:
        about = run_of_key(user, key) or origin
        raise Problem.of(error, **run_facts(about)) from error
    return Status(200 if known else 201, RunOut.of(find_run(user, str(fork.pk))))
