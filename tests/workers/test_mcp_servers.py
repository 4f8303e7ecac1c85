"""Celery workers whose tools are those of an MCP server."""

from __future__ import annotations

import os
import signal

import pytest

from agentruns import start_run
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.effects import VARIABLE, Effects
from tests.mcp import agents  # noqa: F401 - for this process as well
from tests.waiting import wait_for
from tests.workers.processes import Workers

pytestmark = pytest.mark.django_db(transaction=True)


def acted(effects: Effects, tool: str) -> int:
    return sum(line.get("tool") == tool for line in effects.lines())


def test_workers_of_a_forking_pool_have_a_server_each(worker: Workers, effects: Effects) -> None:
    worker("--concurrency=2", "--pool=prefork", SHOP_SERVER="yes", **{VARIABLE: str(effects.path)})
    runs = [start_run("server-slow", "do it", f"s{number}") for number in range(4)]
    ended = Run.objects.filter(pk__in=[run.pk for run in runs], status="completed")
    wait_for(lambda: ended.count() == 4, "the runs")
    assert acted(effects, "slow") == 4
    assert effects.repeated() == []
    assert len({line["parent"] for line in effects.lines()}) == 2, "each process of the pool has its own"


def test_a_worker_killed_inside_a_call_is_not_replaced_by_one_that_sends_it_again(
    worker: Workers, effects: Effects
) -> None:
    environment = {"SHOP_SERVER": "yes", VARIABLE: str(effects.path)}
    process = worker("--concurrency=1", **environment)
    run = start_run("server-slow", "do it", "s1")
    wait_for(lambda: acted(effects, "slow") == 1, "the call")
    os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: Run.objects.runnable().filter(pk=run.pk).exists(), "the lease to expire")
    sweep()
    run.refresh_from_db()
    assert (run.status, acted(effects, "slow")) == ("orphaned", 1)
