"""Sessions with MCP servers, one for each server and set of headers, and the calls of their tools."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from agentruns.content import IMAGES, PDF, Document, Image, Text, type_named
from agentruns.exceptions import ContentError, ToolDurabilityError, ToolRefused
from agentruns.tools.card import one_line
from agentruns.tools.context import Pending, Unknown
from agentruns.utils import json as canonical
from agentruns.utils.bounds import ANSWER_BYTES
from agentruns.utils.db import uptime
from agentruns.utils.forks import in_child, keep, renewed
from agentruns.utils.redaction import Secrets, get_logger

if TYPE_CHECKING:
    from mcp.client.session import ClientSession
    from mcp.types import CallToolResult

    from agentruns.tools.mcp.tasks import Task

logger = get_logger("agentruns.mcp")

MOST_PAGES = 20  # of one list
CONNECT_SECONDS = 30.0
IDLE_SECONDS = 300.0
GRACE_SECONDS = 2.0  # for a child to end by itself, and again after SIGTERM
SHORTEST_SECRET = 5
LONGEST_ERROR = 10_000  # characters of an error's text
LONGEST_TEXT = 2 * LONGEST_ERROR  # the same before its secrets are removed
KEY_META = "agentruns/idempotency-key"
POLL_SECONDS = 10.0
TASKS = "io.modelcontextprotocol/tasks"  # the extension by which a server may answer a call with a task

T = TypeVar("T")
Listed = list[dict[str, Any]]  # tools as a server declares them


class McpError(Exception):
    """Raised for an error that an MCP server returned, with the server's text."""


class McpChanged(ToolRefused):
    """Raised if a server declares its tools in another way than its lock file; the call was not sent."""


class McpForgotten(ToolRefused):
    """Raised if a server does not know the session of a request; it executed nothing."""


@dataclass(frozen=True, slots=True, repr=False)
class Target:
    """The address of a server: a URL, or a command with variables that are added to a minimal environment."""

    url: str = ""
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"<Target {self.shown}>"

    @property
    def shown(self) -> str:
        """The URL or command without secrets: no user, query, arguments or environment."""
        if self.command:
            return os.path.basename(self.command[0])
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"


def secrets_of(target: Target, headers: Mapping[str, str]) -> Secrets:
    """Collect the secrets of a server, which no error may quote.

    These are the values of headers, of the environment and of the URL's query, and the URL's password. Each
    also counts without its first word, such as Bearer. Values of up to 5 characters do not count.
    """
    url = urlsplit(target.url)
    given = [*headers.values(), url.password or ""]
    given += [value for _name, value in (*target.env, *parse_qsl(url.query))]
    parts = [*given, *(each.partition(" ")[2].strip() for each in given)]
    return Secrets([each for each in parts if len(each) > SHORTEST_SECRET])


@contextlib.contextmanager
def without_secrets(target: Target, headers: Mapping[str, str]) -> Iterator[None]:
    """Remove the server's secrets from each McpError, ToolRefused and ToolDurabilityError in the block.

    A server or a library may quote them. The text is cut to LONGEST_ERROR; other exceptions pass unchanged.
    """
    try:
        yield
    except (McpError, ToolRefused, ToolDurabilityError) as error:
        text = secrets_of(target, headers).hide(str(error))[:LONGEST_ERROR]
        raise type(error)(text) from None  # the log would have the error's cause, too


Key = tuple[Target, tuple[tuple[str, str], ...]]  # with the headers
Work = Callable[["Session", "ClientSession"], Awaitable[T]]


class Session:
    """A session with a server. One task opens and leaves it, always in the loop's thread."""

    def __init__(self, owner: Loop, key: Key) -> None:
        self.owner, self.key = owner, key
        self.busy, self.retired = 0, False
        self.listed: Listed | None = None
        self.touched = asyncio.Event()
        self.opened: asyncio.Future[ClientSession] = owner.loop.create_future()
        self.is_left = False
        self.task = owner.loop.create_task(self._live())
        owner.living.add(self)
        self.task.add_done_callback(lambda task: owner.living.discard(self))

    async def _live(self) -> None:
        target, headers = self.key
        try:
            from mcp.client.client import Client
            from mcp.client.extension import advertise
            from mcp.types import Implementation, ToolListChangedNotification

            from agentruns.tools.mcp.http import http_transport

            async def hear(message: object) -> None:
                if isinstance(message, ToolListChangedNotification):
                    self.listed = None

            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(CONNECT_SECONDS):
                    transport: Any = (
                        _piped(target, self.retire) if target.command else http_transport(target.url, headers)
                    )
                    us = Implementation(name="agentruns", version="1")
                    # No cache, and no callbacks: a server's request for a sample or a form is answered by
                    # an error.
                    options: Any = {"cache": None, "message_handler": hear, "client_info": us}
                    client = Client(transport, extensions=[advertise(TASKS)], **options)
                    session = (await stack.enter_async_context(client)).session
                self.opened.set_result(session)
                while self.busy or not self.retired:
                    self.touched.clear()
                    try:
                        await asyncio.wait_for(self.touched.wait(), IDLE_SECONDS)
                    except TimeoutError:
                        if not self.busy:
                            self.retire()
                self.is_left = True
        except BaseException as error:
            if not self.opened.done():
                self.opened.set_exception(_refusal(target, error))
            elif not isinstance(error, Exception):
                raise
            else:  # all calls in the session have ended by now, or are lost
                reason = secrets_of(target, dict(headers)).hide(_told(error))
                logger.info("Session with MCP server %s ended: %s", target.shown, reason)
        finally:
            self.retire()

    def retire(self) -> None:
        """Accept no new calls. The session is left when its running calls are over."""
        self.retired = True
        if self.owner.sessions.get(self.key) is self:
            del self.owner.sessions[self.key]
        self.touched.set()


