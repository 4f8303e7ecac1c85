from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from agentruns import tasks
from tests.celery_app import app
from tests.programs import ROOT
from tests.servers import Broker
from tests.workers.processes import QUICK, Workers, kill


@pytest.fixture(scope="session")
def valkey() -> Iterator[Broker]:
    """A broker for all tests of this process."""
    with tempfile.TemporaryDirectory(prefix="agentruns-broker-") as folder:
        broker = Broker(Path(folder))
        yield broker
        broker.stop()


@pytest.fixture
def broker(valkey: Broker, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """An empty broker, and this process one of those that ring by it."""
    valkey.stop()
    valkey.start()
    monkeypatch.setattr(tasks, "_resting_until", 0.0)
    settings.AGENTRUNS_DISPATCHER = "agentruns.tasks.CeleryDispatcher"
    app.conf.broker_url = valkey.url
    return valkey


@pytest.fixture
def worker(broker: Broker, tmp_path: Path) -> Iterator[Workers]:
    """`worker("--time-limit=1", SHOP_SLOW=...)` starts a Celery worker on this test's database."""
    with ExitStack() as stack:
        made: list[subprocess.Popen[str]] = []

        def start(*options: str, **environment: str) -> subprocess.Popen[str]:
            log = stack.enter_context((tmp_path / f"worker-{len(made)}.log").open("w"))
            options = ("--concurrency=1", *options) if "--concurrency" not in " ".join(options) else options
            child = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.celery_app", "worker", *QUICK, *options],
                cwd=ROOT,
                env={
                    **os.environ,
                    "AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"]),
                    "AGENTRUNS_TEST_LEASE": "2",
                    "AGENTRUNS_TEST_BROKER": broker.url,
                    **environment,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            made.append(child)
            return child

        yield start
        for child in made:
            kill(child)
