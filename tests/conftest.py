from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connections

from agentruns.agents import isolated_registry
from tests import effects as ledger
from tests.settings import DATABASE

# Child processes start twice as fast from compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def _asked_for_database() -> None:
    """Without this, a wrong start would test SQLite twice and still be green."""
    vendor = {"sqlite": "sqlite", "postgres": "postgresql"}[DATABASE]
    assert {connection.vendor for connection in connections.all()} == {vendor}


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ledger.Effects:
    """The ledger of outside effects; child processes find it with `Effects.from_environment()`."""
    path = tmp_path / "effects.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    return ledger.Effects(path)


@pytest.fixture
def agents() -> Iterator[None]:
    """Agents declared by a test are forgotten after it."""
    with isolated_registry():
        yield
