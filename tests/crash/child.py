"""What a process of its own does on the test's database: one thing, or some that faults are to meet.

`serve` ends of the first error; `perform` stops at a crash point, asks what to do, and tells what went wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django
import time_machine

django.setup()

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import F

from agentruns import (
    Agent,
    ModelReply,
    ModelRequest,
    RunContext,
    ToolContext,
    approve,
    cancel_run,
    get_run,
    resume_run,
    run_agent,
    send_message,
    start_run,
    tool,
)
from agentruns.conf import settings
from agentruns.engine.worker import advance
from agentruns.exceptions import AgentRunsError
from agentruns.journal.connection import journal_alias
from agentruns.providers.base import ProviderError
from agentruns.services.sweep import crew_of, sweep
from agentruns.testing import ScriptedModel
from agentruns.utils import failpoints
from tests.effects import VARIABLE, Effects
from tests.mcp.agents import POST, TOOLS as OF_SERVER, write_to
from tests.shop.agents import TOOLS, act, call, misfortune, shop_agent
from tests.shop.models import Order
from tests.shop.waits import collect
from tests.statements import broken_commit


@tool(transactional=True)
def tally(number: str) -> str:
    """Count one more on an order: what ran twice shows."""
    Order.objects.filter(number=number).update(refunded_cents=F("refunded_cents") + 1)
    return "counted"


CALLS = [
    call("post", text="hello"), call("charge", cents=700), call("lookup", number="A1"),
    call("tally", number="A1"),
]  # fmt: skip


class Echo(ScriptedModel):
    """Looks an order up, then says what it was told beforehand."""

    def propose(self, request: ModelRequest) -> ModelReply:
        reply = super().propose(request)
        told = f"{request.system} {' '.join(tool['name'] for tool in request.tools)}"
        is_call = reply.stop_reason == "tool_use"
        return reply if is_call else replace(reply, content=[{"type": "text", "text": told}])


def said(run: RunContext) -> str:
    """Say what the process that starts the run was told to."""
    return os.environ.get("SHOP_SAYS", "nothing")


shop_agent("every-kind", {"tools": CALLS}, tools=[*TOOLS, tally], instructions=said)
shop_agent(
    "first-a-server", {"tools": [POST, *CALLS[1:]]}, tools=[*OF_SERVER, *TOOLS, tally], instructions=said
)
shop_agent(
    "first-waits",
    {"tools": [call("collect", cents=500), *CALLS[1:]]},
    tools=[*TOOLS, collect, tally],
    instructions=said,
)
shop_agent("asks-first", {"tools": [call("refund", cents=5000), *CALLS]}, tools=[*TOOLS, tally])


def chosen(run: RunContext) -> list[str]:
    """Choose what the process that starts the run was told to."""
    return ["lookup", os.environ.get("SHOP_TOOL", "post")]


Agent(
    "made",
    instructions=said,
    tools=TOOLS,
    tools_for=chosen,
    model=Echo([{"tools": [call("lookup", number="A1")]}, {"text": "told"}]),
)


@tool
def write(ctx: ToolContext) -> str:
    """Write a long letter."""
    act("write", ctx)
    return "long " * 1000


class Minding(ScriptedModel):
    """Refuses each conversation with the letter, also with a part of it."""

    def propose(self, request: ModelRequest) -> ModelReply:
        if "long long" in str(request.messages):
            raise ProviderError("too long", disposition="fail", status=413)
        return super().propose(request)


WRITES = Minding([{"tools": [call("write")]}, {"text": "written"}])
Agent("minding", instructions="Write.", tools=[write], model=WRITES)


class Asked:
    """A model that notes each request outside, with places to die before and after it."""

    def __init__(self, identity: str, inner: ScriptedModel | None = None) -> None:
        self.identity, self.inner = identity, inner

    def propose(self, request: ModelRequest) -> ModelReply:
        misfortune(f"{self.identity}:before")
        Effects.from_environment().record(self.identity, step=request.step)
        misfortune(f"{self.identity}:after")
        if self.inner is None:
            usage = {"input_tokens": 1}
            raise ProviderError("busy", disposition="retry", type="overloaded_error", usage=usage)
        return replace(self.inner.propose(request), usage={"input_tokens": 100, "output_tokens": 10})


Agent(
    "falls-back",
    instructions="Serve the shop.",
    tools=TOOLS,
    model=Asked("first"),
    fallback=Asked("second", ScriptedModel([{"tools": [call("charge", cents=5)]}, {"text": "all done"}])),
)


def work() -> None:
    """Be a worker with eight threads until killed."""
    crew = crew_of(8, lambda: False)
    while True:
        with suppress(DatabaseError):  # busy; the next sweep goes on
            sweep(crew=crew)
        time.sleep(0.1)  # waits: as a worker does that found nothing


def sweep_by_threads() -> None:
    """Sweep once, and wait for the threads that drive the runs."""
    crew = crew_of(8, lambda: False)
    sweep(crew=crew)
    if crew is not None:
        crew.join()


ACTIONS: dict[str, Callable[..., object]] = {
    "work": work,
    "run": lambda agent, session: run_agent(agent, "do it", session, idempotency_key=session),
    "start": lambda agent, session: start_run(agent, "do it", session),
    "send": lambda session, text, agent, key=None: send_message(
        session, text, agent=agent, idempotency_key=key
    ),
    "sweep": sweep_by_threads,
    "approve": lambda approval_id: approve(approval_id, None),
    "cancel": lambda run_id: cancel_run(run_id, reason="changed my mind"),
    "advance": lambda run_id: advance(get_run(run_id), "default"),
    "resume": resume_run,
}


@dataclass(frozen=True)
class Orders:
    """What a forked process is to do: actions, and the crash point at which it stops and asks, or dies."""

    actions: list[tuple[str, ...]]
    point: str = ""
    dies: bool = False
    lease: float = 1
    beats: bool = True
    beat: float = 0  # seconds; else a quarter of the lease
    patience: float = 3600  # AGENTRUNS_TOOL_TIMEOUT
    skew: float = 0  # seconds by which the clock of the machine is fast
    module: str = ""  # imported for the agents that it declares
    database: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def serve(orders: Orders, pipe: Connection) -> None:
    """Do it as a program would: in its own environment alone, and what it raises ends it."""
    os.environ.clear()
    prepare(orders)
    for name, *arguments in orders.actions:
        ACTIONS[name](*arguments)
    connections.close_all()


def prepare(orders: Orders) -> None:
    """Let this process work on the database of the orders."""
    connections["default"].settings_dict.update(orders.database)
    os.environ.update(orders.environment)
    write_to(os.environ.get(VARIABLE, os.devnull))
    if orders.skew:  # as on another machine: its wall clock is wrong, its uptime is not
        there = datetime.now(UTC) + timedelta(seconds=orders.skew)
        time_machine.travel(there, tick=True).start()
    settings.LEASE_SECONDS = orders.lease
    settings.TOOL_TIMEOUT = orders.patience
    settings.HEARTBEAT_SECONDS = (orders.beat or orders.lease / 4) if orders.beats else 3600
    if orders.dies:
        failpoints.arm(orders.point)
    if orders.module:
        import_module(orders.module)


def perform(orders: Orders, pipe: Connection) -> None:
    """Do it, and send the errors that the database caused; a call that raised one is repeated once."""
    prepare(orders)
    errors: list[str] = []
    with ExitStack() as faults:
        if orders.point and not orders.dies:
            failpoints.arm(orders.point, lambda: _ask(pipe, faults))
        for action in orders.actions:
            if not _act(action, errors):
                _act(action, errors)
    connections.close_all()
    pipe.send(errors)


def _act(action: tuple[str, ...], errors: list[str]) -> bool:
    try:
        ACTIONS[action[0]](*action[1:])
    except (DatabaseError, InterfaceError, AgentRunsError) as error:
        errors.append(f"{action[0]}: {type(error).__name__}: {error}")
        connections.close_all()  # as every request and every round of a worker does
        return False
    return True


def _ask(pipe: Connection, faults: ExitStack) -> None:
    """Say that the point is reached, with the backend at work; wait for what is to happen."""
    connection = connections[journal_alias("default")]
    connection.ensure_connection()
    pipe.send(connection.connection.info.backend_pid if connection.vendor == "postgresql" else None)
    lost = pipe.recv()
    if lost:
        left = faults.enter_context(broken_commit(1, went_through=lost == "committed"))
        faults.callback(_must_be_lost, left)


def _must_be_lost(left: list[int]) -> None:
    assert left[0] <= 0, "the COMMIT never came"
