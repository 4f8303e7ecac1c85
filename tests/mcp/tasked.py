"""A server on the SDK's own classes that answers each call with a task, over standard streams or HTTP.

`python tasked.py` speaks on its standard streams, `python tasked.py PORT` over HTTP on a port that it prints.
The arguments of the tool `work` say what it answers: `created` has members of the answer to the call, and
`polls` has members of the answer to each poll; the last one is repeated. A poll may also be `{"code": ...}`
(an error of JSON-RPC), `{"after": path}` (it answers once the path exists), `{"kill": true}` (its client, on
standard streams) and `{"huge": characters}`. TASKS in its environment is a folder with what it knows of each
task, so it knows them after it is started anew; LEDGER is the file of effects.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp.server.extension import Extension, MethodBinding  # noqa: TID253 - a process of its own
from mcp.server.mcpserver import MCPServer  # noqa: TID253
from mcp.server.mcpserver.server import require_client_extension  # noqa: TID253
from mcp.shared.exceptions import MCPError  # noqa: TID253
from mcp.types import CallToolRequestParams, GetTaskRequestParams  # noqa: TID253

TASKS = Path(os.environ.get("TASKS", "."))
WHEN = "2026-11-27T10:00:00Z"
ABOUT = {"status": "working", "createdAt": WHEN, "lastUpdatedAt": WHEN, "ttlMs": None}


def record(key: str, **facts: Any) -> None:
    """Let an effect happen."""
    with open(os.environ["LEDGER"], "a") as ledger:
        ledger.write(json.dumps({"key": key, **facts}) + "\n")


class Tasks(Extension):
    """The server's side of the extension."""

    identifier = "io.modelcontextprotocol/tasks"

    def methods(self) -> Sequence[MethodBinding]:
        return [MethodBinding("tasks/get", GetTaskRequestParams, self.get)]

    async def intercept_tool_call(self, params: CallToolRequestParams, ctx: Any, call_next: Any) -> Any:
        given = params.arguments or {}
        require_client_extension(ctx, self.identifier)
        meta: dict[str, Any] = {**(params.meta or {})}
        created = {"taskId": uuid.uuid4().hex, "resultType": "task", **ABOUT, **(given.get("created") or {})}
        record(meta.get("agentruns/idempotency-key", ""), tool="work", task=created["taskId"])
        if isinstance(created["taskId"], str) and len(created["taskId"]) < 200:
            (TASKS / f"{created['taskId']}.task").write_text(json.dumps([0, given.get("polls") or [{}]]))
        return created

    async def get(self, ctx: Any, params: GetTaskRequestParams) -> dict[str, Any]:
        file = TASKS / f"{params.task_id}.task"
        if not file.exists():
            raise MCPError(-32602, "Failed to retrieve task: Task not found")
        number, polls = json.loads(file.read_text())
        file.write_text(json.dumps([number + 1, polls]))
        record("poll", task=params.task_id)
        poll = dict(polls[min(number, len(polls) - 1)])
        if poll.pop("kill", False):
            os.kill(os.getppid(), signal.SIGKILL)
        gate = anyio.Path(poll.pop("after", TASKS))
        while not await gate.exists():
            await anyio.sleep(0.02)  # waits: until the test opens the gate
        if "code" in poll:
            raise MCPError(poll["code"], poll["message"])
        if size := poll.pop("huge", 0):
            poll |= {"status": "completed", "result": {"content": [{"type": "text", "text": "x" * size}]}}
        return {"taskId": params.task_id, "pollIntervalMs": 30_000, **ABOUT, **poll}


server = MCPServer("tasked", extensions=[Tasks()])


@server.tool()
def work(created: dict[str, Any] | None = None, polls: list[dict[str, Any]] | None = None) -> str:
    """Work for long."""
    raise NotImplementedError


app = server.streamable_http_app()


async def noted(scope: Any, receive: Any, send: Any) -> None:
    """Note the headers of each request."""
    if scope["type"] == "http":
        record("headers", **{name.decode(): value.decode() for name, value in scope["headers"]})
    await app(scope, receive, send)


if __name__ == "__main__":
    if sys.argv[1:]:
        with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
            print(listener.getsockname()[1], flush=True)
            uvicorn.Server(uvicorn.Config(noted, log_level="error")).run(sockets=[listener])
    else:
        server.run("stdio")
