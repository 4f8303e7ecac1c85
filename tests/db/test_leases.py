"""A lease is claimed, extended and given back by one worker; what others try with it changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection, transaction

from agentruns import ToolContext, run_agent, start_run, tool
from agentruns.engine import tool_calls
from agentruns.engine.leases import Lease, claim
from agentruns.engine.worker import advance
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.db.dying import elsewhere
from tests.db.helpers import kill, outcomes, payloads, the_run
from tests.db.racing import LIMIT
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_live_run_is_not_claimed(effects: Effects) -> None:
    """Neither by a sweep nor by who names it, while its tool is at work."""
    tries: list[Any] = []

    @tool(safe_to_retry=True)
    def work(ctx: ToolContext) -> str:
        """Act while others go for the run."""
        effects.record(ctx.idempotency_key)
        if ctx.attempt == 1:
            tries.append(elsewhere(lambda: advance(Run.objects.get(), "default")))
        return "done"

    run = the_run(run_agent(shop_agent("live", {"tools": [call("work")]}, tools=[work]), "do it", "s1"))
    assert (tries, run.status, outcomes(run), effects.count()) == ([False], "completed", ["ok"], 1)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite locks the whole file")
def test_a_locked_run_is_passed_over(effects: Effects) -> None:
    run = start_run(shop_agent("locked"), "do it", "s1")
    with transaction.atomic():
        list(Run.objects.filter(pk=run.pk).select_for_update())
        tries = []
        for _ in range(5):  # who waits for the lock waits each time, a slow machine not for ever
            began = tool_calls.uptime()
            assert elsewhere(lambda: claim("default", run.pk)) is None
            tries.append(tool_calls.uptime() - began)
        assert min(tries) < 2
    assert sweep().completed == 1


def test_who_was_overtaken_gives_nothing_back(effects: Effects) -> None:
    """A worker that wakes up late stops as workers do: its successor, at work, still has the run."""
    late: list[Lease] = []

    @tool(safe_to_retry=True)
    def work(ctx: ToolContext) -> str:
        """Act while the worker before gives back what it had, and a third one sweeps."""
        effects.record(ctx.idempotency_key)
        if ctx.attempt == 1:
            elsewhere(late[0].release)
            elsewhere(sweep)
        return "done"

    run = start_run(shop_agent("overtaken", {"tools": [call("work")]}, tools=[work]), "do it", "s1")
    lease = claim("default", run.pk)
    assert lease is not None
    late.append(lease)
    kill(run)
    assert sweep().completed == 1
    run = Run.objects.get()
    assert (outcomes(run), effects.count(), payloads(run, "late_result")) == (["ok"], 1, [])


def test_who_was_overtaken_extends_nothing_and_enters_nothing(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor is at work on the same call, so the run is running as it was when it fell asleep."""
    entered, let_go = threading.Event(), threading.Event()
    first = threading.get_ident()
    successor: list[threading.Thread] = []

    @tool(safe_to_retry=True)
    def work(ctx: ToolContext) -> str:
        """Act; the successor stays at work until it is let go."""
        effects.record(ctx.idempotency_key)
        if threading.get_ident() != first:
            entered.set()
            let_go.wait(LIMIT)
        return "done"

    def sleep(point: str) -> None:
        if point == "before_tool" and not successor:
            kill(Run.objects.get())
            successor.append(threading.Thread(target=elsewhere, args=(sweep,), daemon=True))
            successor[0].start()
            assert entered.wait(LIMIT)
            monkeypatch.setattr("agentruns.engine.driver.uptime", lambda: tool_calls.uptime() + 3600)

    monkeypatch.setattr(tool_calls, "reached", sleep)
    agent = shop_agent("overtaken", {"tools": [call("work")]}, tools=[work])
    assert run_agent(agent, "do it", "s1").status == "running"
    assert effects.count() == 1, "by the successor alone"
    monkeypatch.undo()
    let_go.set()
    wait_for(lambda: Run.objects.get().status == "completed", "the successor")
    successor[0].join(LIMIT)
    run = Run.objects.get()
    assert (outcomes(run), payloads(run, "late_result")[0]["never_entered"]) == (["ok"], True)
