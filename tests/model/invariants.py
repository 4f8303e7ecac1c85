"""What has to hold: of each step, of each state, and of what can still come after each state."""

from __future__ import annotations

from tests.model.world import Event, Scenario, Step, World

# Rows that may come after the end of a run.
EVIDENCE = {("late_result", ""), ("late_result", "never entered"), ("event_delivered", "late")}


def broken_by_step(before: World, step: Step, scenario: Scenario) -> str:
    """Say which promise a step breaks; "" if it breaks none."""
    number = step.number
    if step.engine and not before.drivers[number].holds:
        return "A run whose lease is lost is written to."
    ended = before.run.ended
    for row in step.rows:
        if row.kind == "approval_decided" and row.word != "expired" and before.tolls[row.call].is_due:
            return "A card is decided after its time."
        if ended and (row.kind, row.word) not in EVIDENCE:
            return f"{row.kind} comes after the end of the run."
        if row.kind == "tool_started":
            if before.run.calls and not before.run.calls[row.call].is_open:
                return "A call starts after its result."
            if before.run.cancel:
                return "A call starts after a cancel was requested."
            if before.run.calls and before.run.calls[row.call].is_contradicted:
                return "A call starts again although its handler has returned."
            if not scenario.tools[row.call].parallel and before.run.calls:
                earlier = before.run.calls[: row.call]
                if any((call.waits or call.pending) and call.is_open for call in earlier):
                    return "A call starts although an earlier call waits."
                if any(call.outcome == "unknown" for call in earlier):
                    return "A call starts although the outcome of an earlier call of its reply is unknown."
    if number >= 0 and before.drivers[number].at == "result" and step.what != "dies":
        kept = {(row.kind, row.call) for row in step.rows}
        place = before.drivers[number].call
        kinds = ("tool_result", "late_result", "event_awaited")
        calls = before.run.calls  # empty after the next reply
        is_closed = scenario.tools[place].awaits and not (calls and calls[place].is_open)
        if not is_closed and not kept & {(kind, place) for kind in kinds}:
            return "The result of a handler is lost."
    if step.what == "not_occurred" and before.run.calls[step.call].late:
        return "A person says that a call did not happen although its handler has returned."
    if step.what == "forgets" and is_untold(before):
        return "A delivered event never comes to the journal."
    if step.what == "ends a wait" and all(event.due != "now" for event in before.events):
        return "A wait ends before its time."
    return ""


def broken_in(world: World, scenario: Scenario) -> str:
    """Say which promise a state breaks; "" if it breaks none."""
    if sum(driver.holds and not driver.slept for driver in world.drivers) > 1:
        return "Two drivers hold the lease."
    for place, tool in enumerate(scenario.tools):
        toll = world.tolls[place]
        call = world.run.calls[place] if world.run.calls else None
        if toll.effects > 1 + toll.pardons and tool.declares != "retry":
            return "An effect happens twice for a tool without safe_to_retry."
        if toll.entries > toll.starts:
            return "A handler is entered without its start in the journal."
        if toll.results > 1:
            return "A call has two results."
        if toll.deliveries > 1:
            return "An event is delivered twice."
        if toll.decisions > 1:
            return "A card is decided twice."
        if toll.consumed > 1:
            return "An approval is used twice."
        if call is None:
            continue
        if tool.gated and toll.starts and not (toll.consumed and call.card == "consumed"):
            return "A call starts without an approval that it uses up."
        if tool.gated and toll.starts and not toll.decisions:
            return "A call starts before anybody has decided."
        if call.outcome in ("denied", "expired", "cancelled") and toll.effects and not toll.pardons:
            return f"A call is said to be {call.outcome}, and its effect has happened."
        if tool.declares == "transactional" and (toll.effects > 0) != (call.outcome == "ok"):
            return "The effect of a transactional tool and its result are not one."
        if tool.awaits and call.outcome == "ok" and not (toll.deliveries or toll.answers):
            return "A call has the result of an event that has not come."
        if tool.awaits and not call.is_open and not all(map(_is_over, world.events)):
            return "An event of a call that has its result is open."
        if tool.awaits and call.pending and call.is_open and is_untold(world):
            return "A call waits for an event that has come."
        if world.run.ended and call.is_open:
            return "A run has ended with an open call."
        if world.run.ended and toll.results != 1:
            return "A call of a run that has ended has not exactly one result."
    return ""


def is_settled(world: World, scenario: Scenario) -> bool:
    """Check whether nothing is left to do but what a person is asked to do."""
    if any(driver.at for driver in world.drivers) or world.post[0] or is_untold(world):
        return False
    if world.run.ended:
        return True
    status = scenario.status_of(world)
    if status == "awaiting-approval":
        return any(call.card == "pending" and call.is_open for call in world.run.calls)
    return status == "orphaned"


def _is_over(event: Event) -> bool:
    """Check whether nobody waits for an event any more; one that came and is not told yet is evidence."""
    return event.is_settled or not event.is_mine or (event.is_delivered and not event.is_told)


def is_untold(world: World) -> bool:
    """Check whether an event was delivered to the call, and the journal does not have it yet."""
    started = any(call.attempt for call in world.run.calls)  # from then on the call owns its own key
    first, other = world.events
    untold = [event.is_delivered and not event.is_told for event in world.events]
    return (untold[0] and (first.is_mine or started)) or (untold[1] and other.is_mine)


def is_machine(step: Step) -> bool:
    """Check whether a step needs neither a person, nor a delivery, nor bad luck."""
    return step.who != "person" and step.what not in ("dies", "looks")
