"""What listeners of a run cost while nothing happens, and how soon they hear what does.

No ASGI server is needed: an asyncio loop of the standard library drives Django's handler, with as little
HTTP as listeners ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.goals import spread, table
from tests.servers import Postgres

SETTLED = 7  # seconds until a listener that hears nothing asks as seldom as it will
TOGETHER = 10  # listeners that come at once: each has a connection to the database until it listens
POOL = {"min_size": 2, "max_size": 8}  # connections
TICK = os.sysconf("SC_CLK_TCK")
MEASURED = (
    "process CPU s/s",
    "backends CPU s/s",
    "transactions/s",
    "connects/s",
    "open connections, median (most)",
    "threads, median (most)",
    "process MB",
)


def serve(url: str, path: str, pool: str) -> None:
    """Serve over ASGI, with Django's pool or without; say which run there is, and who may listen to it."""
    from benchmarks.systems import ours

    ours.prepare("agentruns-postgresql", url)
    from django.conf import settings
    from django.contrib.auth import get_user_model
    from django.core.asgi import get_asgi_application
    from django.db import connections

    from agentruns import start_run
    from agentruns.journal.policy import Policy, Quota
    from agentruns.models import ApiToken
    from agentruns.services.api_tokens import create_token

    settings.ALLOWED_HOSTS = ["bench"]
    Policy.quota = lambda *_: Quota(streams=None)  # all of them are one user's
    owner = get_user_model().objects.create_superuser("root")
    run = start_run(ours.agent, "Look it all up.", "crowd", actor=owner)
    token = create_token(owner, ApiToken.Scope.values)[1]
    connections.close_all()
    if pool:
        settings.DATABASES["default"]["CONN_MAX_AGE"] = 0
        settings.DATABASES["default"]["OPTIONS"]["pool"] = POOL

    async def forever() -> None:
        application = get_asgi_application()
        server = await asyncio.start_unix_server(lambda *ends: exchange(application, *ends), path)
        print(json.dumps({"run": str(run.pk), "token": token}), flush=True)
        await server.serve_forever()

    asyncio.run(forever())


