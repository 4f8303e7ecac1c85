"""A tool or a model that hangs for ever keeps its run for AGENTRUNS_TOOL_TIMEOUT and no longer."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from agentruns import Agent, ModelReply, ModelRequest, ToolContext, tool
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.crash import child
from tests.crash.processes import Forked, expire_lease, finish, start, wait_for
from tests.db.helpers import outcomes
from tests.effects import Effects
from tests.shop.agents import act, call, misfortune, shop_agent
from tests.shop.models import Order

pytestmark = [pytest.mark.django_db(transaction=True)]

PATIENCE = 2.0


@tool
def reports(ctx: ToolContext) -> str:
    """Say that it goes on, for longer than a silent handler may take."""
    Effects.from_environment().record("at:reports")
    for _ in range(25):
        time.sleep(0.2)
        ctx.heartbeat()
    return act("reports", ctx)


@tool(timeout=30)
def has_time(ctx: ToolContext) -> str:
    """Take long, as it declares."""
    Effects.from_environment().record("at:has_time")
    time.sleep(5)
    return act("has_time", ctx)


@tool(transactional=True)
def writes(ctx: ToolContext) -> str:
    """Write for long."""
    Effects.from_environment().record("at:writes")
    time.sleep(5)
    Order.objects.create(number="W1", customer="Ann", total_cents=1)
    return "written"


@tool
def asks_whether_to_stop(ctx: ToolContext) -> str:
    """Stop when nobody waits any more."""
    Effects.from_environment().record("at:asks_whether_to_stop")
    while not ctx.is_cancelled():
        time.sleep(0.1)
    return act("asks_whether_to_stop", ctx)


PATIENT = [reports, has_time, writes]
for one in (*PATIENT, asks_whether_to_stop):
    shop_agent(one.name, {"tools": [call(one.name)]}, tools=[one])


class Hanging:
    """A model object that hangs in the process of which a test says so."""

    identity = "hanging"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Answer, sooner or later."""
        misfortune("model:before")
        return ModelReply([{"type": "text", "text": "there"}], "end_turn")


Agent("hangs", instructions="Hang.", model=Hanging())


def serve(orders: child.Orders, pipe: Connection) -> None:
    """Serve, with the agents of this module."""
    child.serve(orders, pipe)


def hanging(agent: str, place: str, effects: Effects, gate: Path) -> tuple[Forked, Run]:
    """Start a worker that hangs at a place; return it when nothing extends its lease any more."""
    gate.touch()
    where = {"SHOP_SLOW": place, "SHOP_GATE": str(gate)}
    worker = start("run", agent, "s1", serve=serve, patience=PATIENCE, **where)
    wait_for(lambda: bool(effects.count(f"at:{place}")), "the worker to hang")
    run = Run.objects.get()
    expire_lease(run)
    return worker, run


@pytest.mark.parametrize(("agent", "status"), [("calls-post", "orphaned"), ("calls-lookup", "completed")])
def test_a_tool_that_hangs_is_in_doubt_by_its_class(
    agent: str, status: str, effects: Effects, tmp_path: Path
) -> None:
    name, gate = agent.removeprefix("calls-"), tmp_path / "gate"
    worker, run = hanging(agent, f"{name}:before", effects, gate)
    sweep()
    assert Run.objects.get().status == status
    gate.unlink()
    finish(worker)
    assert Run.objects.get().status == status
    assert Message.objects.filter(kind="late_result").count() == 1
    assert problems(run.session_id) == []


def test_a_model_that_hangs_keeps_no_run(effects: Effects, tmp_path: Path) -> None:
    worker, run = hanging("hangs", "model:before", effects, tmp_path / "gate")
    assert sweep().completed == 1
    (tmp_path / "gate").unlink()
    finish(worker)
    run = Run.objects.get()
    assert (run.status, run.output, run.step, problems(run.session_id)) == ("completed", "there", 1, [])


def test_a_handler_that_nobody_waits_for_is_told_so(effects: Effects) -> None:
    worker = start("run", "asks_whether_to_stop", "s1", serve=serve, patience=PATIENCE)
    finish(worker)
    run = Run.objects.get()
    assert (run.status, outcomes(run), effects.count()) == (
        "completed",
        ["ok"],
        2,
    )  # nobody had taken it over


@pytest.mark.parametrize("patient", [each.name for each in PATIENT])
def test_a_tool_that_is_at_work_keeps_its_run(patient: str, effects: Effects, settings: Any) -> None:
    if patient == "writes" and connection.vendor == "sqlite":
        pytest.skip("its transaction is the one writer: not even the lease can be extended")
    worker = start("run", patient, "s1", serve=serve, patience=PATIENCE)
    wait_for(lambda: bool(effects.count(f"at:{patient}")), "the handler")
    until = time.monotonic() + 4.5
    while time.monotonic() < until:
        assert sweep().driven == 0
        time.sleep(0.2)
    finish(worker)
    run = Run.objects.get()
    assert (run.status, outcomes(run), run.attempts) == ("completed", ["ok"], 0)
