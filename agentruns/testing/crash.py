"""Crashes for tests, at named boundaries: a SIGKILL of this process or of a child, or a simulated one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from unittest.mock import patch

from django.db import connections

from agentruns.utils import failpoints
from agentruns.utils.failpoints import arm

if TYPE_CHECKING:  # agents.py may import this package before the models can be
    from agentruns.journal.batch import Batch
    from agentruns.journal.store import Store

CHILD = "AGENTRUNS_TESTING_CHILD"  # the variable that tells a child process its databases and scripts


def crash_at(point: str) -> None:
    """Arrange that SIGKILL kills this process the nth time that it reaches a point, by default the first.

    `point` is `<point>[:<nth>]`, such as "before_tool:2". Raises ValueError for an unknown point.
    """
    arm(point)


class Crash(BaseException):
    """Raised by a simulated crash; a BaseException, so that no `except Exception` handles it."""


@contextmanager
def crashing_at(point: str) -> Iterator[None]:
    """Simulate a SIGKILL at a boundary: end the block there without an error, but spare the process.

    Transactions opened in the block roll back, and the run stays leased to its dead driver (see
    `expire_leases`). `point` is `<point>[:<nth>]`, as for `crash_at`. Raises AssertionError if the block does
    not reach the boundary, ValueError for an unknown point.
    """
    from agentruns.engine.leases import Lease

    died: list[Crash] = []
    release = Lease.release

    def die() -> NoReturn:
        died.append(Crash(f"The process died at {point}."))
        raise died[0]

    def release_if_alive(lease: Lease, **options: Any) -> None:
        if not died:  # a dead process releases no lease
            release(lease, **options)

    with patch.object(failpoints, "_armed", None), patch.object(Lease, "release", release_if_alive):
        arm(point, die)
        try:
            yield
        except Crash as crash:
            if crash not in died:
                raise
    if not died:
        raise AssertionError(f"{point} was not reached, so nothing died there.")


@dataclass(eq=False)
class CrashingStore:
    """A store that wraps another `store`: it raises Crash at the nth append and at all later appends."""

    store: Store
    left: int  # appends until the crash, with the one that crashes
    durable: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def append(self, batch: Batch, *, durable: bool = False) -> None:
        """Append a batch to the wrapped store; raises Crash instead from the nth append on."""
        self.left -= 1
        if self.left <= 0:
            raise Crash(f"The store stopped before {[row.kind for row in batch.rows]} were stored.")
        self.store.append(batch, durable=durable)


def crash_after_tool_results(store: Store, nth: int = 2) -> CrashingStore:
    """Build a store, to pass as `store=`, that raises Crash at the nth append and at all later appends.

    Rows that start a run do not count, because they are written without this store. In a run with one call
    that needs no approval, the second append would store the call's result.
    """
    return CrashingStore(store, nth)


def manage_py(*arguments: str, crash_at: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a management command in another process, and wait until it ends.

    The process uses the test's databases, effects ledger and active `scripted_model`s, whose turns must be
    plain data. With `crash_at`, SIGKILL kills the process at this point; raises AssertionError if the process
    ends otherwise. Without `crash_at`, the exit code is not checked. Raises RuntimeError if another process
    cannot see the test's data, and TimeoutExpired after `timeout` seconds.
    """
    from agentruns.testing.script import playing

    # In a test Django blocks all other databases, which may be real ones.
    allowed = [alias for alias in connections if not hasattr(connections[alias].connect, "wrapped")]
    for alias in allowed:
        connection: Any = connections[alias]
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            raise RuntimeError(
                f"The test database {alias!r} is in memory, where no other process can see it. Give it a "
                f'file: DATABASES[{alias!r}]["TEST"] = {{"NAME": "test.sqlite3"}} in the settings of your '
                "tests."
            )
        if connection.in_atomic_block:
            raise RuntimeError(
                f"A transaction is open on {alias!r}, and no other process can see what is in it. Use "
                "@pytest.mark.django_db(transaction=True), or TransactionTestCase."
            )
    orders = {
        "path": sys.path,
        "names": {alias: str(connections[alias].settings_dict["NAME"]) for alias in allowed},
        "scripts": [[agent.name, agent.version, script.turns] for agent, script in playing],
    }
    env = {name: value for name, value in os.environ.items() if name != "AGENTRUNS_CRASH_AT"}
    env |= {CHILD: json.dumps(orders), **({"AGENTRUNS_CRASH_AT": crash_at} if crash_at else {})}
    command = [sys.executable, "-m", "agentruns.testing.crash", *arguments]
    done = subprocess.run(  # noqa: S603 - the test's own command
        command, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    if crash_at and done.returncode != -signal.SIGKILL:
        raise AssertionError(
            f"manage.py {' '.join(arguments)} did not get to {crash_at}; it ended with {done.returncode}.\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


def main() -> None:
    """Run a management command in this child process, with the databases and scripts of the parent's test."""
    orders = json.loads(os.environ[CHILD])
    sys.path += [folder for folder in orders["path"] if folder not in sys.path]
    import django
    from django.conf import settings
    from django.core.management import execute_from_command_line

    for alias, database in settings.DATABASES.items():
        if alias in orders["names"]:
            database["NAME"] = orders["names"][alias]
        else:
            database["ENGINE"] = "django.db.backends.dummy"
    django.setup()

    from agentruns.agents.agent import get_agent
    from agentruns.testing.script import scripted_model

    with ExitStack() as stack:
        for name, version, turns in orders["scripts"]:
            stack.enter_context(scripted_model(get_agent(name, version), turns))
        execute_from_command_line(["manage.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
