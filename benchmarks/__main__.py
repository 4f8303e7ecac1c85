"""Every system on the same work: `python -m benchmarks`, or with words that begin the names of those wanted.

One PostgreSQL, one process for each system, all of them in turn, so that a slow moment of the machine is
everybody's. A system whose run would take too long is not asked for it, which the report says; one that takes
long is asked less often.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from benchmarks import limits, report, throughput
from benchmarks.child import Child, Missing
from benchmarks.counting import Proxy
from benchmarks.systems import modules
from tests.servers import Postgres, postgres

TOO_LONG, SHARE = 6.0, 12.0  # seconds that one run may take, and all runs of a workload
FAR = 0.001  # seconds that a network adds to a round trip
OWN = ("raw", "agentruns")  # are asked for everything
NEAR_ONLY = ("pydantic",)  # are not asked for it over a network
SHIFTS, SECONDS = 3, 2.0  # of each number of processes


class Bench:
    """The server, the folders and the systems that run."""

    def __init__(self, server: Postgres, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.proxy = Proxy(folder, server.folder)
        self.monitor = psycopg.connect(self.url("postgres", server.folder), autocommit=True)
        self.children: dict[str, Child] = {}
        self.far: dict[str, Child] = {}  # whose connections pass the proxy
        self.best: dict[str, tuple[str, list[float]]] = {}  # a workload, and its fastest run's stamps
        self.found: dict[str, dict[str, Any]] = {}
        self.numbers = itertools.count()

    def url(self, name: str, folder: Path) -> str:
        return f"postgresql://postgres@/{name}?host={folder}"

    def database(self, variant: str, folder: Path) -> str:
        """Return where a variant may write: a new database, or a file, or memory."""
        if variant.endswith("-memory"):
            return ":memory:"
        name = f"{variant}-{next(self.numbers)}"
        if "postgresql" not in variant:
            return str(self.folder / f"{name}.sqlite3")
        self.monitor.execute(f'CREATE DATABASE "{name}"')
        return self.url(name, folder)

    def start(self, variants: list[str]) -> None:
        """Start the systems; one that cannot be is noted."""
        self.found = {variant: {"runs": {}, "skipped": {}} for variant in variants}

        def begin(variant: str) -> None:
            tell(f"starting: {variant}")
            try:
                self.children[variant] = self.child(variant, self.database(variant, self.server.folder))
                if "postgresql" in variant and not variant.startswith(NEAR_ONLY):
                    self.far[variant] = self.child(variant, self.database(variant, self.folder))
            except Missing as error:
                self.found[variant]["missing"] = str(error)
            except RuntimeError as error:
                self.found[variant]["failed"] = str(error)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(begin, variants))

    def child(self, variant: str, url: str) -> Child:
        return Child(variant, url, self.folder / f"{variant}.log")

    def stop(self) -> None:
        """End all of them."""
        for child in [*self.children.values(), *self.far.values()]:
            child.stop()
        self.children, self.far = {}, {}

    def measure(self, workload: tuple[int, int], repetitions: int, *, far: bool = False) -> None:
        """Let all systems do a workload again and again, in turn."""
        name, children = report.name_of(workload, far=far), self.far if far else self.children
        seconds = {variant: self.forecast(variant, workload[0]) for variant in children}
        for variant, each in seconds.items():
            if each > TOO_LONG and not variant.startswith(OWN):
                self.found[variant]["skipped"][name] = round(each)
        for number in range(repetitions):
            for variant in list(children):
                is_short = number * seconds[variant] < SHARE or variant.startswith(OWN)
                if is_short and name not in self.found[variant]["skipped"]:
                    tell(f"{name} {number + 1} of {repetitions}: {variant}")
                    self.run(children, variant, workload, name)

    def forget(self) -> None:
        """Drop what was measured while libraries and caches were cold."""
        for told in self.found.values():
            told["runs"].clear()

    def run(self, children: dict[str, Child], variant: str, workload: tuple[int, int], name: str) -> None:
        """Do one run; a system that fails is out."""
        before = self.written()
        try:
            answer = children[variant].run(*workload)
        except RuntimeError as error:
            children.pop(variant).stop()
            self.found[variant]["failed"] = str(error)
            return
        stamps, runs = answer["stamps"], self.found[variant]["runs"].setdefault(name, [])
        last, best = self.best.get(variant, ("", stamps))
        self.best[variant] = name, stamps if last != name else min(best, stamps, key=lambda each: each[-1])
        times = {key: round(answer[key], 6) for key in ("seconds", "cpu")}
        wal = self.written() - before
        runs.append({**times, "wal": wal, "steps": report.costs_of_steps(stamps)})

    def written(self) -> int:
        """Return how many bytes of WAL there are."""
        row = self.monitor.execute("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint").fetchone()
        assert row is not None
        return int(row[0])

    def forecast(self, variant: str, steps: int) -> float:
        """Return the seconds of so many steps, from how their cost grew in the last workload."""
        if variant not in self.best:
            return 0.0
        costs = report.costs(self.best[variant][1])
        part = max(1, len(costs) // 5)
        first, last = median(costs[:part]), median(costs[-part:])
        growth = max(0.0, last - first) / len(costs)
        return steps * (first + growth * steps / 2)

    def count(self, workload: tuple[int, int]) -> None:
        """Count what one run asks of PostgreSQL: the second, for the first prepares statements."""
        for variant, child in self.far.items():
            tell(f"counting: {variant}")
            child.run(*workload)
            before = self.proxy.read()
            child.run(*workload)
            self.found[variant]["counts"] = vars(self.proxy.read().since(before))

    def slow_down(self) -> float:
        """Let a round trip through the proxy take FAR more than a direct one; return how many ms it does."""
        direct, self.proxy.delay = self.round_trip(self.server.folder), FAR / 2
        self.proxy.delay -= (self.round_trip(self.folder) - direct - FAR) / 2  # it takes time by itself
        return (self.round_trip(self.folder) - direct) * 1000

    def round_trip(self, folder: Path) -> float:
        """Return the median seconds of a statement that does nothing."""
        with psycopg.connect(self.url("postgres", folder), autocommit=True) as link:
            return median(limits.took(lambda: link.execute("SELECT 1")) for _ in range(500))

    def toil(self, *, quick: bool) -> dict[str, Any]:
        """Return the throughput of one process to eight."""
        urls: dict[str, str] = {}

        def start(variant: str) -> Child:
            tell(f"starting for throughput: {variant}")
            if variant not in urls:
                urls[variant] = self.database(variant, self.server.folder)
            return self.child(variant, urls[variant])

        assert self.server.server is not None
        size = (1.0, 1) if quick else (SECONDS, SHIFTS)
        return throughput.measure(start, self.server.server.pid, *size)


def tell(what: str) -> None:
    """Say on a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is to stop, too
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("systems", nargs="*", help="the beginnings of their names; all, if none is given")
    parser.add_argument("--quick", action="store_true", help="3 repetitions of short workloads")
    parser.add_argument("--repetitions", type=int, help="5, or 3 with --quick")
    options = parser.parse_args()
    workloads = report.QUICK if options.quick else report.FULL
    repetitions = options.repetitions or (3 if options.quick else 5)
    wanted = tuple(options.systems) or ("",)
    variants = sorted(filter(lambda name: name.startswith(("raw", *wanted)), modules()), key=report.order)
    disk, began = tempfile.gettempdir(), time.monotonic()
    results = {"cores": os.cpu_count(), "repetitions": repetitions, "versions": report.versions()}
    results |= {"throughput": {}, "limits": {}}

    def stage(what: str) -> None:
        tell("")
        print(f"after {(time.monotonic() - began) / 60:.1f} minutes: {what}", file=sys.stderr, flush=True)

    with postgres(disk) as server, tempfile.TemporaryDirectory(prefix="agentruns-bench-") as folder:
        bench = Bench(server, Path(folder))
        try:
            if not options.systems:
                stage("limits")
                results["limits"] = limits.found(lambda name: bench.database(name, server.folder))
                stage("throughput")
                results["throughput"] = bench.toil(quick=options.quick)
            stage("the systems start")
            bench.start(variants)
            bench.measure(workloads.short, 1)
            bench.forget()
            for workload in dict.fromkeys(workloads):
                stage(report.name_of(workload))
                bench.measure(workload, repetitions)
            stage("over a network")
            bench.count(workloads.short)
            results["far"] = bench.slow_down()
            bench.measure(workloads.short, 1, far=True)  # for the forecast
            bench.measure(workloads.calls, repetitions, far=True)
        finally:
            bench.stop()
            bench.monitor.close()
    stage("done")
    results["systems"] = bench.found
    is_kept = not (options.quick or options.systems)
    if is_kept:
        report.RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report.show(results, workloads)
    if is_kept:
        report.write(results, workloads)


if __name__ == "__main__":
    main()
