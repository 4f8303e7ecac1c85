"""Agents with tools of the hostile server, for processes of their own; its lock file is committed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from agentruns import mcp_tools
from agentruns.tools.mcp import servers
from tests.effects import VARIABLE
from tests.shop.agents import call, shop_agent

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "hostile.py"))
TOOLS = mcp_tools(
    COMMAND, name="hostile", allow=["post", "kills", "slow"],
    env={"LEDGER": os.environ.get(VARIABLE, os.devnull)}, requires_approval=False, timeout=30,
)  # fmt: skip
POST = call("hostile__post", text="hello")
for _name, _call in {
    "post": POST,
    "kills": call("hostile__kills"),
    "slow": call("hostile__slow", size=3),
}.items():
    shop_agent(f"server-{_name}", {"tools": [_call]}, tools=TOOLS)


def write_to(ledger: str) -> None:
    """Let the server write to a ledger that was not there when this was imported."""
    for server in servers():
        server.target = replace(server.target, env=(("LEDGER", ledger),))
