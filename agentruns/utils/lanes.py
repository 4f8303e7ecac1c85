"""Lanes: work in separate threads, for which the caller waits a limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from django.db import connections

from agentruns.conf import settings
from agentruns.utils import carry, forks

T = TypeVar("T")


class Lane:
    """A group of at most `threads` threads at a time. Work that hangs keeps its thread busy."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._free = threading.BoundedSemaphore(threads)
        forks.in_child(partial(self._free.__init__, threads))  # type: ignore[misc]

    def __call__(self, work: Callable[[], T], seconds: float) -> T:
        """Run `work` in a new thread; return its result or raise its exception.

        Raises TimeoutError if there is no result within `seconds`, which include the wait for a free thread.
        Work that has begun goes on. The thread closes its database connections at the end.
        """
        late, until = TimeoutError(f"no answer within {seconds} s"), time.monotonic() + seconds
        if not self._free.acquire(timeout=seconds):
            raise late
        done: Future[T] = Future()
        work = carry.carrying(settings.DATABASE, work)

        def target() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            finally:
                connections.close_all()
                self._free.release()

        threading.Thread(target=target, name=self.name, daemon=True).start()
        try:
            return done.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            if done.done():  # `work` raised TimeoutError, or ended in this instant
                return done.result()
            raise late from None
