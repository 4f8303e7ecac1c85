"""Agents, their registry and their definition."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from asgiref.sync import sync_to_async
from django.utils.module_loading import autodiscover_modules
from pydantic import BaseModel

from agentruns.agents.output import schema_of
from agentruns.agents.prices import amount
from agentruns.conf import settings
from agentruns.exceptions import UnknownAgentError
from agentruns.providers.base import Model, model_identity
from agentruns.tools import Tool
from agentruns.tools.card import MASK
from agentruns.utils import json as canonical

if TYPE_CHECKING:
    from agentruns import RunResult
    from agentruns.models import Run

_MAX_NAME = 100
_SECRETS = ("authorization_token", "api_key", "access_token")  # of servers named in model_params
_lock = threading.RLock()
_registry: dict[tuple[str, str], Agent] = {}


class Agent:
    """An agent: instructions, a model and tools, registered by (name, version); treat it as immutable.

    `tools` maps names to tools. `model` defaults to AGENTRUNS_DEFAULT_MODEL, read when the agent is created.
    `token_budget` counts input and output; `deadline` excludes time spent waiting for people. `cost_budget`
    is in the currency of AGENTRUNS_PRICES. `model_params` go to the provider with every request (`max_tokens`
    there limits one reply). `output_type`: a pydantic model that the text of the last reply must fit, and
    the type of `RunResult.output`.
    """

    def __init__(
        self,
        name: str,
        *,
        instructions: str,
        tools: Iterable[Tool] = (),
        model: Model | str | None = None,
        version: str = "1",
        max_steps: int = 50,
        token_budget: int | None = None,
        cost_budget: Decimal | float | None = None,
        deadline: timedelta | None = None,
        on_orphan: Literal["hold", "surface"] = "hold",
        model_params: dict[str, Any] | None = None,
        output_type: type[BaseModel] | None = None,
    ) -> None:
        self.name = _checked_name("name", name)
        self.version = _checked_name("version", version)
        self.instructions = instructions
        self.tools = _tools(name, tools)
        # Read here and not at each use, so that the definition never changes.
        given: Any = (settings.DEFAULT_MODEL or None) if model is None else model
        self.model: Model | str = given
        self.max_steps = max_steps
        self.token_budget = token_budget
        self.cost_budget = _amount(name, cost_budget)
        self.deadline = deadline
        self.on_orphan = on_orphan
        self.model_params = _plain(name, model_params)
        self.output_type = output_type
        self.module = _declaring_module()
        self._check()
        register(self)

    def __repr__(self) -> str:
        return f"<Agent {self.name} version {self.version}>"

    def definition(self) -> dict[str, Any]:
        """Return everything a run of this agent depends on, as JSON; for reading only."""
        return self._definition

    @cached_property
    def _definition(self) -> dict[str, Any]:
        body = {
            "agent": self.name,
            "version": self.version,
            "model": model_identity(self.model),
            "model_params": _without_secrets(self.model_params),
            "instructions": self.instructions,
            "tools": {name: tool.policy() for name, tool in self.tools.items()},
            "on_orphan": self.on_orphan,
            "max_steps": self.max_steps,
            "token_budget": self.token_budget,
            "deadline": self.deadline.total_seconds() if self.deadline else None,
        }
        # Only where they are set: an agent without them keeps the definition of its older runs.
        if self.cost_budget is not None:
            body["cost_budget"] = amount(self.cost_budget)
        if self.output_type is not None:
            body["output"] = schema_of(self.output_type)
        return body

    @cached_property
    def definition_hash(self) -> str:
        """The digest of the definition."""
        return canonical.digest(self.definition())

    def run(
        self,
        text: str,
        session: str | None = None,
        *,
        store: Any = None,
        actor: Any = None,
        idempotency_key: str | None = None,
    ) -> RunResult:
        """Drive a run in this process until it ends or waits; without a session nothing is stored."""
        from agentruns import run_agent

        return run_agent(self, text, session, store=store, actor=actor, idempotency_key=idempotency_key)

    def start(self, text: str, session: str, *, actor: Any = None, idempotency_key: str | None = None) -> Run:
        """Queue a run for a worker."""
        from agentruns import start_run

        return start_run(self, text, session, actor=actor, idempotency_key=idempotency_key)

    async def arun(self, text: str, session: str | None = None, **options: Any) -> RunResult:
        """Awaitable form of `run`."""
        return await sync_to_async(self.run)(text, session, **options)

    async def astart(self, text: str, session: str, **options: Any) -> Run:
        """Awaitable form of `start`."""
        return await sync_to_async(self.start)(text, session, **options)

    def _check(self) -> None:
        where = f"Agent {self.name!r}"
        if not isinstance(self.instructions, str):
            raise TypeError(f"{where}: instructions must be a string, not {self.instructions!r}.")
        if self.model is None:
            raise TypeError(
                f"{where} has no model: give it a model name or an object with propose(), "
                "or set AGENTRUNS_DEFAULT_MODEL."
            )
        is_object = callable(getattr(self.model, "propose", None)) and not isinstance(self.model, type)
        if not is_object and not (isinstance(self.model, str) and self.model):
            raise TypeError(
                f"{where}: model must be a model name or an object with propose(), not {self.model!r}."
            )
        for option in ("max_steps", "token_budget"):
            value = getattr(self, option)
            if value is None and option == "token_budget":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{where}: {option} must be a whole number, not {value!r}.")
            if value < 1:
                raise ValueError(f"{where}: {option} must be at least 1, not {value}.")
        if self.deadline is not None:
            if not isinstance(self.deadline, timedelta):
                raise TypeError(f"{where}: deadline must be a timedelta, not {self.deadline!r}.")
            if self.deadline <= timedelta(0):
                raise ValueError(f"{where}: deadline must be positive, not {self.deadline}.")
        if self.output_type is not None and not (
            isinstance(self.output_type, type) and issubclass(self.output_type, BaseModel)
        ):
            raise TypeError(f"{where}: output_type must be a pydantic model, not {self.output_type!r}.")
        try:
            schema_of(self.output_type)
        except Exception as error:  # found now, and not when its first run starts
            raise TypeError(f"{where}: output_type has no JSON Schema: {error}") from error
        if self.on_orphan not in ("hold", "surface"):
            raise ValueError(f"{where}: on_orphan must be 'hold' or 'surface', not {self.on_orphan!r}.")


def register(agent: Agent) -> None:
    """Register `agent` under its name and version.

    Raises ValueError if another module has registered a different agent under both. A module that is
    imported again replaces its own.
    """
    key = (agent.name, agent.version)
    with _lock:
        other = _registry.get(key)
        if (
            other is not None
            and other.module != agent.module
            and other.definition_hash != agent.definition_hash
        ):
            parts = ", ".join(definition_difference(other.definition(), agent.definition()))
            raise ValueError(
                f"Agent {agent.name!r} version {agent.version!r} is declared differently in {other.module} "
                f"and {agent.module}: {parts}. "
                "Rename one, or give the newer one another version."
            )
        _registry.pop(key, None)  # moves it to the end: the last one registered is the default version
        _registry[key] = agent


def get_agent(agent: Agent | str, version: str | None = None) -> Agent:
    """Return the agent with that name; without a version, the last one registered.

    Raises UnknownAgentError, which lists the registered agents.
    """
    if isinstance(agent, Agent):
        if version is None or version == agent.version:
            return agent
        agent = agent.name
    for found in reversed(registered()):
        if found.name == agent and version in (None, found.version):
            return found
    wanted = f"{agent!r}" if version is None else f"{agent!r} version {version!r}"
    known = ", ".join(f"{each.name} version {each.version}" for each in registered()) or "none"
    raise UnknownAgentError(
        f"There is no agent {wanted} in this process. Registered: {known}. "
        "Agents belong in agents.py of an installed app."
    )


def registered() -> list[Agent]:
    """Return all agents of this process in order of registration."""
    with _lock:
        return list(_registry.values())


def autodiscover() -> None:
    """Import agents.py of every installed app."""
    autodiscover_modules("agents")


@contextmanager
def isolated_registry() -> Iterator[None]:
    """Give a test its own empty registry, and restore the old one afterwards."""
    with _lock:
        before = dict(_registry)
        _registry.clear()
    try:
        yield
    finally:
        with _lock:
            _registry.clear()
            _registry.update(before)


def definition_difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the parts that differ between two definitions: "instructions", "tools.refund (removed)" ..."""
    parts = [part for part in sorted({*old, *new} - {"tools"}) if _differ(old.get(part), new.get(part))]
    before, after = old.get("tools", {}), new.get("tools", {})
    for name in sorted({*before, *after}):
        if name not in after:
            parts.append(f"tools.{name} (removed)")
        elif name not in before:
            parts.append(f"tools.{name} (added)")
        else:
            policies = before[name], after[name]
            changed = sorted({*policies[0], *policies[1]})
            parts += [
                f"tools.{name}.{each}"
                for each in changed
                if _differ(policies[0].get(each), policies[1].get(each))
            ]
    return parts


