"""A real primary and a real streaming replica, behind one address that a failover points to the other."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from tests import scratch
from tests.servers import Postgres
from tests.waiting import wait_for

NAME = "shop"  # the database of the project
SOCKET = ".s.PGSQL.5432"
# Small, as two of them run beside the tests' own server; a replica that was cut off asks again at once.
SETTINGS = (
    "shared_buffers=16MB",
    "wal_level=replica",
    "wal_keep_size=512MB",
    "wal_retrieve_retry_interval=50ms",
)


class Pair:
    """A primary with a replica: asynchronous until `make_synchronous`.

    Clients take `door` as host. It holds a link to the socket of the server that serves, so the same settings
    reach the replica after `fail_over`. The replica finds the primary by such a link, too: without the link
    it receives nothing, and what the primary acknowledges then is missing on the replica.
    """

    def __init__(self, folder: Path, template: Postgres) -> None:
        self.primary, self.replica = _copy(template, folder / "1"), _copy(template, folder / "2")
        self.door, self.feed = folder / "door", folder / "feed"
        for place in (self.door, self.feed):
            place.mkdir(mode=0o755)
            _link(place, self.primary)
        (self.replica.data / "standby.signal").touch()
        self.replica.settings.append(
            f"primary_conninfo=host={self.feed} user=postgres application_name=replica"
        )

    @property
    def environment(self) -> dict[str, str]:
        """What tests.settings reads in a child process."""
        return {**self.primary.environment, "AGENTRUNS_TEST_PG_HOST": str(self.door)}

    def start(self) -> None:
        """Start both, and wait until the replica streams."""
        self.primary.start()
        self.replica.start()
        self.catch_up()

    def stop(self) -> None:
        """Stop both at once."""
        for server in (self.replica, self.primary):
            server.stop(signal.SIGQUIT)

    def make_synchronous(self) -> None:
        """Let each commit on the primary wait until the replica has it on its disk."""
        self.configure("synchronous_standby_names", "replica")
        wait_for(
            lambda: ask(self.primary, "SELECT sync_state FROM pg_stat_replication") == "sync", "the replica"
        )

    def configure(self, name: str, value: str) -> None:
        """Change a setting of the primary while it runs."""
        ask(self.primary, f"ALTER SYSTEM SET {name} = '{value}'")
        ask(self.primary, "SELECT pg_reload_conf()")
        wait_for(lambda: ask(self.primary, f"SHOW {name}") == value, name)

    def catch_up(self) -> None:
        """Wait until the replica has replayed all that the primary has written so far."""
        written = ask(self.primary, "SELECT pg_current_wal_insert_lsn()")
        caught = f"SELECT pg_last_wal_replay_lsn() >= '{written}'::pg_lsn"
        wait_for(lambda: bool(ask(self.replica, caught)), "the replica to catch up")

    def cut_off(self) -> None:
        """Let the replica receive nothing more, as when it lags; catch up first for a known place."""
        (self.feed / SOCKET).unlink()
        ask(self.primary, "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_replication")
        wait_for(lambda: not ask(self.primary, "SELECT count(*) FROM pg_stat_replication"), "the cut")

    def join(self) -> None:
        """Let the replica receive again."""
        _link(self.feed, self.primary)

    def kill_primary(self) -> None:
        """End the primary and its connections at once, as when its machine is gone."""
        self.primary.stop(signal.SIGQUIT)

    def fail_over(self) -> None:
        """Make the replica a primary, and send the clients there. Whoever serves until then must be dead."""
        assert self.primary.server is None, "two servers that both take writes are two journals"
        assert ask(self.replica, "SELECT pg_promote(wait_seconds => 120)")
        _link(self.door, self.replica)


def ask(server: Postgres, sql: str, database: str = NAME) -> Any:
    """Ask that very server by a new connection; return the first value of the answer."""
    place = {"host": str(server.folder), "user": "postgres", "dbname": database}
    with psycopg.connect(**place, autocommit=True) as connection:
        cursor = connection.execute(sql)
        return (cursor.fetchone() or (None,))[0] if cursor.description else None


@contextlib.contextmanager
def template(*command: str, **environment: str) -> Iterator[Postgres]:
    """Make a server, let a command fill its databases, and stop it: pairs are copies of its folder."""
    with tempfile.TemporaryDirectory(prefix="agentruns-pg-", dir=scratch.folder()) as name:
        server = Postgres(Path(name))
        server.settings += SETTINGS
        server.start()
        try:
            subprocess.run(command, check=True, env={**os.environ, **server.environment, **environment})
        finally:
            server.stop()
        yield server


@contextlib.contextmanager
def pair(template: Postgres) -> Iterator[Pair]:
    """Run a primary and its replica, each a copy of a server that was stopped."""
    with tempfile.TemporaryDirectory(prefix="agentruns-pair-", dir=scratch.folder()) as name:
        folder = Path(name)
        folder.chmod(0o755)  # the servers are nobody's where this is root
        made = Pair(folder, template)
        try:
            made.start()
            yield made
        finally:
            made.stop()


def _copy(template: Postgres, folder: Path) -> Postgres:
    server = copy.copy(template)
    server.settings, server.options = [*template.settings], {**template.options, "cwd": folder}
    server.folder, server.data, server.log = folder, folder / "data", folder / "log"
    folder.mkdir()
    os.chown(folder, server.options.get("user", -1), server.options.get("group", -1))
    subprocess.run(["cp", "-R", template.data, server.data], check=True, **server.options)
    return server


def _link(place: Path, server: Postgres) -> None:
    """Let a folder's socket be that server's, from one moment to the next."""
    new = place / "new"
    new.symlink_to(server.folder / SOCKET)
    new.replace(place / SOCKET)