class Loop:
    """The event loop of this process, in a thread of its own, and the sessions with servers."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.sessions: dict[Key, Session] = {}
        self.living: set[Session] = set()  # includes sessions that accept no new calls
        threading.Thread(target=self.loop.run_forever, name="mcp-sessions", daemon=True).start()

    async def use(self, key: Key, work: Work[T], *, again: bool = True) -> T:
        """Do `work` in the session for a key; open a session if there is none.

        Retires the session after any error but McpError. With `again`, does `work` once more, in a new
        session, if the server has forgotten the session: it executed nothing, and the protocol demands this.
        """
        session = self.sessions.get(key)
        if session is None:
            session = self.sessions[key] = Session(self, key)
        session.busy += 1
        try:
            return await work(session, await asyncio.shield(session.opened))
        except McpError:
            raise  # the server answered, so the session works
        except BaseException as error:
            session.retire()
            if not isinstance(error, McpForgotten):
                raise
            if not again:
                raise McpForgotten(f"{error} (in a new session, too)") from error
        finally:
            session.busy -= 1
            session.touched.set()
        return await self.use(key, work, again=False)

    async def close(self) -> None:
        """Leave every session, even one with a running call."""
        tasks = [session.task for session in self.living]
        for session in self.living:
            if not session.is_left:  # a session that was left is ending its child already
                session.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_lock = renewed(threading.Lock())
_loop: Loop | None = None


def _after_fork() -> None:
    global _loop
    keep(_loop)  # collecting it would end the parent's children
    _loop = None


in_child(_after_fork)


def _use(target: Target, headers: dict[str, str], work: Work[T]) -> T:
    global _loop
    import_module("mcp.client.client")  # here, because it takes seconds that would stop the loop

    with _lock:
        if _loop is None:
            _loop = Loop()
            # A child of multiprocessing, as Celery's, ends without `atexit`.
            for name in {"multiprocessing.util", "billiard.util"} & sys.modules.keys():
                sys.modules[name].Finalize(None, close, exitpriority=10)
        loop = _loop
    key = target, tuple(sorted(headers.items()))
    future = asyncio.run_coroutine_threadsafe(loop.use(key, work), loop.loop)
    try:
        return future.result()
    finally:
        future.cancel()  # a worker's time limit: nobody waits any more


@atexit.register
def close() -> None:
    """Leave the sessions of this process; a later call opens a new session."""
    with _lock:
        loop = _loop
    if loop is not None:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(loop.close(), loop.loop).result(3 * GRACE_SECONDS)


def list_tools(target: Target, headers: dict[str, str]) -> Listed:
    """List the tools that a server declares now; raises ToolRefused if they cannot be read."""
    with without_secrets(target, headers):
        return _use(target, headers, partial(_tools, anew=True))


def call_tool(
    target: Target,
    headers: dict[str, str],
    name: str,
    arguments: dict[str, Any],
    *,
    key: str,
    timeout: float | None,
    why_not: Callable[[Listed], str],
) -> Any:
    """Send a call of a tool once, with the idempotency key `key`; convert the server's answer to a result.

    If the server answers with a task, returns Pending with the task's id and the time until the first poll.
    Raises McpChanged if `why_not` objects to the tools that the server declares, ToolRefused if nothing was
    sent or the server refused the request, McpError if the server returned an error or asks for more input,
    and ToolDurabilityError if no answer came within `timeout` seconds, or none that can be read.
    """
    end = math.inf if timeout is None else uptime() + timeout

    async def work(held: Session, session: ClientSession) -> CallToolResult | Pending:
        from mcp import types

        from agentruns.tools.mcp.tasks import Created

        if why := why_not(await _tools(held, session, anew=False)):
            raise McpChanged(why)
        left = end - uptime()
        if left <= 0:  # by now the call may be in doubt, and a person may have it run again
            raise ToolRefused(f"The MCP server {target.shown} was not reached within {timeout:g} s.")
        # `Client.call_tool` would send the request again: with answers to what the server asks for, and
        # after HEADER_MISMATCH. `ClientSession.call_tool` drops a result that does not fit the tool's
        # output schema.
        params = types.CallToolRequestParams(
            name=name, arguments=arguments, _meta=cast("Any", {KEY_META: key})
        )
        forms = types.CallToolResult | types.InputRequiredResult | Created
        limit = None if timeout is None else left
        result = await _answer(session, types.CallToolRequest(params=params), forms, limit)
        if isinstance(result, Created):
            return Pending(result.task_id, _every=result.pace)
        if isinstance(result, types.InputRequiredResult):
            asked = ", ".join(sorted({each.method for each in (result.input_requests or {}).values()}))
            raise McpError(
                f"The server asks for more before it goes on ({asked or 'state'}); nobody answers that."
            )
        return result  # type: ignore[no-any-return]

    with without_secrets(target, headers):
        answer = _use(target, headers, work)
        return answer if isinstance(answer, Pending) else result_of(answer)


def poll_task(target: Target, headers: dict[str, str], task_id: str) -> Any:
    """Poll a task; convert its result, or return Pending with the time until the next poll.

    Returns Unknown if the server does not know the task. Raises McpError if the task ended without a result
    or asks for more input, and ToolRefused or ToolDurabilityError without an answer that can be read.
    """

    async def work(held: Session, session: ClientSession) -> Task | Unknown:
        from mcp.types import INVALID_PARAMS, GetTaskRequestParams

        from agentruns.tools.mcp.tasks import GetTask, Task

        try:
            request = GetTask(params=GetTaskRequestParams(task_id=task_id))
            task: Task = await _answer(session, request, Task, POLL_SECONDS)
        except McpError as error:
            if str(error).endswith(f" (code {INVALID_PARAMS})"):
                return Unknown("The server does not know the task any more.")
            raise ToolDurabilityError(str(error)) from error
        if task.task_id != task_id or (task.status == "completed" and task.result is None):
            raise ToolDurabilityError("The answer is about another task, or lacks the result.")
        return task

    with without_secrets(target, headers):
        task = _use(target, headers, work)
        if isinstance(task, Unknown):
            return task
        if task.status == "working":
            return Pending(_every=task.pace)
        if task.status == "completed" and task.result is not None:
            return result_of(task.result)
        said = task.error.message if task.error else task.status_message or "no reason is given"
        raise McpError(f"The task is {task.status}: {one_line(said, LONGEST_TEXT)}")


async def _answer(session: ClientSession, request: Any, form: Any, seconds: float | None) -> Any:
    """Send a request once, and read the answer as `form`; raises as `call_tool`."""
    from mcp import types
    from mcp.shared.exceptions import MCPError
    from pydantic import TypeAdapter

    try:
        return await session.send_request(request, TypeAdapter(form), request_read_timeout_seconds=seconds)
    except MCPError as error:
        verdict, text = _verdict(error), one_line(error.error.message, LONGEST_TEXT)
        if verdict in ("refused", "forgotten"):
            raise {"refused": ToolRefused, "forgotten": McpForgotten}[verdict](text) from error
        lost = (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT, types.PARSE_ERROR)
        if verdict == "lost" or error.code in lost:
            raise ToolDurabilityError(f"No answer: {text}") from error
        raise McpError(f"{text} (code {error.code})") from error
    except Exception as error:
        raise ToolDurabilityError(f"No answer that can be read: {_told(error)}") from error


async def _tools(held: Session, session: ClientSession, *, anew: bool) -> Listed:
    """List the tools that a server declares; use the last list unless `anew`. Raises ToolRefused."""
    from mcp.types import PaginatedRequestParams

    if held.listed is not None and not anew:
        return held.listed
    found, cursor = Listed(), None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):  # all pages: a run waits for them
            for _ in range(MOST_PAGES):
                params = PaginatedRequestParams(cursor=cursor) if cursor else None
                page = await session.list_tools(params=params)
                found += [
                    each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in page.tools
                ]
                if (cursor := page.next_cursor) is None:
                    break
    except Exception as error:
        raise _refusal(held.key[0], error) from error
    held.listed = found
    return found


def _refusal(target: Target, error: BaseException) -> ToolRefused:
    if isinstance(error, ToolRefused):
        return error
    kind = McpForgotten if _verdict(error) == "forgotten" else ToolRefused
    return kind(f"The MCP server {target.shown} cannot be reached: {_told(error)}")


def _verdict(error: BaseException) -> str:
    """Find the verdict that the HTTP client put into an error of the SDK; "" if there is none."""
    data = getattr(getattr(error, "error", None), "data", None)
    if not isinstance(data, dict):
        return ""
    from agentruns.tools.mcp.http import TOKEN

    return str(data.get(TOKEN, ""))


def _told(error: BaseException) -> str:
    """Describe an error on one line; for a group of errors, describe the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(f"{type(error).__name__}: {error}", LONGEST_TEXT)


