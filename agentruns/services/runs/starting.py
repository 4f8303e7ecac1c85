"""Starts by people: the API and the console start runs for users and visitors only through this module.

The services `lifecycle` and `forks` let a program start anything for anybody. This module asks the policy
first, so `admin` and `api` start runs through no other module (tests/packaging/test_architecture.py).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth.models import AnonymousUser
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, PriorityName, get_agent, registered
from agentruns.conf import settings
from agentruns.content import Input
from agentruns.exceptions import PermissionDeniedError, SessionAccessDeniedError, UnknownAgentError
from agentruns.journal import events
from agentruns.journal.deciders import restore
from agentruns.journal.policy import ANYONE, ask
from agentruns.models import Message, Run, Session, SessionBearer
from agentruns.models.token import VISITOR
from agentruns.services import permissions
from agentruns.services.runs import forks, messages, submit
from agentruns.services.runs.control import agent_again
from agentruns.services.runs.sessions import Owner
from agentruns.services.runs.write import find_run

STARTS = "agentruns.start_run"


def start_run(
    user: Any,
    agent: str,
    text: Input,
    session: str | None,
    *,
    owner: str | None = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
    not_before: datetime | None = None,
    priority: PriorityName | None = None,
) -> Run:
    """Start a user's task, or find its run; only the former `is_new`.

    `owner` is the id of another user. A visitor requests no owner, scope or context: the run is in the
    visitor's session, and has the agent of the last run there. Raises PermissionDeniedError,
    UnknownAgentError, and as `lifecycle.start_run`.
    """
    if isinstance(user, SessionBearer):
        if any(each is not None for each in (owner, scope, context, not_before, priority)):
            text = _("A visitor starts runs in their own session only, now, and without context or priority.")
            raise PermissionDeniedError(text)
        own, last = _conversation(user, session, agent)
        key = user.key(idempotency_key) if idempotency_key else None
        context = _visitors_context(own, last)
        return submit.get_or_start(agent, text, own, actor=user, context=context, idempotency_key=key)
    chosen = startable(user, agent)
    whose, home = _acts_for(user, owner, scope)
    context = permissions.context_of(user, chosen, context or {})
    given = {"owner": whose, "scope": home, "context": context, "idempotency_key": idempotency_key}
    given |= {"actor": user, "priority": priority}
    return submit.get_or_start(chosen, text, session, not_before=not_before, **given)


def send_message(
    user: Any,
    session: Session,
    text: Input,
    agent: str | None = None,
    idempotency_key: str | None = None,
    *,
    acts_for: bool = True,
) -> Run:
    """Send a user's message; return its run, which `is_new` if this call sent the message.

    The caller has checked that the user may see `session`. The user must be allowed to start the agent.
    Writing into somebody else's open run requires the permission for messages. Starting the next run there
    requires an active owner and the permission to act for others. `acts_for` is False for a token without
    that scope. Raises UnknownAgentError, and as `messages.send_message`.
    """
    last: Run | None
    if isinstance(user, SessionBearer):
        session, last = _conversation(user, session.key, agent)
        chosen, key = get_agent(last.agent), user.key(idempotency_key) if idempotency_key else None
    else:
        last, key = messages.last_run(session, idempotency_key, user), idempotency_key
        chosen = startable(user, agent or (last.agent if last else ""))
    given: dict[str, Any] = {"actor": user, "owner": Owner.of_row(session), "key": key}
    try:
        if last is not None and isinstance(user, SessionBearer):
            given["context"] = _visitors_context(session, last)
        else:
            if (whose := session.owner_id) != user.pk:
                # The owner has to be active. For the program's own sessions the policy gets AnonymousUser.
                owner = AnonymousUser() if whose is None else permissions.active_user(whose)
                if not (acts_for and owner and ask("can", False, user, "act_for", (owner, session.scope))):
                    why = "" if owner else _("The owner is not active.")
                    why = why if acts_for else _("The token lacks the scope runs:act_for.")
                    named = {"owner": session.owner_name, "scope": session.scope}
                    raise PermissionDeniedError(_not_for_others(user, why, **named))
            if last is not None:
                given["context"] = permissions.context_again(user, chosen, restore(last), session.owner_id)
    except PermissionDeniedError as error:  # refuses a start, but no message to an open run
        given["refusal"] = str(error)
    return messages.send(session, text, agent=chosen, **given)


def fork_run(
    user: Any,
    run_id: UUID | str,
    at: int,
    *,
    agent: str | None = None,
    owner: str | None = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Make a user's fork, or find the existing one; only the former `is_new`.

    `owner` is the id of another user. Without a scope, takes the origin's. Without a context, takes the
    origin's if the policy grants that, else the policy's own. Raises as `forks.fork_run`.
    """
    origin = restore(find_run(run_id))
    chosen = startable(user, agent_again(origin) if agent is None else agent)
    whose, home = _acts_for(user, owner, scope, origin.scope)
    if context is not None:
        context = permissions.context_of(user, chosen, context)
    else:
        context = permissions.context_again(user, chosen, origin, (whose or user).pk)
    options |= {"owner": whose, "scope": home, "context": context}
    return forks.fork_run(origin.pk, at, agent=chosen, actor=user, **options)


