"""The tools of an MCP server, declared from its lock file; the server is not contacted before a call."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from agentruns.exceptions import ToolRefused
from agentruns.tools.base import Tool
from agentruns.tools.card import one_line
from agentruns.tools.context import Pending, ToolContext
from agentruns.tools.mcp import client
from agentruns.tools.mcp.arguments import arguments_model
from agentruns.tools.mcp.client import Listed, McpChanged, McpError
from agentruns.tools.options import Options, as_names
from agentruns.tools.signature import Signature
from agentruns.tools.builtin import TASK
from agentruns.utils import json as canonical
from agentruns.utils.calls import arity_mistake, call
from agentruns.utils.forks import renewed

__all__ = ["LOCKED", "McpChanged", "McpError", "Server", "mcp_tools", "servers"]

LOCKED = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
CHANGED = (
    "tools_changed: the MCP server {name!r} declares {parts} in another way than {file}. Review that, write "
    "the file anew with `manage.py lock_mcp_tools {name}`, deploy it, and let the run adopt the definition."
)
TIMEOUT = 60.0
NAMED = 64  # characters of a tool's name
_PREFIX = re.compile("[a-zA-Z0-9_-]{1,40}")
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_REFUSED_OPTIONS = ("name", "description", "transactional", "origin", "ready", "poll")

Headers = Mapping[str, str] | Callable[[ToolContext], Mapping[str, str]] | None


@dataclass(eq=False)
class Server:
    """An MCP server as a project declares it. `taken` are the names of the tools that the project uses."""

    name: str
    target: client.Target
    headers: Headers = field(repr=False)
    file: Path
    taken: tuple[str, ...] = ()
    task_timeout: timedelta | None = None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if callable(self.headers) and (wrong := arity_mistake(self.headers, "ctx")):
            raise TypeError(f"MCP server {self.name!r}: headers {wrong}.")
        Pending(timeout=self.task_timeout)  # raises for a wrong value

    @cached_property
    def locked(self) -> dict[str, dict[str, Any]] | None:
        """The tools in the lock file by name; None without a file. Raises ValueError for another file."""
        try:
            listed = json.loads(self.file.read_text())["tools"]
            return {each["name"]: {**each, "inputSchema": {**each["inputSchema"]}} for each in listed}
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.file} is no lock file of an MCP server: it needs `tools`, each with `name` and an "
                f"object `inputSchema` ({error}). Delete it, and run `manage.py lock_mcp_tools {self.name}`."
            ) from error

    def listed(self, ctx: ToolContext) -> Listed:
        """List the tools that the server declares now; raises ToolRefused if it cannot be reached."""
        return client.list_tools(self.target, self.headers_for(ctx))

    def headers_for(self, ctx: ToolContext) -> dict[str, str]:
        """Build the headers of a call from `headers`, which is a dict, or a function of the context.

        Raises ToolRefused if the function fails or a header is invalid.
        """
        try:
            made = dict((call(self.headers, ctx) if callable(self.headers) else self.headers) or {})
            for name, value in made.items():  # the HTTP library would quote a value that it refuses
                is_value = value.isascii() and value.isprintable() and value == value.strip()
                if not is_value or not _HEADER.fullmatch(name):
                    raise ValueError
            return made
        except Exception as error:  # its text may contain a secret
            kind = type(error).__name__
            raise ToolRefused(f"The headers for MCP server {self.name!r} cannot be made: {kind}") from None

    def lock_text(self, listed: Listed) -> str:
        """Build the text of a lock file from the tools that the server declares."""
        tools = sorted(map(_locked, listed), key=lambda each: str(each["name"]))
        return json.dumps({"server": self.name, "tools": tools}, indent=2) + "\n"

    def difference(self, listed: Listed, names: Iterable[str]) -> list[str]:
        """List the tools of `names` that differ between server and lock file, or that one of them lacks."""
        # As texts, for 1 and true are equal.
        now = {each["name"]: canonical.dumps(_locked(each)) for each in listed}
        known = {name: canonical.dumps(each) for name, each in (self.locked or {}).items()}
        return sorted(name for name in {*names} if now.get(name) != known.get(name))

    def why_not(self, listed: Listed) -> str:
        """Explain which of the project's chosen tools have changed on the server; "" if none has."""
        changed = [one_line(name, 100) for name in self.difference(listed, self.taken)]
        told = {"name": self.name, "parts": ", ".join(changed), "file": self.file.name}
        return CHANGED.format(**told) if changed else ""

    def ready(self, ctx: ToolContext) -> str:
        """Query the server's tools and explain which have changed; "" if none has, or if the query fails."""
        try:
            return self.why_not(self.listed(ctx))
        except Exception:
            return ""  # the call meets the same error, and gives it to the model

    def send(
        self, original: str, timeout: float | None, *, arguments: dict[str, Any], ctx: ToolContext
    ) -> Any:
        """Call the server's tool `original` and convert the answer to a result; raises as `call_tool`.

        Returns Pending if the server answers with a task; raises McpError for that in a stateless run. With
        `original` and `timeout` bound, this is the handler of the tool.
        """
        headers, key = self.headers_for(ctx), ctx.idempotency_key
        answer = client.call_tool(
            self.target, headers, original, arguments, key=key, timeout=timeout, why_not=self.why_not
        )
        if not isinstance(answer, Pending):
            return answer
        if ctx.session_key is None:
            raise McpError("The server has begun a task; a stateless run cannot wait for its result.")
        return replace(answer, key=f"{self.name}/{answer.key}", timeout=self.task_timeout, _name=TASK)

    def poll(self, ctx: ToolContext, event: str) -> Any:
        """Poll the task of an event's key, with the headers of its call; see `poll_task`."""
        return client.poll_task(self.target, self.headers_for(ctx), event.partition("/")[2])


