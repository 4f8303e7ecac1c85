"""The network to the database stalls, or breaks, while a worker has a call: another worker takes over.

The proxy that this and the matrix rely on finds every form of a commit, and loses no other.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psycopg
import pytest
from django.db import connection

from agentruns import ToolContext, resolve_orphan, start_run, tool
from agentruns.exceptions import RunStateError
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from tests.crash import child
from tests.crash.child import Orders
from tests.crash.processes import Forked, expire_lease, finish, freeze, start
from tests.crash.proxy import COMMITTED, PORT, ROLLED_BACK, Proxy
from tests.effects import Effects
from tests.settings import DATABASE
from tests.shop.agents import call, charged, shop_agent
from tests.waiting import LIMIT, wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DATABASE == "sqlite", reason="SQLite has no network"),
]
lost = threading.Event()  # in the child: its heartbeat has found that another worker has the run


class Ear(logging.Handler):
    """Hears that the lease is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Lease lost"):
            lost.set()


def perform(orders: Orders, pipe: Connection) -> None:
    """Do what is ordered, with the agents of this module."""
    logging.getLogger("agentruns.leases").addHandler(Ear())
    child.perform(orders, pipe)


def act(ctx: ToolContext) -> str:
    """Act outside; say which attempt that was."""
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt)
    return f"attempt {ctx.attempt}"


async def act_async(ctx: ToolContext) -> str:
    """Act outside, in an event loop."""
    return act(ctx)


@tool
def announce_and_wait(ctx: ToolContext) -> str:
    """Announce, and return when the run is known to be lost."""
    done = act(ctx)
    assert lost.wait(LIMIT)
    return done


DECLARED: dict[str, dict[str, Any]] = {
    "pay": {"reconcile": charged},
    "pay_soon": {"reconcile": charged, "timeout": 2},  # over when the other worker asks
    "pay_in_time": {"reconcile": charged, "timeout": LIMIT},
    "announce": {},
    "write_down": {"transactional": True},
}
TOOLS = [tool(name=name, **options)(act) for name, options in DECLARED.items()]
TOOLS += [tool(name="pay_async", reconcile=charged)(act_async), announce_and_wait]
for _tool in TOOLS:
    shop_agent(f"stalls-{_tool.name}", {"tools": [call(_tool.name)]}, tools=TOOLS)


def worker(run: Run, **options: Any) -> Forked:
    """Start a worker that drives a run with a lease of a second."""
    named = {**connection.settings_dict["OPTIONS"], "application_name": "child"}
    options["database"] = {"OPTIONS": named, **options.get("database", {})}
    return start("advance", str(run.pk), serve=perform, **options)


def others_go_on(run: Run) -> None:
    """Let another worker end the run, with a verdict where it waits for one."""

    def is_completed() -> bool:
        sweep()
        now = Run.objects.get(pk=run.pk)
        if now.status == "orphaned":
            resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
        return now.status == "completed"

    expire_lease(run)
    wait_for(is_completed, "the other worker")


def stalled_before_its_handler(name: str, proxy: Proxy) -> tuple[Run, Forked]:
    """Start a worker whose network stalls when it has looked at its lease and is to enter the handler."""
    run = start_run(f"stalls-{name}", "do it", "s1")
    behind = {"HOST": proxy.folder, "PORT": PORT}
    first = worker(run, point="before_tool", beats=False, database=behind)
    first.hear()
    proxy.stall()
    first.go()
    assert proxy.is_stuck.wait(LIMIT)
    return run, first


@pytest.mark.parametrize("name", ["pay", "pay_soon", "pay_async", "announce", "write_down"])
def test_no_handler_is_entered_after_a_stall_that_outlasts_the_lease(
    name: str, effects: Effects, proxy: Proxy
) -> None:
    run, first = stalled_before_its_handler(name, proxy)
    others_go_on(run)
    proxy.flowing.set()
    assert first.hear() == []
    finish(first)
    assert [line["attempt"] for line in effects.lines()] == [2], "by the worker that took over"
    late = Message.objects.get(kind="late_result")
    assert (late.payload["never_entered"], late.attempt, problems(run.session_id)) == (True, 1, [])


@pytest.mark.parametrize("name", ["pay", "pay_in_time", "announce", "write_down"])
def test_where_nobody_took_over_the_lease_is_extended_and_the_handler_entered(
    name: str, effects: Effects, proxy: Proxy
) -> None:
    run, first = stalled_before_its_handler(name, proxy)
    expire_lease(run)
    proxy.flowing.set()
    assert first.hear() == []
    finish(first)
    assert [line["attempt"] for line in effects.lines()] == [1]
    assert Run.objects.get(pk=run.pk).status == "completed"
    assert not Message.objects.filter(kind__in=["late_result", "orphan_found"]).exists()


def test_a_frozen_worker_whose_connections_were_ended_meanwhile_still_leaves_its_evidence(
    effects: Effects,
) -> None:
    run = start_run("stalls-announce_and_wait", "do it", "s1")
    first = worker(run)
    wait_for(lambda: effects.count() == 1, "the effect")
    freeze(first)
    expire_lease(run)
    sweep()
    assert Run.objects.get(pk=run.pk).status == "orphaned"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT bool_and(pg_terminate_backend(pid)), count(*) >= 2 FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'child'"
        )
        assert cursor.fetchone() == (True, True), "of the drive and of its heartbeat"
    first.signal(signal.SIGCONT)
    assert first.hear() == []
    finish(first)
    assert Message.objects.get(kind="late_result").payload["content"] == "attempt 1"
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
    assert effects.count() == 1


APPEND = "WITH c AS MATERIALIZED (SELECT 1) INSERT INTO written SELECT %s FROM c"


@pytest.fixture
def written() -> Iterator[None]:
    """A table."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE written (number int)")
        yield
        cursor.execute("DROP TABLE written")


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("how", [COMMITTED, ROLLED_BACK])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_transaction"])
@pytest.mark.parametrize("protocol", ["simple", "extended", "prepared"])
def test_each_form_of_a_commit_is_lost(protocol: str, inside: bool, how: str, proxy: Proxy) -> None:
    settings = connection.settings_dict
    client = psycopg.connect(
        dbname=settings["NAME"], user=settings["USER"], host=proxy.folder, port=PORT, autocommit=True
    )
    cursor = psycopg.ClientCursor(client) if protocol == "simple" else client.cursor()
    prepare = {"prepared": True, "extended": False}.get(protocol)
    cursor.execute(APPEND, [1], prepare=prepare)
    proxy.lose_next_commit(how)
    cursor.execute("SELECT number FROM written", prepare=prepare)  # no commit of anything
    assert cursor.fetchall() == [(1,)]
    with pytest.raises(psycopg.OperationalError):
        if inside:
            with client.transaction():
                cursor.execute(APPEND, [2], prepare=prepare)
                assert not proxy.cut.is_set()
        else:
            cursor.execute(APPEND, [2], prepare=prepare)
    assert proxy.over.wait(LIMIT)
    with suppress(psycopg.Error):
        client.close()
    with connection.cursor() as reader:
        reader.execute("SELECT number FROM written ORDER BY number")
        assert reader.fetchall() == [(1,), (2,)][: 2 if how == COMMITTED else 1]
