"""The sweep takes what can go on and what this process serves, and never starves on the rest."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now

from agentruns import approve, cancel_run, pause_run, resume_run, start_run, tool
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.models import Approval, Control, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import BATCH, RENEWED, STAMPED, sweep
from tests.commands.running import run as command
from tests.db.doubts import wire
from tests.db.helpers import outcomes, payloads, run_out, run_turns, the_run
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import spoilt
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_runs_of_a_retired_definition_do_not_starve_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.services.sweep.BATCH", 3)
    assert BATCH > 3
    with isolated_registry():
        old = shop_agent("retired")
        for number in range(5):
            start_run(old, "do it", f"old-{number}")
    start_run(shop_agent("served"), "do it", "new")
    first = sweep()
    assert (first.completed, first.blocked) == (1, 3)
    assert sweep().blocked == 2
    assert sweep().blocked == 0
    assert Run.objects.filter(status="queued", attempts=0).exclude(blocked_reason="").count() == 5
    with isolated_registry():
        shop_agent("retired")
        assert sweep().completed == 3
        assert sweep().completed == 2
    assert not Run.objects.exclude(blocked_reason="").exists()


def test_the_reason_is_that_of_the_process_that_looked_last(effects: Effects) -> None:
    with isolated_registry():
        run = start_run(shop_agent("moved"), "do it", "s1")

    def found(**declared: Any) -> str:
        with isolated_registry():
            if declared:
                shop_agent("moved", **declared)
            swept = sweep()
        run.refresh_from_db()
        assert (swept.driven, run.status, run.attempts) == (0, "queued", 0)
        return run.blocked_reason

    nobody = found()
    assert "There is no agent 'moved'" in nobody
    assert f"(Found by process {os.getpid()} on {socket.gethostname()}, 2" in nobody
    assert found(instructions="Be brief.") == nobody, "it says of when and of whom it is, and is not old yet"
    Run.objects.filter(pk=run.pk).update(blocked_at=Now() - timedelta(seconds=RENEWED + 1))
    differs = found(instructions="Be brief.")
    assert ("instructions differ" in differs, "There is no agent" in differs) == (True, False)
    assert "instructions differ" in command("show_run", str(run.pk)).out
    with isolated_registry():
        shop_agent("moved")
        assert sweep().completed == 1


def test_a_journal_that_cannot_be_read_stops_no_other_run(settings: Any) -> None:
    settings.AGENTRUNS_BACKOFF_SECONDS = (60, 600)

    @tool(requires_approval=True, expires_in=timedelta(hours=1))
    def launch() -> str:
        """Launch."""
        return "launched"

    expired = run_turns({"tools": [call("launch")]}, tools=[launch], session="expired")
    run_out(expired.pending[0])
    doubtful = run_turns({"tools": [call("wire", text="x")]}, session="doubtful", tools=[wire])
    queued = start_run(shop_agent("queued"), "do it", "queued")
    for run_id in (expired.run_id, doubtful.run_id, queued.pk):
        spoilt(run_id)
    start_run(shop_agent("good"), "do it", "good")
    swept = sweep(tell_model=True)
    assert (swept.completed, swept.expired, swept.errors) == (1, 0, 2)
    queued.refresh_from_db()
    assert (queued.status, queued.attempts, queued.not_before is not None) == ("queued", 1, True)
    assert sweep().found == 0, "it is not tried again at once"


def test_an_approval_expires_with_an_honest_text(effects: Effects) -> None:
    @tool(requires_approval=True, expires_in=timedelta(hours=1))
    def launch() -> str:
        """Launch."""
        effects.record("launch")
        return "launched"

    result = run_turns({"tools": [call("launch")]}, tools=[launch])
    card = result.pending[0]
    assert card.expires_at is not None
    assert sweep().expired == 0
    run_out(card)
    with pytest.raises(ApprovalStateError, match="expired"):
        approve(card.pk, None)
    swept = sweep()
    assert (swept.expired, swept.completed, effects.count()) == (1, 1, 0)
    run = the_run(result)
    assert (outcomes(run), Approval.objects.get().status) == (["expired"], "expired")
    assert "nobody answered" in payloads(run, "tool_result")[0]["content"]


def test_the_sweeper_is_seen() -> None:
    sweep()
    first = Control.objects.get(name="resume_runs").seen_at
    sweep()  # right after it: no commit, which would wake other workers
    assert Control.objects.get(name="resume_runs").seen_at == first
    Control.objects.update(seen_at=F("seen_at") - timedelta(seconds=STAMPED))
    sweep()
    assert Control.objects.get(name="resume_runs").seen_at > first


def test_one_run_that_raises_does_not_stop_the_others() -> None:
    def fail(request: object) -> None:
        raise KeyError("oops")

    start_run(shop_agent("bad", fail), "do it", "bad")
    start_run(shop_agent("good"), "do it", "good")
    swept = sweep()
    assert (swept.errors, swept.completed) == (1, 1)


def test_a_stop_leaves_at_a_boundary_and_costs_no_attempt(effects: Effects) -> None:
    turn = {"tools": [call("post", text=str(n)) for n in range(4)]}
    run = start_run(shop_agent("stopped", turn), "do it", "s1")
    sweep(should_stop=lambda: effects.count() >= 2)
    run = Run.objects.get(pk=run.pk)
    assert (run.status, run.attempts, run.lease_expires_at, effects.count()) == ("queued", 0, None, 2)
    assert sweep().completed == 1
    assert effects.count() == 4
    assert "run_resumed" not in run.messages.values_list("kind", flat=True)


def test_pause_and_cancel_without_a_worker_act_at_once() -> None:
    agent = shop_agent("parked", {"tools": [call("refund", cents=5000)]})
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    assert pause_run(run.pk, reason="lunch").status == "paused"
    with pytest.raises(RunStateError, match="is paused already"):
        pause_run(run.pk)
    assert sweep().found == 0
    assert resume_run(run.pk).status == "awaiting-approval"
    assert pause_run(run.pk).status == "paused"
    assert resume_run(run.pk, drive=False).status == "awaiting-approval"
    assert cancel_run(run.pk, reason="no").status == "cancelled"
    assert Approval.objects.get().status == "cancelled"
    the_run(result_of(run.pk))


def test_a_queued_resume_rings_and_leaves_driving_to_the_worker(effects: Effects) -> None:
    run = start_run(shop_agent("rung", {"tools": [call("post", text="x")]}), "do it", "s1")
    pause_run(run.pk)
    assert resume_run(run.pk, drive=False).status == "queued"
    assert effects.count() == 0
    assert sweep().completed == 1


def test_an_idle_sweep_reads_an_index() -> None:
    sql, parameters = Run.objects.runnable().order_by("created_at").values("pk")[:1].query.sql_with_params()
    explain = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    with transaction.atomic(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Of few rows it would as soon sort what another index finds.
            cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        cursor.execute(f"{explain} {sql}", parameters)
        plan = str(cursor.fetchall())
    # Until somebody asked it to ANALYZE, SQLite takes the index on status: as good, but for the order.
    by_status = (
        connection.vendor == "sqlite" and "SEARCH agentruns_run USING INDEX agentruns_run_status" in plan
    )
    assert "agentruns_runnable" in plan or by_status


def test_after_its_time_a_sweep_begins_with_no_further_run() -> None:
    agent = shop_agent("several", {"tools": [call("post", text="x")]})
    for number in range(3):
        start_run(agent, "do it", f"s{number}", idempotency_key=f"k{number}")
    assert (sweep(seconds=0).driven, sweep(seconds=0).driven, sweep().driven) == (1, 1, 1)
