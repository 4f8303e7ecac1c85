"""Instructions and tools of a run that functions of its agent make before the run starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from functools import cache, partial
from typing import Any

from django.db import DatabaseError, connections

from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.engine.driver import user_of
from agentruns.exceptions import RenderingError
from agentruns.journal.connection import mend_connection
from agentruns.journal.events import Actor, RunStarted
from agentruns.journal.masking import veiling
from agentruns.models import Run
from agentruns.models.statuses import Priority
from agentruns.tools import RunContext
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.rendering")

MOST = 2**20  # bytes of instructions


def renders(agent: Agent) -> bool:
    """Check whether a function of the agent makes its runs' instructions or tools."""
    return agent.tools_for is not None or not isinstance(agent.instructions, str)


def render(
    agent: Agent,
    given: dict[str, Any],
    owner: Actor | None,
    *,
    has: Collection[str] = (),
    origin: Run | None = None,
) -> dict[str, Any]:
    """Call the agent's functions for a run's instructions and tools, except for members in `has`.

    `given` are the members of their RunContext that the agent and the run's `owner` do not tell. `origin` is
    the run of a fork, or the parent of a child run. Raises RenderingError if a function raises or returns
    something unusable.
    """
    given, user = {**given, "context": deepcopy(given["context"])}, cache(partial(user_of, owner))
    about, made = RunContext(agent=agent.name, version=agent.version, _user=user, **given), dict[str, Any]()
    if not isinstance(agent.instructions, str) and "instructions" not in has:
        made["instructions"] = _call("instructions", about, agent, origin)
    if agent.tools_for is not None and "tools" not in has:
        made["tools"] = _call("tools_for", about, agent, origin)
    return made


def begun(
    agent: Agent, made: dict[str, Any], context: dict[str, Any], rank: int, facts: dict[str, Any]
) -> RunStarted:
    """Build a run's first payload from `facts`, what `render` made, its context and its priority's rank."""
    named = {"agent": agent.name, "version": agent.version, "definition": agent.definition_hash}
    payload: Any = {**named, **facts, **made, **({"context": context} if context else {})}
    started: RunStarted = payload | ({"priority": Priority.of(rank).value} if rank else {})
    return started


class _UnusableError(Exception):
    """Raised with the reason why a function's return value cannot be used, without quoting the value."""


def _call(name: str, about: RunContext, agent: Agent, origin: Run | None) -> Any:
    """Call an agent's function and check its value; RenderingError does not quote the function's error."""
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
