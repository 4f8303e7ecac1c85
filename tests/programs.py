"""Programs that a test runs to their end, or beside itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.db import connection

ROOT = Path(__file__).parents[1]
PATIENCE = 1800  # seconds, on a machine however slow


def run_program(
    *command: str | Path,
    code: int | None = 0,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    patience: float | None = PATIENCE,
    **added: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program; fail unless it exits with the code, whatever its code where that is None.

    The environment is `env`, or this process's, and `added`.
    """
    done = subprocess.run(
        command, cwd=cwd, env={**(os.environ if env is None else env), **added}, capture_output=True,
        text=True, timeout=patience, check=False,
    )  # fmt: skip
    assert code in (None, done.returncode), f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def start_program(*words: str, stdout: Any = None, **added: str) -> subprocess.Popen[str]:
    """Start an interpreter on this test's database, in a session of its own; its errors go to its output."""
    database = {"AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"])}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **database, **added},
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def has_heard(process: subprocess.Popen[str]) -> bool:
    """Whether a command has taken a first signal: then it leaves the second one to the system."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return not int(caught, 16) & (1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1))
