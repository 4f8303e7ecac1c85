from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.effects import Effects
from tests.failover import replica
from tests.failover.orders import Scene
from tests.failover.replica import NAME
from tests.programs import start_program
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


@pytest.fixture
def scene(pair: replica.Pair, effects: Effects, tmp_path: Path) -> Iterator[Scene]:
    """A pair of servers and workers on it, each a `resume_runs --watch` whose log is `said-0` and so on."""
    with ExitStack() as stack:

        def start(*stops: str, lease: str = "3", size: int = 16) -> subprocess.Popen[str]:
            said = tmp_path / f"said-{len(made.workers)}"
            for where in stops:
                made.gate(where).touch()
            place = {"SHOP_SLOW": " ".join(stops), "SHOP_GATE": str(made.gate("{where}"))}
            child = start_program(
                *("-m", "django", "resume_runs", "--watch", "--interval=1", f"--concurrency={size}"),
                stdout=stack.enter_context(said.open("w")),
                **{**pair.environment, **place, "AGENTRUNS_TEST_LEASE": lease},
            )
            made.workers.append(child)
            stack.callback(child.wait)
            stack.callback(child.kill)
            wait_for(lambda: "watches" in said.read_text(), "the watcher")
            return child

        made = Scene(pair, effects, tmp_path, start)
        yield made
