"""An agent whose tool begins a task that kills the process at its first poll, for processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agentruns import mcp_tools
from tests.effects import VARIABLE
from tests.mcp.servers import KILLS, TASKED
from tests.shop.agents import shop_agent

TOOLS = mcp_tools(
    [sys.executable, TASKED], name="h", lock=Path(os.environ["TASKS"]) / "h.json", requires_approval=False,
    env={"LEDGER": os.environ[VARIABLE], "TASKS": os.environ["TASKS"]},
)  # fmt: skip
shop_agent("tasked", {"tools": [KILLS]}, tools=TOOLS)
