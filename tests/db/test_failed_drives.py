"""A drive that an exception ends: tried again later and later, and the pause at the end says why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, OperationalError, connection, connections

from agentruns import resume_run, start_run, tool
from agentruns.journal.store import DatabaseStore
from agentruns.models import Run
from agentruns.models.run import SERVED
from agentruns.services.runs.waiting import unserved
from agentruns.services.sweep import sweep
from agentruns.utils import failpoints
from agentruns.utils.db import database_now, uptime
from tests.db.dying import elsewhere
from tests.db.helpers import forget_backoff, outcomes, sound
from tests.effects import Effects
from tests.shop.agents import call, charge, shop_agent
from tests.shop.models import Order
from tests.statements import statement_wrapper
from tests.waiting import LIMIT, pause

pytestmark = pytest.mark.django_db(transaction=True)

WHY = "The last drive failed: OSError: [Errno 28] no space for s\\nmore"
ELSEWHERE = {"after_decision", "after_start", "before_start_commit"}
ELSEWHERE |= {"before_children", "after_children", "before_settled", "after_settled"}  # of runs with children
ELSEWHERE |= {"before_void"}  # of approvals that no longer hold
BOUNDARIES = sorted({*failpoints.POINTS} - ELSEWHERE)


def full(*given: Any, **more: Any) -> None:
    raise OSError(28, "no space for s\nmore")


@pytest.mark.parametrize("where", ["model", "load"])
def test_a_failed_drive_waits_longer_each_time_and_the_pause_says_the_error(
    settings: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    settings.AGENTRUNS_BACKOFF_SECONDS, settings.AGENTRUNS_MAX_ATTEMPTS = (1000, 100_000), 4
    run = start_run(shop_agent("full"), "do it", "s1")
    with monkeypatch.context() as patch:
        name = {"model": "agentruns.engine.loop.ModelRequest", "load": f"{DatabaseStore.__module__}.load"}
        patch.setattr(name[where], full)
        for failures in range(3):
            now = database_now("default")
            assert (sweep().errors, sweep().found) == (1, 0), "it is not taken up again at once"
            run.refresh_from_db()
            assert (run.status, run.attempts, run.blocked_reason[:45]) == ("queued", failures + 1, WHY[:45])
            assert run.not_before is not None
            assert run.not_before >= now + timedelta(seconds=500 * 2**failures)
            assert not unserved(Run.objects.all()) and Run.objects.filter(SERVED).get() == run
            forget_backoff(run)
        if where == "model":
            assert sweep().errors == 1
    if where == "load":  # so it cannot be read in the last attempt either
        Run.objects.update(attempts=4)
        sweep()
    run = sound(run)
    assert (run.status, run.blocked_reason[:40]) == ("paused", "attempts_exhausted: OSError: [Errno 28] ")
    assert resume_run(run.pk).status == "completed"


def test_a_person_who_stops_the_process_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(**given: Any) -> None:
        raise KeyboardInterrupt

    run = start_run(shop_agent("stopped"), "do it", "s1")
    with monkeypatch.context() as patch:
        patch.setattr("agentruns.engine.loop.ModelRequest", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep()
    assert (sweep().completed, sound(run).attempts) == (1, 0)


@contextmanager
def cut_from(point: str) -> Iterator[threading.Event]:
    """Cut every connection from a boundary on, for two seconds or until two drives have failed.

    PostgreSQL ends every backend, as its time limit for idle transactions does; SQLite is locked.
    """
    over, began, threads = threading.Event(), threading.Event(), list[threading.Thread]()
    until = [0.0]

    def terminate() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def go_on() -> None:
        while uptime() < until[0] and not over.is_set():
            with suppress(DatabaseError, InterfaceError):
                elsewhere(terminate)
            pause()
        over.set()

    def strike() -> None:
        until[0] = uptime() + 2
        began.set()
        if connection.vendor == "postgresql":
            threads.append(threading.Thread(target=go_on, daemon=True))
            threads[0].start()

    def locked(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if connection.vendor == "sqlite" and began.is_set() and uptime() < until[0]:
            raise OperationalError("database is locked")
        return execute(sql, params, many, context)

    failpoints.arm(point, strike)
    try:
        with statement_wrapper(locked):
            yield began
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT)


@pytest.mark.parametrize("point", BOUNDARIES)
def test_a_database_that_is_cut_for_a_while_at_a_boundary_loses_and_repeats_nothing(
    point: str, effects: Effects, settings: Any
) -> None:
    settings.AGENTRUNS_LEASE_SECONDS, settings.AGENTRUNS_HEARTBEAT_SECONDS = 1.0, 0.2
    settings.AGENTRUNS_BACKOFF_SECONDS = (0.5, 5)
    turns = [{"tools": [call("charge", cents=7), call("annotate", number="A1", note="seen")]}]
    Order.objects.create(number="A1", customer="Ann", total_cents=1)
    run = start_run(shop_agent("cut", *turns), "do it", "s1")
    end = uptime() + LIMIT
    with cut_from(point) as began:
        while uptime() < end:
            with suppress(DatabaseError, InterfaceError):
                connection.close()
                if Run.objects.get().status not in ("queued", "running"):
                    break
                sweep()
            pause()
    connections.close_all()  # cut, perhaps, after the last query
    assert began.is_set()
    run = sound(run)
    assert run.status in ("completed", "orphaned"), run.blocked_reason
    if run.status == "orphaned":
        resume_run(run.pk)
        run = sound(run)
    assert run.status == "completed", (run.status, run.blocked_reason)
    assert [line["tool"] for line in effects.lines()].count("charge") == 1


# PostgreSQL ends sessions by itself

ONLY_POSTGRESQL = pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no such limits")


@pytest.fixture
def limit() -> Iterator[Callable[[str], None]]:
    """Let PostgreSQL end what idles for 0.4 s in every session from now on: idle_in_transaction or idle."""
    names, database = list[str](), connection.settings_dict["NAME"]

    def alter(how: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f'ALTER DATABASE "{database}" {how}')
        connections.close_all()

    def set_to(name: str) -> None:
        names.append(name)
        alter(f"SET {name}_session_timeout = 400")

    yield set_to
    connections.close_all()  # cut, perhaps
    for name in names:
        alter(f"RESET {name}_session_timeout")


def driven(run: Run) -> Run:
    """Drive a run until it has ended, or waits for a person."""
    end = uptime() + LIMIT
    while Run.objects.get().status in ("queued", "running"):
        assert uptime() < end
        sweep()
        pause()
    return sound(run)


@ONLY_POSTGRESQL
@pytest.mark.parametrize("then", ["write", "return"])
@pytest.mark.parametrize("often", [1, 99])
def test_a_tool_that_idles_in_its_transaction_is_undone_and_tried_again(
    often: int, then: str, effects: Effects, settings: Any, limit: Callable[[str], None]
) -> None:
    settings.AGENTRUNS_BACKOFF_SECONDS = (0.1, 0.5)
    tries = list[int]()

    @tool(transactional=True)
    def write_and_idle() -> str:
        """Write, think for longer than a transaction may idle, and perhaps write again."""
        Order.objects.create(number=f"A{len(tries)}", customer="Ann", total_cents=1)
        tries.append(1)
        time.sleep(1 if len(tries) <= often else 0)  # waits: until the server ends the session
        if then == "write":
            Order.objects.update(note="thought about")
        return "written"

    turns = [{"tools": [call("charge", cents=7)]}, {"tools": [call("write_and_idle")]}]
    run = start_run(shop_agent("idler", *turns, tools=[charge, write_and_idle]), "do it", "s1")
    limit("idle_in_transaction")
    run = driven(run)
    if often == 1:
        assert (run.status, outcomes(run), Order.objects.count()) == ("completed", ["ok", "ok"], 1)
    else:
        assert (run.status, outcomes(run), Order.objects.count()) == ("paused", ["ok"], 0)
        assert run.blocked_reason.startswith("attempts_exhausted: OperationalError: The connection was lost")
        assert "idle_in_transaction_session_timeout" in run.blocked_reason
    assert [line["tool"] for line in effects.lines()] == ["charge"]


@ONLY_POSTGRESQL
def test_sessions_that_end_because_they_idle_between_two_calls_cost_nothing(
    effects: Effects, limit: Callable[[str], None]
) -> None:
    ended = list[bool]()

    @tool
    def think() -> str:
        """Use the connection, and think for longer than a session may idle."""
        Order.objects.count()
        raw = connection.connection
        time.sleep(1)  # waits: until the server ends the session
        try:
            raw.execute("SELECT 1")
        except Exception:  # as for whatever of the process uses it next
            ended.append(raw.broken)
        return "thought"

    turns = [
        {"tools": [call("charge", cents=7), call("think")]},
        {"tools": [call("think"), call("charge", cents=8)]},
    ]
    run = start_run(shop_agent("slow", *turns, tools=[charge, think]), "do it", "s1")
    limit("idle")
    run = driven(run)
    assert (run.status, outcomes(run), run.attempts, ended) == ("completed", ["ok"] * 4, 0, [True, True])
    assert [line["cents"] for line in effects.lines()] == [7, 8]
