"""A project that is served over ASGI: its streams hold no thread and no connection while nothing happens."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.db import connections

from agentruns import deny
from agentruns.api import stream
from agentruns.api.stream import Poller
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.api.streaming import Guest, connected, cookies, in_a_thread, journal, rows
from tests.waiting import LIMIT, wait_for, wait_for_async

pytestmark = pytest.mark.django_db(transaction=True)

LISTENERS = 20


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "atomic-requests"])
def test_streams_under_asgi(
    atomic: bool, pending: Any, owner: Any, decider: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    approval = pending()
    settings.AGENTRUNS_POLICY = "tests.api.streaming.Unlimited"  # all listeners are one user
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(Poller, name, 0.7)
    threads = threading.active_count()
    run, cookie = approval.run, cookies(owner)
    connections.close_all()
    with monkeypatch.context() as patch:
        patch.setattr(stream, "poller", Poller())
        for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
            patch.setattr(Poller, name, 10 * LIMIT)
        asyncio.run(left_before_the_next_look(run, cookie))
    asyncio.run(listened_to(run, cookie, lambda: decide(approval, decider)))
    wait_for(lambda: threading.active_count() <= threads + 2, "the threads to end")
    wait_for(lambda: connected() == 0, "the server to see the connections closed")


async def left_before_the_next_look(run: Run, cookie: str) -> None:
    """End a stream when its reader leaves, and not at the next look at the run, which is far off here."""
    application = ASGIHandler()
    known = await in_a_thread(lambda: journal(run))
    for _number in range(3):
        guest = Guest(application, run, cookie)
        await guest.arrive()
        await guest.hear(len(known))
        await guest.leave()


async def listened_to(run: Run, cookie: str, decide: Callable[[], None]) -> None:
    application = ASGIHandler()
    known = await in_a_thread(lambda: journal(run))
    threads = threading.active_count()
    guests = [Guest(application, run, cookie) for _number in range(LISTENERS)]
    await asyncio.gather(*(guest.arrive() for guest in guests))
    await asyncio.gather(*(guest.hear(len(known)) for guest in guests))
    looks: deque[tuple[int, int]] = deque(maxlen=15)

    async def come_to_rest() -> bool:
        looks.append((threading.active_count(), await in_a_thread(connected)))
        return is_calm(looks, threads)

    await wait_for_async(come_to_rest, "the listeners to come to rest")
    for _guest in range(6):
        await guests.pop().leave()
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


def decide(approval: Approval, decider: Any) -> None:
    deny(approval.pk, decider, "no")
    sweep()
