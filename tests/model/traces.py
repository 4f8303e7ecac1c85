"""A sample of the ways through the model: every action, and every pair of consecutive actions that occurs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tests.model.explore import Explored, name_of
from tests.model.world import Scenario, Step, canonical, steps

Seen = tuple[str, str]  # two consecutive actions, or "" and an action with all that it comes to


def seen_in(names: list[str]) -> Iterator[Seen]:
    """List what a trace covers, by the names of its actions."""
    yield from (("", name) for name in names)
    yield from pairwise(name.partition(":")[0] for name in names)


def sample(found: Explored, covered: set[Seen]) -> list[list[Step]]:
    """Choose traces that together have each action and each pair of actions that is not `covered` yet.

    Adds what they have to `covered`. The longest come first, because they cover much.
    """
    first: dict[Seen, tuple[int, list[tuple[str, int]]]] = {}  # a state, edges from there
    for index, edges in enumerate(found.edges):
        for edge in edges:
            first.setdefault(("", edge[0]), (index, [edge]))
            name = edge[0].partition(":")[0]
            for after in found.edges[edge[1]]:
                first.setdefault((name, after[0].partition(":")[0]), (index, [edge, after]))
    chosen: list[list[Step]] = []
    for seen, (index, edges) in sorted(first.items(), key=lambda item: (-found.depths[item[1][0]], item[0])):
        if seen not in covered:
            trace = found.path(index)
            for edge in edges:
                trace.append(_step(found, trace, edge))
            covered.update(seen_in([name_of(step, found.scenario) for step in trace]))
            chosen.append(trace)
    assert covered >= first.keys()
    return chosen


def way_to(found: Explored, name: str) -> list[Step]:
    """Build a shortest trace that ends with the action of a name."""
    places = ((index, edge) for index, edges in enumerate(found.edges) for edge in edges)
    index, edge = next(place for place in places if place[1][0] == name)
    trace = found.path(index)
    return [*trace, _step(found, trace, edge)]


def _step(found: Explored, trace: list[Step], edge: tuple[str, int]) -> Step:
    """Find the step of an edge from the state in which a trace ends."""
    scenario: Scenario = found.scenario
    world = trace[-1].world if trace else scenario.begin()
    aim = canonical(found.worlds[edge[1]])
    possible = (step for step in steps(world, scenario) if name_of(step, scenario) == edge[0])
    return next(step for step in possible if canonical(step.world) == aim)
