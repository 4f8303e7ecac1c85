"""The agents of the recorded journals. Never changed: their runs go on by what is declared here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from agentruns import Agent, ToolContext, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.testing import ScriptedModel
from tests.effects import Effects

while_at_work: list[Callable[[], None]] = []  # called by `find`, at most once each


@tool(safe_to_retry=True)
def find(ctx: ToolContext, number: str) -> str:
    """Find an order."""
    while while_at_work:
        while_at_work.pop()()
    Effects.from_environment().record(ctx.idempotency_key, tool="find", attempt=ctx.attempt)
    return f"{number}: paid"


@tool(requires_approval=True)
def refund(ctx: ToolContext, number: str, cents: int) -> str:
    """Refund an order."""
    Effects.from_environment().record(ctx.idempotency_key, tool="refund", cents=cents)
    return f"{cents} refunded"


@tool(requires_approval=True, expires_in=timedelta(milliseconds=1))
def offer(cents: int) -> str:
    """Offer a voucher, if somebody says so at once."""
    return f"{cents} offered"


@tool
def wire(text: str) -> str:
    """Send a wire, and never hear of it again."""
    raise ToolDurabilityError("the bank's answer was lost")


def call(name: str, **arguments: object) -> dict[str, object]:
    """One tool call of a turn."""
    return {"name": name, "input": arguments}


def declare() -> dict[str, Agent]:
    """Declare them all, by name."""
    ask = {"text": "I would refund it.", "tools": [call("refund", number="A1", cents=500)]}
    told = {
        "decided": [
            {
                "tools": [
                    call("find", number="A1"),
                    *(call("refund", number="A1", cents=n) for n in (1, 2, 3)),
                ]
            },
            {"tools": [call("offer", cents=4)]},
            {"tools": [call("refund", number="A1", cents=2)]},
        ],
        "asks": [ask],
        "finds": [{"tools": [call("find", number="A1")]}, ask],
        "wires": [{"tools": [call("wire", text="x"), call("find", number="A1")]}],
        "refuses": [{"content": [{"type": "text", "text": "No."}], "stop_reason": "refusal"}],
    }
    tools = {
        "decided": [find, refund, offer],
        "asks": [refund],
        "finds": [find, refund],
        "wires": [wire, find],
    }
    return {
        name: Agent(
            name,
            instructions="Serve the shop.",
            tools=tools.get(name, []),
            model=ScriptedModel([*turns, {"text": "all done"}]),
        )
        for name, turns in told.items()
    }
