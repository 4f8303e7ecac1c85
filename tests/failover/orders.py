"""Orders that workers process in these tests, what happened outside for them, and what staff do then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from django.db import connection

from agentruns import approve, deny, get_run, resolve_orphan, resume_run, start_run
from agentruns.models import Control, Run
from agentruns.services.waiting import waits
from tests.effects import Effects
from tests.waiting import wait_for

# A lookup is safe to retry, a post declares nothing, a charge can be asked about.
AGENT = "posts-in-the-middle"


def begin(number: int = 1, agent: str = AGENT) -> Run:
    """Start an order."""
    return start_run(agent, "do it", f"s{number}", idempotency_key=f"k{number}")


def acted(effects: Effects) -> Counter[str]:
    """Return how often each tool acted."""
    return Counter(line["tool"] for line in effects.lines() if "tool" in line)


def is_at(effects: Effects, where: str) -> Callable[[], bool]:
    """Return a question: is a worker at that place?"""
    return lambda: effects.count(f"at:{where}") == 1


def left_alone(run: Run) -> Run:
    """Wait until no worker goes on with a run."""
    connection.close()

    def stands() -> bool:
        run.refresh_from_db()
        return run.status not in ("queued", "running")

    wait_for(stands, "the run to stand still")
    return run


def settle(run: Run, done: Counter[str]) -> None:
    """Do what staff do with a held run, for which the outside world has `done` this."""
    resume_run(run.pk, drive=False)
    for _ in range(10):
        run = left_alone(get_run(run.pk))
        if run.is_ended:
            return
        [wait, *_rest] = waits("default", [run])[run.pk]
        happened = done[wait.tool] > 0
        if wait.kind == "orphan":
            verdict = "occurred" if happened else "not_occurred"
            resolve_orphan(run.pk, wait.call_id, verdict, None, result="x")
        elif happened:
            deny(wait.approval_id, None, "it has happened")
        else:
            approve(wait.approval_id, None)
    raise AssertionError(f"{run} does not end: {run.status}")


def noted() -> bool:
    """Tell whether a sweep has noted the timeline of the promoted server."""
    connection.close()
    return Control.objects.filter(name="server", reason="00000002").exists()
