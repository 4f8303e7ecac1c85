"""The shop's agent: one tool of each kind, each acting on the outside ledger or on an Order."""

from __future__ import annotations

import os
import signal
import time

from agentruns import Agent, ModelRequest, NotOccurred, Occurred, ToolContext, Unknown, tool
from agentruns.testing import ScriptedModel
from tests.effects import Effects
from tests.shop.models import Order
from tests.waiting import pause


def misfortune(where: str) -> None:
    """Die, hang or fail at a place inside a handler, as the test that started this process asked."""
    if os.environ.get("SHOP_KILL") == where:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("SHOP_FAIL") == where:
        raise ConnectionError("the line is dead")
    if where in os.environ.get("SHOP_SLOW", "").split():  # each place may have a gate of its own
        Effects.from_environment().record(f"at:{where}")
        while os.path.exists(os.environ["SHOP_GATE"].replace("{where}", where)):
            pause()


def act(name: str, ctx: ToolContext, **facts: object) -> str:
    """Let an effect happen outside, with places to die before and after it."""
    misfortune(f"{name}:before")
    Effects.from_environment().record(ctx.idempotency_key, tool=name, attempt=ctx.attempt, **facts)
    time.sleep(float(os.environ.get("SHOP_PACE", "0")))  # waits: as the test asks
    misfortune(f"{name}:after")
    return f"{name} done"


@tool
def post(ctx: ToolContext, text: str) -> str:
    """Post to the channel: declares nothing."""
    return act("post", ctx, text=text)


@tool(safe_to_retry=True)
def lookup(ctx: ToolContext, number: str) -> str:
    """Look an order up."""
    return act("lookup", ctx, number=number)


@tool(safe_to_retry=True, parallel=True)
def search(ctx: ToolContext, query: str) -> str:
    """Search the knowledge base."""
    return act("search", ctx, query=query)


@tool(transactional=True)
def annotate(ctx: ToolContext, number: str, note: str) -> str:
    """Write a note on an order."""
    Order.objects.filter(number=number).update(note=note)
    misfortune("annotate:after")
    return "noted"


def charged(ctx: ToolContext, args: dict[str, object]) -> Occurred | NotOccurred | Unknown:
    """Ask the ledger by key, or say what the test wants said."""
    misfortune("charged:before")
    if os.environ.get("SHOP_RECONCILE") == "unknown":
        return Unknown("the bank does not answer")
    happened = Effects.from_environment().count(ctx.idempotency_key)
    return Occurred("charge done, says the bank") if happened else NotOccurred()


@tool(reconcile=charged)
def charge(ctx: ToolContext, cents: int) -> str:
    """Charge the card."""
    return act("charge", ctx, cents=cents)


@tool(requires_approval=lambda args, ctx: args["cents"] > 1000, risk="high")
def refund(ctx: ToolContext, cents: int) -> str:
    """Refund the customer."""
    return act("refund", ctx, cents=cents)


@tool
def broken(ctx: ToolContext) -> str:
    """Raise after its effect."""
    act("broken", ctx)
    raise ValueError("the printer is on fire")


TOOLS = [post, lookup, search, annotate, charge, refund, broken]


def call(name: str, **arguments: object) -> dict[str, object]:
    """One tool call of a scripted turn."""
    return {"name": name, "input": arguments}


def shop_agent(name: str, *turns: object, **options: object) -> Agent:
    """An agent over the shop's tools whose model says `turns`."""
    return Agent(
        name,
        instructions=options.pop("instructions", "Serve the shop."),  # type: ignore[arg-type]
        tools=options.pop("tools", TOOLS),  # type: ignore[arg-type]
        model=ScriptedModel([*turns, {"text": "all done"}]),
        starters=options.pop("starters", "anyone"),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


for _tool, _arguments in {
    "post": {"text": "hello"},
    "lookup": {"number": "A1"},
    "search": {"query": "returns"},
    "annotate": {"number": "A1", "note": "seen"},
    "charge": {"cents": 500},
    "refund": {"cents": 5000},
}.items():
    shop_agent(f"calls-{_tool}", {"tools": [call(_tool, **_arguments)]})

if os.environ.get("SHOP_SERVER"):  # a worker that is to use an MCP server
    from tests.mcp import agents as _agents  # noqa: F401

if os.environ.get("SHOP_FAMILIES"):  # a worker whose runs are to have child runs
    from tests.workers import families as _families  # noqa: F401

# The call under test in the middle of others: the first has a result, the last never starts.
shop_agent(
    "posts-in-the-middle",
    {"tools": [call("lookup", number="A1"), call("post", text="hello"), call("charge", cents=700)]},
)


def _orders(request: ModelRequest) -> dict[str, object]:
    misfortune("reply:before")
    return {"tools": [call("post", text="hello"), call("charge", cents=700)]}


shop_agent("thinks-twice", {"tools": [call("lookup", number="A1")]}, _orders)

shop_agent("breaks-twice", {"tools": [call("broken")]}, {"tools": [call("broken")]})

shop_agent("asks-and-searches", {"tools": [call("refund", cents=5000), call("search", query="refunds")]})

# Ten steps with every kind of tool, for the soak.
shop_agent(
    "soaked",
    {"tools": [call("lookup", number="A1"), call("post", text="one")]},
    {"tools": [call("search", query="x"), call("search", query="y"), call("search", query="z")]},
    {"tools": [call("charge", cents=500)]},
    {"tools": [call("annotate", number="A1", note="seen")]},
    {"tools": [call("refund", cents=5000), call("post", text="two")]},
    {"tools": [call("post", text="three"), call("post", text="four")]},
    {"tools": [call("broken")]},
    {"tools": [call("refund", cents=10)]},
    {"tools": [call("charge", cents=700), call("lookup", number="A1")]},
)
