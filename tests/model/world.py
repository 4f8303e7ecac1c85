"""The world around one run: its lease, its drivers, the effects outside, and the possible actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.guards import Off
from tests.model.runs import Call, Row, Run, Tools, apply, status

NOBODY: Run = Run(replies=-1)  # the view of a driver that drives nothing


class Driver(NamedTuple):
    """A process that drives, and the place at which it stands: just before one step that others can see."""

    at: str = ""  # "" if it drives nothing; else a key of drivers.STEPS
    call: int = -1
    word: str = ""  # verdict of `reconcile`
    holds: bool = False  # whether the run's lease is still the one that it claimed
    slept: bool = False  # whether its lease is over by its own clock
    view: Run = NOBODY  # the state of the run that it knows
    started: tuple[int, int] = (-1, 0)  # call and attempt that it has journaled and not entered yet


IDLE = Driver()


class Left(NamedTuple):
    """How often what is rare may still happen: this makes the number of states finite."""

    crashes: int = 1
    freezes: int = 1  # leases that run out although their driver lives
    verdicts: int = 1
    resumes: int = 1
    cancels: int = 1  # requests to cancel by force included
    deliveries: int = 0  # of events, by whatever key


class Toll(NamedTuple):
    """What has happened with one call, which no part of the protocol reads."""

    effects: int = 0
    entries: int = 0
    starts: int = 0
    results: int = 0
    decisions: int = 0
    consumed: int = 0
    pardons: int = 0  # verdicts "it did not happen" by people
    answers: int = 0  # verdicts "it happened", by people or by reconcile
    deliveries: int = 0  # of its event, in the journal
    is_due: bool = False  # the time of its card is over


class Event(NamedTuple):
    """The row beside the journal of one key under which the call's event may come."""

    is_there: bool = False
    is_mine: bool = False  # whether the call waits for it, or may wait for it
    is_delivered: bool = False
    due: str = ""  # when the sweep has to look: "" never, later, now
    is_settled: bool = False
    is_told: bool = False  # whether the journal has the delivery


NO_EVENTS = (Event(), Event())  # by the call's own key, and by another key


class World(NamedTuple):
    """One state of the model."""

    run: Run
    lease: str  # free | live | expired
    drivers: tuple[Driver, ...]
    tolls: tuple[Toll, ...]
    left: Left
    events: tuple[Event, ...] = NO_EVENTS
    post: tuple[str, int] = ("", 0)  # what the deliverer is about to do, and with which event


class Scenario(NamedTuple):
    """What is fixed in one exploration."""

    name: str
    tools: Tools
    left: Left = Left()
    drivers: int = 2
    decides: bool = True  # whether people decide cards, give verdicts and cancel
    off: Off = frozenset()

    @property
    def waiter(self) -> int:
        """The place of the call that waits for an event, or -1."""
        return next((place for place, tool in enumerate(self.tools) if tool.awaits), -1)

    def begin(self) -> World:
        """Build the first state: the run is queued, and nobody drives it."""
        tolls = tuple(Toll() for _ in self.tools)
        return World(Run(), "free", (IDLE,) * self.drivers, tolls, self.left)

    def status_of(self, world: World) -> str:
        """Compute the run's column `status`."""
        if world.lease != "free":
            return "running"
        folded = status(world.run, self.tools, self.off)
        return "queued" if folded == "active" else folded


class Step(NamedTuple):
    """One action: who does what, the rows that it appends, and the state after it."""

    who: str  # driver 1 | driver 2 | person | clock | sweep | deliverer
    what: str  # its name; with `call`, enough to repeat the action on the engine
    call: int
    text: str
    world: World
    rows: tuple[Row, ...] = ()
    engine: bool = False  # whether a driver wrote the rows under its lease

    @property
    def number(self) -> int:
        """The place of the driver that acts, or -1."""
        return int(self.who[-1]) - 1 if self.who.startswith("driver") else -1


