"""Waiting for an event: the one place of the tests that looks again and again, with a limit of minutes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# Seconds after which a test counts as hung, on a machine however slow; fewer for mutants that fall only then.
LIMIT = float(os.environ.get("AGENTRUNS_TEST_LIMIT", "120"))
LOOK = 0.02  # seconds between two looks


def wait_for(condition: Callable[[], T], what: str, seconds: float = LIMIT) -> T:
    """Wait until a condition holds; return what it returned then, or fail and name what was awaited."""
    end = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s in vain for: {what}"
        pause()
    return outcome


async def wait_for_async(condition: Callable[[], Awaitable[T]], what: str, seconds: float = LIMIT) -> T:
    """Wait until a condition holds, as `wait_for` does, and leave the event loop to others meanwhile."""
    end = time.monotonic() + seconds
    while not (outcome := await condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s in vain for: {what}"
        await asyncio.sleep(LOOK)
    return outcome


def pause() -> None:
    """Leave the processor to others until the next look."""
    time.sleep(LOOK)


class Hanging:
    """Something that does not return before the test lets it go.

    `was_waited_for` says that its caller stayed with it until the limit of minutes was over.
    """

    def __init__(self) -> None:
        self._let_go = threading.Event()
        self.was_waited_for = False

    def hang(self) -> None:
        """Do not return before `let_go`."""
        if not self._let_go.wait(LIMIT):
            self.was_waited_for = True

    def let_go(self) -> None:
        """Let everything that hangs return."""
        self._let_go.set()

    def reset(self) -> None:
        """Let callers hang from now on."""
        self._let_go.clear()
        self.was_waited_for = False
