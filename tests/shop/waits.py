"""A tool whose result comes with an event; apart from the others, which releases without events use, too."""

from __future__ import annotations

from datetime import timedelta

from agentruns import Agent, Pending, ToolContext, tool
from tests.effects import Effects
from tests.shop.agents import TOOLS, act, call, shop_agent


@tool(awaits="payment")
def collect(ctx: ToolContext, cents: int) -> Pending:
    """Send an invoice; the payment of the customer is the result."""
    act("collect", ctx, cents=cents)
    return Pending(key=f"pi_{cents}", timeout=timedelta(days=3))


@tool(awaits="payment")
def invoice(ctx: ToolContext) -> Pending:
    """Send an invoice of its own for each call; the payment of the customer is the result."""
    act("invoice", ctx)
    return Pending(key=f"pi-{ctx.idempotency_key}", timeout=timedelta(days=3))


def paid() -> list[str]:
    """List the idempotency keys of the invoices that were sent."""
    return [line["key"] for line in Effects.from_environment().lines() if line["tool"] == "invoice"]


def collecting() -> Agent:
    """Declare an agent that sends an invoice, and posts what came of it."""
    calls = {"tools": [call("collect", cents=500), call("post", text="paid")]}
    return shop_agent("collects", calls, tools=[*TOOLS, collect])
