from __future__ import annotations

import pytest

from agentruns.engine import leases
from agentruns.utils import clock


@pytest.fixture
def nothing_by_time(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver looks every five seconds, and on a slow machine a run lasts as long; a process asks once."""
    monkeypatch.setattr("agentruns.engine.leases.DRAIN_CHECK_SECONDS", 3600.0)
    clock.now("default")
    leases.request_at_start("default")
