"""The steps of a driver, each as long as nobody else can see a half of it. Mirrors `engine/`.

A driver stands just before a commit, or before another step that others can see. What it does next was chosen
by the state that it knew, which may be old; a commit builds its rows again on the newest state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.model.runs import Batch, Row, Run, is_started, next_calls, status
from tests.model.world import (
    IDLE,
    Driver,
    Scenario,
    Step,
    World,
    settled,
    spent,
    taken,
    toll,
    with_driver,
)

Build = Callable[[Batch], None]


def steps(world: World, scenario: Scenario, number: int) -> Iterator[Step]:
    """Find what a driver can do now."""
    driver, who = world.drivers[number], f"driver {number + 1}"
    if not driver.at:
        if is_claimable(world, scenario):
            yield _claim(world, scenario, number)
        return
    if world.left.crashes:
        died = with_driver(spent(world, "crashes"), number, IDLE)
        yield Step(who, "dies", driver.call, f"Driver {number + 1} dies before it {TEXTS[driver.at]}.", died)
    yield STEPS[driver.at](world, scenario, number)


def is_claimable(world: World, scenario: Scenario) -> bool:
    """Check whether a driver may claim the run."""
    if world.lease == "free":
        return scenario.status_of(world) == "queued"
    if world.lease == "live":
        return "the claim" in scenario.off
    return "the takeover" not in scenario.off


def _claim(world: World, scenario: Scenario, number: int) -> Step:
    took_over = world.lease != "free"
    word = "takes over" if took_over else ""
    driver = Driver(at="recover", word=word, holds=True, view=world.run)
    world = with_driver(taken(world)._replace(lease="live"), number, driver)
    text = f"Driver {number + 1} {'takes over the run, whose lease has run out' if took_over else 'claims'}"
    return Step(f"driver {number + 1}", "takes over" if took_over else "claims", -1, text + ".", world)


def chosen(driver: Driver, scenario: Scenario) -> Driver:
    """Let a driver go on to its next step, by the state that it knows. Mirrors `loop._step` and `execute`."""
    run, tools, off = driver.view, scenario.tools, scenario.off
    ready = next_calls(run, tools, off)
    call, attempt = driver.started
    may_stop = not (0 <= call < len(run.calls) and run.calls[call].is_open)
    may_stop = may_stop or run.calls[call].attempt != attempt
    driver = driver._replace(call=-1, word="")
    if run.cancel and may_stop:
        return driver._replace(at="close")
    if not ready and status(run, tools, off) != "active":
        return driver._replace(at="release")
    if not ready:
        return driver._replace(at="reply")
    place = ready[0]
    call = run.calls[place]
    driver = driver._replace(call=place)
    is_entered = driver.started == (place, call.attempt)
    if call.decision:
        return driver._replace(at="decided")
    if call.is_contradicted and "the contradiction" not in off:
        return driver._replace(at="doubt")
    if call.orphan == "reconcile":
        return driver._replace(at="ask")
    is_again = is_started(run, place, tools) and not is_entered and call.orphan != "retry"
    if is_again and not call.is_contradicted:
        return driver._replace(at="doubt")
    return driver._replace(at="enter" if is_entered else "start")


def _lost(world: World, scenario: Scenario, number: int) -> bool:
    """Check whether an append under this driver's lease would be refused."""
    holds = world.drivers[number].holds or "the epoch" in scenario.off
    return not holds or bool(world.run.ended and "the end" not in scenario.off)


def _commit(
    world: World,
    scenario: Scenario,
    number: int,
    build: Build,
    what: str,
    then: Callable[[Driver], Driver] | None = None,
    returned: int = -1,
) -> Step:
    """Append what `build` adds, as `Driver.commit` does, and let the driver go on.

    If the lease is lost, the driver drives no more; with `returned`, it keeps that call's result as evidence.
    """
    driver, who = world.drivers[number], f"driver {number + 1}"
    text = f"Driver {number + 1} {TEXTS[driver.at]}"
    batch = Batch(driver.view, scenario.tools, scenario.off)
    build(batch)
    rows: list[Row] = batch.rows
    if rows and _lost(world, scenario, number):
        names = int(returned >= 0 and scenario.tools[returned].awaits == "other")
        late = [Row("late_result", returned, attempt=names)] if returned >= 0 else []
        if "the late result" in scenario.off:
            late = []
        why = "keeps the result as evidence" if late else "stops"
        world = with_driver(settled(world, scenario, late), number, IDLE)
        return Step(who, what, driver.call, f"{text}: refused, because its lease is lost; it {why}.", world,
                    tuple(late))  # fmt: skip
    if rows and world.run != driver.view and "the last row" not in scenario.off:
        batch = Batch(world.run, scenario.tools, scenario.off)
        build(batch)
        rows, text = batch.rows, text + ", on the newest state"
        driver = driver._replace(view=world.run)
    if not rows:
        driver = (then or (lambda after: chosen(after, scenario)))(driver)
        return Step(who, what, world.drivers[number].call, f"{text}: nothing to append.",
                    with_driver(world, number, driver))  # fmt: skip
    call = world.drivers[number].call
    world = settled(world, scenario, rows)
    starts = [(row.call, row.attempt) for row in rows if row.kind == "tool_started"]
    driver = driver._replace(view=batch.run, slept=False)
    if starts:
        driver = driver._replace(started=starts[-1])
    if status(batch.run, scenario.tools, scenario.off) != "active":
        world = with_driver(taken(world)._replace(lease="free"), number, IDLE)
        text += " and gives the lease back"
    else:
        driver = (then or (lambda after: chosen(after, scenario)))(driver)
        world = with_driver(world._replace(lease="live"), number, driver)
    return Step(who, what, call, f"{text}.", world, tuple(rows), engine=True)


