"""Workers in operating-system processes of their own, which the demo can kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from django.conf import settings


class Worker:
    """A child process that runs `manage.py COMMAND ...`, with its output in workers.log.

    `hold` names an effect that its provider acknowledges late, such as "refund:ticket-2".
    """

    def __init__(self, *command: str, hold: str = "") -> None:
        with log_path().open("ab") as log:
            self._log_from = log.tell()
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, str(settings.BASE_DIR / "manage.py"), *command],
                env={**os.environ, "HELPDESK_HOLD": hold},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def name(self) -> str:
        """The worker's name in the story."""
        return f"worker {self.process.pid}"

    def is_alive(self) -> bool:
        """Check whether the process is still running."""
        return self.process.poll() is None

    def said(self) -> str:
        """Read the process's output so far."""
        with log_path().open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the process at once, as a power cut would, without any clean-up."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.is_alive():
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


def log_path() -> Path:
    """Build the path of the file with the workers' output."""
    return Path(settings.DATA_DIR) / "workers.log"