def result_of(answer: CallToolResult) -> Any:
    """Convert a server's answer to a tool's result; raises McpError if the answer reports a failed tool.

    Structured content replaces each text that repeats it. If other content is left, a text with the
    structured content follows that; otherwise the result is the structured content.
    """
    blocks, structured = [*map(_block, answer.content)], answer.structured_content
    if answer.is_error:
        texts = [block.text for block in blocks if isinstance(block, Text)]
        raise McpError("\n".join(texts)[: 2 * LONGEST_ERROR] or "The server gives no reason.")
    if structured is not None:
        for block in [block for block in blocks if isinstance(block, Text)]:
            repeats = structured == {"result": block.text}  # as the SDK's servers wrap a text
            with contextlib.suppress(ValueError, RecursionError):
                repeats = repeats or json.loads(block.text) == structured
            if repeats:
                blocks.remove(block)
        if not blocks:
            return structured
        blocks.append(Text(canonical.dumps(structured)))
    if len(blocks) > 1 or not all(isinstance(block, Text) for block in blocks):
        return blocks
    return blocks[0].text if blocks else ""


def _block(item: Any) -> Any:
    """Convert an item of an answer to a block; a text with the reason replaces a file that cannot be kept."""
    resource = getattr(item, "resource", None)
    if item.type == "text" or hasattr(resource, "text"):
        return Text((resource or item).text)
    if item.type == "resource_link":
        return Text(f"[resource {one_line(item.name)}: {one_line(str(item.uri))}]")
    data = item.data if resource is None else resource.blob
    name = "" if resource is None else one_line(str(resource.uri))
    media_type = type_named((resource or item).mime_type or "")
    try:
        kind = Image if media_type in IMAGES else {PDF: Document}[media_type]
        return kind(data=base64.b64decode(data, validate=True), media_type=media_type, name=name)
    except KeyError:
        why = "no type of file that is kept"
    except (ValueError, ContentError) as error:
        why = str(error)
    return Text(f"[{item.type} {name} {one_line(media_type)}, {len(data)} characters, left out: {why}]")


