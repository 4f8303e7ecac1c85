"""Crashes for tests: a real SIGKILL at a named boundary, or a store that stops in the middle of a drive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from agentruns.crashpoints import arm

if TYPE_CHECKING:  # agents.py may import this package before the models can be
    from django.db.models import Q

    from agentruns.journal.batch import Batch
    from agentruns.journal.conversation import SessionState
    from agentruns.stores import Store

crash_at = arm


class Crash(BaseException):
    """What a crashing store raises: no `except Exception` on the way may mistake it for an error."""


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
