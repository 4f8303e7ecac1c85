"""What a type checker says of declarations, for test_typing.py.

Each `type: ignore` names the one error that has to be there: strict mypy complains about any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

from agentruns import Agent, RunResult, ToolContext, run_agent, tool
from agentruns.testing import ScriptedModel
from agentruns.tools import Tool

MODEL = ScriptedModel([{"text": "Hello."}])


@tool
def find(order: str) -> str:
    """Find an order."""
    return order


@tool(
    requires_approval=lambda args, ctx: args["cents"] > 10_000,
    holds=lambda args, ctx: {"order": args["order"]},
    safe_to_retry=True,
    risk="high",
)
def refund(ctx: ToolContext, order: str, cents: int = 0) -> list[str]:
    """Refund an order."""
    return [order]


def plain(order: str) -> str:
    """Find an order."""
    return order


def right(ctx: ToolContext) -> None:
    """A tool is called as the function was; what comes back keeps its type."""
    assert_type(find("A1"), str)
    assert_type(refund(ctx, "A1", cents=5), list[str])
    agent = Agent("typed", instructions="Help.", tools=[find, refund], model=MODEL)
    assert_type(run_agent(agent, "do it", "s1", idempotency_key="k"), RunResult)
    assert_type(agent.run("do it"), RunResult)
    declared: Tool[[str], str] = tool(plain, safe_to_retry=True)
    declared("A1")


def wrong_calls(ctx: ToolContext) -> None:
    """Only looked at by the type checker."""
    find(1)  # type: ignore[arg-type]
    refund(ctx, "A1", euros=5)  # type: ignore[call-arg]
    find("A1") + 1  # type: ignore[operator]


# Found when it runs, too.
WRONG: list[Callable[[], Any]] = [
    lambda: tool(plain, safe_to_retry="yes"),  # type: ignore[call-overload]
    lambda: tool(safe_to_retry="yes")(plain),  # type: ignore[call-overload]
    lambda: tool(plain, retries=3),  # type: ignore[call-overload]
    lambda: tool(plain, risk="enormous"),  # type: ignore[call-overload]
    lambda: tool(plain, requires_approval=True, approvals="two"),  # type: ignore[call-overload]
    lambda: Agent("plain", instructions="Help.", tools=[plain], model=MODEL),  # type: ignore[list-item]
    lambda: Agent("steps", instructions="Help.", model=MODEL, max_steps="5"),  # type: ignore[arg-type]
]