@contextlib.asynccontextmanager
async def _piped(target: Target, ended: Callable[[], None]) -> AsyncIterator[Any]:
    """Start a server in its own process group, and exchange lines with it. Ends the group after the block.

    Calls `ended` when the server's output ends. The SDK's own transport is not used, because it reads lines
    of any length, at a cost that grows with the square of the length.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    pipe = asyncio.subprocess.PIPE
    environment = get_default_environment() | dict(target.env)
    process = await asyncio.create_subprocess_exec(
        *target.command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True, limit=ANSWER_BYTES
    )
    arriving, read = anyio.create_memory_object_stream[Any](0)
    write, leaving = anyio.create_memory_object_stream[Any](0)

    async def reader(output: asyncio.StreamReader) -> None:
        with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with arriving:
                while line := await output.readline():  # ValueError: longer than ANSWER_BYTES
                    with contextlib.suppress(ValueError):  # not JSON-RPC
                        await arriving.send(SessionMessage(jsonrpc_message_adapter.validate_json(line)))
        ended()

    async def writer(given: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            async with leaving:
                async for each in leaving:
                    text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    given.write(text.encode() + b"\n")
                    await given.drain()

    try:
        async with anyio.create_task_group() as tasks:
            assert process.stdin is not None and process.stdout is not None  # noqa: S101 - pipes
            tasks.start_soon(reader, process.stdout)
            tasks.start_soon(writer, process.stdin)
            try:
                yield read, write
            finally:
                tasks.cancel_scope.cancel()
    finally:
        for stream in (arriving, read, write, leaving):
            stream.close()
        # End the server and the processes it started: close its input, then send SIGTERM, then SIGKILL.
        if process.stdin is not None:
            process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None and not _signalled(process.pid, number):
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_SECONDS)
                if not _signalled(process.pid, 0):
                    break


def _signalled(group: int, number: int) -> bool:
    """Send a signal to a process group (0 only checks); return True if the group has any process left."""
    try:
        with contextlib.suppress(PermissionError):
            os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
