"""Agents, their registry and their definition."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from django.utils.module_loading import autodiscover_modules
from pydantic import BaseModel

from agentruns.agents.output import schema_of
from agentruns.agents.prices import amount, is_amount, price_of
from agentruns.conf import settings
from agentruns.content import Input
from agentruns.exceptions import UnknownAgentError
from agentruns.providers.attachments import Limits, limits_of
from agentruns.providers.base import Model, provider_tools
from agentruns.providers.names import model_identity
from agentruns.tools import ChildKeywords, RunContext, Tool, child_tool
from agentruns.tools.card import MASK
from agentruns.tools.mcp import servers
from agentruns.tools.options import as_names
from agentruns.utils import json as canonical
from agentruns.utils.calls import arity_mistake, in_thread, path_of
from agentruns.utils.forks import renewed

if TYPE_CHECKING:
    from agentruns import RunResult
    from agentruns.models import Run, Session

_MAX_NAME = 100
# Members of model_params with secrets of servers.
_SECRETS = ("authorization_token", "authorization", "headers", "api_key", "access_token")
_NUMBER = re.compile("([0-9]+)")
_DOTTED = re.compile(r"[0-9]+(\.[0-9]+)*")
_lock = renewed(threading.RLock())
_registry: dict[tuple[str, str], Agent] = {}


PriorityName = Literal["high", "normal", "low"]


class CommonOptions(TypedDict, total=False):
    """The options of both `start_run` and `run_agent`."""

    actor: Any
    owner: Any
    scope: str | None
    context: dict[str, Any] | None
    idempotency_key: str | None
    priority: PriorityName | None


class StartOptions(CommonOptions, total=False):
    """The options of `start_run`."""

    not_before: datetime | None


class RunOptions(CommonOptions, total=False):
    """The options of `run_agent`."""

    store: Any


class Agent:
    """An agent: instructions, a model and tools, registered by (name, version); treat it as immutable.

    `instructions` may be a function of a RunContext; `tools_for` is a function of a RunContext that names the
    tools of a run. Both are called once, at the start of the run. `model` is a Claude model's name, a name
    with a provider such as "openai:gpt-5.4", a name of AGENTRUNS_MODELS, or an object with `identity` and
    `propose`. It defaults to AGENTRUNS_DEFAULT_MODEL, read when the agent is created. `fallback` is a second
    model, used at once when the provider of `model` is overloaded. `token_budget` counts input and output;
    `deadline` excludes time spent waiting for people. `cost_budget` is in the currency of AGENTRUNS_PRICES.
    A run that has used up a limit is paused for a person, or with `on_budget="fail"` fails.
    `model_params` are sent to the provider with every request (`max_tokens` there limits one reply); a
    fallback of another provider gets only `max_tokens`. `output_type` is a pydantic model that the text of
    the last reply must fit, and the type of `RunResult.output`. `starters` is a permission or group that
    people need to start the agent, beside `agentruns.start_run`, or "anyone". `unjournaled_tools` allows
    tools and MCP servers in `model_params`, which the provider runs by itself, without a row before the
    effect and without a gate. `priority` is that of its runs unless their start names another. At most
    `max_concurrent` runs of agents with this name are driven at once, by all processes together; the highest
    version decides. `trusts` names tools whose text counts as trusted although they are declared untrusted.
    The attribute `tools` maps names to tools.
    """

    def __init__(
        self,
        name: str,
        *,
        instructions: str | Callable[[RunContext], str],
        tools: Iterable[Tool] = (),
        tools_for: Callable[[RunContext], Iterable[str]] | None = None,
        model: Model | str | None = None,
        version: str = "1",
        max_steps: int = 50,
        token_budget: int | None = None,
        cost_budget: Decimal | float | str | None = None,
        deadline: timedelta | None = None,
        on_orphan: Literal["hold", "surface"] = "hold",
        on_budget: Literal["pause", "fail"] = "pause",
        model_params: dict[str, Any] | None = None,
        output_type: type[BaseModel] | None = None,
        starters: str | None = None,
        fallback: Model | str | None = None,
        unjournaled_tools: bool = False,
        priority: PriorityName = "normal",
        max_concurrent: int | None = None,
        trusts: Iterable[str] = (),
    ) -> None:
        for what, value in (("name", name), ("version", version)):
            if not isinstance(value, str):
                raise TypeError(f"The {what} of an agent must be a string, not {value!r}.")
            if not value.strip() or len(value) > _MAX_NAME or not value.isprintable():
                form = f"1 to {_MAX_NAME} printable characters"
                raise ValueError(f"The {what} of an agent must be {form}, not {value!r}.")
        self.name, self.version = name, version
        self.instructions = instructions
        if inspect.isroutine(tools):
            text = "tools is a function; list the tools, and let tools_for= choose among them."
            raise TypeError(f"Agent {name!r}: {text}")
        self.tools: dict[str, Tool] = {}
        for each in tools:
            if not isinstance(each, Tool):
                label = getattr(each, "__name__", repr(each))
                raise TypeError(f"Agent {name!r}: {label} is not a tool; decorate it with @tool.")
            if each.name in self.tools:
                raise ValueError(f"Agent {name!r} has two tools named {each.name!r}.")
            self.tools[each.name] = each
        self.tools_for = tools_for
        # Read here and not at each use, so that the definition never changes.
        given: Any = (settings.DEFAULT_MODEL or None) if model is None else model
        self.model: Model | str = given
        self.fallback = fallback
        budgets = {"token_budget": token_budget, "cost_budget": cost_budget, "deadline": deadline}
        budgets = {limit: value for limit, value in budgets.items() if value is not None}
        self.limits = checked_limits(f"Agent {name!r}", max_steps=max_steps, **budgets)
        self.max_steps, self.token_budget, self.deadline = max_steps, token_budget, deadline
        self.cost_budget = None if cost_budget is None else Decimal(self.limits["cost_budget"])
        self.on_orphan, self.on_budget = on_orphan, on_budget
        try:
            if not isinstance(model_params, dict | None):
                raise TypeError
            self.model_params = dict(canonical.loads(canonical.dumps(model_params or {})))
        except (TypeError, ValueError):
            text = f"model_params must be a dict of JSON values, not {model_params!r}."
            raise TypeError(f"Agent {name!r}: {text}") from None
        self.output_type = output_type
        self.starters = starters
        self.unjournaled_tools = unjournaled_tools
        self.priority, self.max_concurrent = priority, max_concurrent
        self.trusts = as_names(trusts, f"Agent {name!r}: trusts", "names of tools")
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
        self.module = str(frame.f_globals.get("__name__", "?"))  # the declaring one
        self._check()
        register(self)

    def __repr__(self) -> str:
        return f"<Agent {self.name} version {self.version}>"

    def definition(self) -> dict[str, Any]:
        """Return the definition, as JSON: the parts of the agent that a run depends on. Do not change it."""
        return self._definition

    @cached_property
    def _definition(self) -> dict[str, Any]:
        body = {
            "agent": self.name,
            "version": self.version,
            "model": model_identity(self.model),
            "model_params": _without_secrets(self.model_params),
            "instructions": self.instructions
            if isinstance(self.instructions, str)
            else {"function": path_of(self.instructions)},
            "tools": {name: tool.policy() for name, tool in self.tools.items()},
            "on_orphan": self.on_orphan,
            **{"token_budget": None, "deadline": None, **self.limits},
        }
        # Only where they are set: an agent without them keeps the definition of its older runs.
        optional = {
            "tools_for": self.tools_for and path_of(self.tools_for),
            "on_budget": None if self.on_budget == "pause" else self.on_budget,
            "fallback": None if self.fallback is None else model_identity(self.fallback),
            "output": schema_of(self.output_type),
            "unjournaled_tools": self.unjournaled_tools or None,
            "trusts": [*self.trusts] or None,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    @cached_property
    def unjournaled_readers(self) -> list[str]:
        """Tools that the provider runs, if any: they may read text of outsiders for each reply."""
        return ["tools of the provider"] if self.unjournaled_tools else []

    @property
    def models(self) -> list[Model | str]:
        """The model and the fallback, in the order of requests."""
        return [self.model] if self.fallback is None else [self.model, self.fallback]

    @property
    def file_limits(self) -> Limits:
        """The limits for files that every model of the agent accepts."""
        return limits_of(*map(model_identity, self.models))

    @cached_property
    def definition_hash(self) -> str:
        """The digest of the definition."""
        return canonical.digest(self.definition())

    def run(
        self, text: Input, session: Session | str | None = None, **options: Unpack[RunOptions]
    ) -> RunResult:
        """Run the agent in this process until the run ends or waits. Without a session nothing is stored."""
        from agentruns import run_agent

        return run_agent(self, text, session, **options)

    def start(self, text: Input, session: Session | str, **options: Unpack[StartOptions]) -> Run:
        """Queue a run. A worker drives it at once, or from `not_before` on."""
        from agentruns import start_run

        return start_run(self, text, session, **options)

    async def arun(
        self, text: Input, session: Session | str | None = None, **options: Unpack[RunOptions]
    ) -> RunResult:
        """Call `run` from async code; a process drives at most 32 runs for such callers at once."""
        return await in_thread(settings.DATABASE, self.run, text, session, drives=True, **options)

    async def astart(self, text: Input, session: Session | str, **options: Unpack[StartOptions]) -> Run:
        """Call `start` from async code."""
        return await in_thread(settings.DATABASE, self.start, text, session, **options)

    def as_tool(
        self, name: str = "", description: str = "", **options: Unpack[ChildKeywords]
    ) -> Tool[..., Any]:
        """Build a tool by which other agents hand this agent a task; a call starts a child run.

        The child run has a session of its own, and the owner, scope, context and requesters of the caller's
        run, which waits for it without a process. Its output is the result of the call. `name` defaults to
        the agent's name; the other options are those of `@tool`. Raises TypeError as `@tool` does.
        """
        return child_tool(self.name, name, description, **options)

    def _check(self) -> None:
        where = f"Agent {self.name!r}"
        functions: dict[str, Any] = {"instructions": self.instructions, "tools_for": self.tools_for}
        for what, function in functions.items():
            if isinstance(function, str) if what == "instructions" else function is None:
                continue
            form = "a string or a function" if what == "instructions" else "a function"
            kind = f"{where}: {what} must be {form} of a module, not {function!r}"
            if not inspect.isroutine(function):
                raise TypeError(f"{kind}.")
            if inspect.iscoroutinefunction(function):
                raise TypeError(f"{kind}: it is called before the run starts, without an event loop.")
            if wrong := arity_mistake(function, "run"):
                raise TypeError(f"{where}: {what} {wrong}.")
            if not getattr(function, "__module__", None) or "<" in path_of(function):
                text = "lambdas and local functions have no path to compare definitions by"
                raise TypeError(f"{kind}: {text}.")
        if self.model is None:
            text = "give it a model name or an object with propose(), or set AGENTRUNS_DEFAULT_MODEL."
            raise TypeError(f"{where} has no model: {text}")
        for what, model in zip(("model", "fallback"), self.models, strict=False):
            propose = None if isinstance(model, type) else getattr(model, "propose", None)
            if not callable(propose) and not (isinstance(model, str) and model):
                text = f"{what} must be a model name or an object with propose(), not {model!r}."
                raise TypeError(f"{where}: {text}")
            if callable(propose) and (wrong := arity_mistake(propose, "request")):
                raise TypeError(f"{where}: propose() of {what} {wrong}.")
        if self.fallback is not None and model_identity(self.fallback) == model_identity(self.model):
            raise ValueError(f"{where}: fallback must be another model than {self.fallback!r}.")
        starters = self.starters
        if starters is not None and not (isinstance(starters, str) and starters.strip()):
            raise TypeError(f"{where}: starters must be a permission, a group or 'anyone', not {starters!r}.")
        for name in self.trusts:
            tool = self.tools.get(name)
            # A tool of a server may be missing until `lock_mcp_tools`, which imports this agent.
            if tool is None and not any(name.startswith(f"{each.name}__") for each in servers()):
                raise ValueError(f"{where}: trusts names {name!r}, which is none of its tools.")
            if tool is not None and not tool.untrusted:
                raise ValueError(f"{where}: trusts names {name!r}, which is not declared untrusted.")
        if self.priority not in get_args(PriorityName):
            raise ValueError(f"{where}: priority must be 'high', 'normal' or 'low', not {self.priority!r}.")
        if self.max_concurrent is not None:
            checked_limits(where, max_concurrent=self.max_concurrent)
        if not self.unjournaled_tools and (named := provider_tools(self.model_params)):
            raise ValueError(
                f"{where}: the provider runs what {', '.join(named)} of model_params names by itself, "
                "without a row before the effect and without a gate. Declare tools with @tool or "
                "mcp_tools(), or say unjournaled_tools=True."
            )
        if self.output_type is not None and not (
            isinstance(self.output_type, type) and issubclass(self.output_type, BaseModel)
        ):
            raise TypeError(f"{where}: output_type must be a pydantic model, not {self.output_type!r}.")
        try:
            schema_of(self.output_type)
        except Exception as error:  # found here rather than at the start of its first run
            raise TypeError(f"{where}: output_type has no JSON Schema: {error}") from error
        if self.on_orphan not in ("hold", "surface"):
            raise ValueError(f"{where}: on_orphan must be 'hold' or 'surface', not {self.on_orphan!r}.")
        if self.on_budget not in ("pause", "fail"):
            raise ValueError(f"{where}: on_budget must be 'pause' or 'fail', not {self.on_budget!r}.")


def register(agent: Agent) -> None:
    """Register `agent` under its name and version, in place of an earlier agent.

    Raises ValueError if another module has registered an agent with this name and version, but with another
    definition.
    """
    key = (agent.name, agent.version)
    with _lock:
        other = _registry.get(key)
        if other and other.module != agent.module and other.definition_hash != agent.definition_hash:
            parts = ", ".join(definition_difference(other.definition(), agent.definition()))
            raise ValueError(
                f"Agent {agent.name!r} version {agent.version!r} is declared differently in {other.module} "
                f"and {agent.module}: {parts}. "
                "Rename one, or give the newer one another version."
            )
        _registry.pop(key, None)  # moves it to the end
        _registry[key] = agent


def get_agent(agent: Agent | str, version: str | None = None) -> Agent:
    """Find the agent with a name and version; without a version, the one with the highest version.

    Numbers in a version are compared as numbers: 1.10 is higher than 1.9, and v10 is higher than v9. Versions
    of dots and numbers only are higher than all others. Raises UnknownAgentError, which lists the agents.
    """
    if isinstance(agent, Agent):
        if version is None or version == agent.version:
            return agent
        agent = agent.name

    def rank(each: Agent) -> tuple[bool, list[str | int], str]:
        # Texts and numbers by turns, so that equals are compared.
        parts = [int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(each.version))]
        return bool(_DOTTED.fullmatch(each.version)), parts, each.version

    if among := [each for each in registered() if each.name == agent and version in (None, each.version)]:
        return max(among, key=rank)
    wanted = f"{agent!r}" if version is None else f"{agent!r} version {version!r}"
    known = ", ".join(f"{each.name} version {each.version}" for each in registered()) or "none"
    place = "Agents belong in agents.py of an installed app."
    raise UnknownAgentError(f"There is no agent {wanted} in this process. Registered: {known}. {place}")


def registered() -> list[Agent]:
    """List all agents of this process in order of registration."""
    with _lock:
        return list(_registry.values())


def autodiscover() -> None:
    """Import agents.py of every installed app."""
    autodiscover_modules("agents")


def definition_difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the parts that differ between definitions, such as "instructions" or "tools.refund (removed)"."""

    def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
        names = sorted({*one, *other})
        return [name for name in names if canonical.dumps(one.get(name)) != canonical.dumps(other.get(name))]

    parts = [part for part in differing(old, new) if part != "tools"]
    before, after = old.get("tools", {}), new.get("tools", {})
    for name in differing(before, after):
        if name in before and name in after:
            parts += [f"tools.{name}.{each}" for each in differing(before[name], after[name])]
        else:
            parts.append(f"tools.{name} ({'added' if name in after else 'removed'})")
    return parts


