"""Locks and isolation on PostgreSQL: what waits keeps nobody else, what is refused is only tried again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connection, connections, transaction

from agentruns import (
    ToolContext,
    cancel_run,
    deny,
    pause_run,
    resume_run,
    start_run,
    tool,
)
from agentruns.exceptions import JournalLockedError
from agentruns.journal.verify import problems
from agentruns.models import Control, Message, Run, Session
from agentruns.services.runs import write as service_write
from agentruns.services.sweep import sweep
from agentruns.utils import db
from tests.crash.processes import expire_lease, run_and_die
from tests.db import races
from tests.db.dying import elsewhere
from tests.db.helpers import outcomes, run_out, run_turns, the_run
from tests.db.racing import Click, deadlocks, somebody_waits
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, post, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, Hanging, wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one level, and one writer"),
]

LEVELS = {"repeatable read": 3, "serializable": 4}  # as psycopg.IsolationLevel numbers them
SERIALIZABLE = pytest.mark.parametrize("isolation", ["serializable"], indirect=True)


def show(setting: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SHOW {setting}")
        return str(cursor.fetchone()[0])


def level() -> str:
    with transaction.atomic():  # outside of a block Django leaves it as it is
        return show("transaction_isolation")


@pytest.fixture(params=LEVELS)
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let every connection of this process, those of threads too, have a level of the project's choice."""
    options = {**connection.settings_dict["OPTIONS"], "isolation_level": LEVELS[request.param]}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    connection.close()
    assert level() == request.param
    Order.objects.create(number="A1", customer="Ada", total_cents=1)
    yield request.param
    connection.close()


@tool(transactional=True)
def slow_note(ctx: ToolContext, note: str) -> str:
    """Write a note, slowly enough for some heartbeats."""
    Order.objects.filter(number="A1").update(note=note)
    wait_for_heartbeats(3)
    return level()


def wait_for_heartbeats(times: int) -> None:
    """Wait until the lease of the only run was extended so many times."""
    ends: set[Any] = set()

    def are_enough() -> bool:
        ends.add(elsewhere(lambda: Run.objects.get().lease_expires_at))
        return len(ends) > times

    wait_for(are_enough, "heartbeats")


def test_a_run_with_a_transactional_tool_that_outlives_heartbeats(isolation: str, settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05

    @tool
    def look() -> str:
        return level()

    turn = {"tools": [call("look"), call("slow_note", note="seen"), call("search", query="x")]}
    run = the_run(run_turns(turn, tools=[look, slow_note, *TOOLS]))
    assert (run.status, outcomes(run), Order.objects.get().note) == ("completed", ["ok"] * 3, "seen")
    rows = Message.objects.filter(run=run, kind="tool_result").order_by("seq")
    levels = {row.tool_name: row.payload["content"] for row in rows}
    assert (levels["look"], levels["slow_note"]) == (isolation, "read committed")
    assert Message.objects.filter(kind="tool_started").count() == 3


@pytest.mark.parametrize(("word", "ends"), [("cancel", "cancelled"), ("pause", "paused")])
def test_a_click_from_elsewhere_while_the_heartbeat_beats(
    word: str, ends: str, isolation: str, effects: Effects, settings: Any
) -> None:
    """The worker's appends, its heartbeat and the click all change the same row."""
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.25  # so that a beat spoils some tries of the click, and not all
    click = Click(word)

    @tool
    def clicked(ctx: ToolContext) -> str:
        person = click.start(ctx.run_id)
        wait_for_heartbeats(2)
        person.join(LIMIT)
        effects.record("clicked")
        return "done"

    turn = {"tools": [call("clicked"), call("post", text="not any more")]}
    result = run_turns(turn, tools=[*TOOLS, clicked])
    run = the_run(result)
    assert (click.made, click.refused, run.status, run.attempts) == (True, None, ends, 0)
    assert effects.count() == 1
    if ends == "paused":
        assert (resume_run(run.pk).status, effects.count()) == ("completed", 2)
    assert outcomes(the_run(result)) == ["ok", "cancelled" if ends == "cancelled" else "ok"]


@SERIALIZABLE
@pytest.mark.parametrize("race", races.ALL, ids=lambda race: race.__name__)
def test_races_end_as_at_the_default_level(
    race: Callable[[Effects], None], isolation: str, effects: Effects
) -> None:
    race(effects)


@SERIALIZABLE
@pytest.mark.parametrize(("name", "times"), [("charge", 1), ("annotate", 0)])
def test_a_killed_process_of_such_a_project_is_taken_over(
    name: str, times: int, isolation: str, effects: Effects
) -> None:
    run_and_die("run", f"calls-{name}", "s1", SHOP_KILL=f"{name}:after")
    run = Run.objects.get()
    expire_lease(run)
    assert (sweep().completed, effects.count(), problems(run.session_id)) == (1, times, [])


# A transaction that never ends, as that of a frozen process, keeps its own session and no other


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

    thread = threading.Thread(target=elsewhere, args=(hold,))
    thread.start()
    assert locked.wait(LIMIT)
    try:
        yield
    finally:
        thaw.let_go()
        thread.join()
    assert not thaw.was_waited_for


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that waits for a person; who waits for a lock waits 300 ms."""
    monkeypatch.setattr(db, "LOCK_TIMEOUT", db.LOCK_TIMEOUT.replace(f"'{db.LOCK_SECONDS}s'", "'300ms'"))
    return the_run(run_turns({"tools": [call("refund", cents=5000)]}))


def test_a_frozen_session_keeps_no_other_run_and_no_service_waiting(
    waiting: Run, effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    card = waiting.approvals.get()
    run_out(card)
    other = start_run(shop_agent("other", {"tools": [call("post", text="x")]}), "do it", "free")
    with frozen(waiting), caplog.at_level(logging.WARNING, "agentruns"):
        swept = sweep()
        assert (swept.completed, swept.expired) == (1, 0)
        assert Run.objects.get(pk=other.pk).status == "completed"
        for service in (cancel_run, pause_run):
            with pytest.raises(JournalLockedError, match=str(waiting.pk)):
                service(waiting.pk)
        with pytest.raises(JournalLockedError, match="locked"):
            deny(card.pk, None, reason="no")
    assert "put off" in caplog.text
    assert (sweep().expired, effects.count()) == (1, 1)


def test_the_callers_transaction_goes_on_and_keeps_its_lock_timeout(waiting: Run) -> None:
    free = start_run(shop_agent("other"), "do it", "free")
    with transaction.atomic():
        before = show("lock_timeout")
        with frozen(waiting), pytest.raises(JournalLockedError):
            cancel_run(waiting.pk)
        assert show("lock_timeout") == before
        pause_run(free.pk)
        assert show("lock_timeout") == before
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
        clicks.append(threading.Thread(target=elsewhere, args=(partial(pause_run, ctx.run_id),)))
        clicks[0].start()
        assert locked.wait(LIMIT)
        return "done"

    before = deadlocks()
    monkeypatch.setattr(service_write, "lock_session", lock_and_meet_the_worker)
    turn = {"tools": [call("be_paused"), call("post", text="x")]}
    result = run_turns(turn, tools=[be_paused, post])
    clicks[0].join(LIMIT)
    assert (deadlocks(), result.status, effects.count()) == (before, "paused", 0)
