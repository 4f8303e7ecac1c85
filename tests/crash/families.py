"""Agents that hand tasks to each other, for a process that is to be killed, and for the one that goes on."""

from __future__ import annotations

from tests.shop.agents import call, charge, lookup, shop_agent

errand = shop_agent("errand", {"tools": [call("lookup", number="A1"), call("charge", cents=700)]})
scout = shop_agent("crash-scout", {"tools": [call("errand", task="pay")]}, tools=[errand.as_tool()])
HAND_OVER = {"tools": [call("crash-scout", task="one"), call("crash-scout", task="two")]}
boss = shop_agent(
    "crash-parent",
    HAND_OVER,
    {"tools": [call("lookup", number="A2")]},
    tools=[scout.as_tool(), lookup, charge],
)
