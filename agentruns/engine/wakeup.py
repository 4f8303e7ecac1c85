"""The doorbell: tells workers that a run can go on. Losing it delays a run until the next sweep."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from django.db import transaction
from django.utils.module_loading import import_string

from agentruns.conf import settings


class Dispatcher(Protocol):
    """The class that AGENTRUNS_DISPATCHER names; called after the commit, when nothing can be rolled back."""

    def notify(self, run_id: UUID) -> None:
        """Tell a worker that a run can go on. May fail or be lost."""


class SweepDispatcher:
    """Notifies nobody: `resume_runs`, once or with --watch, finds the run in the database."""

    def notify(self, run_id: UUID) -> None:
        """Leave the run to the next sweep."""


def notify_on_commit(alias: str, run_id: UUID) -> None:
    """Notify when the open transaction commits; what the dispatcher raises is logged, never the caller's."""
    dispatcher: Dispatcher = import_string(settings.DISPATCHER)()

    def notify() -> None:  # not functools.partial: Django logs the name of what failed
        dispatcher.notify(run_id)

    transaction.on_commit(notify, using=alias, robust=True)