async def exchange(application: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the one request of a connection."""
    first, *rest = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    method, path, _version = first.decode().split()
    headers = [(name.lower(), value) for name, _colon, value in (line.partition(b": ") for line in rest)]
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "headers": headers}
    body = [await reader.readexactly(int(dict(headers).get(b"content-length", 0)))]

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop()}
        await reader.read()  # until the client has gone
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            writer.write(f"HTTP/1.1 {message['status']} \r\n\r\n".encode())
        else:
            writer.write(message.get("body", b""))
        await writer.drain()

    with contextlib.suppress(ConnectionError):
        await application({**scope, "query_string": b""}, receive, send)
    writer.close()


class Guests:
    """Listeners of one run, and when each got each row."""

    def __init__(self, path: str, run: str, token: str) -> None:
        self.path, self.url = path, f"/agentruns/runs/{run}"
        self.headers = f"Host: bench\r\nAuthorization: Bearer {token}\r\n"
        self.arrived: list[dict[int, float]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def request(self, method: str, what: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request; return its connection when it was answered 200."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        head = f"{method} {self.url}/{what} HTTP/1.1\r\n{self.headers}Content-Length: 0\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer:
            raise RuntimeError(f"{method} {what}: {answer + await reader.read()!r}")
        return reader, writer

    async def come(self, count: int) -> None:
        """Let so many more listen; return when each has the rows there are."""
        for number in range(0, count, TOGETHER):
            for _each in range(min(TOGETHER, count - number)):
                self.arrived.append({})
                self.tasks.append(asyncio.create_task(self.listen(self.arrived[-1])))
            await self.have(1)

    async def listen(self, arrived: dict[int, float]) -> None:
        """Note when each row comes, until this is cancelled."""
        reader, writer = await self.request("GET", "events")
        with contextlib.closing(writer):
            async for line in reader:
                if line.startswith(b"id: "):
                    arrived[int(line[4:])] = time.perf_counter()

    def leave(self) -> None:
        """Let nobody listen any more."""
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        self.arrived.clear()

    async def have(self, seq: int) -> None:
        """Wait until all have a row."""
        while not all(seq in arrived for arrived in self.arrived):
            for task in self.tasks:
                if task.done():
                    raise RuntimeError("A listener was cut off.") from task.exception()
            await asyncio.sleep(0.01)

    async def told(self, verb: str) -> list[float]:
        """Write a row by a request; return after how many seconds each had it."""
        before = max(self.arrived[0])
        began = time.perf_counter()
        _reader, writer = await self.request("POST", verb)
        writer.close()
        await self.have(before + 1)
        return [arrived[before + 1] - began for arrived in self.arrived]


class Gauge:
    """What the serving process and PostgreSQL use."""

    def __init__(self, server: Postgres, pid: int, name: str) -> None:
        import psycopg

        assert server.server is not None
        self.server, self.pid, self.name = server.server.pid, pid, name
        self.monitor = psycopg.connect(
            f"postgresql://postgres@/postgres?host={server.folder}", autocommit=True
        )

    def read(self) -> list[float]:
        """Return CPU seconds of the process and of its backends, transactions and connections."""
        row = self.monitor.execute(
            "SELECT xact_commit + xact_rollback, sessions FROM pg_stat_database WHERE datname = %s",
            [self.name],
        ).fetchone()
        assert row is not None
        open_now = self.monitor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = %s", [self.name]
        ).fetchall()
        backends = sum(alive(pid) for (pid,) in open_now) + ticks(self.server)[1]  # and those that ended
        return [ticks(self.pid)[0] / TICK, backends / TICK, *map(float, row)]

    def look(self) -> tuple[int, int]:
        """Return how many connections to the database are open, and how many threads the process has."""
        row = self.monitor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [self.name]
        ).fetchone()
        assert row is not None
        return row[0], status(self.pid, "Threads")

    async def watch(self, seconds: float) -> list[str]:
        """Return what is used in so many seconds: cells of a table."""
        before, began, looks = self.read(), time.perf_counter(), []
        while time.perf_counter() - began < seconds:
            looks.append(self.look())
            await asyncio.sleep(0.1)
        passed = time.perf_counter() - began
        process, backends, transactions, connections = (
            (after - old) / passed for after, old in zip(self.read(), before, strict=True)
        )
        opened, threads = zip(*looks, strict=True)
        memory = status(self.pid, "VmRSS") / 1024
        return [
            f"{process:.3f}",
            f"{backends:.3f}",
            f"{transactions:.1f}",
            f"{connections:.1f}",
            *(f"{median(each):.0f} ({max(each)})" for each in (opened, threads)),
            f"{memory:.1f}",
        ]


def ticks(pid: int) -> tuple[int, int]:
    """Return what a process used, and what its children did that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, of_children, system_of_children = map(int, fields[11:15])
    return user + system, of_children + system_of_children


def alive(pid: int) -> int:
    """Return what a process used, none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return ticks(pid)[0]
    return 0


def status(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


async def listened(guests: Guests, gauge: Gauge, count: int, seconds: float, rows: int) -> list[str]:
    """Return what they cost when nothing happens, and how soon they have what does."""
    await guests.come(1)  # what the first of them has to import is no listener's
    guests.leave()
    await asyncio.sleep(1)
    none = ["none", *await gauge.watch(seconds / 3)]
    await guests.come(count)
    await asyncio.sleep(SETTLED)
    lines = table(["listeners", *MEASURED], [none, [f"{count}", *await gauge.watch(seconds)]])
    for number in range(rows):
        waits = await guests.told("resume" if number % 2 else "pause")
        lines.append(
            f"a row reached {len(waits)} in seconds: {spread(waits)}, all of them in {max(waits):.2f}"
        )
        await asyncio.sleep(SETTLED if number < rows - 1 else 0)
    guests.leave()
    return [*lines, ""]
