"""A server on the SDK's own classes, over streamable HTTP with sessions, on a port that it prints."""

from __future__ import annotations

import socket

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


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app())).run(sockets=[listener])