def run_again(user: Any, run_id: UUID | str, *, idempotency_key: str | None = None) -> Run:
    """Queue an ended run's task again for its owner, at a user's request. Raises as `forks.run_again`."""
    run = restore(find_run(run_id))
    chosen = startable(user, agent_again(run))
    if run.owner_id not in (None, user.pk) and permissions.active_user(run.owner_id) is None:
        raise PermissionDeniedError(_not_for_others(user))
    context = permissions.context_again(user, chosen, run, run.owner_id)
    return forks.run_again(run_id, user, context=context, idempotency_key=idempotency_key)


def agents_of(user: Any) -> list[Agent]:
    """List the agents that a user may start, in order of registration."""
    return [agent for agent in registered() if ask("can_start", False, user, agent)]


def why_not_start(user: Any, agent: Agent) -> str:
    """Explain why a user may not start an agent; "" if they may."""
    if ask("can_start", False, user, agent):
        return ""
    facts = {"name": user.get_username(), "agent": agent.name, "permission": STARTS, "who": agent.starters}
    if not user.has_perm(STARTS) and agent.starters != ANYONE:
        return _("%(name)s may not start agent %(agent)s: permission %(permission)s is missing.") % facts
    if agent.starters in (None, ANYONE):
        return _("The project's own rule does not let %(name)s start agent %(agent)s.") % facts
    return _("%(name)s may not start agent %(agent)s: only %(who)s may.") % facts


def startable(user: Any, agent: Agent | str) -> Agent:
    """Find an agent that a user may start. Raises UnknownAgentError, PermissionDeniedError."""
    try:
        agent = get_agent(agent)
    except UnknownAgentError:
        names = ", ".join(dict.fromkeys(each.name for each in agents_of(user))) or _("none")
        text = _("There is no agent %(name)r in this process. You may start: %(names)s.")
        raise UnknownAgentError(text % {"name": agent, "names": names}) from None
    permissions.require_somebody(user)
    if why := why_not_start(user, agent):
        raise PermissionDeniedError(why)
    return agent


def _acts_for(user: Any, owner_id: str | None, scope: str | None, home: str | None = None) -> tuple[Any, str]:
    """Find the owner (None: the user) and the scope of a run; PermissionDeniedError if not allowed.

    `home` is the scope if none is given; without `home`, that is the policy's scope for the owner.
    """
    whose = user if owner_id in (None, str(user.pk)) else permissions.active_user(owner_id)
    if home is None and whose is not None:
        home = ask("scope", None, whose)
    if home is None and whose is user:
        raise PermissionDeniedError(str(permissions.FAILED))
    scope, owner = home if scope is None else scope, None if whose is user else whose
    is_own = whose is user and scope == home
    # An unknown user gets the same answer, so that nobody finds out ids of users here.
    if whose is None or scope is None or not (is_own or ask("can", False, user, "act_for", (owner, scope))):
        raise PermissionDeniedError(_not_for_others(user))
    return owner, scope


def _not_for_others(user: Any, why: str = "", **named: str | None) -> str:
    text = _("%(name)s may not start runs for others or in this scope (%(asked)s): %(why)s")
    asked = ", ".join(["act_for", *(f"{name} {value!r}" for name, value in named.items() if value)])
    facts = {"name": user.get_username(), "asked": asked, "why": why or permissions.why_not(user, "act_for")}
    return text % facts


def _visitors_context(own: Session, last: Run) -> dict[str, Any]:
    """Find the context for a visitor's run in the session `own`, whose last run is `last`.

    If the session has an owner, the owner's right to the context of `last` decides (`context_again`); raises
    PermissionDeniedError if the owner is not active. Without an owner, it is the context of `last`. But if
    the policy has its own `context`, it is that of the newest run of the program or a visitor, or {}.
    """
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
            return dict(restore(find_run(run_id)).context)
    return {}


def _conversation(bearer: SessionBearer, session: str | None, agent: str | None) -> tuple[Session, Run]:
    """Find a visitor's session and its last run; `session` and `agent`, if given, must be theirs.

    Raises SessionAccessDeniedError for another session, PermissionDeniedError for another agent or no run.
    """
    if (own := Session.objects.using(settings.DATABASE).filter(pk=bearer.session_id).first()) is None:
        raise SessionAccessDeniedError(_("The session of this token is gone."))
    if session is not None and session != own.key:
        raise SessionAccessDeniedError(f"There is no session {session!r}.")
    if (last := messages.last_run(own)) is None:
        raise PermissionDeniedError(_("The session has no run yet, and the program starts the first one."))
    restore(last)
    if agent is not None and agent != last.agent:
        text = _("A visitor goes on with the agent of the session, %(agent)s.")
        raise PermissionDeniedError(text % {"agent": last.agent})
    return own, last
