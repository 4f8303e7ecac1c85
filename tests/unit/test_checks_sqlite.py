"""Checks of a journal in SQLite, on databases of their own: those of the tests are as they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings

from agentruns.checks.database import check_database
from tests.unit.checks import ids

WAL = "PRAGMA journal_mode=WAL"


@pytest.fixture
def scratch(tmp_path: Path, django_db_blocker: Any) -> Iterator[Callable[..., None]]:
    """Make the journal's database an SQLite one of its own."""

    def make(name: str, **options: Any) -> None:
        database = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": name or tmp_path / "db",
            "OPTIONS": options,
        }
        connections.settings["scratch"] = connections.configure_settings({"default": database})["default"]

    with override_settings(AGENTRUNS_DATABASE="scratch"), django_db_blocker.unblock():
        yield make
    BaseDatabaseWrapper.close(connections["scratch"])  # SQLite's own leaves a database in memory open
    del connections["scratch"], connections.settings["scratch"]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (":memory:", {}, ["agentruns.E015"]),
        ("file:shop?mode=memory&cache=shared", {}, ["agentruns.E015"]),
        # As Django's own tests have it.
        ("file:memorydb_default?mode=memory&cache=shared", {"transaction_mode": "IMMEDIATE"}, []),
        ("", {"transaction_mode": "IMMEDIATE"}, ["agentruns.W006"]),
        (
            "",
            {"init_command": "PRAGMA synchronous=OFF"},
            ["agentruns.W002", "agentruns.W006", "agentruns.E006"],
        ),
        ("", {"init_command": f"{WAL}; PRAGMA synchronous=NORMAL"}, ["agentruns.W002", "agentruns.E006"]),
        ("", {"init_command": WAL}, ["agentruns.W002"]),
        ("", {"transaction_mode": "IMMEDIATE", "init_command": WAL}, []),
    ],
)
def test_a_database_of_sqlite(
    name: str, options: dict[str, Any], expected: list[str], scratch: Callable[..., None]
) -> None:
    scratch(name, **options)
    found = check_database(None, databases=["scratch"])
    assert ids(found) == expected
    assert all(one.hint for one in found)
