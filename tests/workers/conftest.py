from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from agentruns import tasks
from tests.celery_app import app
from tests.programs import start_program
from tests.servers import Broker


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
def worker(broker: Broker, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`worker("--time-limit=1", SHOP_SLOW=...)` starts a Celery worker on this test's database."""
    quick = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]
    with ExitStack() as stack:
        made: list[subprocess.Popen[str]] = []

        def start(*options: str, **environment: str) -> subprocess.Popen[str]:
            log = stack.enter_context((tmp_path / f"worker-{len(made)}.log").open("w"))
            options = ("--concurrency=1", *options) if "--concurrency" not in " ".join(options) else options
            environment = {"AGENTRUNS_TEST_LEASE": "2", "AGENTRUNS_TEST_BROKER": broker.url, **environment}
            command = ["-m", "celery", "-A", "tests.celery_app", "worker", *quick, *options]
            made.append(start_program(*command, stdout=log, **environment))
            return made[-1]

        yield start
        for child in made:  # and its pool
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
