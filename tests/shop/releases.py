"""Two releases of one code: SHOP_RELEASE says which of them this process runs."""

from __future__ import annotations

import os

from agentruns import Agent, ToolContext, tool
from tests.shop.agents import act, call, shop_agent

RELEASE = os.environ.get("SHOP_RELEASE", "")


@tool
def ship(ctx: ToolContext, number: str) -> str:
    """Ship an order, and write down by which release."""
    return act("ship", ctx, release=RELEASE, number=number)


@tool(requires_approval=True)
def pay_back(ctx: ToolContext, cents: int) -> str:
    """Pay back, and write down by which release."""
    return act("pay_back", ctx, release=RELEASE, cents=cents)


TOOLS = [ship, pay_back]
WORK = [{"tools": [call("ship", number=str(number))]} for number in range(12)]


def declare(release: str) -> dict[str, Agent]:
    """Declare the agents of a release."""
    older = [shop_agent("kept", {"tools": [call("pay_back", cents=5)]}, WORK[0], tools=TOOLS, version="1")]
    if release == "2":  # beside the version of the release before, until no run of it is left
        return {
            "kept": older[0],
            "newer": shop_agent("kept", WORK[0], tools=TOOLS, version="2", instructions="Serve well."),
            "changed": shop_agent("changed", *WORK, tools=TOOLS, instructions="Serve well."),
        }
    return {"kept": older[0], "changed": shop_agent("changed", *WORK, tools=TOOLS)}


if RELEASE:
    declare(RELEASE)
