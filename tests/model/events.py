"""The actions of a deliverer, and of the sweep and the clock on waits. Mirrors `services/events.py`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.runs import Batch, Call
from tests.model.world import Event, Scenario, Step, World, settled, spent

WHICH = ("the event by the call's key", "the event by another key")


def steps(world: World, scenario: Scenario) -> Iterator[Step]:
    """Find what can be done with the event of the call that waits."""
    yield from _delivery(world, scenario)
    for key, event in enumerate(world.events):
        if event.due == "later" and not event.is_settled:
            text = f"The time of {WHICH[key]} is over."
            yield Step("clock", "event is due", key, text, with_event(world, key, event._replace(due="now")))
        is_early_end = event.due == "later" and "the time of a wait" in scenario.off
        if (event.due == "now" or is_early_end) and not event.is_settled:
            yield from _sweep(world, scenario, key)
    call = world.run.calls[scenario.waiter] if world.run.calls else None
    if scenario.decides and world.left.verdicts and call and call.pending and call.is_open:
        batch = Batch(world.run, scenario.tools, scenario.off)
        batch.surface(scenario.waiter)
        after = settled(spent(world, "verdicts"), scenario, batch.rows)
        yield Step("person", "stops the wait", scenario.waiter, "A person stops the wait.", after,
                   tuple(batch.rows))  # fmt: skip


def with_event(world: World, key: int, event: Event) -> World:
    """Replace the row of one event."""
    return world._replace(events=(*world.events[:key], event, *world.events[key + 1 :]))


def _delivery(world: World, scenario: Scenario) -> Iterator[Step]:
    """Deliver in two steps, because the look for a waiter locks nothing."""
    at, key = world.post
    idle = world._replace(post=("", 0))
    event, toll = world.events[key], world.tolls[scenario.waiter]
    if at == "" and world.left.deliveries:
        for key in range(2 if scenario.tools[scenario.waiter].awaits == "other" else 1):
            # The handler tells its key to the world outside.
            if toll.entries if key == 0 else toll.effects:
                at = "deliver" if world.events[key].is_mine else "store"
                after = spent(world, "deliveries")._replace(post=(at, key))
                yield Step("deliverer", "looks", key, f"The deliverer of {WHICH[key]} looks.", after)
    elif at == "store":
        if event.is_mine and "the second look" not in scenario.off:
            after, text = world._replace(post=("deliver", key)), "and finds a waiter by now"
        elif event.is_delivered:
            after, text = idle, "which is a duplicate"
        else:
            due = event.due if event.is_mine else "later"
            stored = event._replace(is_there=True, is_delivered=True, due=due)
            after, text = with_event(idle, key, stored), "which is early"
        yield Step("deliverer", "stores", key, f"The deliverer stores {WHICH[key]}, {text}.", after)
    elif at == "deliver":
        yield _deliver(world, scenario, key)
    elif at == "tell":
        yield Step("deliverer", "dies", key, "The deliverer dies.", idle)
        rows = _rows(world, scenario, key)
        told = settled(idle, scenario, rows.rows)
        yield Step("deliverer", "tells", key, "The deliverer tells the journal.", told, tuple(rows.rows))


def _deliver(world: World, scenario: Scenario, key: int) -> Step:
    idle, event = world._replace(post=("", 0)), world.events[key]
    text = f"The deliverer delivers {WHICH[key]}"
    known = any(each.is_mine and each.is_delivered for each in world.events)
    if known and "the first delivery" not in scenario.off:
        return Step("deliverer", "delivers", key, f"{text}, which is a duplicate.", idle)
    if "one delivery" in scenario.off:  # in two transactions
        after = with_event(world, key, event._replace(is_delivered=True))._replace(post=("tell", key))
        return Step("deliverer", "delivers", key, f"{text} without telling the journal.", after)
    rows = _rows(world, scenario, key).rows
    return Step("deliverer", "delivers", key, f"{text}.", settled(idle, scenario, rows), tuple(rows))


def _rows(world: World, scenario: Scenario, key: int) -> Batch:
    """Build the rows of a delivery: the result of the call, or evidence beside it."""
    batch, place = Batch(world.run, scenario.tools, scenario.off), scenario.waiter
    if batch.run.calls and batch.run.calls[place].is_open:
        batch.add("event_delivered", place, attempt=key)
        batch.result(place, "ok")
    else:
        batch.add("event_delivered", place, "late", key)
        batch.add("late_result", place)
    return batch


def _sweep(world: World, scenario: Scenario, key: int) -> Iterator[Step]:
    """Let the sweep settle an event that is due."""
    event, place = world.events[key], scenario.waiter
    if not event.is_mine:
        text = f"The sweep forgets {WHICH[key]}, for which nobody has waited."
        yield Step("sweep", "forgets", key, text, with_event(world, key, Event()))
        return
    if "the sweep of events" in scenario.off:
        return
    call = world.run.calls[place] if world.run.calls else Call(outcome="ok")
    if event.is_delivered and (call.is_open or not event.is_told):
        rows = tuple(_rows(world, scenario, key).rows)
        after = settled(world, scenario, rows)
        yield Step("sweep", "settles", key, f"The sweep settles {WHICH[key]}.", after, rows)
    elif call.is_open and call.pending:
        batch = Batch(world.run, scenario.tools, scenario.off)
        batch.surface(place)
        text = f"The sweep ends the wait for {WHICH[key]}."
        yield Step("sweep", "ends a wait", key, text, settled(world, scenario, batch.rows), tuple(batch.rows))
