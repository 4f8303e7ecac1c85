"""Stores of a run's rows: the database, or memory for a stateless run."""

from __future__ import annotations

from typing import ClassVar, Protocol
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from agentruns.conf import settings
from agentruns.journal import telemetry
from agentruns.journal.append import append
from agentruns.journal.batch import Batch
from agentruns.journal.conversation import SessionState
from agentruns.journal.outbox import announce
from agentruns.journal.projection import project
from agentruns.journal.read import load


class Store(Protocol):
    """The contract of a store: one append is all or nothing."""

    durable: ClassVar[bool]

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Store a batch, or raise and leave nothing of it."""

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state from what is stored."""


class DatabaseStore:
    """Appends to the journal in the project's own database."""

    durable: ClassVar[bool] = True

    def __init__(self, alias: str | None = None) -> None:
        self.alias = alias or settings.DATABASE

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Store rows, folded columns and approvals in one transaction (a savepoint inside another).

        `durable` insists that no transaction is open, so that the commit is real. Raises
        JournalConflictError when the writer did not know the whole journal.
        """
        with transaction.atomic(using=self.alias, durable=durable):
            append(self.alias, batch, closed=closed)
            project(self.alias, batch, guard)
            announce(self.alias, batch)
        telemetry.stored(batch, self.alias)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Rebuild the state from the session's rows."""
        return load(self.alias, session_id, run_id)


class MemoryStore:
    """Keeps rows for the life of one stateless run; nothing survives the process."""

    durable: ClassVar[bool] = False

    def append(
        self, batch: Batch, *, guard: Q | None = None, closed: bool = False, durable: bool = False
    ) -> None:
        """Accept a batch: its state is folded already."""
        telemetry.stored(batch, None)

    def load(self, session_id: UUID, run_id: UUID) -> SessionState:
        """Refuse: there is nothing to read back."""
        raise LookupError(f"Run {run_id} lives in memory only; there is nothing to load.")
