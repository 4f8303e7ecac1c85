"""The sweep takes what can go on and what this process serves, and never starves on the rest.

AGENTRUNS_LONG=1 takes a million ended runs and ten thousand that wait, and prints how much a sweep reads.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from agentruns import ToolContext, approve, cancel_run, pause_run, resume_run, run_agent, start_run, tool
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.models import Approval, Control, Run, Session
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import BATCH, RENEWED, STAMPED, sweep
from tests.commands.running import run as command
from tests.db.crowds import ID, multiply, plan
from tests.db.doubts import wire
from tests.db.helpers import outcomes, payloads, run_out, run_turns, the_run
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import spoilt
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

LONG = bool(os.environ.get("AGENTRUNS_LONG"))
# Of the runs that can go on, of pending cards, of a status, and of the ids that are named
SELECTIVE = (
    *("agentruns_runnable", "agentruns_pending", "agentruns_run_status"),
    *("agentruns_run_pkey", "autoindex_agentruns_run_"),
)
ENDED, WAITING, RESUMABLE = (1_000_000, 10_000, 10) if LONG else (5000, 2000, 10)


@tool(requires_approval=True, expires_in=timedelta(hours=1))
def launch(ctx: ToolContext) -> str:
    return act("launch", ctx)


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


def test_the_reason_is_that_of_the_process_that_looked_last() -> None:
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


def test_pause_and_cancel_without_a_worker_act_at_once(effects: Effects) -> None:
    agent = shop_agent("parked", {"tools": [call("post", text="x"), call("refund", cents=5000)]})
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    assert pause_run(run.pk, reason="lunch").status == "paused"
    with pytest.raises(RunStateError, match="is paused already"):
        pause_run(run.pk)
    assert sweep().found == 0
    assert resume_run(run.pk, drive=False).status == "queued"
    assert effects.count() == 0, "a worker drives it"
    assert pause_run(run.pk).status == "paused"
    assert resume_run(run.pk).status == "awaiting-approval"
    assert pause_run(run.pk).status == "paused"
    assert resume_run(run.pk, drive=False).status == "awaiting-approval"
    assert cancel_run(run.pk, reason="no").status == "cancelled"
    assert (Approval.objects.get().status, effects.count()) == ("cancelled", 1)
    the_run(result_of(run.pk))


def test_after_its_time_a_sweep_begins_with_no_further_run() -> None:
    agent = shop_agent("several", {"tools": [call("post", text="x")]})
    for number in range(3):
        start_run(agent, "do it", f"s{number}", idempotency_key=f"k{number}")
    assert (sweep(seconds=0).driven, sweep(seconds=0).driven, sweep().driven) == (1, 1, 1)


def fill() -> None:
    """Let there be very many runs that ended, and many that wait for a person, each with its card."""
    made = ID[connection.vendor].format
    run_agent("calls-refund", "do it", "waiting", idempotency_key="")
    multiply(Session, WAITING, id=made("n"), key="'waiting-' || n")
    multiply(Run, WAITING, id=made("n"), session_id=made("n"))
    multiply(Approval, WAITING, id=made("n"), run_id=made("n"))
    run_agent("calls-post", "do it", "ended")
    multiply(Run, ENDED, id=made(f"n + {WAITING}"))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def swept() -> list[dict[str, Any]]:
    """Do a sweep; return its queries."""
    with CaptureQueriesContext(connection) as queries:
        assert sweep(drives=False).found == RESUMABLE
    return queries.captured_queries


def least() -> list[dict[str, Any]]:
    """Return the queries of a sweep that need not note that it is alive, which one does every few seconds."""
    return min((swept() for _ in range(3)), key=len)


@pytest.mark.remembers
def test_a_sweep_reads_partial_indexes_however_much_there_is() -> None:
    for number in range(RESUMABLE):
        start_run("calls-post", "do it", f"s{number}", idempotency_key=f"k{number}")
    sweep(drives=False)  # the first there ever was
    before = len(least())
    alone = work(least())
    fill()
    queries = least()
    assert len(queries) == before
    beside = work(queries)
    if LONG:
        print(f"a sweep: {alone} steps or pages alone, {beside} beside {ENDED} and {WAITING} runs")
    assert beside < 3 * alone + 100
    for query in queries:
        about_many = any(table in query["sql"] for table in ('"agentruns_run"', '"agentruns_approval"'))
        if query["sql"].startswith(("SELECT", "WITH")) and about_many:
            used = plan(query["sql"])
            assert any(index in used for index in SELECTIVE), used
            for line in used.splitlines():
                assert "Scan on agentruns_run" not in line or "Index" in line, used
                assert "SCAN agentruns" not in line or "USING INDEX" in line, used


def work(queries: list[dict[str, Any]]) -> int:
    """Let the database answer the reads of a sweep again; return how many steps, or pages, that takes it."""
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    with connection.cursor() as cursor:
        for query in (each["sql"] for each in queries if each["sql"].startswith(("SELECT", "WITH"))):
            if connection.vendor == "sqlite":
                connection.connection.set_progress_handler(step, 10)
                cursor.execute(query)
                cursor.fetchall()
                connection.connection.set_progress_handler(None, 0)
            else:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}")
                [(answer,)] = cursor.fetchall()
                pages = (answer if isinstance(answer, list) else json.loads(answer))[0]["Plan"]
                steps += pages["Shared Hit Blocks"] + pages["Shared Read Blocks"]
    return steps
