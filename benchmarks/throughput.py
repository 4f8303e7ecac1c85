"""Steps a second of several processes, each at runs of its own, on one PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.child import Child, Missing
from benchmarks.listeners import TICK, ticks

SYSTEMS = [f"{name}-postgresql" for name in ("raw", "agentruns", "absurd", "dbos", "langgraph")]
STEPS, CALLS = 50, 1
PROCESSES = (1, 2, 4, 8)

Shift = dict[str, float]  # steps a second, and the CPU seconds of a step: the clients' and the server's


def measure(
    start: Callable[[str], Child], server: int, seconds: float, shifts: int
) -> dict[str, dict[str, list[Shift]]]:
    """Return the shifts of each system by its processes; `start` makes the next process of a system."""
    teams: dict[str, list[Child]] = {}
    found: dict[str, dict[str, list[Shift]]] = {}
    try:
        for system in SYSTEMS:
            with contextlib.suppress(Missing):
                teams[system] = [start(system)]  # it makes the tables
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    for child in pool.map(start, [system] * (PROCESSES[-1] - 1)):
                        teams[system].append(child)
                for child in teams[system]:
                    child.run(1, CALLS)
        for _ in range(shifts):
            for count in PROCESSES:
                for system, team in teams.items():
                    done = shift(team[:count], server, seconds)
                    found.setdefault(system, {}).setdefault(str(count), []).append(done)
    finally:
        for child in (child for team in teams.values() for child in team):
            child.stop()
    return found


def shift(team: list[Child], server: int, seconds: float) -> Shift:
    """Let processes work at the same time."""
    before, until = spent(server), time.perf_counter() + seconds
    for child in team:
        child.begin(steps=STEPS, calls=CALLS, until=until)
    answers: list[dict[str, Any]] = [child.answer() for child in team]
    done, steps, client = (sum(answer[key] for answer in answers) for key in ("done", "steps", "cpu"))
    return {
        "rate": round(done / seconds, 1),
        "client": round(client / steps, 7),
        "server": round((spent(server) - before) / steps, 7),
    }


def spent(server: int) -> float:
    """Return the CPU seconds of a server and its backends, those that have ended included."""
    total = sum(ticks(server))
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == server:
                total += ticks(int(path.parent.name))[0]
    return total / TICK
