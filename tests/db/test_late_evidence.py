"""A late result that cannot be stored at once: it is kept and tried again, as long as its process lives."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from agentruns import ToolContext, resolve_orphan, run_agent, tool
from agentruns.exceptions import JournalUnreadableError, RunStateError
from agentruns.journal.connection import own_alias
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from tests.db.dying import elsewhere
from tests.db.helpers import kill, payloads
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


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


@pytest.fixture(autouse=True)
def _impatient(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lease lasts a second, and a connection to SQLite waits for no lock for long."""
    settings.AGENTRUNS_LEASE_SECONDS = 1
    if connection.vendor == "sqlite":
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.05)
    connection.close()
    yield
    connections.close_all()


def lose_the_run() -> None:
    kill(Run.objects.get())
    elsewhere(sweep)


@pytest.mark.parametrize("threaded", [False, True], ids=["here", "in_a_thread"])
def test_what_cannot_be_stored_within_a_lease_is_stored_when_it_can_be(
    threaded: bool, effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    allow, refusing = threading.Event(), threading.Event()

    def refuse_writes() -> None:
        with no_writes():
            refusing.set()
            wait_for(lambda: "Late result not stored" in caplog.text or allow.is_set(), "the first log")

    @tool(timeout=600 if threaded else None)
    def post(ctx: ToolContext) -> str:
        """Act, and lose the run; then the database takes nothing more."""
        effects.record(ctx.idempotency_key)
        lose_the_run()
        watcher.start()
        assert refusing.wait(120)
        return "posted"

    watcher = threading.Thread(target=refuse_writes, daemon=True)
    agent = shop_agent("posts", {"tools": [call("post")]}, tools=[post])
    with caplog.at_level(logging.ERROR, "agentruns.executor"):
        run_agent(agent, "do it", "s1", idempotency_key="k")
        allow.set()
        watcher.join(120)
    connection.close()  # it was opened while nothing could be written
    for thread in threading.enumerate():
        if thread.name == "agentruns-late":
            thread.join(120)
    (record,) = [one for one in caplog.records if "Late result not stored" in one.getMessage()]
    assert (record.levelname, "posted" in record.getMessage()) == ("CRITICAL", True)
    run = Run.objects.get()
    assert (run.status, [one["content"] for one in payloads(run, "late_result")]) == ("orphaned", ["posted"])
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
    assert (effects.count(), problems(run.session_id)) == (1, [])


def test_evidence_whose_acknowledgement_was_lost_is_stored_once(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, broken = DatabaseStore.append, []

    def append_and_break(store: DatabaseStore, batch: Any, **options: Any) -> None:
        append(store, batch, **options)
        if batch.rows[0].kind == "late_result" and not broken:
            broken.append(batch)
            raise OperationalError("the connection broke before the acknowledgement came")

    @tool
    def post(ctx: ToolContext) -> str:
        """Act, and lose the run."""
        effects.record(ctx.idempotency_key)
        lose_the_run()
        return "posted"

    monkeypatch.setattr(DatabaseStore, "append", append_and_break)
    run_agent(shop_agent("posts", {"tools": [call("post")]}, tools=[post]), "do it", "s1")
    assert (len(broken), len(payloads(Run.objects.get(), "late_result"))) == (1, 1)


def test_evidence_is_stored_on_a_new_connection_after_its_own_has_broken(
    effects: Effects, monkeypatch: pytest.MonkeyPatch, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.AGENTRUNS_LEASE_SECONDS = 30
    append, broken = DatabaseStore.append, []

    def break_and_append(store: DatabaseStore, batch: Any, **options: Any) -> None:
        if batch.rows[0].kind == "late_result" and not broken:
            broken.append(batch)
            connections[own_alias("default")].connection.close()
        append(store, batch, **options)

    @tool
    def post(ctx: ToolContext) -> str:
        """Act, and lose the run."""
        effects.record(ctx.idempotency_key)
        lose_the_run()
        return "posted"

    monkeypatch.setattr(DatabaseStore, "append", break_and_append)
    run_agent(shop_agent("posts", {"tools": [call("post")]}, tools=[post]), "do it", "s1")
    assert (len(broken), len(payloads(Run.objects.get(), "late_result"))) == (1, 1)
    assert "Late result not stored" not in caplog.text


def test_evidence_of_a_journal_that_is_gone_ends_the_tries(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    @tool
    def post(ctx: ToolContext) -> str:
        """Act, while the journal becomes unreadable."""
        effects.record(ctx.idempotency_key)
        kill(Run.objects.get())
        Run.objects.update(lease_epoch=99)
        monkey.setattr("agentruns.journal.store.rows_with_secret", lambda *_: ([None], ""))
        return "posted"

    agent = shop_agent("posts", {"tools": [call("post")]}, tools=[post])
    with (
        pytest.MonkeyPatch.context() as monkey,
        caplog.at_level(logging.ERROR, "agentruns.executor"),
        pytest.raises(JournalUnreadableError),
    ):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    assert "Late result not stored" in caplog.text
    assert "posted" in caplog.text
    assert "tried again" not in caplog.text
