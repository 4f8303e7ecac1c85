"""The endpoint of events: an outside system says that something happened for which a run may wait."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Body, Path, Query
from pydantic import BaseModel, Field

from agentruns.api import auth
from agentruns.api.errors import Problem
from agentruns.api.routing import router
from agentruns.api.schemas import Id, Key, Plain, Scope
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events, policy
from agentruns.models import ApiToken, statuses
from agentruns.services import events as services, permissions

NOTHING: Any = Body(None)  # type: ignore[type-arg]
EventName = Annotated[Key, Path(description="name of the event, as the tool's `awaits`")]
EventKey = Annotated[Key, Path(description="key of the event, percent-encoded; it may hold slashes")]
EventScope = Annotated[
    Scope | None, Query(description='scope of the runs that may wait; your own, or of a signed request ""')
]


class Delivery(BaseModel):
    status: statuses.DeliveryStatus
    run: Id | None = Field(description="run that waits or waited for the event, if you may see the run")


@router.post(
    "/events/{name}/{path:key}",
    response=Delivery,
    auth=[auth.SignatureAuth(), auth.BearerAuth(), auth.SessionAuth()],
)
def deliver_event(
    request: HttpRequest, name: EventName, key: EventKey, payload: Plain = NOTHING, scope: EventScope = None
) -> Delivery:
    """Deliver an event; the whole body, any JSON, is the result of the call that waits for the event.

    The sender signs the request as in Standard Webhooks, or sends a token with `events:write` of a user with
    the permission to deliver events. `status` is `delivered`; `early` if no run waits for the event yet (the
    first one that does gets it); `duplicate` if the event was delivered before; `late` if the run waits no
    more. The first delivery counts, so that a request needs no idempotency key.
    """
    signer, user = getattr(request, "auth", None), None
    if isinstance(signer, auth.Signer):
        actor, place = events.Program(f"the sender of {signer.name}"), signer.scope
    else:
        actor = user = auth.user_of(request)
        home = policy.ask("scope", None, user)
        if home is None:
            raise PermissionDeniedError(str(permissions.FAILED))
        if scope not in (None, home):
            auth.require_token_scope(request, ApiToken.Scope.RUNS_ACT_FOR.value)
            if not permissions.may(user, "act_for", (None, scope)):
                raise PermissionDeniedError(permissions.why_not(user, "act_for"))
        place = str(home if scope is None else scope)
    try:
        done = services.deliver_event(name, key, payload, actor=actor, scope=place)
    except ValueError as error:  # of a name that only the package delivers, or of a long payload
        raise Problem.named("validation", str(error), errors=[]) from error
    is_seen = done.run_id and user and auth.visible_runs(user).filter(pk=done.run_id).exists()
    return Delivery(status=done.status, run=str(done.run_id) if is_seen else None)
