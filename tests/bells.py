"""Dispatchers that remember for which runs they rang, and a notifier that tells nobody."""

from __future__ import annotations

from typing import Any, ClassVar

from agentruns.models import Run
from tests.db.dying import elsewhere


class Bell:
    """Remember the id of each run."""

    rung: ClassVar[list[Any]] = []

    def notify(self, run_id: Any) -> None:
        self.rung.append(run_id)


class WitnessBell(Bell):
    """Remember the id of each run, and whether another connection saw the run by then."""

    rung: ClassVar[list[Any]] = []

    def notify(self, run_id: Any) -> None:
        self.rung.append((run_id, elsewhere(lambda: Run.objects.filter(pk=run_id).exists())))


def ignore(notice: object) -> None:
    """Take every notice, and do nothing."""
