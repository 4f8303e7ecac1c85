"""Rendering: an agent's own functions make a run's instructions and choice of tools before the run starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connections

from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.engine.driver import user_of
from agentruns.exceptions import RenderingError
from agentruns.journal import events, payloads
from agentruns.journal.connection import mend_connection
from agentruns.journal.fold import RunState
from agentruns.journal.masking import veiling
from agentruns.models import Run
from agentruns.services.runs.requests import RunRequest
from agentruns.tools import RunContext
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.rendering")

MOST = 2**20  # bytes of instructions


def renders(agent: Agent) -> bool:
    """Check whether a function of the agent makes its runs' instructions or tools."""
    return agent.tools_for is not None or not isinstance(agent.instructions, str)


def rendered(request: RunRequest, *, has: Collection[str] = (), origin: Run | None = None) -> RunRequest:
    """Add the instructions and tools that the agent's functions make, unless the request or `has` has them.

    Raises RenderingError if a function raises or returns something unusable. Nothing is stored; a transaction
    that a function leaves open is rolled back. `origin` is the run that is being forked.
    """
    agent, made = request.agent, dict(request.rendered)
    about = RunContext(
        agent=agent.name,
        version=agent.version,
        run_id=str(request.run_id),
        session_key=request.session or None,
        scope=request.scope,
        context=deepcopy(request.context),
        actor=events.actor_ref(request.actor),
        text=request.text,
        _user=cache(partial(user_of, request.owner.ref())),
    )
    if not isinstance(agent.instructions, str) and "instructions" not in {*has, *made}:
        made["instructions"] = _call("instructions", about, agent, origin)
    if agent.tools_for is not None and "tools" not in {*has, *made}:
        made["tools"] = _call("tools_for", about, agent, origin)
    return replace(request, rendered=made)


class _UnusableError(Exception):
    """Raised with the reason why a function's return value cannot be used, without quoting the value."""


def _call(name: str, about: RunContext, agent: Agent, origin: Run | None) -> Any:
    """Call an agent's function and check its value. Errors do not quote its exception; the log masks it."""
    what = f"Agent {agent.name!r}: its function {name}"
    is_callers = connections[settings.DATABASE].in_atomic_block
    try:
        value = getattr(agent, name)(about)
        if name == "instructions":
            if not isinstance(value, str):
                raise _UnusableError(f"must return a string, not {type(value).__name__}.")
            if not value.strip():
                raise _UnusableError("returned no text.")
            if (size := len(value.encode(errors="surrogatepass"))) > MOST:
                raise _UnusableError(f"returned {size} bytes; there may be {MOST}.")
            return value
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise _UnusableError(f"must return names of tools, not {type(value).__name__}.")
        chosen = list(value)
        if wrong := next((type(each).__name__ for each in chosen if not isinstance(each, str)), None):
            raise _UnusableError(f"must return names of tools, and one is {wrong}.")
        if not agent.tools.keys() >= {*chosen}:
            known = ", ".join(sorted(agent.tools)) or "none"
            raise _UnusableError(f"chose a tool that is not declared in tools. Declared: {known}.")
        return [each for each in agent.tools if each in chosen]
    except _UnusableError as error:
        raise RenderingError(f"{what} {error}") from None
    except Exception as error:
        failed = error
    finally:
        if not is_callers:
            mend_connection(settings.DATABASE)
    past: list[Run] | None = [origin] if origin else []
    try:
        if about.session_key and not origin:
            runs = Run.objects.using(settings.DATABASE).filter(scope=about.scope)
            past = list(runs.filter(session__key=about.session_key)[:1])  # has the session's sensitive values
    except DatabaseError:  # in a transaction that the function broke
        past = None
    with veiling(*(past or ())) as is_known:
        logger.error("%s failed", what, exc_info=failed if is_known and past is not None else None)
        raise RenderingError(f"{what} failed with {type(failed).__name__}. The log says why.") from failed


def kept(agent: Agent, state: RunState, then: dict[str, Any]) -> dict[str, Any]:
    """Collect a run's instructions and tools whose functions have not changed since its definition `then`."""
    members, now = dict[str, Any](), agent.definition()
    if state.instructions is not None and now["instructions"] == then["instructions"]:
        members["instructions"] = payloads.instructions_of(state)
    if state.tools is not None and now.get("tools_for") == then.get("tools_for"):
        members["tools"] = state.tools
    return members


def put_away(request: RunRequest, session_id: UUID, *, has_text: bool = True) -> RunRequest:
    """Store the files and long texts of a request in the session's folder; return the changed request.

    Inside a caller's transaction texts stay in their rows. `has_text` is False if the request's text is no
    part of its rows, or stored already.
    """
    made, stored, name = request.rendered, request.stored, f"{session_id}/input"
    may_move = not connections[settings.DATABASE].in_atomic_block
    if has_text and payloads.has_blocks(stored):
        stored = payloads.put_blocks(name, stored or {})
    elif has_text and may_move and payloads.may_be_large(request.text):
        stored = payloads.put(name, request.text) or None
    if may_move and payloads.may_be_large(text := made.get("instructions", "")):
        kept = payloads.put(f"{session_id}/instructions", text)
        made = {**made, "instructions": kept["content"], "stored": kept["stored"]} if kept else made
    return replace(request, session_id=session_id, stored=stored, rendered=made)
