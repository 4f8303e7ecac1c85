"""What was measured as tables, goals, JSON and a chart: ratios to the raw limit on the same database.

`python -m benchmarks.report` prints once more what `results.json` has, and writes it into the documentation.
"""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import chart, goals
from benchmarks.goals import label, ratios, spread, table

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
RESULTS, CHART, PAGE = (
    FOLDER / "results.json",
    DOCS / "pictures" / "benchmark.svg",
    DOCS / "explanation" / "performance.md",
)
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

Systems = dict[str, dict[str, Any]]


def name_of(workload: tuple[int, int], *, far: bool = False) -> str:
    return f"W({workload[0]}, {workload[1]})" + (" at 1 ms" if far else "")


def names_of(workloads: Workloads) -> dict[str, str]:
    """Return what each workload is called where runs are kept."""
    found = {field: name_of(workload) for field, workload in workloads._asdict().items()}
    return {**found, "far": name_of(workloads.calls, far=True)}


def raw_of(variant: str) -> str:
    """Return the limit on the database that a variant uses."""
    kinds = ("postgresql", "sqlite-memory", "sqlite")
    return "raw-" + next(kind for kind in kinds if kind in variant)


def order(variant: str) -> tuple[str, bool, bool, str]:
    """Return what sorts systems by database, the limit first and ours next to it."""
    is_raw, is_ours = variant.startswith("raw"), variant.startswith(("agentruns", "statements"))
    return raw_of(variant), not is_raw, not is_ours, variant


def costs(stamps: list[float]) -> list[float]:
    """Return what each step took."""
    return [after - before for before, after in pairwise(stamps)]


def cost_of_step(stamps: list[float], step: int) -> float:
    """Return the median cost of the steps around one."""
    found = costs(stamps[:-1])  # without the last reply, which asks for nothing
    end = min(step + AROUND, len(found))
    return median(found[max(0, end - 2 * AROUND) : end])


def costs_of_steps(stamps: list[float]) -> dict[str, float]:
    """Return the cost of those of STEPS that there were, by their numbers as JSON has them."""
    return {str(step): round(cost_of_step(stamps, step), 7) for step in STEPS if step <= len(stamps) - 2}


def absent(told: dict[str, Any], workload: str) -> str:
    """Say why there is no figure."""
    if "missing" in told:
        return f"missing: {told['missing']}"
    if "failed" in told:
        return "failed"
    seconds = told["skipped"].get(workload)
    return f"would take {seconds} s" if seconds else "-"


def times(systems: Systems, names: dict[str, str]) -> list[str]:
    """Return the wall time of whole runs over that of the raw limit."""
    rows = []
    for system, told in systems.items():
        if system.startswith("raw"):
            continue
        over_raw = {name: ratios(systems, system, raw_of(system), name) for name in names.values()}
        cells = [spread(values) if values else absent(told, name) for name, values in over_raw.items()]
        rows.append([label(system), *cells])
    return table(["wall time over hand-written SQL", *names.values()], rows)


def takings(systems: Systems, workload: str) -> list[str]:
    """Return what one run takes of the client and of the database."""
    rows = []
    for system, told in systems.items():
        runs = told["runs"].get(workload)
        if not runs:
            continue
        counts = told.get("counts")
        wal = f"{median(run['wal'] for run in runs) / 1024:.0f}" if counts else "-"
        counted = [str(value) for value in counts.values()] if counts else ["-", "-", "-"]
        milliseconds = [f"{median(run[key] for run in runs) * 1000:.1f}" for key in ("seconds", "cpu")]
        rows.append([label(system), *milliseconds, *counted, wal])
    head = [f"one {workload}", "wall ms", "client CPU ms", "transactions", "statements", "round trips"]
    return table([*head, "WAL KiB"], rows)


