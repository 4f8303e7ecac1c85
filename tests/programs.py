"""Programs that a test runs to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 1800  # seconds, on a machine however slow


def run_program(
    *command: str | Path,
    code: int | None = 0,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    **added: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program; fail unless it exits with the code, whatever its code where that is None.

    The environment is `env`, or this process's, and `added`.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**(os.environ if env is None else env), **added},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert code in (None, done.returncode), f"{command}\n{done.stdout}\n{done.stderr}"
    return done