_servers: dict[str, Server] = {}
_lock = renewed(threading.Lock())


def servers() -> list[Server]:
    """List the servers that this process has declared, sorted by name."""
    with _lock:
        return [_servers[name] for name in sorted(_servers)]


def mcp_tools(
    server: str | Sequence[str],
    *,
    name: str,
    allow: Iterable[str] | None = None,
    read_only: Iterable[str] = (),
    trust_hints: bool = False,
    headers: Headers = None,
    env: Mapping[str, str] | None = None,
    lock: str | Path | None = None,
    task_timeout: timedelta | None = timedelta(days=1),
    **tool_options: Any,
) -> list[Tool]:
    """Build the tools of an MCP server, which is a URL or a command; each tool is named `{name}__{tool}`.

    The tools are declared from the server's lock file: `lock`, by default `{name}.mcp.json` beside the
    calling module. Without that file the list is empty, and a system check reports it. `allow` selects tools
    by name. By default each call needs approval and is sent at most once. Tools in `read_only` need no
    approval, and their calls may be sent again. With `trust_hints` this also holds for tools that the server
    declares read-only. Calls of tools that it declares idempotent need approval, but may be sent again.
    `headers`, which may be a function of a ToolContext, and `env` are never stored. A call that the server
    answers with a task waits for the task's end, at most `task_timeout` (None: without a limit). Other
    options are those of `@tool`; `timeout` defaults to 60 seconds, and `untrusted` to True. Raises TypeError
    as `tool` does, and ValueError for a name that is invalid or taken and for a broken lock file.
    """
    where = f"MCP server {name!r}"
    if not isinstance(name, str) or not _PREFIX.fullmatch(name):
        raise ValueError(f"The name of an MCP server must be 1 to 40 letters, digits, _ and -, not {name!r}.")
    if refused := sorted({*_REFUSED_OPTIONS} & tool_options.keys()):
        raise TypeError(f"{where}: {refused[0]} cannot be given to the tools of a server.")
    if isinstance(server, str) and re.match("https?://", server):
        if env is not None:
            raise TypeError(f"{where}: env is for a command; a URL has headers.")
        target = client.Target(url=server)
    else:
        command = tuple(shlex.split(server) if isinstance(server, str) else server)
        if not command or not all(isinstance(each, str) for each in command):
            raise TypeError(f"{where} must be a URL or a command, not {server!r}.")
        target = client.Target(command=command, env=tuple(sorted((env or {}).items())))
    beside = Path(sys._getframe(1).f_globals.get("__file__") or ".").parent
    file = beside / f"{name}.mcp.json" if lock is None else Path(lock)
    made = Server(name, target, headers, file, task_timeout=task_timeout)
    with _lock:
        known = _servers.setdefault(name, made)
        if (known.target, known.file) != (made.target, file):
            raise ValueError(f"Two MCP servers are named {name!r}: give one another name.")
        _servers[name] = made
    reads = as_names(read_only, "read_only", "names of tools")
    wanted = None if allow is None else as_names(allow, "allow", "names of tools")
    if made.locked is None:
        made.problems.append(f"there is no {file}")
        return []
    if unknown := sorted({*(wanted or ()), *reads} - {*made.locked}):
        made.problems.append(f"{file.name} has no {', '.join(unknown)}")
    made.taken = tuple(each for each in made.locked if wanted is None or each in wanted)
    tools: dict[str, Tool] = {}
    for original in made.taken:
        tool = _tool(made, made.locked[original], original in reads, trust_hints, dict(tool_options))
        if tools.setdefault(tool.name, tool) is not tool:
            raise ValueError(f"{where}: two of its tools would be named {tool.name!r}; use allow=.")
    taking = {each for tool in tools.values() for each in tool.sensitive}
    if unknown := sorted({*as_names(tool_options.get("sensitive", ()))} - taking):
        raise TypeError(f"{where}: sensitive names {', '.join(unknown)}, which no tool of it takes.")
    return list(tools.values())


