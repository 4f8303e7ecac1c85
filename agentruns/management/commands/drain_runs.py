"""`manage.py drain_runs`: before a deploy, workers finish their call, give the run back and claim no more."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from agentruns.conf import settings
from agentruns.engine import leases
from agentruns.management.base import WRONG, AgentRunsCommand, Stop

PAUSE = 0.2  # seconds between two looks
SETTLES = 1.0  # seconds in which a claim that was under way as the stamp was written gets through


class Command(AgentRunsCommand):
    help = "Before a deploy: let every process that runs now stop at its next boundary and claim no more."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--timeout",
            type=float,
            default=60.0,
            metavar="S",
            help="Seconds to wait for the calls that are under way (60).",
        )

    def act(self, *, timeout: float, json: bool, **options: Any) -> None:
        alias = settings.DATABASE
        leases.drain(alias)
        if not json:
            self.say("Draining: no process that is running now claims a run any more.")
        with Stop() as stop:
            left = _wait(alias, timeout, stop)
        if json:
            self.say_json({"drained": not left, "runs": [str(run_id) for run_id in left]})
        elif left:
            runs = "1 run is" if len(left) == 1 else f"{len(left)} runs are"
            self.say(f"After {timeout:g} s {runs} still in a call:")
            for run_id in left:
                self.say(f"  {run_id}")
            self.say(
                "Stop their workers all the same: once a lease has run out, recovery takes its run over."
            )
        else:
            self.say(
                "Drained: nothing of the old code drives a run. Stop its workers and start the new ones."
            )
        if left:
            raise SystemExit(WRONG)


def _wait(alias: str, timeout: float, stop: Stop) -> list[UUID]:
    """Wait until what was driven at the stamp is driven no more; return what still is."""
    began = time.monotonic()
    watched: dict[UUID, int] = {}
    while True:
        driven, passed = leases.driven_runs(alias), time.monotonic() - began
        if passed <= SETTLES:  # later ones are of processes that were started since
            watched |= driven
        left = [run_id for run_id, epoch in watched.items() if driven.get(run_id) == epoch]
        if stop() or passed >= max(timeout, SETTLES) or (not left and passed > SETTLES):
            return left
        time.sleep(PAUSE)
