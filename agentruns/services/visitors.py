"""Runs that a session's visitor starts and writes to, who has a session token and no user."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from agentruns.agents.agent import get_agent
from agentruns.agents.content import Input
from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError, SessionAccessDeniedError
from agentruns.journal import events
from agentruns.models import Message, Run, Session, SessionBearer
from agentruns.models.token import VISITOR
from agentruns.services import messages, permissions
from agentruns.services.api_tokens import visited
from agentruns.services.runs import get_or_start
from agentruns.services.sessions import Owner
from agentruns.services.write import find_run


def start_run(
    bearer: SessionBearer, agent: str, text: Input, session: str | None, key: str | None = None
) -> tuple[Run, bool]:
    """Return the run of the visitor's message, and whether this started it: of the agent of the last run.

    `session` is the key of the visitor's session, or None. Raises SessionAccessDeniedError for another one,
    PermissionDeniedError for another agent, before the session's first run and where its owner is not active;
    else as `start_run`. The run has no context that a user got for themself.
    """
    own, last = _conversation(bearer, session, agent)
    given = bearer.key(key) if key else None
    return get_or_start(agent, text, own, actor=bearer, context=_context(own, last), idempotency_key=given)


def send_message(
    bearer: SessionBearer, text: Input, session: str, agent: str | None = None, key: str | None = None
) -> tuple[Run, bool]:
    """Return the run that reads the visitor's message, and whether this sent it. Raises as `start_run`."""
    own, last = _conversation(bearer, session, agent)
    given: dict[str, Any] = {"owner": Owner.of_session(own), "key": bearer.key(key) if key else None}
    try:
        given["context"] = _context(own, last)
    except PermissionDeniedError as error:  # in the way of a start only
        given["refusal"] = str(error)
    return messages.send(own, text, agent=last.agent, actor=bearer, **given)


def _context(own: Session, last: Run) -> dict[str, Any]:
    """Return the context of a visitor's run: what the owner has now, else the last that was no user's."""
    owner = None if own.owner_id is None else permissions.active_user(own.owner_id)
    if owner is None and own.owner_id is not None:
        raise PermissionDeniedError(_("The user of this session is not active."))
    if owner is not None:
        given = permissions.context_again(owner, get_agent(last.agent), last, own.owner_id)
        return dict(last.context if given is None else given)
    if not permissions.narrows("context"):
        return dict(last.context)
    begun = Message.objects.using(settings.DATABASE).filter(session_id=own.pk, kind=events.RUN_STARTED)
    for run_id, facts in begun.order_by("-seq").values_list("run_id", "facts").iterator():
        starter = (facts.get("actor") or events.PROGRAM)["id"]
        if not starter or starter.startswith(VISITOR):
            return dict(find_run(run_id).context)
    return {}


def _conversation(bearer: SessionBearer, session: str | None, agent: str | None) -> tuple[Session, Run]:
    """Return the visitor's session and its last run."""
    own = visited(bearer)
    if session is not None and session != own.key:
        raise SessionAccessDeniedError(f"There is no session {session!r}.")
    last = messages.last_run(own)
    if last is None:
        raise PermissionDeniedError(_("The session has no run yet, and the program starts the first one."))
    if agent is not None and agent != last.agent:
        raise PermissionDeniedError(
            _("A visitor goes on with the agent of the session, %(agent)s.") % {"agent": last.agent}
        )
    return own, last
