"""Behind pgbouncer in transaction mode, which gives each transaction another connection to the server."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from agentruns import ToolContext, approve, start_run, tool
from agentruns.journal.verify import problems
from agentruns.management.commands import resume_runs
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests import pgbouncer
from tests.commands.running import run as command
from tests.crash import child  # noqa: F401 - declares its agents
from tests.crash.processes import expire_lease, run_and_die
from tests.db.helpers import outcomes
from tests.effects import Effects
from tests.settings import DATABASE
from tests.shop.agents import TOOLS, act, call, shop_agent
from tests.shop.models import Order
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DATABASE != "postgres", reason="pgbouncer stands before PostgreSQL only"),
    pytest.mark.skipif(
        pgbouncer.binary() is None, reason="pgbouncer is not installed: apt-get install pgbouncer"
    ),
]


@pytest.fixture(autouse=True)
def _behind_pgbouncer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    facts = connection.settings_dict
    with pgbouncer.pgbouncer(facts["HOST"], facts["PORT"], facts["USER"]) as folder:
        monkeypatch.setitem(facts, "HOST", folder)
        monkeypatch.setitem(facts, "PORT", pgbouncer.PORT)
        monkeypatch.setitem(facts, "DISABLE_SERVER_SIDE_CURSORS", True)
        monkeypatch.setitem(facts, "OPTIONS", {"prepare_threshold": None})
        connection.close()
        yield
        connection.close()
        monkeypatch.undo()


def backend() -> int:
    """Return which connection to the server this transaction is given."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


@tool
def dawdle(ctx: ToolContext, text: str) -> str:
    """Take until the heartbeat has extended the lease."""
    run = Run.objects.filter(pk=ctx.run_id).values_list("lease_expires_at", flat=True)
    first = run.get()
    wait_for(lambda: run.get() > first, "a heartbeat")
    return act("dawdle", ctx, text=text)


def test_a_run_with_everything(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.1
    Order.objects.create(number="A1", customer="Ada", total_cents=1)
    agent = shop_agent(
        "pooled",
        {"tools": [call("dawdle", text="x"), call("annotate", number="A1", note="seen")]},
        {"tools": [call("search", query="x"), call("search", query="y"), call("refund", cents=5000)]},
        tools=[*TOOLS, dawdle],
    )
    with transaction.atomic():
        run = start_run(agent, "do it", "s1", idempotency_key="k")
    wait_for(lambda: len({backend() for _turn in range(6)}) > 1, "another connection to the server")
    assert sweep().waiting == 1
    approve(Approval.objects.get().pk, None)
    assert (sweep().completed, outcomes(run)) == (1, ["ok"] * 5)
    assert (Order.objects.get().note, effects.count(), problems(run.session_id)) == ("seen", 4, [])
    assert [line["status"] for line in command("list_runs", "--json").lines] == ["completed"]
    assert command("verify_journal").code == 0


def test_a_crash(effects: Effects) -> None:
    run_and_die("run", "every-kind", "s1", SHOP_KILL="charge:after")
    run = Run.objects.get()
    expire_lease(run)
    assert (sweep().completed, outcomes(run)) == (1, ["ok"] * 4)
    assert Counter(line["tool"] for line in effects.lines()) == {"post": 1, "charge": 1, "lookup": 1}
    assert problems(run.session_id) == []


def test_a_watcher_says_that_it_looks_where_no_ring_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_runs, "_wait", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    said = command("resume_runs", "--watch").out
    assert "No doorbell behind a pooler such as pgbouncer: it looks every 1 s.\n" in said
