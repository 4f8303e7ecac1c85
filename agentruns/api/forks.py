"""The endpoint of forks. It records and queues; a worker drives."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Status

from agentruns.api.auth import behalf_of, find_run, run_named, shown, user_of
from agentruns.api.errors import Problem, documented, run_facts
from agentruns.api.idempotency import KEY, key_of
from agentruns.api.routing import router
from agentruns.api.schemas import ForkRun, Key, RunId, RunOut
from agentruns.exceptions import RunStateError
from agentruns.services import starting


@router.post(
    "/runs/{run_id}/fork",
    response={201: RunOut, 200: RunOut},
    openapi_extra=documented(400, 401, 403, 404, 409, 413, 422, 429, 500),
)
def fork_run(request: HttpRequest, run_id: RunId, body: ForkRun, key: Key | None = KEY) -> Status[RunOut]:
    """Queue a run of yours that goes on from the row `at` (201), or return that of the same key (200).

    It gets a session of its own with a copy of the rows up to there; open calls are settled, and no effect is
    repeated. 409 if there is no such row, if nothing is left to do and no `text` is given, if the session
    exists or the key belongs to another run; 403 and 429 as for a start; 422 if there is no such agent.
    """
    user = user_of(request)
    origin = find_run(user, run_id)
    key = key_of(key, body)
    given = body.model_dump(include={"at", "text", "agent", "session"})
    behalf = behalf_of(request, body.behalf())
    try:
        fork, is_new = starting.fork_run(user, origin.pk, behalf=behalf, idempotency_key=key, **given)
    except RunStateError as error:
        raise Problem.of(error, **(run_named(user, error) or run_facts(origin))) from error
    return Status(201 if is_new else 200, RunOut.of(shown(user, fork, is_new, body.owner)))
