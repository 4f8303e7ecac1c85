"""A lease is claimed, extended and given back by one worker; what others try with it changes nothing.

A late result that cannot be stored at once is kept and tried again, as long as its process lives.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from agentruns import ToolContext, resolve_orphan, start_run, tool
from agentruns.engine import tool_calls
from agentruns.engine.leases import Lease, claim
from agentruns.engine.worker import advance
from agentruns.exceptions import JournalUnreadableError, RunStateError
from agentruns.journal.connection import own_alias
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.utils import failpoints
from tests.db.dying import elsewhere
from tests.db.helpers import kill, outcomes, payloads, run_turns, the_run
from tests.db.racing import somebody_waits
from tests.effects import Effects
from tests.rows import spoilt
from tests.shop.agents import call, shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_live_run_is_not_claimed(effects: Effects) -> None:
    """Neither by a sweep nor by who names it, while its tool is at work."""
    tries: list[Any] = []

    @tool(safe_to_retry=True)
    def work(ctx: ToolContext) -> str:
        effects.record(ctx.idempotency_key)
        if ctx.attempt == 1:
            tries.append(elsewhere(lambda: advance(Run.objects.get(), "default")))
        return "done"

    run = the_run(run_turns({"tools": [call("work")]}, tools=[work]))
    assert (tries, run.status, outcomes(run), effects.count()) == ([False], "completed", ["ok"], 1)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite locks the whole file")
def test_a_locked_run_is_passed_over() -> None:
    run = start_run(shop_agent("locked"), "do it", "s1")
    claims: list[Any] = []
    claimer = threading.Thread(target=lambda: claims.append(elsewhere(lambda: claim("default", run.pk))))
    with transaction.atomic():
        list(Run.objects.filter(pk=run.pk).select_for_update())
        claimer.start()
        wait_for(lambda: claims or elsewhere(somebody_waits), "the claim")
        assert claims == [None], "it waits for the lock"
    claimer.join(LIMIT)
    assert sweep().completed == 1


def test_who_was_overtaken_gives_nothing_back(effects: Effects) -> None:
    """A worker that wakes up late stops as workers do: its successor, at work, still has the run."""
    late: list[Lease] = []

    @tool(safe_to_retry=True)
    def work(ctx: ToolContext) -> str:
        effects.record(ctx.idempotency_key)
        if ctx.attempt == 1:
            elsewhere(late[0].release)
            elsewhere(sweep)
        return "done"

    run = start_run(shop_agent("overtaken", {"tools": [call("work")]}, tools=[work]), "do it", "s1")
    late += filter(None, [claim("default", run.pk)])
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
        effects.record(ctx.idempotency_key)
        if threading.get_ident() != first:
            entered.set()
            let_go.wait(LIMIT)
        return "done"

    def sleep() -> None:
        kill(Run.objects.get())
        successor.append(threading.Thread(target=elsewhere, args=(sweep,), daemon=True))
        successor[0].start()
        assert entered.wait(LIMIT)
        slept = iter([3600])  # seconds; it looks at its clock once before it extends its lease
        monkeypatch.setattr("agentruns.engine.driver.uptime", lambda: tool_calls.uptime() + next(slept, 0))

    failpoints.arm("before_tool", sleep)
    assert run_turns({"tools": [call("work")]}, tools=[work]).status == "running"
    assert effects.count() == 1, "by the successor alone"
    monkeypatch.undo()
    let_go.set()
    wait_for(lambda: Run.objects.get().status == "completed", "the successor")
    successor[0].join(LIMIT)
    run = Run.objects.get()
    assert (outcomes(run), payloads(run, "late_result")[0]["never_entered"]) == (["ok"], True)


@contextmanager
def no_writes() -> Iterator[None]:
    """Let the database refuse all writes: read-only as after a failover, or locked by another process.

    On PostgreSQL the connections that are open are ended, too.
    """
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        with closing(sqlite3.connect(name, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
        return
    psycopg = pytest.importorskip("psycopg")
    options = {key: connection.settings_dict[key.upper()] for key in ("host", "port", "user")}
    with psycopg.connect(dbname=name, **options, autocommit=True) as other:
        other.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        try:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            yield
        finally:
            other.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')


@pytest.fixture
def _impatient(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lease lasts a second, and a connection to SQLite waits for no lock for long."""
    settings.AGENTRUNS_LEASE_SECONDS = 1
    if connection.vendor == "sqlite":
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.05)
    connection.close()
    yield
    connections.close_all()


def post_late(effects: Effects, then: Callable[[], object] = lambda: None, **options: Any) -> None:
    """Run an agent whose tool acts, and loses the run meanwhile."""

    @tool(**options)
    def post(ctx: ToolContext) -> str:
        effects.record(ctx.idempotency_key)
        kill(Run.objects.get())
        elsewhere(sweep)
        then()
        return "posted"

    run_turns({"tools": [call("post")]}, tools=[post])


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("threaded", [False, True], ids=["here", "in_a_thread"])
def test_what_cannot_be_stored_within_a_lease_is_stored_when_it_can_be(
    threaded: bool, effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    allow, refusing = threading.Event(), threading.Event()

    def refuse_writes() -> None:
        with no_writes():
            refusing.set()
            wait_for(lambda: "Late result not stored" in caplog.text or allow.is_set(), "the first log")

    def then() -> None:
        watcher.start()
        assert refusing.wait(LIMIT)

    watcher = threading.Thread(target=refuse_writes, daemon=True)
    with caplog.at_level(logging.ERROR, "agentruns.executor"):
        post_late(effects, then, timeout=600 if threaded else None)
        allow.set()
        watcher.join(LIMIT)
    connection.close()  # it was opened while nothing could be written
    for thread in threading.enumerate():
        if thread.name == "agentruns-late":
            thread.join(LIMIT)
    (record,) = [one for one in caplog.records if "Late result not stored" in one.getMessage()]
    assert (record.levelname, "posted" in record.getMessage()) == ("CRITICAL", True)
    run = Run.objects.get()
    assert (run.status, [one["content"] for one in payloads(run, "late_result")]) == ("orphaned", ["posted"])
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
    assert (effects.count(), problems(run.session_id)) == (1, [])


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("when", ["before", "after"])
def test_evidence_is_stored_once_although_the_connection_breaks_before_or_after(
    when: str,
    effects: Effects,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is stored on a new connection, or found although its acknowledgement was lost."""
    settings.AGENTRUNS_LEASE_SECONDS = 30
    append, broken = DatabaseStore.append, []

    def break_and_append(store: DatabaseStore, batch: Any, **options: Any) -> None:
        breaks = batch.rows[0].kind == "late_result" and not broken
        if breaks:
            broken.append(batch)
        if breaks and when == "before":
            connections[own_alias("default")].connection.close()
        append(store, batch, **options)
        if breaks and when == "after":
            raise OperationalError("the connection broke before the acknowledgement came")

    monkeypatch.setattr(DatabaseStore, "append", break_and_append)
    post_late(effects)
    assert (len(broken), len(payloads(Run.objects.get(), "late_result"))) == (1, 1)
    assert "Late result not stored" not in caplog.text


@pytest.mark.usefixtures("_impatient")
def test_evidence_of_a_journal_that_is_gone_ends_the_tries(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "agentruns.executor"), pytest.raises(JournalUnreadableError):
        post_late(effects, lambda: spoilt(Run.objects.get().pk))
    assert "Late result not stored" in caplog.text
    assert "posted" in caplog.text
    assert "tried again" not in caplog.text
