"""AGENTRUNS_TEST_REBUILD=1: what a driver remembers of a run is thrown away after each append and read again.

Whatever passes without it and fails with it depends on memory that a crash would lose.
"""

from __future__ import annotations

import os

from agentruns.engine.driver import Driver
from agentruns.journal.store import Batch
from agentruns.models import Run
from tests.settings import BRIEF

ALWAYS = bool(os.environ.get("AGENTRUNS_TEST_REBUILD"))
LONG = bool(os.environ.get("AGENTRUNS_LONG"))


def examples(usually: int, *, brief: int, long: int) -> int:
    """Return how many examples a property is tried on; `brief`: in `make test`, and where drivers forget."""
    return long if LONG else brief if BRIEF or ALWAYS else usually


def always() -> None:
    """Let every driver of this process forget, from now on."""
    from agentruns.journal.connection import own_alias  # older code, which tests run beside this, has none

    stored = Driver._stored

    def stored_and_forgotten(self: Driver, batch: Batch, sent: float) -> None:
        stored(self, batch, sent)
        if self.lease is None:
            return
        self.state = self.store.load(self.lease.session_id, self.lease.run_id)
        self.attempts = (
            Run.objects.using(own_alias(self.alias))
            .values_list("attempts", flat=True)
            .get(pk=self.lease.run_id)
        )

    Driver._stored = stored_and_forgotten  # type: ignore[method-assign]
