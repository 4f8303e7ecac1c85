"""MCP servers as tests declare them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentruns import run_agent
from agentruns.models import Message, Run
from agentruns.tools import Tool, ToolContext, mcp as declared
from agentruns.tools.mcp import mcp_tools
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

HOSTILE = str(Path(__file__).parent / "hostile.py")
TASKED = str(Path(__file__).parent / "tasked.py")
SLOW = {"pollIntervalMs": 30_000}
NOBODY = ToolContext(run_id="", call_id="", tool_name="", idempotency_key="")
Declare = Callable[..., list[Tool]]


def lock(server: Any, name: str, file: Path, **options: Any) -> list[Tool]:
    """Declare a server, write its lock file as it is now, and return its tools."""
    if not file.exists():
        assert mcp_tools(server, name=name, lock=file, **options) == []
        (made,) = (each for each in declared.servers() if each.name == name)
        file.write_text(made.lock_text(made.listed(NOBODY)))
        declared._servers.pop(name)
    return mcp_tools(server, name=name, lock=file, **options)


def drive(tools: list[Tool], name: str, *others: Any, **arguments: Any) -> Run:
    """Let an agent call a tool, and return its run as it is then."""
    turn = {"tools": [call(f"h__{name}", **arguments), *others]}
    agent = shop_agent(f"mcp-{time.time_ns()}", turn, tools=tools)
    return Run.objects.get(pk=run_agent(agent, "do it", f"s-{agent.name}").run_id)


def done(text: str, **more: Any) -> dict[str, Any]:
    """Build the end of a task, as a server tells it."""
    return {"status": "completed", "result": {"content": [{"type": "text", "text": text}], **more}}


KILLS = call("h__work", created=SLOW, polls=[{"kill": True}, done("it is done")])  # of tests.mcp.tasked


def results(run: Run) -> list[Any]:
    """List the contents of a run's results."""
    rows = Message.objects.filter(run=run, kind="tool_result").order_by("seq")
    return [row.payload["content"] for row in rows]


def acted(effects: Effects, tool: str) -> int:
    """Count how often a tool acted."""
    return sum(line.get("tool") == tool for line in effects.lines()) + effects.count(tool)