def checked_limits(where: str, **limits: Any) -> dict[str, Any]:
    """Check limits by name, and convert them to the form of a definition: a cost as text, times in seconds.

    Raises TypeError or ValueError that begins with `where`.
    """
    checked = dict(limits)
    for name, value in limits.items():
        if name == "deadline":
            if not isinstance(value, timedelta):
                raise TypeError(f"{where}: deadline must be a timedelta, not {value!r}.")
            checked[name] = value.total_seconds()
        elif name == "cost_budget":
            if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
                raise TypeError(f"{where}: cost_budget must be a number, or one as text, not {value!r}.")
            if not is_amount(value):
                raise ValueError(f"{where}: cost_budget must be a positive number, not {value!r}.")
            checked[name] = amount(Decimal(str(value)))
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{where}: {name} must be a whole number, not {value!r}.")
        elif value < 1:
            raise ValueError(f"{where}: {name} must be at least 1, not {value}.")
        if Decimal(checked[name]) <= 0:
            raise ValueError(f"{where}: {name} must be positive, not {limits[name]}.")
    return checked


def unpriced(agent: Agent, *, is_limited: bool = False) -> str:
    """Explain that a cost budget cannot be kept because a model has no price; "" otherwise.

    With `is_limited` the run has a cost budget even if its agent has none.
    """
    models = map(model_identity, agent.models) if is_limited or agent.cost_budget is not None else []
    model = next((each for each in models if price_of(each) is None), None)
    return f"AGENTRUNS_PRICES has no price for {model}, so cost_budget cannot be kept." if model else ""


def _without_secrets(params: Any) -> Any:
    """Mask the members that _SECRETS names, at any depth: a definition must not show or compare them."""
    if isinstance(params, dict):
        return {name: MASK if name in _SECRETS else _without_secrets(each) for name, each in params.items()}
    return [_without_secrets(each) for each in params] if isinstance(params, list | tuple) else params
