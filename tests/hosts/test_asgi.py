"""A project that is served over ASGI: its streams hold no thread and no connection while nothing happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connections

from agentruns import deny
from agentruns.api.poller import Poller
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.api.conftest import decider, owner, pending, shop
from tests.api.streaming import Reader, connected, cookies, journal, rows
from tests.crash.processes import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["decider", "owner", "pending", "shop"]  # fixtures

LISTENERS = 20
LIMIT = 120  # seconds for a slow machine


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

    async def leave(self) -> float:
        """Go away; return in how many seconds everything of it had ended."""
        began = time.monotonic()
        await self._there.send_input({"type": "http.disconnect"})
        await self._there.wait(LIMIT)
        return time.monotonic() - began


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "atomic-requests"])
def test_streams_under_asgi(
    atomic: bool, pending: Any, owner: Any, decider: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    approval = pending()
    settings.AGENTRUNS_POLICY = "tests.api.test_stream.Unlimited"  # all listeners are one user
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(Poller, name, 0.7)
    threads = threading.active_count()
    run, cookie = approval.run, cookies(owner)
    connections.close_all()
    asyncio.run(listened_to(run, cookie, lambda: decide(approval, decider)))
    wait_for(lambda: threading.active_count() <= threads + 2, "the threads to end")
    wait_for(lambda: connected() == 0, "the server to see the connections closed")


async def listened_to(run: Run, cookie: str, decide: Callable[[], None]) -> None:
    application = ASGIHandler()
    known = await in_a_thread(lambda: journal(run))
    threads = threading.active_count()
    guests = [Guest(application, run, cookie) for _number in range(LISTENERS)]
    await asyncio.gather(*(guest.arrive() for guest in guests))
    await asyncio.gather(*(guest.hear(len(known)) for guest in guests))
    looks: deque[tuple[int, int]] = deque(maxlen=15)
    until = time.monotonic() + LIMIT
    while not is_calm(looks, threads):  # a slow machine takes a while to come to rest
        assert time.monotonic() < until, looks
        looks.append(await look())
    # All of them wait for the same look: who would not leave before it, is gone as late as the next one.
    _first, *left = [await guests.pop().leave() for _guest in range(6)]
    assert min(left) < 0.5, left
    await in_a_thread(decide)
    await asyncio.gather(*(guest.to_the_end() for guest in guests))
    everything = await in_a_thread(lambda: journal(run))
    for guest in guests:
        assert rows(guest.events) == everything
        assert guest.events[-1].data == {"status": "completed"}


def is_calm(looks: deque[tuple[int, int]], threads: int) -> bool:
    """Whether hardly a thread and hardly a connection was at work for the listeners in so many looks."""
    if len(looks) < 15:
        return False
    busy, held = (sorted(counted) for counted in zip(*looks, strict=True))
    quiet = busy[0] <= threads + 2 and held[0] == 0
    return quiet and busy[7] <= threads + 4 and held[7] <= 2


async def in_a_thread(ask: Callable[[], Any]) -> Any:
    """Return what a thread answers that leaves no connection behind."""

    def answer() -> Any:
        try:
            return ask()
        finally:
            connections.close_all()

    return await sync_to_async(answer)()


async def look() -> tuple[int, int]:
    """Return how many threads there are, and connections to the database that the streams hold."""
    await asyncio.sleep(0.05)
    return threading.active_count(), await in_a_thread(connected)


def decide(approval: Approval, decider: Any) -> None:
    deny(approval.pk, decider, "no")
    sweep()
