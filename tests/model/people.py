"""The actions of people, of the clock and of the sweep. Mirrors `services/approvals` and `services/runs`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.runs import Batch
from tests.model.world import Scenario, Step, World, settled, spent, taken, toll


def steps(world: World, scenario: Scenario) -> Iterator[Step]:
    """Find what people, the clock and the sweep can do now."""
    yield from _clock(world, scenario)
    if world.run.ended:
        return
    for place, call in enumerate(world.run.calls):
        if call.card == "pending" and world.tolls[place].is_due and not world.run.cancel:
            yield _decide(world, scenario, place, "expired", "sweep")
    if scenario.decides:
        yield from _decisions(world, scenario)
        yield from _verdicts(world, scenario)
        yield from _control(world, scenario)


def _clock(world: World, scenario: Scenario) -> Iterator[Step]:
    holder = next((number for number, driver in enumerate(world.drivers) if driver.holds), -1)
    if world.lease == "live" and (holder < 0 or world.left.freezes):
        after = world._replace(lease="expired")
        text = "The lease of a dead driver runs out."
        if holder >= 0:
            drivers = tuple(each._replace(slept=True) if each.holds else each for each in after.drivers)
            after = spent(after._replace(drivers=drivers), "freezes")
            text = f"The lease runs out while driver {holder + 1} is frozen."
        yield Step("clock", "lease runs out", -1, text, after)
    for place, call in enumerate(world.run.calls):
        if call.card == "pending" and not world.tolls[place].is_due and not world.run.ended:
            text = f"The time of the card of call {place + 1} is over."
            yield Step("clock", "card is due", place, text, toll(world, place, is_due=True))


def _decisions(world: World, scenario: Scenario) -> Iterator[Step]:
    if world.run.cancel:
        return
    for place, call in enumerate(world.run.calls):
        decidable = ("pending", "approved", "denied") if "the pending card" in scenario.off else ("pending",)
        is_late = world.tolls[place].is_due and "the expiry" not in scenario.off
        if call.card in decidable and call.is_open and not is_late:
            for verb in ("approved", "denied"):
                yield _decide(world, scenario, place, verb, "person")


def _decide(world: World, scenario: Scenario, place: int, verb: str, who: str) -> Step:
    batch = Batch(world.run, scenario.tools, scenario.off)
    batch.add("approval_decided", place, verb)
    does = {"approved": "A person approves", "denied": "A person denies", "expired": "The sweep expires"}
    after = settled(world, scenario, batch.rows)
    return Step(who, verb, place, f"{does[verb]} call {place + 1}.", after, tuple(batch.rows))


def _verdicts(world: World, scenario: Scenario) -> Iterator[Step]:
    """Give verdicts on calls that are held. The service takes the lease and gives it back."""
    if scenario.status_of(world) != "orphaned" or not world.left.verdicts:
        return
    for place, call in enumerate(world.run.calls):
        if not call.is_open or call.orphan != "held":
            continue
        for word in ("occurred", "not_occurred", "unknown"):
            if word == "not_occurred" and call.late and "the evidence" not in scenario.off:
                continue
            batch = Batch(world.run, scenario.tools, scenario.off)
            batch.add("orphan_resolved", place, word)
            if word == "occurred":
                batch.result(place, "ok")
            elif word == "unknown":
                batch.surface(place)
            after = taken(settled(spent(world, "verdicts"), scenario, batch.rows))
            says = {"occurred": "happened", "not_occurred": "did not happen", "unknown": "is unknown"}[word]
            yield Step("person", word, place, f"A person says that call {place + 1} {says}.", after,
                       tuple(batch.rows))  # fmt: skip


def _control(world: World, scenario: Scenario) -> Iterator[Step]:
    if world.left.cancels:
        yield from _cancels(world, scenario)
    status = scenario.status_of(world)
    if world.left.resumes and (world.lease == "expired" or status == "orphaned"):
        batch = Batch(world.run, scenario.tools, scenario.off)
        batch.add("run_resumed")
        for place in range(len(batch.run.calls)):
            call = batch.run.calls[place]
            if call.is_open and call.attempt and not call.orphan and not call.pending:
                batch.orphan(place, tell_model=True)
            elif call.is_open and call.orphan == "held":
                batch.surface(place)
        after = _taken(settled(spent(world, "resumes"), scenario, batch.rows), scenario)
        yield Step("person", "resumes", -1, "A person resumes the run.", after._replace(lease="free"),
                   tuple(batch.rows))  # fmt: skip


def _cancels(world: World, scenario: Scenario) -> Iterator[Step]:
    """Cancel at once if the lease is free or has run out, else by a request; a second time by force."""
    batch = Batch(world.run, scenario.tools, scenario.off)
    is_free = world.lease != "live"
    if not world.run.cancel:
        batch.add("run_cancel_requested")
    elif not is_free and world.left.cancels < scenario.left.cancels:
        is_free = True  # the request was ignored for as long as a lease
    elif not is_free:
        return
    forced = world.lease == "live" and is_free
    after, text = spent(world, "cancels"), "A person requests to cancel the run."
    if is_free:
        batch.close()
        after = _taken(after, scenario)._replace(lease="free")
        text = f"A person cancels the run{', whose live driver has ignored it' if forced else ''}."
    after = settled(after, scenario, batch.rows)
    yield Step("person", "cancels by force" if forced else "cancels", -1, text, after, tuple(batch.rows))


def _taken(world: World, scenario: Scenario) -> World:
    return world if "the fence" in scenario.off else taken(world)
