"""What a crowd costs: `python -m benchmarks.crowd` measures very many runs, listeners and workers.

What is compared is measured in turn, on one PostgreSQL: pages of the console and the API beside few runs and
beside very many (`benchmarks.lists`), listeners and none (`benchmarks.listeners`), agentruns and raw SQL in
so many processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from statistics import median
from typing import Any, NamedTuple

from benchmarks import listeners, lists
from benchmarks.processes import Child, children, database, say
from benchmarks.report import spread, table
from benchmarks.workload import Workload
from tests import scratch
from tests.servers import Postgres, postgres

STEPS, CALLS = 10, 2
VARIANTS = ("raw-postgresql", "agentruns-postgresql")


class Size(NamedTuple):
    """How much is measured."""

    runs: int
    pages: int  # repetitions
    listeners: int
    listening: float  # seconds
    rows: int
    workers: tuple[int, ...]
    working: float  # seconds
    shifts: int


FULL = Size(1_000_000, 7, 200, 20.0, 2, (1, 2, 4, 8), 2.0, 3)
QUICK = Size(10_000, 3, 20, 6.0, 1, (1, 2), 1.5, 2)


def listening(server: Postgres, size: Size) -> list[str]:
    """Return what idle listeners cost a server, and how soon all of them have a row."""
    return [*listened(server, size, ""), *listened(server, size, "pool")]


def listened(server: Postgres, size: Size, pool: str) -> list[str]:
    """Return it for a server with Django's pool of connections, or without."""
    name = f"listeners{pool}"
    url, path = database(server, name), server.folder / name
    with children() as started:
        started.append(Child("serve", url, str(path), pool))
        told = started[0].answer()
        gauge = listeners.Gauge(server, started[0].process.pid, name)
        guests = listeners.Guests(str(path), **told)
        found = asyncio.run(listeners.listened(guests, gauge, size.listeners, size.listening, size.rows))
    how = "with Django's pool" if pool else "without a pool"
    return [f"Idle listeners of one run over ASGI, {how}, during {size.listening:.0f} s", "", *found]


def drive(variant: str, url: str, is_first: str) -> None:
    """Do runs for as many seconds as each line of the input says; answer what was done."""
    from benchmarks.systems import ours, raw

    system: Any = raw if variant == "raw-postgresql" else ours
    if system is raw and not is_first:
        raw.database = raw.Postgresql(url)
    else:
        system.prepare(variant, url)
    system.run(Workload(STEPS, CALLS))
    say("ready")
    for line in sys.stdin:
        began, cpu, runs = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < json.loads(line):
            workload = Workload(STEPS, CALLS)
            system.run(workload)
            workload.check()
            runs += 1
        cpu = time.process_time() - cpu
        say({"steps": runs * STEPS, "seconds": time.perf_counter() - began, "cpu": cpu})


def workers(server: Postgres, size: Size) -> list[str]:
    """Return how many steps a second so many processes do, in turn with raw SQL and with agentruns."""
    with children() as started:
        teams: list[list[Child]] = []
        for variant in VARIANTS:
            url = database(server, variant)
            teams.append([])
            for number in range(max(size.workers)):
                started.append(Child("drive", variant, url, "" if number else "first"))
                teams[-1].append(started[-1])
                if not number:
                    started[-1].answer()  # the tables are there
        for worker in teams[0][1:] + teams[1][1:]:
            worker.answer()
        rows = []
        for count in size.workers:
            shifts = [[shift(team[:count], size.working) for team in teams] for _ in range(size.shifts)]
            rates, cpus = ([[each[at] for each in pair] for pair in shifts] for at in (0, 1))
            told = [f"{median(each):.0f}" for each in zip(*rates, strict=True)]
            told.append(spread(mine / limit for limit, mine in rates))
            told += [f"{median(each) * 1000:.2f}" for each in zip(*cpus, strict=True)]
            rows.append([str(count), *told])
    head = ["processes", "raw steps/s", "our steps/s", "ours over raw", "raw CPU ms", "our CPU ms"]
    title = f"W({STEPS}, {CALLS}) with raw SQL and with agentruns; CPU is the clients', of one step"
    return [title, "", *table(head, rows)]


def shift(team: list[Child], seconds: float) -> tuple[float, float]:
    """Return the steps a second of all together, and the CPU seconds of a step."""
    for worker in team:
        worker.begin(seconds)
    done = [worker.answer() for worker in team]
    steps = sum(each["steps"] for each in done)
    return sum(each["steps"] / each["seconds"] for each in done), sum(each["cpu"] for each in done) / steps


def main() -> None:
    """Measure everything and print it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is to stop, too
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10,000 runs, 20 listeners, 2 processes")
    size = QUICK if parser.parse_args().quick else FULL
    with postgres() as server:
        place = "in memory" if server.folder.is_relative_to(scratch.MEMORY) else "on a disk"
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; PostgreSQL's data {place}\n")
        print("\n".join(lists.pages(server, size.runs, size.pages)), flush=True)
        for measure in (listening, workers):
            print("\n".join(measure(server, size)), flush=True)


if __name__ == "__main__":
    actions = {"show": lists.show, "serve": listeners.serve, "drive": drive}
    with contextlib.suppress(KeyboardInterrupt):
        actions[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in actions else main()
