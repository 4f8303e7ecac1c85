"""Crashes for tests: a SIGKILL at a named boundary, one that spares the process, or a store that stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from unittest.mock import patch
from uuid import UUID

from agentruns.utils import failpoints
from agentruns.utils.failpoints import arm

if TYPE_CHECKING:  # agents.py may import this package before the models can be
    from django.db.models import Q

    from agentruns.journal.batch import Batch
    from agentruns.journal.conversation import SessionState
    from agentruns.journal.store import Store


def crash_at(point: str) -> None:
    """Kill this process with SIGKILL the nth time it reaches a point, given as `<point>[:<nth>]`.

    Raises ValueError for a point that does not exist.
    """
    arm(point)


class Crash(BaseException):
    """What a crash raises in this process: no `except Exception` on the way may mistake it for an error."""


@contextmanager
def crashing_at(point: str) -> Iterator[None]:
    """End the block at a boundary as a SIGKILL there would end its process, but spare the process.

    Open transactions roll back, and nothing is stored or released on the way out: the run stays leased to
    its dead driver (see `expire_leases`). `point` is `<point>[:<nth>]`, as for `crash_at`. AssertionError if
    the boundary was not reached.
    """
    from agentruns.engine.leases import Lease

    died: list[Crash] = []
    release = Lease.release

    def die() -> NoReturn:
        died.append(Crash(f"The process died at {point}."))
        raise died[0]

    def release_if_alive(lease: Lease, **options: Any) -> None:
        if not died:  # the dead release nothing
            release(lease, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(failpoints, "_armed", None))
        stack.enter_context(patch.object(failpoints, "_strike", die))
        stack.enter_context(patch.object(Lease, "release", release_if_alive))
        arm(point, die)
        try:
            yield
        except Crash as crash:
            if crash not in died:
                raise
    if not died:
        raise AssertionError(f"{point} was not reached, so nothing died there.")


class CrashingStore:
    """Passes appends on to `store` and stops at the nth; nothing of that one, or of later ones, lands."""

    durable: ClassVar[bool] = True

    def __init__(self, store: Store, nth: int) -> None:
        self.store = store
        self.left = nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Store a batch, or raise Crash."""
        self.left -= 1
        if self.left <= 0:
            raise Crash(f"The store stopped before {[row.kind for row in batch.rows]} were stored.")
        self.store.append(batch, guard=guard, closed=closed, durable=durable)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state from what is stored."""
        return self.store.load(session_id, run_id)


def crash_after_tool_results(store: Store, nth: int = 2) -> CrashingStore:
    """Return a store that raises Crash on the nth append of a drive; `start()` is not counted.

    With one ungated call the second append is the one that would store its result.
    """
    return CrashingStore(store, nth)
