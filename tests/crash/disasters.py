"""Agents whose tools, reconcilers and hooks can die, and the forked process they die in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F

from agentruns import NotOccurred, Occurred, ToolContext, Unknown, tool
from agentruns.conf import settings
from agentruns.utils import failpoints
from tests.crash.child import ACTIONS, Orders, prepare
from tests.crash.processes import Forked, start
from tests.db.helpers import only_the_first_is_late
from tests.effects import VARIABLE, Effects
from tests.shop.agents import TOOLS, act, call, misfortune, shop_agent
from tests.shop.models import Order
from tests.statements import at_each_commit


def asked(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred | Unknown:
    """Ask the ledger by key, or answer as the test wants; and perhaps die of it."""
    misfortune("ask:before")
    answer = os.environ.get("DISASTER_ANSWER", "")
    if answer == "raises":
        raise ConnectionError("the carrier does not answer")
    if answer == "hangs":
        time.sleep(3600)  # waits: until the process ends
    happened = Effects.from_environment().count(ctx.idempotency_key)
    misfortune("ask:after")
    if answer == "unknown":
        return Unknown("the carrier has no record")
    return Occurred("shipped, says the carrier") if happened else NotOccurred()


@tool(reconcile=asked)
def ship(ctx: ToolContext) -> str:
    """Ship the order."""
    return act("ship", ctx)


@tool(reconcile=asked, timeout=0.3)
def ship_soon(ctx: ToolContext) -> str:
    """Ship the order, in time."""
    return act("ship", ctx)


@tool(transactional=True)
def tally_up(number: str) -> str:
    """Count one more on an order, then tell the outside of it: what ran twice shows."""
    misfortune("tally:before")
    Order.objects.filter(number=number).update(refunded_cents=F("refunded_cents") + 1)
    transaction.on_commit(partial(_told, number))
    misfortune("tally:after")
    return "counted"


def _told(number: str) -> None:
    misfortune("hook:before")
    Effects.from_environment().record("hook", tool="hook", number=number)


@tool(transactional=True, requires_approval=True)
def tally_asked(number: str) -> str:
    """Count one more on an order, after a person said so."""
    return str(tally_up(number))


@tool(safe_to_retry=True)
def leave(ctx: ToolContext, how: str) -> str:
    """End the process, until the test says that it is cured."""
    Effects.from_environment().record(ctx.idempotency_key, tool="leave")
    if "DISASTER_CURED" not in os.environ:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    return "stayed"


FAULTS = ExitStack()  # for as long as the process lives
DISASTERS = [*TOOLS, ship, ship_soon, tally_up, tally_asked, leave]

for _name, _call in {
    "ships": call("ship"),
    "ships-soon": call("ship_soon"),
    "tallies": call("tally_up", number="A1"),
    "tallies-asked": call("tally_asked", number="A1"),
    "exits": call("leave", how="exit"),
    "kills-itself": call("leave", how="kill"),
}.items():
    shop_agent(_name, {"tools": [_call]}, tools=DISASTERS)

shop_agent("surfaces", {"tools": [call("post", text="hello")]}, on_orphan="surface")


def die_before_commit(nth: int) -> None:
    """Kill this process just before the nth commit of its thread: what it wrote since is undone."""
    left = [nth]

    def commit_or_die(commit: Callable[[], Any], undo: Callable[[], Any]) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit()

    FAULTS.enter_context(at_each_commit(commit_or_die))


def stop_at(point: str) -> None:
    """Let this process freeze, once, where it would be killed: a host that sleeps."""
    failpoints.arm(point, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def perform(orders: Orders, pipe: Connection) -> None:
    """Do what a forked process is ordered to do."""
    os.environ.clear()
    prepare(orders)
    settings.MAX_ATTEMPTS = int(os.environ.get("DISASTER_ATTEMPTS", "5"))
    # Only reconcile may be late: a slow machine shall not interrupt a handler that is to die.
    only_the_first_is_late(pytest.MonkeyPatch(), lambda: True, times=0)
    if commit := os.environ.get("DISASTER_COMMIT"):
        die_before_commit(int(commit))
    if orders.point and not orders.dies:
        stop_at(orders.point)
    for name, *arguments in orders.actions:
        ACTIONS[name](*arguments)
    connections.close_all()


def forked(effects: Effects, *action: str, point: str = "", freezes: bool = False, **given: Any) -> Forked:
    """Start an action on this test's database in a process that dies, or freezes, at a crash point."""
    dies = bool(point) and not freezes
    ledger = {VARIABLE: str(effects.path)}
    return start(*action, serve=perform, point=point, dies=dies, **{"lease": 60, **ledger, **given})
