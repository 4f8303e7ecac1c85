"""Calls that wait for an event: the rows that begin a wait, and those that end it."""

from __future__ import annotations

from typing import Any

from agentruns.engine import in_doubt
from agentruns.engine.driver import Driver
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.connection import own_alias
from agentruns.journal.events import Actor
from agentruns.journal.fold import Call
from agentruns.models import Event
from agentruns.models.statuses import Outcome
from agentruns.tools import Pending
from agentruns.tools.builtin import TIMER

TAKEN = "{tool} cannot wait: another call waits, or has waited, for the event {name} with the key {key}."
NOT_WAITED = " Nothing happened. Wait under another key."


def begin(driver: Driver, batch: Batch, call: Call, pending: Pending) -> None:
    """Add the rows of a wait; also those that end it, if the event came before or another call has it."""
    run, tool = batch.state.run, driver.agent.tools[call.tool]
    name, key = pending._name or call.awaits, pending.key or call.key
    until = pending._until or (batch.at + pending.timeout if pending.timeout else None)
    event = Event.objects.using(own_alias(driver.alias)).named(run.scope, name, key).first()
    owner = (event.run_id, event.call_id) if event and event.run_id else None
    if owner not in (None, (run.run_id, call.id)):
        taken = TAKEN.format(tool=call.tool, name=repr(name), key=repr(key))
        if tool.only_waits:
            batch.result(call, taken + NOT_WAITED, Outcome.ERROR, is_error=True)
        else:
            in_doubt.surface(batch, call, None, why=taken)
        return
    awaited = events.EventAwaited(
        name=name, key=key, until=None if until is None else events.timestamp(until)
    )
    if tool.only_waits:
        awaited["harmless"] = True
    if pending._every is not None:
        awaited["every"] = pending._every
    batch.add(events.EVENT_AWAITED, awaited, call=call, attempt=call.attempt)
    if event is not None and event.delivered_at is not None:
        event.call_id = call.id
        deliver(batch, event, event.payload, event.actor)


def deliver(batch: Batch, event: Event, payload: Any, actor: Actor | None) -> None:
    """Add the rows of a delivery: the payload is the result of the call, or evidence beside its result."""
    call = batch.state.run.calls.get(event.call_id)
    facts = events.EventDelivered(name=event.name, key=event.key, actor=actor)
    if event.delivered_at is not None:  # before these rows
        facts["at"] = events.timestamp(event.delivered_at)
    if call is not None and call.is_open:
        batch.add(events.EVENT_DELIVERED, facts, call=call, attempt=call.attempt)
        batch.result(call, payload, Outcome.OK)
        return
    results = (row for row in batch.state.conversation.rows if row.kind == events.TOOL_RESULT)
    result = next(row for row in results if row.call_id == event.call_id)
    about: Any = {"call_id": result.call_id, "tool_name": result.tool_name, "attempt": result.attempt}
    facts["late"] = True
    batch.add(events.EVENT_DELIVERED, facts, **about)
    batch.add(events.LATE_RESULT, events.LateResult(worker_epoch=0, content=payload, is_error=False), **about)


def end(batch: Batch, call: Call, actor: Any) -> None:
    """Add the result of a call whose event has not come in time: `unknown`, unless the call only waits."""
    if call.event is None or not call.event.get("harmless"):
        in_doubt.surface(batch, call, actor)
        return
    content = {"now": events.timestamp(batch.at)} if call.event["name"] == TIMER else {"timed_out": True}
    who = events.actor_ref(actor)
    facts = events.ResultFacts() if who is None else events.ResultFacts(actor=who)
    batch.result(call, content, Outcome.OK, **facts)
