"""Drivers of the real engine, each in a thread that goes one step of the model at a time, or dies."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connections

from agentruns.engine import tool_calls
from agentruns.engine.driver import Driver
from agentruns.engine.leases import Lease, keeper
from agentruns.services import events
from agentruns.utils.db import uptime
from tests.waiting import LIMIT

# The commit of a driver by the function that builds its rows -> the place in the model just before it.
COMMITS = {
    "_recover.<locals>.build": "recover",
    "_step.<locals>.<lambda>": "close",
    "execute.<locals>.<lambda>": "decided",
    "_run.<locals>.start": "start",
    "_ask.<locals>.build": "reply",
    "_record.<locals>.build": "result",
    "_doubt.<locals>.build": "doubt",
    "_reconcile.<locals>.build": "resolve",
}


class Death(BaseException):
    """Stands for SIGKILL inside this process: no step follows it, and the lease stays as it is."""


class Process:
    """One driver. Nothing happens at the same time: its caller waits until it stands at its next place."""

    here = threading.local()

    def __init__(self) -> None:
        self.slept = 0.0  # seconds by which its clock is ahead
        self._news: queue.Queue[str | BaseException] = queue.Queue()
        self._orders: queue.Queue[bool] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_dead = False

    def begin(self, action: Callable[[], Any]) -> str:
        """Start an action; return the place before its first step, or "" if it has ended."""
        self._is_dead = False
        self._thread = threading.Thread(target=self._live, args=[action], daemon=True)
        self._thread.start()
        return self._wait()

    def go(self) -> str:
        """Let it do one step; return its next place, or "" if it has ended."""
        self._orders.put(True)
        return self._wait()

    def die(self) -> None:
        """Let it die before its next step."""
        self._orders.put(False)
        assert self._wait() == ""

    @classmethod
    def stop(cls, place: str) -> None:
        """Wait at a place for the next order, if this thread is one of a Process."""
        process = getattr(cls.here, "process", None)
        if process is not None:
            process._stop(place)

    @classmethod
    def uptime(cls) -> float:
        """Read the clock of this thread's process."""
        process = getattr(cls.here, "process", None)
        return uptime() + (process.slept if process else 0.0)

    def _live(self, action: Callable[[], Any]) -> None:
        Process.here.process = self
        news: str | BaseException = ""
        try:
            action()
        except Death:
            pass
        except BaseException as error:
            news = error
        finally:
            connections.close_all()
        self._news.put(news)

    def _wait(self) -> str:
        news = self._news.get(timeout=LIMIT)
        if isinstance(news, BaseException):
            raise AssertionError("a driver failed") from news
        if not news and self._thread is not None:
            self._thread.join(LIMIT)
        return news

    def _stop(self, place: str) -> None:
        if not self._is_dead:
            self._news.put(place)
            self._is_dead = not self._orders.get(timeout=LIMIT)
        if self._is_dead:  # also where a handler's end was caught, to put the call in doubt
            raise Death(place)


def take_steps(patch: pytest.MonkeyPatch) -> None:
    """Let every Process stop before each step of the model."""
    commit, release, reconcile = Driver.commit, Lease.release, tool_calls._reconcile

    def stepwise_commit(driver: Driver, build: Any, *, joined: bool = False) -> Any:
        if not joined:
            Process.stop(COMMITS[build.__qualname__])
        return commit(driver, build, joined=joined)

    def stepwise_release(lease: Lease, **how: Any) -> None:
        if not isinstance(sys.exc_info()[1], Death):
            Process.stop("release")
            release(lease, **how)

    def stepwise_reconcile(driver: Driver, call: Any) -> None:
        Process.stop("ask")
        reconcile(driver, call)

    look, deliver = events.in_transaction, events._deliver

    def stepwise_store(alias: str, action: Callable[[], Any]) -> Any:
        Process.stop("store")
        return look(alias, action)

    def stepwise_delivery(*args: Any) -> Any:
        Process.stop("deliver")
        return deliver(*args)

    def reached(point: str) -> None:
        if point == "before_tool":
            Process.stop("enter")

    patch.setattr(Driver, "commit", stepwise_commit)
    patch.setattr(Lease, "release", stepwise_release)
    patch.setattr(tool_calls, "_reconcile", stepwise_reconcile)
    patch.setattr(tool_calls, "reached", reached)
    patch.setattr(events, "in_transaction", stepwise_store)
    patch.setattr(events, "_deliver", stepwise_delivery)
    patch.setattr(keeper, "keeping", lambda lease: nullcontext())  # nothing happens by itself
    for module in ("driver", "tool_calls", "leases", "handler"):
        patch.setattr(f"agentruns.engine.{module}.uptime", Process.uptime)
