"""An agent whose payments a standing rule approves, for a process that dies, and for who goes on."""

from __future__ import annotations

from typing import Any

from agentruns import Agent, ToolContext, tool
from agentruns.testing import Script
from tests.shop.agents import act, call


@tool(requires_approval=True)
def pay(ctx: ToolContext, cents: int) -> str:
    """Pay."""
    return act("pay", ctx, cents=cents, call=ctx.call_id)


def payer(name: str, *amounts: int) -> Agent:
    """Make an agent whose first reply makes a payment for each of `amounts`."""
    turns: list[Any] = [{"tools": [call("pay", cents=cents) for cents in amounts]}, {"text": "done"}]
    return Agent(name, instructions="Pay.", tools=[pay], model=Script(turns, name))


one, two = payer("pays-once", 4000), payer("pays-twice", 4000, 4000)
