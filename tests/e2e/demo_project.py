"""The demo project as its users start it: processes, in a folder of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.programs import ROOT, run_program
from tests.waiting import LIMIT, wait_for

TICKETS = {f"ticket-{number}" for number in range(1, 7)}
STATUSES = {
    "ticket-1": "completed",
    "ticket-2": "completed",
    "ticket-3": "completed",
    "ticket-4": "awaiting-approval",
    "ticket-5": "orphaned",
    "ticket-6": "completed",
}
EFFECTS = [
    ("ticket-1", "email"),
    ("ticket-2", "refund"),
    ("ticket-2", "email"),
    ("ticket-3", "refund"),
    ("ticket-3", "email"),
    ("ticket-5", "email"),
    ("ticket-6", "label"),
    ("ticket-6", "refund"),
    ("ticket-6", "email"),
]


class Project:
    """The demo project with its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "manage.py"), *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """Build an environment in which only what the test says can matter."""
        foreign = ("AGENTRUNS_", "ANTHROPIC_", "DJANGO_", "MODEL", "HELPDESK_", "OPENAI_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        warnings = "error::DeprecationWarning,error::PendingDeprecationWarning"
        return {**kept, "AGENTRUNS_DEMO_DIR": str(self.folder), "PYTHONWARNINGS": warnings, **more}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of manage.py to its end."""
        return run_program(*self.command(*arguments), code=None, env=self.environment(**environment))

    def runs(self) -> dict[str, dict[str, Any]]:
        """List the runs of the six tickets by session, as `list_runs --json` has them."""
        lines = self.run("list_runs", "--json").stdout.splitlines()
        return {run["session"]: run for run in map(json.loads, lines) if run["session"] in TICKETS}

    def journals(self, *sessions: str) -> list[list[dict[str, Any]]]:
        """List the rows of the run of each session, as `show_run --json` has them."""
        show = "call_command('show_run', str(run(session).pk), '--json')"
        told = self.python(f"for session in {sessions}:\n    {show}")
        return [json.loads(each)["messages"] for each in told.splitlines()]

    def ledger(self) -> list[dict[str, Any]]:
        """Read what happened outside, but for what had happened before the demo began."""
        lines = map(json.loads, (self.folder / "effects.jsonl").read_text().splitlines())
        return [line for line in lines if line["session"] in TICKETS]

    def python(self, code: str, **environment: str) -> str:
        """Run code in the project, to whom `user` is the user demo, and `run` finds a session's run."""
        preamble = (
            "import agentruns; from django.contrib.auth.models import User; "
            "from django.core.management import call_command; "
            "user = User.objects.filter(username='demo').first(); "
            "run = lambda session: agentruns.list_runs().get(session__key=session)\n"
        )
        done = self.run("shell", "-v0", "-c", preamble + code, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def console(project: Project) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve the project with a worker beside it; yield the process, and the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    child = subprocess.Popen(
        project.command("console", f"--port={port}"),
        cwd=ROOT,
        env=project.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: answers(port), "the web server")
        yield child, port
    finally:
        child.terminate()
        child.communicate(timeout=LIMIT)


def answers(port: int) -> bool:
    """Say whether a server listens on a port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT):
            return True
    except OSError:
        return False
