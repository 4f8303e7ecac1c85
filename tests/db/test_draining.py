"""A stamp by the database clock: what was started before it claims nothing, what comes after it does."""

from __future__ import annotations

import json
import time
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError

from agentruns import ToolContext, run_agent, start_run, tool
from agentruns.engine import leases
from agentruns.engine.leases import claim
from agentruns.models import Control, Run
from agentruns.services.sweep import sweep
from tests.db.helpers import outcomes
from tests.effects import Effects
from tests.shop.agents import call, post, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process have loaded its code just now."""

    def restart() -> None:
        time.sleep(0.01)  # SQLite's clock counts milliseconds
        monkeypatch.setattr(leases, "LOADED", leases.uptime())
        monkeypatch.setattr(leases, "_process_started", {})

    return restart


def test_a_process_claims_nothing_after_the_stamp_and_its_successor_does(
    effects: Effects, restarted: Any
) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    leases.drain("default")
    assert claim("default", run.pk) is None
    assert (sweep().found, sweep(drives=False).notified) == (0, 1)
    result = run_agent("calls-post", "do it", "s2", idempotency_key="k2")
    assert (result.status, effects.lines()) == ("queued", [])
    assert run_agent("calls-post", "do it", "s1", idempotency_key="k1").status == "queued"
    restarted()
    assert sweep().completed == 2
    assert list(Run.objects.values_list("attempts", flat=True)) == [0, 0]


@tool
def deploy(ctx: ToolContext) -> str:
    """Deploy, which is to drain the worker that does it."""
    leases.drain("default")
    return "deployed"


def test_a_drive_ends_at_its_next_boundary(
    effects: Effects, restarted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "DRAIN_CHECK_SECONDS", 0)
    agent = shop_agent("deploys", {"tools": [call("deploy"), call("post", text="up")]}, tools=[deploy, post])
    result = run_agent(agent, "deploy it", "s1", idempotency_key="k1")
    run = Run.objects.get()
    assert (result.status, outcomes(run), effects.lines()) == ("queued", ["ok"], [])
    assert (run.lease_expires_at, run.attempts) == (None, 0)
    restarted()
    assert (sweep().completed, effects.count()) == (1, 1)


def test_looking_costs_nothing_until_it_is_time_and_a_database_out_of_reach_is_no_stamp(
    django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = leases.DrainCheck("default")
    leases.drain("default")
    with django_assert_num_queries(0):
        assert not look()
    look.looked -= leases.DRAIN_CHECK_SECONDS

    def unreachable(alias: str) -> bool:
        raise OperationalError("the server is restarting")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "is_draining", unreachable)
        assert not look()
    look.looked -= leases.DRAIN_CHECK_SECONDS
    assert look() and look()


def test_the_command_waits_for_what_is_driven_and_names_what_stays(restarted: Any) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    lease = claim("default", run.pk)
    assert lease is not None
    out = StringIO()
    with pytest.raises(SystemExit) as exit_code:
        call_command("drain_runs", timeout=0.1, stdout=out)
    assert (exit_code.value.code, str(run.pk) in out.getvalue()) == (1, True)
    assert "recovery takes over its run" in out.getvalue()
    with pytest.raises(SystemExit):
        call_command("drain_runs", "--timeout=0.1", "--json", stdout=(out := StringIO()))
    assert json.loads(out.getvalue()) == {"drained": False, "runs": [str(run.pk)]}
    lease.release()
    call_command("drain_runs", "--json", stdout=(out := StringIO()))
    assert json.loads(out.getvalue()) == {"drained": True, "runs": []}


def test_the_stamp_is_no_sweeper(restarted: Any) -> None:
    leases.drain("default")
    sweep()
    assert not Control.objects.sweepers().exists(), "a drained worker is none"
    restarted()
    sweep()
    assert list(Control.objects.sweepers().values_list("name", flat=True)) == ["resume_runs"]