def _recover(world: World, scenario: Scenario, number: int) -> Step:
    took_over = world.drivers[number].word

    def build(batch: Batch) -> None:
        open_calls = [(place, call) for place, call in enumerate(batch.run.calls) if call.is_open]
        left = [place for place, call in open_calls if call.attempt and not call.orphan and not call.pending]
        if took_over or left:
            batch.add("run_resumed")
        if batch.run.cancel:
            batch.close()
            return
        for place in left:
            if batch.run.calls[place].is_open:
                batch.orphan(place)

    return _commit(world, scenario, number, build, "recovers")


def _close(world: World, scenario: Scenario, number: int) -> Step:
    return _commit(world, scenario, number, Batch.close, "closes")


def _decided(world: World, scenario: Scenario, number: int) -> Step:
    place = world.drivers[number].call
    return _commit(world, scenario, number, lambda batch: batch.decided(place), "stores a decision")


def _doubt(world: World, scenario: Scenario, number: int) -> Step:
    place = world.drivers[number].call

    def build(batch: Batch) -> None:
        if batch.run.calls[place].is_open:
            batch.orphan(place, failed=True)

    return _commit(world, scenario, number, build, "doubts")


def _start(world: World, scenario: Scenario, number: int) -> Step:
    place = world.drivers[number].call

    def build(batch: Batch) -> None:
        if batch.run.cancel and "cancel before start" not in scenario.off:
            return
        if batch.run.calls[place].is_contradicted and "the contradiction" not in scenario.off:
            return
        if batch.run.calls[place].is_open or "the start of an open call" in scenario.off:
            batch.start(place)

    if "start before handler" in scenario.off:  # the handler is entered first
        driver = world.drivers[number]
        attempt = driver.view.calls[place].attempt + 1
        ahead = with_driver(world, number, driver._replace(at="enter", started=(place, attempt)))
        return Step(f"driver {number + 1}", "starts", place, f"Driver {number + 1} starts a call.", ahead)

    def then(driver: Driver) -> Driver:
        attempt = driver.view.calls[place].attempt
        if driver.started != (place, attempt):  # a cancel or an event came before the start was stored
            return chosen(driver, scenario)
        return driver._replace(at="enter")

    return _commit(world, scenario, number, build, "starts", then)


def _reply(world: World, scenario: Scenario, number: int) -> Step:
    def build(batch: Batch) -> None:
        is_first = batch.run.replies == 0
        batch.add("assistant")
        if is_first:
            for place, tool in enumerate(scenario.tools):
                if tool.gated:
                    batch.add("approval_requested", place)
            batch.start_next()
        elif not batch.run.cancel:
            batch.add("run_completed")

    return _commit(world, scenario, number, build, "replies")


def _release(world: World, scenario: Scenario, number: int) -> Step:
    who, text = f"driver {number + 1}", f"Driver {number + 1} gives the lease back."
    if world.drivers[number].holds:
        world = taken(world)._replace(lease="free")
    return Step(who, "releases", -1, text, with_driver(world, number, IDLE))


def _held(world: World, scenario: Scenario, number: int) -> bool:
    """Check whether a driver may go on to a handler: if its time is over, only after extending its lease."""
    driver = world.drivers[number]
    return driver.holds or not driver.slept or "the deadline" in scenario.off


def _awake(world: World, scenario: Scenario, number: int) -> World:
    """Let the driver extend its lease if its own clock says that it is over."""
    driver = world.drivers[number]
    if driver.slept and driver.holds:
        world = with_driver(world._replace(lease="live"), number, driver._replace(slept=False))
    return world


