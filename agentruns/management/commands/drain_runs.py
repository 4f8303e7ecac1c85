from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from agentruns.conf import settings
from agentruns.engine import leases
from agentruns.management.base import AgentRunsCommand, Stop, argument

PAUSE = 0.2  # seconds between two checks
SETTLES = 1.0  # seconds in which a claim that began before the request to drain completes


class Command(AgentRunsCommand):
    help = "Before a deploy: make every running process stop at its next boundary and claim no more runs."

    arguments = (
        argument(
            "--timeout", "Seconds to wait for calls in progress (60).", type=float, default=60.0, metavar="S"
        ),
    )

    def act(self, *, timeout: float, **options: Any) -> bool:
        alias = settings.DATABASE
        leases.drain(alias)
        self.tell(None, "Draining: processes that are running now claim no more runs.")
        began, watched = time.monotonic(), dict[UUID, int]()
        with Stop() as stop:
            while True:
                driven, passed = leases.driven_runs(alias), time.monotonic() - began
                if passed <= SETTLES:  # later claims are of new processes
                    watched |= driven
                left = [run_id for run_id, epoch in watched.items() if driven.get(run_id) == epoch]
                if stop() or passed >= max(timeout, SETTLES) or (not left and passed > SETTLES):
                    break
                time.sleep(PAUSE)
        runs = "1 run is" if len(left) == 1 else f"{len(left)} runs are"
        undrained = [
            f"After {timeout:g} s {runs} still in a call:",
            *(f"  {run_id}" for run_id in left),
            "Stop their workers anyway: once a lease has expired, recovery takes over its run.",
        ]
        none = "Drained: no process of the old code drives a run. Stop its workers and start the new ones."
        self.tell({"drained": not left, "runs": list(map(str, left))}, *(undrained if left else [none]))
        return bool(left)
