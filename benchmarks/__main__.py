"""Every system on the same work: `python -m benchmarks`, or with words that begin the names of those wanted.

One PostgreSQL, one process for each system, all of them in turn, so that a slow moment of the machine is
everybody's. A system whose run would take too long is not asked for it, which the report says.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from benchmarks import report
from benchmarks.child import Child, Missing
from benchmarks.counting import Proxy
from benchmarks.systems import modules
from tests.servers import Postgres, postgres

TOO_LONG = 20.0  # seconds that one run may take


class Bench:
    """The server, the folders and the systems that run."""

    def __init__(self, server: Postgres, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.proxy = Proxy(folder, server.folder)
        self.monitor = psycopg.connect(self.url("postgres", server.folder), autocommit=True)
        self.children: dict[str, Child] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def url(self, name: str, folder: Path) -> str:
        return f"postgresql://postgres@/{name}?host={folder}"

    def database(self, variant: str, *, counted: bool = False) -> str:
        """Return where a variant may write: a new database, or a file, or memory."""
        if variant.endswith("-memory"):
            return ":memory:"
        if "postgresql" not in variant:
            return str(self.folder / f"{variant}.sqlite3")
        name = f"{variant}-counted" if counted else variant
        self.monitor.execute(f'CREATE DATABASE "{name}"')
        return self.url(name, self.folder if counted else self.server.folder)

    def start(self, variants: list[str]) -> None:
        """Start the systems; one that cannot be is noted."""
        for variant in variants:
            tell(f"starting: {variant}")
            self.found[variant] = {"runs": {}, "skipped": {}}
            try:
                child = Child(variant, self.database(variant), self.folder / f"{variant}.log")
            except Missing as error:
                self.found[variant]["missing"] = str(error)
            except RuntimeError as error:
                self.found[variant]["failed"] = str(error)
            else:
                self.children[variant] = child

    def stop(self) -> None:
        """End all of them."""
        for child in self.children.values():
            child.stop()
        self.monitor.close()

    def measure(self, workload: tuple[int, int], repetitions: int) -> None:
        """Let all systems do a workload again and again, in turn."""
        name = report.name_of(workload)
        for variant in list(self.children):
            seconds = self.forecast(variant, workload[0])
            if seconds > TOO_LONG:
                self.found[variant]["skipped"][name] = round(seconds)
        for number in range(repetitions):
            for variant in list(self.children):
                if name not in self.found[variant]["skipped"]:
                    tell(f"{name} {number + 1} of {repetitions}: {variant}")
                    self.run(variant, workload, self.found[variant]["runs"].setdefault(name, []))

    def forget(self) -> None:
        """Drop what was measured while libraries and caches were cold."""
        for told in self.found.values():
            told["runs"].clear()

    def run(self, variant: str, workload: tuple[int, int], runs: list[dict[str, Any]]) -> None:
        """Do one run; a system that fails is out."""
        before = self.written()
        try:
            answer = self.children[variant].run(*workload)
        except RuntimeError as error:
            self.children.pop(variant).stop()
            self.found[variant]["failed"] = str(error)
        else:
            runs.append({**answer, "wal": self.written() - before})

    def written(self) -> int:
        """Return how many bytes of WAL there are."""
        row = self.monitor.execute("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint").fetchone()
        assert row is not None
        return int(row[0])

    def forecast(self, variant: str, steps: int) -> float:
        """Return the seconds of so many steps, from how the cost of a step grew in the last workload."""
        runs = list(self.found[variant]["runs"].values())
        if not runs:
            return 0.0
        costs = report.costs(runs[-1][-1]["stamps"])
        part = max(1, len(costs) // 5)
        first, last = median(costs[:part]), median(costs[-part:])
        growth = max(0.0, last - first) / len(costs)
        return steps * (first + growth * steps / 2)

    def count(self, workload: tuple[int, int]) -> None:
        """Count what one run asks of PostgreSQL, in a process whose connections pass the proxy."""
        for variant in self.children:
            if "postgresql" in variant:
                tell(f"counting: {variant}")
                url = self.database(variant, counted=True)
                child = Child(variant, url, self.folder / f"{variant}.log")
                child.run(*workload)
                before = self.proxy.read()
                child.run(*workload)
                self.found[variant]["counts"] = vars(self.proxy.read().since(before))
                child.stop()


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
    disk = tempfile.gettempdir()
    with postgres(disk) as server, tempfile.TemporaryDirectory(prefix="agentruns-bench-") as folder:
        bench = Bench(server, Path(folder))
        try:
            bench.start(variants)
            bench.measure(workloads.short, 1)
            bench.forget()
            for workload in dict.fromkeys(workloads):
                bench.measure(workload, repetitions)
            bench.count(workloads.short)
        finally:
            bench.stop()
    tell("")
    report.publish(bench.found, workloads, repetitions, keep=not (options.quick or options.systems))


if __name__ == "__main__":
    main()
