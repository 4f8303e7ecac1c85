"""What was measured as tables, targets, JSON and a chart: ratios to the raw limit on the same database."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import chart

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "docs" / "pictures" / "benchmark.svg"
STEPS = (10, 100, 1000)  # whose cost is told
AROUND = 10  # steps on either side of such a one


class Workloads(NamedTuple):
    """Steps and calls a step of each workload."""

    short: tuple[int, int]
    calls: tuple[int, int]
    long: tuple[int, int]
    flat: tuple[int, int]


FULL = Workloads((10, 2), (100, 2), (300, 1), (1000, 1))
QUICK = Workloads((10, 2), (20, 2), (60, 1), (100, 1))

Found = dict[str, dict[str, Any]]


class Target(NamedTuple):
    """How long a system may take, as a multiple of another's time."""

    system: str
    other: str
    workload: str  # a field of Workloads
    at_most: float


TARGETS = (
    Target("agentruns-postgresql", "raw-postgresql", "long", 1.5),
    Target("agentruns-sqlite", "raw-sqlite", "long", 2.5),
    Target("agentruns-sqlite-memory", "raw-sqlite-memory", "short", 8),
    Target("agentruns-postgresql", "dbos-postgresql", "calls", 1 / 5),
    Target("agentruns-postgresql", "absurd-postgresql", "calls", 1 / 2),
    Target("agentruns-postgresql", "langgraph-postgresql", "calls", 1 / 10),
)
FLAT = ("agentruns-postgresql", "agentruns-sqlite")
FLAT_AT_MOST = 1.2


def name_of(workload: tuple[int, int]) -> str:
    return f"W({workload[0]}, {workload[1]})"


def raw_of(variant: str) -> str:
    """Return the limit on the database that a variant uses."""
    kinds = ("postgresql", "sqlite-memory", "sqlite")
    return "raw-" + next(kind for kind in kinds if kind in variant)


def order(variant: str) -> tuple[str, bool, bool, str]:
    """Return what sorts systems by database, the limit first and ours next to it."""
    is_raw, is_ours = variant.startswith("raw"), variant.startswith("agentruns")
    return raw_of(variant), not is_raw, not is_ours, variant


def costs(stamps: list[float]) -> list[float]:
    """Return what each step took."""
    return [after - before for before, after in pairwise(stamps)]


def cost_of_step(stamps: list[float], step: int) -> float:
    """Return the median cost of the steps around one."""
    found = costs(stamps[:-1])  # without the last reply, which asks for nothing
    end = min(step + AROUND, len(found))
    return median(found[max(0, end - 2 * AROUND) : end])


def costs_of_steps(stamps: list[float]) -> dict[int, float]:
    """Return the cost of those of STEPS that there were."""
    return {step: cost_of_step(stamps, step) for step in STEPS if step <= len(stamps) - 2}