def _tool(
    server: Server, declared: dict[str, Any], named_read: bool, trust_hints: bool, given: dict[str, Any]
) -> Tool:
    original, hints = declared["name"], declared.get("annotations") or {}
    reads = named_read or (trust_hints and hints.get("readOnlyHint") is True)
    schema = {"type": "object", **declared["inputSchema"]}
    # `true` and `false` are schemas, too; the console takes the form of an edit from objects.
    properties = {
        key: each if isinstance(each, dict) else ({} if each else {"not": {}})
        for key, each in (schema.get("properties") or {}).items()
    }
    schema |= {"properties": properties} if properties else {}
    given = {"timeout": TIMEOUT, "requires_approval": True, "untrusted": True, **given}
    if (reads or (trust_hints and hints.get("idempotentHint") is True)) and "reconcile" not in given:
        given["safe_to_retry"] = True
    if not given.get("safe_to_retry") and given.get("parallel") is True:  # meant for the other tools
        del given["parallel"]
    given["sensitive"] = [each for each in as_names(given.get("sensitive", ())) if each in properties]
    origin = {"server": server.name, "tool": original, "at": server.target.shown, "hints": hints}
    options = Options.of({**given, "origin": origin, "ready": server.ready, "poll": server.poll})
    name = re.sub("[^a-zA-Z0-9_-]", "_", f"{server.name}__{original}")[:NAMED]
    options.check(name, is_async=False, parameters=properties)
    if reads:  # options about approval are meant for the other tools
        options.requires_approval = options.outward = False
    about = declared.get("description") or declared.get("title") or ""
    arguments = arguments_model(name, schema, quotes=not options.sensitive)
    signature = Signature(arguments, {"arguments": "root"}, "ctx", about, schema, None)
    return Tool(partial(server.send, original, options.timeout), name, about, signature, options)


def _locked(declared: Mapping[str, Any]) -> dict[str, Any]:
    return {key: declared[key] for key in LOCKED if declared.get(key) is not None}
