"""Starting child processes, waiting for what they do outside, and killing them."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.db import connection

from agentruns.models import Run
from tests.effects import Effects
from tests.programs import run_program
from tests.waiting import LIMIT, pause, wait_for

if TYPE_CHECKING:
    from tests.crash.child import Orders

LEASE = 1
BRIEF = 0.3  # of a child that nobody competes with


def start(*action: str, serve: Callable[[Orders, Connection], None] | None = None, **given: Any) -> Forked:
    """Start a child that does one thing on this test's database, and that an error ends.

    What is given in capitals is added to its environment; the rest belongs to its `Orders`.
    """
    from tests.crash import child

    names = ("NAME", "HOST", "PORT", "OPTIONS")
    database = {name: connection.settings_dict[name] for name in names} | given.pop("database", {})
    options = {"lease": LEASE, **{name: value for name, value in given.items() if not name.isupper()}}
    added = {name: value for name, value in given.items() if name.isupper()}
    orders = child.Orders([action], database=database, environment={**os.environ, **added}, **options)
    return Forked(serve or child.serve, orders)


def start_held(agent: str, at: str, effects: Effects, gate: Path, **given: Any) -> tuple[Forked, Run]:
    """Start a child that runs an agent, and wait until it is at a place; it stays until the gate is gone."""
    gate.touch()
    child = start("run", agent, "s1", SHOP_SLOW=at, SHOP_GATE=str(gate), **given)
    wait_for(lambda: effects.count(f"at:{at}") > 0, f"{agent} to reach {at}")
    return child, Run.objects.get()


def finish(child: Forked) -> None:
    """Wait for a child that is to end well."""
    assert ended(child) == 0


def ended(child: Forked) -> int | None:
    """Wait for the end of a process; return how it ended."""
    try:
        return child.ended()
    finally:
        child.close()


def run(*action: str, point: str = "", **given: Any) -> int | None:
    """Run a child, which dies if it comes to the point; return how it ended."""
    return ended(start(*action, point=point, dies=bool(point), **{"lease": BRIEF, **given}))


def run_and_die(*action: str, **given: Any) -> None:
    """Run a child that is to be killed by SIGKILL."""
    assert run(*action, **given) == -signal.SIGKILL


def die(*action: str, at: str = "", **given: Any) -> Run:
    """Run a child that is killed at a place; return the only run once the dead worker's lease is over.

    A place is a crash point, or "post:before" and "post:after" inside a handler or a model.
    """
    place = {"SHOP_KILL": at} if at.endswith((":before", ":after")) else {"point": at}
    run_and_die(*action, **place, **given)
    run = Run.objects.get()
    if not run.is_ended:
        expire_lease(run)
    return run


def interpret_and_die(*words: str, **environment: str) -> None:
    """Let a new interpreter work on this test's database, until it is killed by SIGKILL."""
    database = {"AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"])}
    environment = {"DJANGO_SETTINGS_MODULE": "tests.settings", **database, **environment}
    run_program(sys.executable, *words, code=-signal.SIGKILL, **environment)


def expire_lease(run: Run) -> None:
    """Wait until the dead worker's lease has run out by the database clock."""
    wait_for(lambda: Run.objects.runnable().filter(pk=run.pk).exists(), "the lease to expire")


def freeze(child: Forked, but: int | None = None) -> None:
    """Stop a process while it is inside no transaction: its locks would hold up whoever goes on beside it.

    `but` is the backend that may be inside one, at the crash point that the process has reached.
    """

    def is_outside() -> bool:
        child.signal(signal.SIGSTOP)
        if not any(_is_anybody_inside(but or 0) for _look in range(3)):  # what it has sent may arrive late
            return True
        child.signal(signal.SIGCONT)
        return False

    wait_for(is_outside, "a moment in which the process is inside no transaction")


def _is_anybody_inside(but: int) -> bool:
    pause()
    if connection.vendor == "sqlite":
        with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            return False
    return is_any_backend(f"xact_start IS NOT NULL AND backend_type = 'client backend' AND pid <> {but}")


def is_any_backend(where: str) -> bool:
    """Ask PostgreSQL whether any other backend of this database is in such a state."""
    with connection.cursor() as cursor:
        activity = "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        cursor.execute(f"SELECT EXISTS (SELECT FROM {activity} AND {where})")
        return bool(cursor.fetchone()[0])


class Forked:
    """A process of its own, forked from a server that has imported everything already."""

    def __init__(self, perform: Callable[[Orders, Connection], None], orders: Orders) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.crash.child"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=perform, args=(orders, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """Wait for the next that it says: at its crash point its backend, at its end its errors."""
        assert self.pipe.poll(LIMIT), "the child says nothing"
        return self.pipe.recv()

    def go(self, lost: str = "") -> None:
        """Let it go on from its crash point; on SQLite its next COMMIT may be lost."""
        self.pipe.send(lost)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid or 0, number)

    def ended(self) -> int | None:
        """Wait for its end; return its exit code."""
        self.process.join(LIMIT)
        return self.process.exitcode

    def close(self) -> None:
        """Make sure that it is gone, also if it is frozen."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