def _without_secrets(params: Any) -> Any:
    """Return parameters for a definition, without tokens: they may be renewed and must not be read."""
    if isinstance(params, dict):
        return {name: MASK if name in _SECRETS else _without_secrets(each) for name, each in params.items()}
    return [_without_secrets(each) for each in params] if isinstance(params, list | tuple) else params


def _differ(old: Any, new: Any) -> bool:
    return canonical.dumps(old) != canonical.dumps(new)


def _checked_name(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"The {what} of an agent must be a string, not {value!r}.")
    if not value.strip() or len(value) > _MAX_NAME or not value.isprintable():
        raise ValueError(
            f"The {what} of an agent must be 1 to {_MAX_NAME} printable characters, not {value!r}."
        )
    return value


def _tools(agent: str, tools: Iterable[Any]) -> dict[str, Tool]:
    result: dict[str, Tool] = {}
    for each in tools:
        if not isinstance(each, Tool):
            name = getattr(each, "__name__", repr(each))
            raise TypeError(f"Agent {agent!r}: {name} is not a tool; decorate it with @tool.")
        if each.name in result:
            raise ValueError(f"Agent {agent!r} has two tools named {each.name!r}.")
        result[each.name] = each
    return result


def _plain(agent: str, params: dict[str, Any] | None) -> dict[str, Any]:
    try:
        if params is None or isinstance(params, dict):
            return dict(canonical.loads(canonical.dumps(params or {})))
    except (TypeError, ValueError):
        pass
    raise TypeError(f"Agent {agent!r}: model_params must be a dict of JSON values, not {params!r}.")


def _amount(agent: str, value: Decimal | float | None) -> Decimal | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError(f"Agent {agent!r}: cost_budget must be a number, not {value!r}.")
    budget = Decimal(str(value))
    if not budget.is_finite() or budget <= 0:
        raise ValueError(f"Agent {agent!r}: cost_budget must be positive, not {value}.")
    return budget


def _declaring_module() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?"))