def steps(systems: Systems, names: dict[str, str]) -> list[str]:
    """Return the cost of early and late steps, in the longest run that a system did."""
    rows = []
    for system, told in systems.items():
        done = [name for field, name in names.items() if field != "far" and told["runs"].get(name)]
        if not done:
            continue
        found = [run["steps"] for run in told["runs"][done[-1]]]
        cells = [f"{median(each[step] for each in found) * 1000:.2f}" for step in found[0]]
        cells += ["-"] * (len(STEPS) - len(cells))
        rows.append([label(system), done[-1], *cells, spread(map(goals.growth, found))])
    head = ["ms of a step, median of the 20 around it", "in", *(f"step {step}" for step in STEPS)]
    return table([*head, "the last over step 10"], rows)


def throughput(found: Systems) -> list[str]:
    """Return how many steps a second so many processes do together, and whose the CPU was."""
    counts = list(next(iter(found.values()), {}))
    rows = []
    for system, by_count in found.items():
        rates = [f"{median(shift['rate'] for shift in shifts):.0f}" for shifts in by_count.values()]
        most = by_count[counts[-1]]
        cpu = [f"{median(shift[key] for shift in most) * 1000:.2f}" for key in ("client", "server")]
        share = median(shift["server"] / (shift["server"] + shift["client"]) for shift in most)
        rows.append([label(system, place=False), *rates, *cpu, f"{share:.0%}"])
    head = ["steps a second, by processes", *counts, "client CPU ms a step", "server CPU ms a step"]
    return table([*head, "of it the server's"], rows)


def tables(results: dict[str, Any], workloads: Workloads) -> dict[str, list[str]]:
    """Return every table by its name on the page."""
    systems, names = results["systems"], names_of(workloads)
    return {
        "times": times(systems, names),
        "takings": takings(systems, names["short"]),
        "steps": steps(systems, names),
        "throughput": throughput(results["throughput"]),
        "goals": goals.verdicts(goals.judged(systems, names, results["limits"])),
    }


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


def panels(systems: Systems, workloads: Workloads) -> list[chart.Panel]:
    """Return the chart's: one for PostgreSQL, one for it over a network, one for SQLite in a file."""
    drawn = []
    near, far = name_of(workloads.calls), name_of(workloads.calls, far=True)
    for title, raw, workload in (
        ("PostgreSQL on the same host", "raw-postgresql", near),
        ("PostgreSQL over a network that takes 1 ms", "raw-postgresql", far),
        ("SQLite, a file", "raw-sqlite", near),
    ):
        bars = []
        for system in systems:
            values = ratios(systems, system, raw, workload)
            if values and raw_of(system) == raw:
                name = label(system, place=False)
                name += " (nothing prepared)" if system.endswith("unprepared") else ""
                bars.append(chart.Bar(name, median(values), system.startswith("agentruns")))
        if bars:
            drawn.append(chart.Panel(title, sorted(bars, key=lambda bar: bar.value)))
    return drawn


def show(results: dict[str, Any], workloads: Workloads) -> None:
    """Print everything."""
    print(f"{results['cores']} cores, {results['repetitions']} repetitions, systems in turn")
    print(f"A round trip over the slowed connection took {results['far']:.2f} ms more.\n")
    for lines in tables(results, workloads).values():
        print("\n".join(lines))
    for system, told in results["systems"].items():
        if "failed" in told:
            print(f"{system} failed: {told['failed']}")


def write(results: dict[str, Any], workloads: Workloads) -> None:
    """Put the tables between their marks on the page, and draw the chart."""
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in tables(results, workloads).items():
        marked = f"<!-- {name} -->\n" + "\n".join(lines) + "<!-- end -->"
        page = re.sub(f"<!-- {name} -->\n.*?<!-- end -->", lambda _, text=marked: text, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")
    title = f"{name_of(workloads.calls)}: wall time over hand-written SQL, logarithmic"
    CHART.write_text(chart.draw(title, panels(results["systems"], workloads)), encoding="utf-8")


if __name__ == "__main__":
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    show(kept, FULL)
    write(kept, FULL)
