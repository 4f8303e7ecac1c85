"""A server on the SDK's own classes, over streamable HTTP with sessions, on a port that it prints."""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer  # noqa: TID253 - a process of its own
from pydantic import BaseModel

server = MCPServer("honest")


class Sum(BaseModel):
    total: int


@server.tool()
def add(first: int, second: int) -> Sum:
    """Add two numbers."""
    return Sum(total=first + second)


@server.tool(name="say.hello")
def hello(name: str = "you") -> str:
    """Greet somebody."""
    return f"Hello {name}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("on purpose")


async def legacy(scope: Any, receive: Any, send: Any) -> None:
    """Serve only the era of the protocol that has sessions."""
    if scope["type"] == "http" and dict(scope["headers"]).get(b"mcp-protocol-version", b"") > b"2026":
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await app(scope, receive, send)


app = server.streamable_http_app()

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app if sys.argv[2:] == ["modern"] else legacy)).run(sockets=[listener])
