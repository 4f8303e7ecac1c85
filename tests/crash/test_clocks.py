"""Workers whose own clocks are wrong: nothing is asked, ended, delayed or expired at another time for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections

from agentruns import ToolContext, approve, cancel_run, start_run, tool
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run
from agentruns.services.approvals.decisions import expire_due
from agentruns.services.sweep import sweep
from agentruns.testing import frozen_clock
from agentruns.utils import clock
from agentruns.utils.db import database_now, uptime
from tests.crash import child
from tests.crash.processes import Forked, die, expire_lease, finish, start, start_held
from tests.db.helpers import outcomes
from tests.effects import Effects
from tests.shop.agents import act, call, charged, shop_agent

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite's clock is this machine's own"),
]

TIMEOUT = 300.0  # so long that no slow machine comes to its end
SLOW, FAST, TOMORROW = -600, 3600, 86_400


@tool(reconcile=charged, timeout=TIMEOUT)
def charge_in_time(ctx: ToolContext, cents: int) -> str:
    """Charge the card within seconds."""
    return act("charge_in_time", ctx, cents=cents)


@tool(requires_approval=True, expires_in=timedelta(minutes=30))
def wire(ctx: ToolContext) -> str:
    """Wire the money once somebody has said yes."""
    return act("wire", ctx)


shop_agent("charges-in-time", {"tools": [call("charge_in_time", cents=700)]}, tools=[charge_in_time])
shop_agent("clocked", {"tools": [call("wire")]}, tools=[wire])
shop_agent("hurries", {"tools": [call("lookup", number="A1")]}, deadline=timedelta(minutes=10))


def process(*action: str, **options: Any) -> Forked:
    """Start a child that knows the agents of this module."""
    return start(*action, module=__name__, **options)


def acted(effects: Effects) -> int:
    return sum("tool" in line for line in effects.lines())


def swept_in_time() -> int:
    """Sweep when the handler's time is over, by the database's clock; return how many runs it completed."""
    with frozen_clock() as time:
        time.forward(seconds=TIMEOUT + 10)
        return sweep().completed


@pytest.mark.parametrize(("first", "second"), [(SLOW, 0), (0, FAST), (0, TOMORROW), (SLOW, TOMORROW)])
def test_nobody_is_asked_while_the_first_attempt_is_at_work(
    first: int, second: int, effects: Effects, tmp_path: Path
) -> None:
    at, gate = "charge_in_time:before", tmp_path / "gate"
    worker, run = start_held("charges-in-time", at, effects, gate, module=__name__, beats=False, skew=first)
    expire_lease(run)
    finish(process("sweep", skew=second))
    assert acted(effects) == 0
    gate.unlink()
    finish(worker)
    assert acted(effects) == 1
    assert swept_in_time() == 1
    assert (acted(effects), outcomes(run), problems(run.session_id)) == (1, ["ok"], [])


def test_a_run_is_not_delayed_to_tomorrow(effects: Effects) -> None:
    at = "charge_in_time:after"
    run = die("run", "charges-in-time", "s1", at=at, module=__name__, skew=TOMORROW)
    assert sweep().completed == 0, "its handler may be at work"
    assert swept_in_time() == 1
    assert (acted(effects), outcomes(run)) == (1, ["ok"])


@pytest.mark.parametrize(("starter", "driver"), [(0, FAST), (0, TOMORROW), (-FAST, 0), (-TOMORROW, FAST)])
def test_a_deadline_that_is_not_over_ends_no_run(starter: int, driver: int, effects: Effects) -> None:
    finish(process("start", "hurries", "s1", skew=starter))
    finish(process("sweep", skew=driver))
    run = Run.objects.get()
    assert (run.status, run.error, acted(effects)) == ("completed", "", 1)


@pytest.mark.parametrize("skew", [-FAST, -TOMORROW, TOMORROW])
def test_a_card_is_not_expired_at_birth(skew: int, effects: Effects) -> None:
    start_run("clocked", "do it", "s1")
    finish(process("sweep", skew=skew))
    approval = Approval.objects.get()
    assert approval.expires_at is not None
    assert abs(approval.expires_at - approval.requested_at - timedelta(minutes=30)) < timedelta(seconds=1)
    finish(process("sweep", skew=TOMORROW))
    assert expire_due() == 0
    approve(approval.pk, None)
    assert sweep().completed == 1
    assert acted(effects) == 1


def test_a_cancel_is_not_repeated_too_early(effects: Effects, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    worker, run = start_held("calls-post", "post:before", effects, gate, lease=60)
    assert cancel_run(run.pk).status == "running"
    finish(process("cancel", str(run.pk), lease=60, skew=FAST))
    assert Run.objects.get().status == "running"
    gate.unlink()
    finish(worker)
    assert (Run.objects.get().status, outcomes(run), acted(effects)) == ("cancelled", ["ok"], 1)


def tell(orders: child.Orders, pipe: Connection) -> None:
    """Tell the time by each clock."""
    child.prepare(orders)
    pipe.send((datetime.now(UTC), uptime(), clock.now("default")))
    connections.close_all()


def test_a_child_has_a_clock_of_its_own() -> None:
    teller = start("tell", serve=tell, skew=TOMORROW)
    wall, since, journal = teller.hear()
    finish(teller)
    assert abs(wall - datetime.now(UTC) - timedelta(days=1)) < timedelta(minutes=1)
    assert abs(since - uptime()) < 60
    assert abs(journal - database_now("default")) < timedelta(minutes=1)