def _enter(world: World, scenario: Scenario, number: int) -> Step:
    driver, who = world.drivers[number], f"driver {number + 1}"
    place, tool = driver.call, scenario.tools[driver.call]
    if not _held(world, scenario, number):
        late = [Row("late_result", place, "never entered")]
        world = with_driver(settled(world, scenario, late), number, IDLE)
        text = f"Driver {number + 1} finds its lease lost before it enters the handler of call {place + 1}."
        return Step(who, "enters", place, text, world, tuple(late))
    world = _awake(world, scenario, number)
    driver = world.drivers[number]._replace(started=(-1, 0))
    text = f"Driver {number + 1} enters the handler of call {place + 1}"
    if tool.declares == "transactional" and "one transaction" not in scenario.off:
        return _together(with_driver(world, number, driver), scenario, number, text)
    world = toll(with_driver(world, number, driver._replace(at="act")), place, entries=1)
    if tool.declares == "nothing":
        return Step(who, "enters", place, text + ".", world)
    acted = _act(world, scenario, number)
    return acted._replace(what="enters", text=text + ", which acts and returns.")


def _together(world: World, scenario: Scenario, number: int, text: str) -> Step:
    """Commit the effect of a transactional handler with its result, or neither."""
    place = world.drivers[number].call
    step = _commit(world, scenario, number, _result(world, scenario, place), "enters", returned=-1)
    text += ", in one transaction with its result"
    if any(row.kind == "tool_result" for row in step.rows):
        done = toll(step.world, place, effects=1, entries=1)
        return step._replace(world=done, text=text + ".")
    return step._replace(text=text + ", which is rolled back.")


def _act(world: World, scenario: Scenario, number: int) -> Step:
    driver, place = world.drivers[number], world.drivers[number].call
    world = toll(with_driver(world, number, driver._replace(at="result")), place, effects=1)
    text = f"The handler of call {place + 1} in driver {number + 1} acts and returns."
    return Step(f"driver {number + 1}", "acts", place, text, world)


def _result(world: World, scenario: Scenario, place: int) -> Build:
    """Build the rows of what a handler returned: a result, or the wait for an event that brings it."""
    awaits = scenario.tools[place].awaits

    def build(batch: Batch) -> None:
        if "start before handler" in batch.off:
            batch.start(place)
        if not batch.run.calls[place].is_open and "the result of an open call" not in batch.off:
            if not awaits:  # no event brings its result
                batch.add("late_result", place)
        elif awaits:
            key = int(awaits == "other")
            batch.add("event_awaited", place, attempt=key)
            if world.events[key].is_delivered and "the early event" not in batch.off:
                batch.add("event_delivered", place, attempt=key)
                batch.result(place, "ok")
        else:
            batch.result(place, "ok")
        batch.start_next()

    return build


def _store(world: World, scenario: Scenario, number: int) -> Step:
    place = world.drivers[number].call
    build = _result(world, scenario, place)
    return _commit(world, scenario, number, build, "stores a result", returned=place)


def _ask(world: World, scenario: Scenario, number: int) -> Step:
    """Ask by the tool's `reconcile` whether the effect has happened."""
    driver, who = world.drivers[number], f"driver {number + 1}"
    place = driver.call
    text = f"Driver {number + 1} asks whether call {place + 1} happened"
    if not _held(world, scenario, number):
        stopped = with_driver(world, number, IDLE)
        return Step(who, "asks", place, text + ", and finds its lease lost.", stopped)
    world = _awake(world, scenario, number)
    happened = world.tolls[place].effects > 0
    word = ("occurred" if happened else "not_occurred") if scenario.tools[place].sure else "unknown"
    at = "unsure" if word == "unknown" else "resolve"
    driver = world.drivers[number]._replace(at=at, word=word)
    return Step(who, "asks", place, f"{text}: {word}.", with_driver(world, number, driver))


def _resolve(world: World, scenario: Scenario, number: int) -> Step:
    place, word = world.drivers[number].call, world.drivers[number].word

    def build(batch: Batch) -> None:
        if not batch.run.calls[place].is_open:  # an event came
            return
        batch.add("orphan_resolved", place, word)
        if word == "occurred":
            batch.result(place, "ok")
            batch.start_next()

    step = _commit(world, scenario, number, build, "resolves")
    if word == "not_occurred" and step.engine:  # the verdict of a machine pardons nothing
        step = step._replace(world=toll(step.world, place, pardons=-1))
    return step


STEPS: dict[str, Callable[[World, Scenario, int], Step]] = {
    "recover": _recover, "close": _close, "decided": _decided, "doubt": _doubt, "start": _start,
    "reply": _reply, "release": _release, "enter": _enter, "act": _act, "result": _store, "ask": _ask,
    "resolve": _resolve, "unsure": _doubt,
}  # fmt: skip
TEXTS = {
    "recover": "classifies the calls left open", "close": "closes the cancelled run",
    "decided": "stores the result of a decision", "doubt": "holds a call for a person",
    "start": "journals the start of a call", "reply": "journals a reply of the model",
    "release": "gives the lease back", "enter": "enters a handler", "act": "acts inside a handler",
    "result": "journals a result", "ask": "asks by reconcile", "resolve": "journals the answer of reconcile",
    "unsure": "holds a call that reconcile does not know",
}  # fmt: skip

__all__ = ["STEPS", "Run", "chosen", "is_claimable", "steps"]
