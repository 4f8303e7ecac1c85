"""Let a driver forget what it remembers of a run after each append, and read the run again.

A test that passes without this and fails with it depends on memory that a crash would lose.
`AGENTRUNS_TEST_FORGETFUL=1` asks for it in the tests of the engine. Such a test sets
`AGENTRUNS_TEST_REBUILD=1` for its child processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentruns.engine.driver import Driver
from agentruns.models import Run
from tests.settings import BRIEF

FORGETFUL = bool(os.environ.get("AGENTRUNS_TEST_FORGETFUL"))
ALWAYS = bool(os.environ.get("AGENTRUNS_TEST_REBUILD"))
# The tests of the engine, except modules that drive no run, or that count what a memory saves.
ENGINE = {"db", "crash", "properties"}
REMEMBERING = {
    "crash/test_soak", "db/test_claims", "db/test_claude", "db/test_cost",
    "db/test_host_project", "db/test_imports", "db/test_notifications",
    "db/test_odd_results", "db/test_opentelemetry", "db/test_pgbouncer", "db/test_releases",
    "db/test_replay", "db/test_retention", "db/test_routers",
    "db/test_verify",
}  # fmt: skip
LONG = bool(os.environ.get("AGENTRUNS_LONG"))


def examples(usually: int, *, brief: int, long: int) -> int:
    """Return how many examples a property is tried on; `brief`: in `make test`, and where drivers forget."""
    return long if LONG else brief if BRIEF or ALWAYS or FORGETFUL else usually


def remembers(module: Path) -> bool:
    """Say whether the tests of a module run with drivers that remember, whatever was asked for."""
    return module.parent.name not in ENGINE or f"{module.parent.name}/{module.stem}" in REMEMBERING


def always() -> None:
    """Let every driver of this process forget, from now on."""
    Driver._stored = forgetting(Driver._stored)  # type: ignore[method-assign]


def forgetting(stored: Callable[..., None]) -> Callable[..., None]:
    """Build a `Driver._stored` that calls the given one and then reads the run from its rows."""
    from agentruns.journal.connection import own_alias  # older code, which tests run beside this, has none

    def stored_and_forgotten(self: Driver, *args: Any) -> None:
        stored(self, *args)
        if self.lease is None:
            return
        self.state = self.store.load(self.lease.session_id, self.lease.run_id)
        self.attempts = (
            Run.objects.using(own_alias(self.alias))
            .values_list("attempts", flat=True)
            .get(pk=self.lease.run_id)
        )

    return stored_and_forgotten
