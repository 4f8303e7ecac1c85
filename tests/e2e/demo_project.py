"""The demo project as its users start it: processes, in a folder of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.programs import ROOT, run_program
from tests.waiting import LIMIT

TICKETS = {f"ticket-{number}" for number in range(1, 6)}
STATUSES = {
    "ticket-1": "completed",
    "ticket-2": "completed",
    "ticket-3": "completed",
    "ticket-4": "awaiting-approval",
    "ticket-5": "orphaned",
}
EFFECTS = [
    ("ticket-1", "email"),
    ("ticket-2", "refund"),
    ("ticket-2", "email"),
    ("ticket-3", "refund"),
    ("ticket-3", "email"),
    ("ticket-5", "email"),
]


class Project:
    """The demo project with its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *arguments: str) -> list[str]:
        """Return what to start."""
        return [sys.executable, str(ROOT / "manage.py"), *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment in which only what the test says can matter."""
        foreign = ("AGENTRUNS_", "ANTHROPIC_", "DJANGO_", "MODEL", "HELPDESK_", "OPENAI_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        warnings = "error::DeprecationWarning,error::PendingDeprecationWarning"
        return {**kept, "AGENTRUNS_DEMO_DIR": str(self.folder), "PYTHONWARNINGS": warnings, **more}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of manage.py to its end."""
        return run_program(*self.command(*arguments), code=None, env=self.environment(**environment))

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return the runs of the five tickets by session, as `list_runs --json` has them."""
        lines = self.run("list_runs", "--json").stdout.splitlines()
        return {run["session"]: run for run in map(json.loads, lines) if run["session"] in TICKETS}

    def journal(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a run, as `show_run --json` has them."""
        shown = self.run("show_run", run["id"], "--json")
        return list(json.loads(shown.stdout)["messages"])

    def ledger(self) -> list[dict[str, Any]]:
        """Return what happened outside, but for what had happened before the demo began."""
        lines = map(json.loads, (self.folder / "effects.jsonl").read_text().splitlines())
        return [line for line in lines if line["session"] in TICKETS]

    def decide(self, code: str) -> None:
        """Let user demo decide, as in the console: `run` finds a session's run."""
        preamble = (
            "import agentruns; from django.contrib.auth.models import User; "
            "user = User.objects.get(username='demo'); "
            "run = lambda session: agentruns.list_runs().get(session__key=session)\n"
        )
        done = self.run("shell", "-c", preamble + code)
        assert done.returncode == 0, done.stderr


def answers(port: int) -> bool:
    """Say whether a server listens on a port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT):
            return True
    except OSError:
        return False
