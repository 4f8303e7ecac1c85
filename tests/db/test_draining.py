"""A request to drain: a process that was there before it claims nothing, one that finds it does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections

from agentruns import ToolContext, run_agent, start_run, tool
from agentruns.engine import leases
from agentruns.engine.leases import claim
from agentruns.journal.connection import own_alias
from agentruns.models import Control, Run
from agentruns.services.sweep import sweep
from agentruns.utils.db import database_now
from tests.commands.running import run as command
from tests.db.helpers import outcomes
from tests.effects import Effects
from tests.shop.agents import call, post, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def restarted(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let this process have begun just now."""

    def restart() -> None:
        monkeypatch.setattr(leases, "_at_start", {})
        leases.request_at_start("default")

    restart()
    return restart


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Step the database's clock by so many hours."""

    def by(hours: float) -> None:
        later = timedelta(hours=hours)
        monkeypatch.setattr(leases, "database_now", lambda alias: database_now(alias) + later)

    return by


def test_a_process_claims_nothing_after_the_stamp_and_its_successor_does(
    effects: Effects, restarted: Any
) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    leases.drain("default")
    assert claim("default", run.pk) is None
    assert (sweep().found, Control.objects.sweepers().exists()) == (0, False), "a drained worker is none"
    assert sweep(drives=False).notified == 1
    result = run_agent("calls-post", "do it", "s2", idempotency_key="k2")
    assert (result.status, effects.lines()) == ("queued", [])
    assert run_agent("calls-post", "do it", "s1", idempotency_key="k1").status == "queued"
    restarted()
    assert sweep().completed == 2
    assert list(Control.objects.sweepers().values_list("name", flat=True)) == ["resume_runs"]
    assert list(Run.objects.values_list("attempts", flat=True)) == [0, 0]


@tool
def deploy(ctx: ToolContext) -> str:
    """Deploy, which is to drain the worker that does it."""
    return str(leases.drain("default"))


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
    django_assert_num_queries: Any,
) -> None:
    look = leases.DrainCheck("default")
    leases.drain("default")
    with django_assert_num_queries(0):
        assert not look()
    look.looked -= leases.DRAIN_CHECK_SECONDS

    def refuse(*statement: Any) -> Any:
        raise OperationalError("the server is restarting")

    with connections[own_alias("default")].execute_wrapper(refuse):
        assert not look()
    look.looked -= leases.DRAIN_CHECK_SECONDS
    assert look() and look()


def test_the_command_waits_for_what_is_driven_and_names_what_stays(restarted: Any) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    lease: Any = claim("default", run.pk)
    said = command("drain_runs", "--timeout=0.1")
    assert (said.code, str(run.pk) in said.out, "recovery takes over its run" in said.out) == (1, True, True)
    said = command("drain_runs", "--timeout=0.1", "--json")
    assert (said.code, said.lines) == (1, [{"drained": False, "runs": [str(run.pk)]}])
    lease.release()
    said = command("drain_runs", "--json")
    assert (said.code, said.lines) == (0, [{"drained": True, "runs": []}])


@pytest.mark.parametrize("hours", [-1, 1])
@pytest.mark.parametrize("when", ["before the request", "after it"])
def test_a_clock_that_steps_strands_no_new_worker_and_frees_no_old_one(
    when: str, hours: int, effects: Effects, restarted: Any, step: Any
) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    leases.drain("default")
    if when == "before the request":
        restarted()  # that was an earlier one
        step(hours)
        leases.drain("default")
    else:
        step(hours)
    assert claim("default", run.pk) is None
    restarted()
    assert (sweep().completed, effects.count()) == (1, 1)


def test_a_request_that_a_restore_lost_is_none_and_the_next_one_counts(restarted: Any, step: Any) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    step(-2)
    leases.drain("default")
    request = Control.objects.filter(name=Control.DRAINING)
    before = request.get().seen_at
    step(0)
    leases.drain("default")
    restarted()
    request.update(seen_at=before)
    assert not leases.is_draining("default"), "the journal is as it was two hours ago"
    step(-1)
    leases.drain("default")
    assert leases.is_draining("default")
    request.update(seen_at=before)
    assert leases.is_draining("default"), "this process was asked"
    assert claim("default", run.pk) is None
    restarted()
    assert sweep().completed == 1


def test_a_celery_worker_that_was_idle_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("agentruns.tasks")
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    monkeypatch.setattr(leases, "_at_start", {})
    assert tasks.signals.worker_init.send(sender=None)
    leases.drain("default")
    assert claim("default", run.pk) is None
