"""A transaction that never ends, as that of a frozen process, keeps its own session and no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections, transaction

from agentruns import ToolContext, cancel_run, deny, pause_run, run_agent, start_run, tool
from agentruns.exceptions import JournalLockedError
from agentruns.models import Approval, Control, Run, Session
from agentruns.services import write as service_write
from agentruns.services.sweep import sweep
from agentruns.utils import db
from tests.db.dying import elsewhere
from tests.db.helpers import run_out, run_turns
from tests.db.racing import deadlocks
from tests.effects import Effects
from tests.shop.agents import call, post, shop_agent
from tests.waiting import LIMIT, Hanging, wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite locks the whole file"),
]


@pytest.fixture(autouse=True)
def _shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "LOCK_TIMEOUT", db.LOCK_TIMEOUT.replace(f"'{db.LOCK_SECONDS}s'", "'300ms'"))


@contextmanager
def frozen(run: Run) -> Iterator[None]:
    """Hold, in another backend, the locks of an append between its statement and its COMMIT."""
    locked, thaw = threading.Event(), Hanging()

    def hold() -> None:
        with transaction.atomic():
            list(Session.objects.filter(pk=run.session_id).select_for_update())
            list(Run.objects.filter(pk=run.pk).select_for_update())
            Control.objects.stamp("resume_runs")
            locked.set()
            thaw.hang()
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(LIMIT)
    try:
        yield
    finally:
        thaw.let_go()
        thread.join()
    assert not thaw.was_waited_for


def test_a_frozen_session_keeps_no_other_run_and_no_service_waiting(
    effects: Effects, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    asked = Run.objects.get(pk=run_turns({"tools": [call("refund", cents=5000)]}, session="frozen").run_id)
    run_out(asked.approvals.get())
    other = start_run(shop_agent("other", {"tools": [call("post", text="x")]}), "do it", "free")
    with frozen(asked), caplog.at_level(logging.WARNING, "agentruns"):
        swept = sweep()
        assert (swept.completed, swept.expired) == (1, 0)
        assert Run.objects.get(pk=other.pk).status == "completed"
        for service in (cancel_run, pause_run):
            with pytest.raises(JournalLockedError, match=str(asked.pk)):
                service(asked.pk)
        with pytest.raises(JournalLockedError, match="locked"):
            deny(Approval.objects.get(run=asked).pk, None, reason="no")
    assert "put off" in caplog.text
    assert sweep().expired == 1
    assert effects.count() == 1


def test_the_callers_transaction_goes_on_and_keeps_its_lock_timeout() -> None:
    asked = Run.objects.get(pk=run_turns({"tools": [call("refund", cents=5000)]}, session="frozen").run_id)
    free = start_run(shop_agent("other"), "do it", "free")

    def timeout() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            return str(cursor.fetchone()[0])

    with transaction.atomic():
        before = timeout()
        with frozen(asked), pytest.raises(JournalLockedError):
            cancel_run(asked.pk)
        assert timeout() == before
        pause_run(free.pk)
        assert timeout() == before
    assert Run.objects.get(pk=free.pk).status == "paused"


def test_a_service_and_a_worker_take_their_locks_in_the_same_order(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round each would wait for the other, until PostgreSQL ends one of them."""
    lock, locked, clicks = service_write.lock_session, threading.Event(), list[threading.Thread]()

    def lock_and_meet_the_worker(alias: str, session_id: Any) -> None:
        lock(alias, session_id)
        locked.set()
        wait_for(lambda: bool(elsewhere(somebody_waits)), "the worker to wait for the service")

    @tool
    def be_paused(ctx: ToolContext) -> str:
        """Return once a service has its first lock."""
        clicks.append(threading.Thread(target=elsewhere, args=(lambda: pause_run(ctx.run_id),)))
        clicks[0].start()
        assert locked.wait(120)
        return "done"

    before = deadlocks()
    agent = shop_agent(
        "ordered", {"tools": [call("be_paused"), call("post", text="x")]}, tools=[be_paused, post]
    )
    monkeypatch.setattr(service_write, "lock_session", lock_and_meet_the_worker)
    result = run_agent(agent, "do it", "s1")
    clicks[0].join(120)
    assert deadlocks() == before
    assert (result.status, effects.count()) == ("paused", 0)


def somebody_waits() -> bool:
    """Tell whether a backend waits for a lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database())"
        )
        return bool(cursor.fetchone()[0])
