"""What agentruns may cost at most, and what became of it: one run of the benchmark judges every goal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

PREPARED, SQLITE, MEMORY = "agentruns-postgresql", "agentruns-sqlite", "agentruns-sqlite-memory"
FLAT_AT_MOST = 1.1  # the cost of step 1,000 over that of step 10
LABELS = {
    "raw": "hand-written SQL",
    "statements": "agentruns' statements alone",
    "absurd": "Absurd",
    "dbos": "DBOS",
    "langgraph": "LangGraph's react agent",
    "pydantic-ai-dbos": "pydantic-ai on DBOS",
}
PLACES = {
    "-postgresql-unprepared": "PostgreSQL, nothing prepared",
    "-postgresql": "PostgreSQL",
    "-sqlite-memory": "SQLite in memory",
    "-sqlite": "SQLite",
}

Judged = tuple[str, float, list[float]]  # what, at most, measured


class Over(NamedTuple):
    """How long a system may take on a workload, as a multiple of another's time."""

    workload: str  # a field of report.Workloads, or "far": the same as "calls" over a network
    system: str
    other: str
    at_most: float


OVER = (
    Over("long", PREPARED, "raw-postgresql", 1.2),
    Over("long", SQLITE, "raw-sqlite", 2.2),
    Over("short", MEMORY, "raw-sqlite-memory", 9),
    Over("calls", PREPARED, "absurd-postgresql", 0.75),
    Over("calls", PREPARED, "dbos-postgresql", 0.25),
    Over("calls", PREPARED, "langgraph-postgresql", 0.1),
    Over("far", PREPARED, "absurd-postgresql", 0.6),
    Over("far", PREPARED, "dbos-postgresql", 0.2),
)
LOAD, REACTION = "load of 1,000 messages over a bare SELECT", "ms from an approval to its handler"
CHECK, PEAK = "CPU of manage.py check over Django with ninja", "peak MB of 1,000 steps over the idle process"
LIMITS = {
    f"{LOAD}, PostgreSQL": 3,
    f"{LOAD}, SQLite": 4,
    CHECK: 1.5,
    f"{REACTION}, PostgreSQL": 100,
    f"{REACTION}, SQLite": 1000,
    f"{PEAK}, PostgreSQL": 40,
    f"{PEAK}, SQLite": 40,
}


def label(variant: str, *, place: bool = True) -> str:
    """Return what people call a system, and its database."""
    suffix = next(suffix for suffix in PLACES if variant.endswith(suffix))
    system = variant.removesuffix(suffix)
    return LABELS.get(system, system) + (f", {PLACES[suffix]}" if place else "")


def ratios(systems: dict[str, Any], system: str, other: str, workload: str) -> list[float]:
    """Return the ratio of each repetition; none if one of both did not do the workload."""
    both = [systems.get(name, {}).get("runs", {}).get(workload, []) for name in (system, other)]
    return [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(*both, strict=False)]


def judged(systems: dict[str, Any], names: dict[str, str], limits: dict[str, list[float]]) -> list[Judged]:
    """Return each goal with what was measured; `names` has the workloads as the systems' runs name them."""
    found: list[Judged] = []
    for workload, system, other, at_most in OVER:
        name = names[workload]
        what = f"{name}: {label(system)}, over {label(other, place=False)}"
        found.append((what, at_most, ratios(systems, system, other, name)))
    for system in (PREPARED, SQLITE):
        runs = systems.get(system, {}).get("runs", {}).get(names["flat"], [])
        late = [growth(run["steps"]) for run in runs]
        found.append((f"{names['flat']}: {label(system)}, the last step over step 10", FLAT_AT_MOST, late))
    return [*found, *((what, at_most, limits.get(what, [])) for what, at_most in LIMITS.items())]


def growth(costs: dict[str, float]) -> float:
    """Return what the last of some steps cost over the first."""
    known = list(costs.values())
    return known[-1] / known[0]


def verdict(values: list[float], at_most: float) -> str:
    """Return "met", or by how much a goal was missed."""
    if not values:
        return "not measured"
    excess = median(values) / at_most - 1
    return "met" if excess <= 0 else f"missed by {math.ceil(100 * excess)} %"


def verdicts(judged: Iterable[Judged]) -> list[str]:
    """Return a table of goals: what, at most how much, and what was measured."""
    rows = [
        [what, f"{at_most:g}", spread(values), verdict(values, at_most)] for what, at_most, values in judged
    ]
    return table(["goal", "at most", "measured", ""], rows)


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the median with the least and the greatest."""
    known = sorted(values)
    if not known:
        return "-"
    digits = digits if known[-1] < 100 else 0
    return f"{median(known):.{digits}f} ({known[0]:.{digits}f} to {known[-1]:.{digits}f})"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return lines of a Markdown table with columns that line up."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines] + [""]
