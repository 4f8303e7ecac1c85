"""Breadth-first search of the model: every state up to a bound, and a shortest trace to what is wrong."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass, field
from functools import cache

from tests.model.invariants import broken_by_step, broken_in, is_machine, is_settled, is_untold
from tests.model.world import Scenario, Step, World, canonical, steps


@dataclass
class Explored:
    """What a search has found."""

    scenario: Scenario
    worlds: list[World] = field(default_factory=list)
    parents: list[tuple[int, Step | None]] = field(default_factory=list)  # of each, with the step from it
    depths: list[int] = field(default_factory=list)
    edges: list[list[tuple[str, int]]] = field(default_factory=list)  # of each: actions, states after them
    is_complete: bool = True  # whether no state was left out because of a limit
    wrong: str = ""  # the promise that is broken, or ""
    trace: list[Step] = field(default_factory=list)  # the way to it

    def __str__(self) -> str:
        bound = "all of them" if self.is_complete else "up to a limit"
        transitions = sum(map(len, self.edges))
        figures = f"{len(self.worlds):,} states, {transitions:,} transitions, depth {max(self.depths)}"
        return f"{self.scenario.name}: {figures} ({bound})"

    def path(self, index: int) -> list[Step]:
        """Build the way from the first state to a state."""
        path: list[Step] = []
        while (parent := self.parents[index])[1] is not None:
            path.append(parent[1])
            index = parent[0]
        return path[::-1]

    def told(self) -> str:
        """Describe what is wrong, with the numbered steps that lead to it."""
        lines = [f"{number}. {step.text}{rows_of(step)}" for number, step in enumerate(self.trace, 1)]
        off = f", without: {', '.join(sorted(self.scenario.off))}" if self.scenario.off else ""
        return "\n".join([f"{self.wrong} ({self.scenario.name}{off})", *lines])


def rows_of(step: Step) -> str:
    """List the rows that a step appends."""
    if not step.rows:
        return ""
    return " [" + ", ".join(f"{row.kind} {row.call + 1 or ''}{row.word and ' ' + row.word}".strip()
                            for row in step.rows) + "]"  # fmt: skip


def name_of(step: Step, scenario: Scenario) -> str:
    """Name an action, whichever driver does it: what it does, and what that comes to."""
    who = "driver" if step.number >= 0 else step.who
    tool = scenario.tools[step.call].declares if step.what == "enters" else ""
    rows = ", ".join(f"{row.kind} {row.word}".strip() for row in step.rows)
    return f"{who} {step.what} {tool}".strip() + (f": {rows}" if rows else "")


@cache
def explore(scenario: Scenario, *, most: int = 2_000_000) -> Explored:
    """Search every state that can be reached; stop at the first broken promise, or at `most` states."""
    was_on = gc.isenabled()
    gc.disable()  # or it looks through all states again and again, and finds no circle
    try:
        return _explored(scenario, most)
    finally:
        if was_on:
            gc.enable()


def _explored(scenario: Scenario, most: int) -> Explored:
    found = Explored(scenario)
    first = scenario.begin()
    numbers = {canonical(first): 0}
    found.worlds.append(first)
    found.parents.append((0, None))
    found.depths.append(0)
    before: list[list[int]] = [[]]  # the states from which a machine alone comes to each state
    queue = deque([0])
    while queue:
        index = queue.popleft()
        world, edges = found.worlds[index], list[tuple[str, int]]()
        found.edges.append(edges)
        for step in steps(world, scenario):
            wrong = broken_by_step(world, step, scenario)
            key = canonical(step.world)
            number = numbers.get(key)
            if number is None:
                wrong = wrong or broken_in(step.world, scenario)
                if len(numbers) >= most and not wrong:
                    found.is_complete = False
                    continue
                number = numbers[key] = len(found.worlds)
                found.worlds.append(step.world)
                found.parents.append((index, step))
                found.depths.append(found.depths[index] + 1)
                before.append([])
                queue.append(number)
            if wrong:
                found.wrong, found.trace = wrong, [*found.path(index), step]
                return found
            edges.append((name_of(step, scenario), number))
            if is_machine(step):
                before[number].append(index)
    if found.is_complete:
        _find_stuck(found, before)
    return found


def _find_stuck(found: Explored, before: list[list[int]]) -> None:
    """Find a state from which machines alone come neither to the end nor to a person who is asked."""
    good = [number for number, world in enumerate(found.worlds) if is_settled(world, found.scenario)]
    reached = set(good)
    while good:
        for number in before[good.pop()]:
            if number not in reached:
                reached.add(number)
                good.append(number)
    stuck = next((number for number in range(len(found.worlds)) if number not in reached), None)
    if stuck is not None:
        found.wrong, found.trace = "The run waits for ever, and nobody is asked.", found.path(stuck)
        if is_untold(found.worlds[stuck]):
            found.wrong = "A delivered event never comes to the journal."
