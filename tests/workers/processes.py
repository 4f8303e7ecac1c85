"""Celery workers of a test, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

Workers = Callable[..., subprocess.Popen[str]]
QUICK = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]


def kill(worker: subprocess.Popen[str]) -> None:
    """End a worker and the processes of its pool at once."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