def ratios(found: Found, system: str, other: str, workload: str) -> list[float]:
    """Return the ratio of each repetition; none if one of both did not do the workload."""
    both = [found.get(name, {}).get("runs", {}).get(workload, []) for name in (system, other)]
    return [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(*both, strict=False)]


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the median with the least and the greatest."""
    known = sorted(values)
    if not known:
        return "-"
    return f"{median(known):.{digits}f} ({known[0]:.{digits}f} to {known[-1]:.{digits}f})"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return lines of a Markdown table with columns that line up."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines] + [""]


def absent(told: dict[str, Any], workload: str) -> str:
    """Say why there is no figure."""
    if "missing" in told:
        return f"missing: {told['missing']}"
    if "failed" in told:
        return "failed"
    seconds = told["skipped"].get(workload)
    return f"would take {seconds} s" if seconds else "-"


def times(found: Found, workloads: Workloads) -> list[str]:
    """Return the wall time of whole runs over that of the raw limit."""
    names = [name_of(workload) for workload in workloads]
    rows = []
    for system, told in found.items():
        over_raw = {name: ratios(found, system, raw_of(system), name) for name in names}
        rows.append(
            [system, *(spread(values) if values else absent(told, name) for name, values in over_raw.items())]
        )
    return ["Wall time over raw: median (least to greatest)", "", *table(["", *names], rows)]


def takings(found: Found, workload: str) -> list[str]:
    """Return what one run takes of the client and of the database."""
    rows = []
    for system, told in found.items():
        runs = told["runs"].get(workload)
        if not runs:
            continue
        counts = told.get("counts")
        wal = f"{median(run['wal'] for run in runs) / 1024:.0f}" if counts else "-"
        counted = [str(value) for value in counts.values()] if counts else ["-", "-", "-"]
        milliseconds = [f"{median(run[key] for run in runs) * 1000:.1f}" for key in ("seconds", "cpu")]
        rows.append([system, *milliseconds, *counted, wal])
    head = ["", "wall ms", "client CPU ms", "transactions", "statements", "round trips", "WAL KiB"]
    return [f"What one {workload} takes; counted on the wire, functions as one", "", *table(head, rows)]


def steps(found: Found, workloads: Workloads) -> list[str]:
    """Return the cost of early and late steps, in the longest run that a system did."""
    rows = []
    for system, told in found.items():
        done = [workload for workload in workloads if told["runs"].get(name_of(workload))]
        if not done:
            continue
        name = name_of(max(done))
        stamps = [run["stamps"] for run in told["runs"][name]]
        found_costs = [costs_of_steps(each) for each in stamps]
        reached = list(found_costs[0])
        cells = [f"{median(each[step] for each in found_costs) * 1000:.2f}" for step in reached]
        cells += ["-"] * (len(STEPS) - len(reached))
        rows.append([system, name, *cells, spread(growth(stamps, reached[-1]))])
    head = ["", "in", *(f"step {step}" for step in STEPS), "the last over step 10"]
    return ["Cost of a step in ms, median of the 20 around it", "", *table(head, rows)]


def growth(stamps: list[list[float]], late: int) -> list[float]:
    """Return what a late step costs over what step 10 does, in each run."""
    return [cost_of_step(each, late) / cost_of_step(each, STEPS[0]) for each in stamps]


def targets(found: Found, workloads: Workloads) -> list[str]:
    """Return each target with what became of it."""
    judged = []
    for target in TARGETS:
        name = name_of(getattr(workloads, target.workload))
        values = ratios(found, target.system, target.other, name)
        judged.append((f"{name}: {target.system} over {target.other}", target.at_most, values))
    late = workloads.flat[0]
    for system in FLAT:
        runs = found.get(system, {}).get("runs", {}).get(name_of(workloads.flat), [])
        values = growth([run["stamps"] for run in runs], late)
        judged.append((f"{system}: step {late} over step {STEPS[0]}", FLAT_AT_MOST, values))
    return verdicts(judged)


def verdicts(judged: list[tuple[str, float, list[float]]]) -> list[str]:
    """Return a table of targets: what, at most how much, and what was measured."""
    rows = [
        [what, f"{at_most:g}", spread(values), verdict(values, at_most)] for what, at_most, values in judged
    ]
    return table(["target", "at most", "measured", ""], rows)


def verdict(values: list[float], at_most: float) -> str:
    if not values:
        return "not measured"
    return "met" if median(values) <= at_most else "missed"


def versions() -> dict[str, str]:
    """Return what was measured, as far as requirements-bench.txt names it."""
    known = {"python": platform.python_version()}
    for line in (FOLDER.parent / "requirements-bench.txt").read_text(encoding="utf-8").splitlines():
        name = line.split("#")[0].split("[")[0].split("=")[0].split("<")[0].split(">")[0].strip()
        if name and not name.startswith("-"):
            try:
                known[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                known[name] = "missing"
    return known


def panels(found: Found, workload: str) -> list[chart.Panel]:
    """Return the chart's: one for PostgreSQL, one for SQLite in a file."""
    drawn = []
    for title, raw in (("PostgreSQL", "raw-postgresql"), ("SQLite, a file", "raw-sqlite")):
        bars = []
        for system in found:
            values = ratios(found, system, raw, workload)
            if values and raw_of(system) == raw:
                label = system.replace("-postgresql", "").replace("-sqlite", "")
                label = label.replace("statements", "agentruns' SQL alone")
                bars.append(chart.Bar(label, median(values), system.startswith("agentruns")))
        if bars:
            drawn.append(chart.Panel(title, sorted(bars, key=lambda bar: bar.value)))
    return drawn


def publish(found: Found, workloads: Workloads, repetitions: int, *, keep: bool) -> None:
    """Print everything; `keep` also writes the JSON and the chart."""
    print(f"{os.cpu_count()} cores, {repetitions} repetitions, systems in turn\n")
    lines = [*times(found, workloads), *takings(found, name_of(workloads.short)), *steps(found, workloads)]
    print("\n".join([*lines, *targets(found, workloads)]))
    for system, told in found.items():
        if "failed" in told:
            print(f"{system} failed: {told['failed']}")
    if keep:
        told = {"cores": os.cpu_count(), "repetitions": repetitions, "versions": versions()}
        text = json.dumps({**told, "systems": compact(found)}, indent=1)
        (FOLDER / "results.json").write_text(text + "\n", encoding="utf-8")
        name = name_of(workloads.calls)
        svg = chart.draw(f"{name}: wall time over hand-written SQL, logarithmic", panels(found, name))
        CHART.write_text(svg, encoding="utf-8")


def compact(found: Found) -> Found:
    """Return what is found with the costs of three steps in place of every stamp."""
    kept: Found = {}
    for system, told in found.items():
        kept[system] = {**told, "runs": {}}
        for name, runs in told["runs"].items():
            kept[system]["runs"][name] = [
                {
                    "seconds": round(run["seconds"], 6),
                    "cpu": round(run["cpu"], 6),
                    "wal": run["wal"],
                    "steps": costs_of_steps(run["stamps"]),
                }
                for run in runs
            ]
    return kept
