"""The network to the database breaks while a worker has a call: another worker takes over."""

from __future__ import annotations

import logging
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
from django.db import connection

from agentruns import ToolContext, resolve_orphan, start_run, tool
from agentruns.exceptions import RunStateError
from agentruns.models import Message, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from tests.crash import child
from tests.crash.child import Orders
from tests.crash.processes import LIMIT, Forked, expire_lease, wait_for
from tests.effects import VARIABLE, Effects
from tests.settings import DATABASE
from tests.shop.agents import call, shop_agent

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
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt)
    return f"attempt {ctx.attempt}"


@tool
def announce_and_wait(ctx: ToolContext) -> str:
    """Announce, and return when the run is known to be lost."""
    done = act(ctx)
    assert lost.wait(LIMIT)
    return done


shop_agent("stalls-announce_and_wait", {"tools": [call("announce_and_wait")]}, tools=[announce_and_wait])


def worker(run: Run, effects: Effects, **options: Any) -> Forked:
    """Start a worker that drives a run with a lease of a second."""
    database = {name: connection.settings_dict[name] for name in ("NAME", "HOST", "PORT")}
    of_children = {**connection.settings_dict["OPTIONS"], "application_name": "child"}
    options["database"] = {**database, "OPTIONS": of_children}
    orders = Orders([("advance", str(run.pk))], environment={VARIABLE: str(effects.path)}, **options)
    return Forked(perform, orders)


def test_a_frozen_worker_whose_connections_were_ended_meanwhile_still_leaves_its_evidence(
    effects: Effects,
) -> None:
    run = start_run("stalls-announce_and_wait", "do it", "s1")
    first = worker(run, effects)
    try:
        wait_for(lambda: effects.count() == 1, "the effect")
        first.signal(signal.SIGSTOP)
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
        assert first.ended() == 0
    finally:
        first.close()
    assert Message.objects.get(kind="late_result").payload["content"] == "attempt 1"
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(run.pk, result_of(run.pk).orphans[0], "not_occurred", None)
    assert effects.count() == 1
