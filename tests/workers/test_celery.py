"""Real Celery workers and a real broker: the message is only a doorbell, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import transaction

from agentruns import approve, start_run, tasks
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from agentruns.tasks import advance_run, sweep_runs
from tests.celery_app import app
from tests.db.helpers import outcomes
from tests.effects import Effects
from tests.mcp import agents  # noqa: F401 - for this process as well
from tests.programs import run_program
from tests.servers import Broker
from tests.shop.agents import shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

Workers = Callable[..., subprocess.Popen[str]]


def ended(run: Run, status: str = "completed") -> bool:
    """Whether a run has come to a status."""
    return Run.objects.filter(pk=run.pk, status=status).exists()


def test_a_message_is_sent_on_commit_and_one_too_many_does_nothing(
    broker: Broker, worker: Workers, effects: Effects
) -> None:
    with transaction.atomic():
        run = start_run("calls-refund", "do it", "s1", idempotency_key="k1")
        for _ in range(4):
            advance_run.delay(str(run.pk))  # too early: the row is not committed
    for _ in range(4):
        advance_run.delay(str(run.pk))
    worker("--concurrency=2")
    wait_for(lambda: ended(run, "awaiting-approval"), "the gate")
    approve(Approval.objects.get().pk, None)
    wait_for(lambda: ended(run), "the end")
    advance_run.delay(str(run.pk))
    assert [line["tool"] for line in effects.lines()] == ["refund"]


def test_a_message_that_comes_again_while_its_tool_is_at_work_does_nothing(
    worker: Workers, effects: Effects, tmp_path: Path
) -> None:
    """As from a broker whose visibility time-out is shorter than the tool."""
    gate = tmp_path / "gate"
    gate.touch()
    # So long that no machine stalls until it is over; the heartbeat comes after a quarter of it.
    worker("--concurrency=2", SHOP_SLOW="post:before", SHOP_GATE=str(gate), AGENTRUNS_TEST_LEASE="20")
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    wait_for(lambda: effects.count("at:post:before") == 1, "the call")
    first = Run.objects.get().lease_expires_at
    wait_for(lambda: Run.objects.get().lease_expires_at > first, "the heartbeat")
    for _ in range(4):
        advance_run.delay(str(run.pk))
    (log,) = tmp_path.glob("worker-*.log")
    wait_for(lambda: log.read_text().count("Nothing to do") == 4, "the messages")
    gate.unlink()
    wait_for(lambda: ended(run), "the end")
    assert [line.get("tool") for line in effects.lines()] == [None, "post"]


def test_while_the_broker_is_away_nobody_notices_and_the_sweep_delivers(
    broker: Broker,
    worker: Workers,
    effects: Effects,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "REST_SECONDS", 3600.0)
    broker.stop()
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    assert "on_commit" in caplog.text
    assert ended(run, "queued")
    caplog.clear()
    start_run("calls-post", "do it", "s2", idempotency_key="k2")
    assert "on_commit" not in caplog.text, "only the first caller waits for a broker that is away"
    broker.start()
    monkeypatch.setattr(tasks, "_resting_until", 0.0)  # some seconds later
    worker()
    assert sweep_runs()["notified"] == 2
    wait_for(lambda: Run.objects.filter(status="completed").count() == 2, "the end")
    assert effects.count() == 2


@pytest.mark.parametrize("limit", ["--time-limit=4", "--soft-time-limit=4"])
def test_a_time_limit_leaves_an_orphan_and_no_error(
    limit: str, worker: Workers, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    worker(limit, SHOP_SLOW="post:after", SHOP_GATE=str(gate))
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    # A slow machine may reach the limit before the call, and is rung again.
    wait_for(lambda: bool(sweep_runs()) and effects.count("at:post:after") == 1, "the call")
    wait_for(lambda: bool(sweep_runs()) and ended(run, "orphaned"), "the limit")
    assert (outcomes(run), len(effects.lines())) == ([], 2)


def test_a_warm_shutdown_finishes_the_call_and_another_worker_goes_on(
    worker: Workers, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    first = worker(SHOP_SLOW="post:after", SHOP_GATE=str(gate))
    run = start_run("posts-in-the-middle", "do it", "s1", idempotency_key="k1")
    wait_for(lambda: effects.count("at:post:after") == 1, "the call")
    first.send_signal(signal.SIGTERM)
    (log,) = tmp_path.glob("worker-*.log")
    wait_for(lambda: "Warm shutdown" in log.read_text(), "it to hear the signal")
    gate.unlink()
    assert first.wait(LIMIT) == 0
    assert (ended(run, "queued"), outcomes(run)) == (True, ["ok", "ok"])
    assert Run.objects.get().attempts == 0
    worker()  # rung by the first as it left
    wait_for(lambda: ended(run), "the end")
    assert [line["tool"] for line in effects.lines() if "tool" in line] == ["lookup", "post", "charge"]


def test_the_demo_project_has_both_tasks_and_a_schedule(tmp_path: Path) -> None:
    code = (
        "import django; django.setup(); from project import celery as app\n"
        "app.loader.import_default_modules()\n"
        "print([name for name in app.tasks if 'agentruns' in name], app.conf.beat_schedule['sweep'])"
    )
    environment = {
        "BROKER_URL": "redis://localhost",
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "AGENTRUNS_DEMO_DIR": str(tmp_path),
    }
    done = run_program(sys.executable, "-c", code, **environment)
    for word in ("agentruns.advance_run", "agentruns.sweep_runs", "'schedule': 10.0"):
        assert word in done.stdout


def test_no_tool_runs_inside_the_process_that_rings(broker: Broker, effects: Effects) -> None:
    app.conf.task_always_eager = True
    try:
        run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    finally:
        app.conf.task_always_eager = False
    assert (ended(run, "queued"), effects.lines()) == (True, [])


def test_a_run_of_other_code_is_left_and_says_why(broker: Broker, effects: Effects) -> None:
    run = start_run("calls-post", "do it", "s1", idempotency_key="k1")
    Run.objects.update(version="2")
    advance_run(str(run.pk))
    run.refresh_from_db()
    assert (run.status, run.attempts, effects.lines()) == ("queued", 0, [])
    assert "version" in run.blocked_reason


def test_what_a_drive_raises_is_logged_and_the_run_given_back(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def confused(request: object) -> None:
        raise ZeroDivisionError("a bug in the model's own class")

    run = start_run(shop_agent("confused", confused), "do it", "s1", idempotency_key="k1")
    advance_run(str(run.pk))
    run.refresh_from_db()
    assert (run.status, run.attempts) == ("queued", 1)
    assert "Drive failed" in caplog.text


# Workers whose tools are those of an MCP server


def acted(effects: Effects, tool: str) -> int:
    return sum(line.get("tool") == tool for line in effects.lines())


def test_workers_of_a_forking_pool_have_a_server_each(worker: Workers, effects: Effects) -> None:
    worker("--concurrency=2", "--pool=prefork", SHOP_SERVER="yes")
    runs = [start_run("server-slow", "do it", f"s{number}") for number in range(4)]
    ended = Run.objects.filter(pk__in=[run.pk for run in runs], status="completed")
    wait_for(lambda: ended.count() == 4, "the runs")
    assert acted(effects, "slow") == 4
    assert effects.repeated() == []
    assert len({line["parent"] for line in effects.lines()}) == 2, "each process of the pool has its own"


def test_a_worker_killed_inside_a_call_is_not_replaced_by_one_that_sends_it_again(
    worker: Workers, effects: Effects
) -> None:
    process = worker("--concurrency=1", SHOP_SERVER="yes")
    run = start_run("server-slow", "do it", "s1")
    wait_for(lambda: acted(effects, "slow") == 1, "the call")
    os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: Run.objects.runnable().filter(pk=run.pk).exists(), "the lease to expire")
    sweep()
    run.refresh_from_db()
    assert (run.status, acted(effects, "slow")) == ("orphaned", 1)


def test_a_pool_of_threads_drives_as_many_runs_at_once(
    worker: Workers, effects: Effects, tmp_path: Path
) -> None:
    (gate := tmp_path / "gate").touch()
    runs = [start_run("calls-post", "do it", f"s{number}") for number in range(12)]
    worker("--pool=threads", "--concurrency=12", SHOP_SLOW="post:before", SHOP_GATE=str(gate))
    wait_for(lambda: effects.count("at:post:before") == 12, "every handler to be at work")
    gate.unlink()
    for run in runs:
        wait_for(lambda run=run: ended(run), "every run to end")
    assert len({line["key"] for line in effects.lines() if line.get("tool") == "post"}) == 12
