"""A process of its own, working on the test's database: `python -m tests.crash.child ACTION ARGUMENTS`."""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.db import DatabaseError

from agentruns import approve, cancel_run, run_agent
from agentruns.sweep import sweep


def work() -> None:
    """Sweep until killed."""
    while True:
        try:
            if not sweep().driven:
                time.sleep(0.1)
        except DatabaseError:  # busy; the next sweep goes on
            time.sleep(0.1)


ACTIONS = {
    "work": work,
    "run": lambda agent, session: run_agent(agent, "do it", session, idempotency_key=session),
    "sweep": sweep,
    "approve": lambda approval_id: approve(approval_id, None),
    "cancel": lambda run_id: cancel_run(run_id, reason="changed my mind"),
}

if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    print(ACTIONS[action](*arguments))
