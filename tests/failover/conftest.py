from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.failover import replica
from tests.failover.replica import NAME
from tests.programs import ROOT
from tests.servers import Postgres
from tests.waiting import wait_for

MIGRATED = f"""
import django, psycopg, os
place = {{"host": os.environ["AGENTRUNS_TEST_PG_HOST"], "user": "postgres", "dbname": "postgres"}}
with psycopg.connect(**place, autocommit=True) as connection:
    connection.execute("CREATE DATABASE {NAME}")
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
"""


@pytest.fixture(scope="session")
def migrated() -> Iterator[Postgres]:
    """A server that was stopped, with the tables of this project."""
    environment = {"AGENTRUNS_TEST_DB_NAME": NAME, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    with replica.template(sys.executable, "-c", MIGRATED, **environment) as server:
        yield server


@pytest.fixture
def pair(
    migrated: Postgres, django_db_setup: None, django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[replica.Pair]:
    """A primary and its replica; this test's connection goes through their door, as workers' do."""
    with replica.pair(migrated) as made, django_db_blocker.unblock():
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "HOST", str(made.door))
        monkeypatch.setitem(connection.settings_dict, "NAME", NAME)
        yield made
        connection.close()
        monkeypatch.undo()


Workers = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def worker(pair: replica.Pair, tmp_path: Path) -> Iterator[Workers]:
    """`worker("--interval=1", SHOP_SLOW=...)` starts `resume_runs --watch`; `said-0` and so on is its log."""
    with ExitStack() as stack:
        made: list[subprocess.Popen[str]] = []

        def start(*options: str, **environment: str) -> subprocess.Popen[str]:
            said = tmp_path / f"said-{len(made)}"
            child = subprocess.Popen(
                [sys.executable, "-m", "django", "resume_runs", "--watch", *(options or ("--interval=1",))],
                cwd=ROOT,
                env={
                    **os.environ,
                    **pair.environment,
                    "DJANGO_SETTINGS_MODULE": "tests.settings",
                    "AGENTRUNS_TEST_DB_NAME": NAME,
                    "AGENTRUNS_TEST_LEASE": "3",
                    **environment,
                },
                stdout=stack.enter_context(said.open("w")),
                stderr=subprocess.STDOUT,
                text=True,
            )
            made.append(child)
            stack.callback(child.wait)
            stack.callback(child.kill)
            wait_for(lambda: "watches" in said.read_text(), "the watcher")
            return child

        yield start


@pytest.fixture
def gates(tmp_path: Path) -> Callable[[str], Path]:
    """`gates("post:after")` closes the gate of a place, which is open again once the file is gone."""

    def close(where: str) -> Path:
        gate = tmp_path / f"gate-{where}"
        gate.touch()
        return gate

    return close
