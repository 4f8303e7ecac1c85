"""Orders that workers process in these tests, what happened outside for them, and what staff do then."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from django.db import connection

from agentruns import approve, deny, get_run, resolve_orphan, resume_run, start_run
from agentruns.models import Run
from agentruns.services.runs.waiting import waits
from tests.effects import Effects
from tests.failover.replica import Pair
from tests.waiting import wait_for

# A lookup is safe to retry, a post declares nothing, a charge can be asked about.
AGENT = "posts-in-the-middle"


def begin(number: int = 1, agent: str = AGENT) -> Run:
    """Start an order."""
    return start_run(agent, "do it", f"s{number}", idempotency_key=f"k{number}")


def acted(effects: Effects) -> Counter[str]:
    return Counter(line["tool"] for line in effects.lines() if "tool" in line)


class Scene:
    """A pair of servers, the workers on it, and what they do outside."""

    def __init__(
        self, pair: Pair, effects: Effects, folder: Path, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        self.pair, self.effects, self.folder = pair, effects, folder
        self.workers: list[subprocess.Popen[str]] = []
        self.start = start  # `start("post:after")`: a worker that stops at that place until it is opened

    def gate(self, where: str) -> Path:
        return self.folder / f"gate-{where}"

    def open(self, where: str) -> None:
        """Let workers go on from a place."""
        self.gate(where).unlink()

    def wait_at(self, where: str) -> None:
        """Wait until a worker is at a place."""
        wait_for(lambda: self.effects.count(f"at:{where}") == 1, where)

    def lose(self, where: str) -> None:
        """Wait until a worker is at a place, and let nothing that happens after it reach the replica."""
        self.wait_at(where)
        self.pair.catch_up()
        self.pair.cut_off()
        self.open(where)

    def fail_over(self) -> None:
        """Let the primary die, and the replica take over."""
        self.pair.kill_primary()
        self.pair.fail_over()
        connection.close()


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
