"""A reader of Server-Sent Events as browsers have one, over a connection that a test can cut anywhere."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import DEFAULT_DB_ALIAS, connection, connections
from django.test import Client

import agentruns
from agentruns.models import Message, Run
from tests.api.http import strict_json
from tests.waiting import LIMIT, wait_for

RESET = struct.pack("ii", 1, 0)  # linger for no time: the server sees a broken connection, not an end


class Event(NamedTuple):
    id: str
    name: str
    data: Any


class Reader:
    """Takes a stream apart. An event has come when the empty line behind it has."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.comments: list[str] = []
        self.notes: list[Event] = []  # what is no row
        self.retry = ""
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line.decode())

    def _line(self, line: str) -> None:
        assert "\r" not in line
        name, _, value = line.partition(":")
        if line and not name:
            self.comments.append(value.strip())
        elif name == "retry":
            self.retry = value.strip()
        elif name:
            assert name in ("id", "event", "data") and name not in self._fields, line
            self._fields[name] = value.removeprefix(" ")
        elif self._fields:
            fields, self._fields = self._fields, {}
            data = strict_json(fields["data"].encode())
            among = self.notes if fields["event"] in ("draft", "waits_for") else self.events
            among.append(Event(fields.get("id", ""), fields["event"], data))


def read(chunks: Iterable[bytes]) -> Reader:
    """Read a stream to its end."""
    reader = Reader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader


def cookies(user: Any) -> str:
    """Return the Cookie header of somebody who is signed in."""
    client = Client()
    client.force_login(user)
    return "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())


class Listener(Reader):
    """One connection to the stream of a run."""

    def __init__(self, server: str, path: str, cookie: str, last: str = "") -> None:
        super().__init__()
        address = urlsplit(server)
        self._socket = socket.create_connection((address.hostname, address.port or 80), timeout=LIMIT)
        headers = [f"GET {path} HTTP/1.1", f"Host: {address.netloc}", f"Cookie: {cookie}"]
        headers += [f"Last-Event-ID: {last}"] if last else []
        self._socket.sendall("\r\n".join([*headers, "", ""]).encode())
        self._head: bytes | None = b""

    def listen(self, seconds: float = 1.0, most: int = 65_536) -> int:
        """Read what comes in time, at most so many bytes; return how many, -1 if the server has closed."""
        self._socket.settimeout(seconds)
        try:
            chunk = self._socket.recv(max(1, most))
        except TimeoutError:
            return 0
        if not chunk:
            return -1
        self.feed(self._body(chunk))
        return len(chunk)

    def wait_for(self, seen: Callable[[Listener], Any]) -> None:
        """Read until something was seen; fail if the server closes or is silent before that."""

        def read_on() -> bool:
            while not seen(self):
                size = self.listen()
                assert size >= 0, (self.events, self.comments)
                if not size:
                    return False
            return True

        wait_for(read_on, "an event")

    def to_the_end(self) -> list[Event]:
        """Read until the server closes; return the events."""

        def read_on() -> bool:
            while (size := self.listen()) > 0:
                pass
            return size < 0

        wait_for(read_on, "the end of the stream")
        self._socket.close()
        return self.events

    def cut(self) -> None:
        """Break the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.close()

    def _body(self, chunk: bytes) -> bytes:
        if self._head is None:
            return chunk
        head, found, body = (self._head + chunk).partition(b"\r\n\r\n")
        self._head = None if found else head
        assert not found or head.startswith(b"HTTP/1.1 200 "), head
        return body


def wait_until_nobody_is_served() -> None:
    """Wait for the threads of the live server: each notices within two polls that its client is gone."""
    wait_for(lambda: not serving(), "the threads of the server")


def serving() -> list[str]:
    """Return the threads in which the live server answers."""
    return [thread.name for thread in threading.enumerate() if "process_request_thread" in thread.name]


def rows(events: Iterable[Event]) -> list[tuple[int, str]]:
    """Return seq and kind of each event that is a row, as it says itself and as its data say."""
    found = [(int(event.id), event.name) for event in events if event.name != "end"]
    assert found == [(event.data["seq"], event.data["kind"]) for event in events if event.name != "end"]
    return found


def connected() -> int:
    """Return how many connections to the database are open, but for the one that this is asked through."""
    if connection.vendor == "sqlite":  # it has no server that could be asked
        kind = type(connections[DEFAULT_DB_ALIAS])
        found = [each for each in gc.get_objects() if type(each) is kind and each.alias == DEFAULT_DB_ALIAS]
        return sum(each.connection is not None for each in found if each is not connections[DEFAULT_DB_ALIAS])
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return int(cursor.fetchone()[0])


def journal(run: Run) -> list[tuple[int, str]]:
    """Return seq and kind of each of a run's rows."""
    return list(Message.objects.filter(run=run).order_by("seq").values_list("seq", "kind"))


def url(run: Run) -> str:
    return f"/api/runs/{run.pk}/events"


class Stream(Reader):
    """A stream that is asked for one poll after the other, in the test's own thread."""

    def __init__(self, user: Any, run: Run, **headers: str) -> None:
        super().__init__()
        client = Client()
        if user is not None:
            client.force_login(user)
        self.client = client
        self.response: Any = client.get(url(run), headers=headers)
        assert self.response.status_code == 200, self.response.content
        self._chunks = iter(self.response.streaming_content)
        self.is_open = True
        self.poll()  # retry

    def poll(self) -> list[tuple[int, str]]:
        """Let it poll once; return the rows that came."""
        before = len(self.events)
        chunk = next(self._chunks, None)
        self.is_open = chunk is not None
        self.feed(chunk or b"")
        return rows(self.events[before:])

    def to_the_end(self) -> None:
        """Let it poll until it ends."""
        while self.is_open:
            self.poll()

    def drafted(self) -> list[str]:
        """List the texts of the drafts that came."""
        return [event.data["text"] for event in self.notes if event.name == "draft"]


class Guest(Reader):
    """A listener of an ASGI application."""

    def __init__(self, application: ASGIHandler, run: Run, cookie: str) -> None:
        super().__init__()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "path": f"/api/runs/{run.pk}/events",
            "query_string": b"",
            "headers": [(b"host", b"testserver"), (b"cookie", cookie.encode())],
        }
        self.head: dict[str, Any] = {}
        self._there = ApplicationCommunicator(application, scope)

    async def arrive(self) -> None:
        await self._there.send_input({"type": "http.request"})
        self.head = await self._there.receive_output(LIMIT)
        assert self.head["status"] == 200

    async def hear(self, number: int) -> None:
        """Listen until so many events have come."""
        while len(self.events) < number:
            message = await self._there.receive_output(LIMIT)
            assert message.get("more_body"), "it has ended"
            self.feed(message["body"])

    async def to_the_end(self) -> None:
        while (message := await self._there.receive_output(LIMIT)).get("more_body"):
            self.feed(message["body"])
        await self._there.wait(LIMIT)

    async def leave(self) -> None:
        """Go away, and wait until everything of it has ended."""
        await self._there.send_input({"type": "http.disconnect"})
        await self._there.wait(LIMIT)


async def in_a_thread(ask: Callable[[], Any]) -> Any:
    """Call a function in a thread that closes its connections, and return its answer."""

    def answer() -> Any:
        try:
            return ask()
        finally:
            connections.close_all()

    return await sync_to_async(answer)()


class Unlimited(agentruns.Policy):
    """Any number of streams at once."""

    def quota(self, user: Any, agent: Any) -> Any:
        return replace(super().quota(user, agent), streams=None)
