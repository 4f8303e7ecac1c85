"""A tool or a model that hangs for ever keeps its run for AGENTRUNS_TOOL_TIMEOUT and no longer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection

from agentruns import ModelRequest, ToolContext, tool
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.crash.processes import Forked, expire_lease, finish, start, start_held
from tests.db.helpers import outcomes, sound
from tests.effects import Effects
from tests.shop.agents import act, call, misfortune, shop_agent
from tests.shop.models import Order
from tests.waiting import pause, wait_for

pytestmark = [pytest.mark.django_db(transaction=True)]

AT_MOST = 2.0  # waits: seconds of AGENTRUNS_TOOL_TIMEOUT in the child, which nothing here has to meet


def is_at_work() -> bool:
    """Let some time pass; return whether the test wants more of it."""
    pause()
    return os.path.exists(os.environ["SHOP_GATE"])


def work(ctx: ToolContext) -> None:
    """Go on for as long as the test wants."""
    Effects.from_environment().record(f"at:{ctx.tool_name}")
    while is_at_work():
        if ctx.tool_name == "reports":
            ctx.heartbeat()


@tool
def reports(ctx: ToolContext) -> str:
    """Say that it goes on, for longer than a silent handler may take."""
    work(ctx)
    return act("reports", ctx)


@tool(timeout=600)
def has_time(ctx: ToolContext) -> str:
    """Take long, as it declares."""
    work(ctx)
    return act("has_time", ctx)


@tool(transactional=True)
def writes(ctx: ToolContext) -> str:
    """Write for long."""
    work(ctx)
    Order.objects.create(number="W1", customer="Ann", total_cents=1)
    return "written"


@tool
def asks_whether_to_stop(ctx: ToolContext) -> str:
    """Stop when nobody waits any more."""
    Effects.from_environment().record("at:asks_whether_to_stop")
    while not ctx.is_cancelled():
        pause()
    return act("asks_whether_to_stop", ctx)


PATIENT = [reports, has_time, writes]
for one in (*PATIENT, asks_whether_to_stop):
    shop_agent(one.name, {"tools": [call(one.name)]}, tools=[one])


def hang(request: ModelRequest) -> dict[str, str]:
    """Answer, sooner or later: the model hangs in the process of which a test says so."""
    misfortune("model:before")
    return {"text": "there"}


shop_agent("hangs", hang)


def hanging(agent: str, place: str, effects: Effects, gate: Path) -> tuple[Forked, Run]:
    """Start a worker that hangs at a place; return it when nothing extends its lease any more."""
    worker, run = start_held(agent, place, effects, gate, module=__name__, patience=AT_MOST)
    expire_lease(run)
    return worker, run


@pytest.mark.parametrize(
    ("agent", "at", "status", "late"),
    [
        ("calls-post", "post:before", "orphaned", 1),
        ("calls-lookup", "lookup:before", "completed", 1),
        ("hangs", "model:before", "completed", 0),
    ],
)
def test_a_tool_or_a_model_that_hangs_is_in_doubt_by_its_class(
    agent: str, at: str, status: str, late: int, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    worker, run = hanging(agent, at, effects, gate)
    assert sweep().completed == (status == "completed")
    gate.unlink()
    finish(worker)
    run = sound(run)
    assert (run.status, Message.objects.filter(kind="late_result").count()) == (status, late)
    assert agent != "hangs" or (run.output, run.step) == ("there", 1)


def test_a_handler_that_nobody_waits_for_is_told_so(effects: Effects) -> None:
    worker = start("run", "asks_whether_to_stop", "s1", module=__name__, patience=AT_MOST)
    finish(worker)
    run = Run.objects.get()
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["ok"], 2), "nobody took it over"


@pytest.mark.parametrize("patient", [each.name for each in PATIENT])
def test_a_tool_that_is_at_work_keeps_its_run(patient: str, effects: Effects, tmp_path: Path) -> None:
    """Its lease is extended after its time without a word would be over; it is long, as machines stall."""
    if patient == "writes" and connection.vendor == "sqlite":
        pytest.skip("its transaction is the one writer: not even the lease can be extended")
    gate = tmp_path / "gate"
    gate.touch()
    worker = start(
        "run", patient, "s1", module=__name__, patience=AT_MOST, lease=60, beat=0.25, SHOP_GATE=str(gate)
    )
    wait_for(lambda: bool(effects.count(f"at:{patient}")), "the handler")
    ends = Run.objects.values_list("lease_expires_at", flat=True)
    later = ends.get() + timedelta(seconds=2 * AT_MOST)
    wait_for(lambda: ends.all().get() > later, "a heartbeat after more than that time")
    for _ in range(3):
        end = ends.get()
        wait_for(lambda end=end: ends.all().get() > end, "the lease to be extended")  # type: ignore[misc]
        assert sweep().driven == 0
    gate.unlink()
    finish(worker)
    run = Run.objects.get()
    assert (run.status, outcomes(run), run.attempts) == ("completed", ["ok"], 0)