def settled(world: World, scenario: Scenario, rows: list[Row] | tuple[Row, ...]) -> World:
    """Append rows, and count what they say."""
    run, tolls = world.run, list(world.tolls)
    for row in rows:
        run = apply(run, row, scenario.tools)
        if 0 <= row.call < len(tolls):
            toll = tolls[row.call]
            if row.kind == "tool_started":
                used = scenario.tools[row.call].gated and row.attempt == 1 and row.word == "consumed"
                tolls[row.call] = toll._replace(starts=toll.starts + 1, consumed=toll.consumed + used)
            elif row.kind == "tool_result":
                tolls[row.call] = toll._replace(results=toll.results + 1)
            elif row.kind == "approval_decided":
                tolls[row.call] = toll._replace(decisions=toll.decisions + 1)
            elif row.kind == "orphan_resolved" and row.word == "not_occurred":
                tolls[row.call] = toll._replace(pardons=toll.pardons + 1)
            elif row.kind == "orphan_resolved" and row.word == "occurred":
                tolls[row.call] = toll._replace(answers=toll.answers + 1)
            elif row.kind == "event_delivered":
                tolls[row.call] = toll._replace(deliveries=toll.deliveries + 1)
            if scenario.tools[row.call].awaits:
                world = projected(world, scenario, row, run.calls)
    return world._replace(run=run, tolls=tuple(tolls))


def projected(world: World, scenario: Scenario, row: Row, calls: tuple[Call, ...]) -> World:
    """Change the rows of events with a row of the journal. Mirrors `journal/waits.py`."""
    events = list(world.events)
    match row.kind:
        case "tool_started" if "the row of the event" not in scenario.off:
            if not events[0].is_there:
                events[0] = Event(is_there=True, is_mine=True)
            elif not events[0].is_mine:
                events[0] = events[0]._replace(is_mine=True, due="now")
        case "late_result" if row.attempt and calls and calls[row.call].is_open:  # names it
            if not events[1].is_there:
                events[1] = Event(is_there=True, is_mine=True)
            elif not events[1].is_mine:
                events[1] = events[1]._replace(is_mine=True, due="now")
        case "event_awaited":
            events[row.attempt] = events[row.attempt]._replace(is_there=True, is_mine=True, due="later")
        case "event_delivered":
            told = events[row.attempt]._replace(is_delivered=True, is_told=True)
            events[row.attempt] = told._replace(is_settled=True, due="") if row.word else told
        case "tool_result":
            for key, each in enumerate(events):
                is_kept = each.is_delivered and not each.is_told and "the untold event" not in scenario.off
                if each.is_mine and not is_kept:
                    events[key] = each._replace(is_settled=True, due="")
    return world._replace(events=tuple(events))


def toll(world: World, call: int, **changes: int) -> World:
    """Count more for one call."""
    old = world.tolls[call]
    new = old._replace(**{name: getattr(old, name) + more for name, more in changes.items()})
    return world._replace(tolls=(*world.tolls[:call], new, *world.tolls[call + 1 :]))


def with_driver(world: World, number: int, driver: Driver) -> World:
    """Replace one driver."""
    return world._replace(drivers=(*world.drivers[:number], driver, *world.drivers[number + 1 :]))


def taken(world: World, by: int = -1) -> World:
    """Give the lease a new epoch: whoever drove the run before holds it no more."""
    drivers = tuple(
        driver._replace(holds=False) if driver.holds and number != by else driver
        for number, driver in enumerate(world.drivers)
    )
    return world._replace(drivers=drivers)


def spent(world: World, name: str) -> World:
    """Count one of the rare events."""
    return world._replace(left=world.left._replace(**{name: getattr(world.left, name) - 1}))


def call_of(world: World, place: int) -> Call | None:
    """Find a call of the run; None before the reply that asks for it."""
    return world.run.calls[place] if place < len(world.run.calls) else None


def canonical(world: World) -> World:
    """Merge states that differ only by which driver is which."""
    return world._replace(drivers=tuple(sorted(world.drivers)))


def steps(world: World, scenario: Scenario) -> Iterator[Step]:
    """Find every action that is possible in a state."""
    from tests.model import drivers, events, people

    for number in range(len(world.drivers)):
        yield from drivers.steps(world, scenario, number)
    yield from people.steps(world, scenario)
    if scenario.waiter >= 0:
        yield from events.steps(world, scenario)
