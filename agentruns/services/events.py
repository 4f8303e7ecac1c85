"""Events: their delivery to the calls that wait, polls of servers' tasks, and the end of other waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.agents.agent import get_agent, registered
from agentruns.conf import settings
from agentruns.engine import in_doubt, tool_calls, waits
from agentruns.engine.driver import Driver
from agentruns.engine.handler import Observation, failed, in_thread
from agentruns.exceptions import (
    DurableRunNotFoundError,
    JournalLockedError,
    PermissionDeniedError,
    RunStateError,
)
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.connection import rest
from agentruns.journal.payloads import Offload
from agentruns.journal.policy import Occurrence
from agentruns.journal.store import DatabaseStore
from agentruns.models import Event, Run
from agentruns.models.event import CHILD, DEFERRED
from agentruns.models.statuses import DeliveryStatus
from agentruns.services import permissions
from agentruns.services.runs import family
from agentruns.services.runs.write import find_run, write
from agentruns.tools import Pending, Unknown, to_jsonable
from agentruns.tools.builtin import TASK
from agentruns.tools.mcp import McpError
from agentruns.utils import clock, json as canonical
from agentruns.utils.bounds import EVENT_LENGTH, OWN_EVENTS, check_name
from agentruns.utils.db import TRIES, delete_rows, in_transaction, later
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.events")

DUE_AT_ONCE = 100  # waits that one sweep ends
DAY = 86_400  # seconds
POLLED_AT_ONCE = 32  # tasks that one sweep polls
POLL_SECONDS = 10.0  # for which a sweep waits for all their answers
LEAST, MOST = timedelta(seconds=5), timedelta(minutes=5)  # until a poll without an answer is repeated
Answer = Observation | Pending | Unknown


class Delivery(NamedTuple):
    """The outcome of a delivery, and the run that the event was for; None while nobody waits for it."""

    status: DeliveryStatus
    run_id: UUID | None = None


def deliver_event(
    name: str, key: str, payload: Any = None, *, actor: Any = None, scope: str = ""
) -> Delivery:
    """Deliver an event: `payload`, as JSON, becomes the result of the call that waits for this name and key.

    The status is "early" if nobody waits yet: the event is kept for AGENTRUNS_EVENT_DAYS. It is "duplicate"
    if the event was delivered before, and "late" if the call has a result already, such as after a time-out;
    the payload is then kept in the journal as evidence. Raises ValueError for an invalid name or key, and for
    a payload of over EVENT_LENGTH characters; PermissionDeniedError, JournalLockedError.
    """
    for what, text in (("name of an event", name), ("key of an event", key), ("scope", scope)):
        check_name(what, text)
    if not name or not key or name.startswith(OWN_EVENTS):
        raise ValueError(f"An event needs a key, and a name that does not begin with {OWN_EVENTS!r}.")
    content, who, alias = to_jsonable(payload)[0], events.actor_ref(actor), settings.DATABASE
    if (length := len(canonical.dumps(content))) > EVENT_LENGTH:
        text = "The payload of event %s has %d characters as JSON; at most %d are allowed."
        raise ValueError(text % (name, length, EVENT_LENGTH))
    permissions.require_somebody(actor)
    if not permissions.may(actor, "deliver", Occurrence(scope, name, key)):
        raise PermissionDeniedError(permissions.why_not(actor, "deliver"))
    its_row = Event.objects.using(alias).named(scope, name, key)

    def store() -> Delivery | None:
        """Store the event for the call that will wait for it; None if a call waits by now."""
        row = Event(scope=scope, name=name, key=key, payload=content, actor=who, delivered_at=Now())
        row.due_at = later(settings.EVENT_DAYS * DAY)
        Event.objects.using(alias).bulk_create([row], ignore_conflicts=True)
        found = its_row.values_list("pk", "run_id").first()
        if found is None or found[1] is not None:
            return None
        return Delivery(DeliveryStatus.EARLY if found[0] == row.pk else DeliveryStatus.DUPLICATE)

    for _attempt in range(TRIES):
        event = its_row.first()
        with suppress(DurableRunNotFoundError):  # pruned just now, and its events with it
            if event is not None and event.run_id is not None:
                return _deliver(event, event.run_id, content, who)
            if (delivery := in_transaction(alias, store)) is not None:
                return delivery
    raise JournalLockedError(f"Event {name}: too many others changed it. Nothing was stored; try again.")


def _deliver(event: Event, run_id: UUID, content: Any, who: events.Actor | None) -> Delivery:
    """Deliver an event to its run; do nothing if it was delivered before, also by another key of its call."""
    status = DeliveryStatus.DUPLICATE

    def change(run: Run, batch: Batch) -> None:
        nonlocal status
        its_events = Event.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=event.call_id)
        if (again := its_events.filter(pk=event.pk).first()) is None:
            raise DurableRunNotFoundError(f"The wait of run {run.pk} is gone.")
        if its_events.exclude(delivered_at=None).exists():
            status = DeliveryStatus.DUPLICATE
            return
        batch.closed = again.settled_at is not None
        status = DeliveryStatus.LATE if batch.closed else DeliveryStatus.DELIVERED
        waits.deliver(batch, again, content, who)

    run = write(run_id, change)
    return Delivery(status, run.pk)


def stop_waiting(run_id: UUID | str, call_id: str, actor: Any) -> Run:
    """End the wait of a call at once, as its time-out would.

    Raises RunStateError if the call does not wait for an event, DurableRunNotFoundError,
    PermissionDeniedError.
    """
    run = permissions.require(actor, "resolve", find_run(run_id))

    def change(run: Run, batch: Batch) -> None:
        call = batch.state.run.calls.get(call_id)
        if call is None or not call.is_pending or call.child:  # who gives up a child run cancels it
            text = _("Call %(call)s of run %(run)s does not wait for an event.")
            raise RunStateError(text % {"call": call_id, "run": run.pk})
        waits.end(batch, call, actor)

    return write(run.pk, change)


def settle_due() -> int:
    """Settle up to DUE_AT_ONCE events that are due by the database's clock, then poll; return how many.

    Ends waits whose time is over, gives calls what was stored for them, and deletes events for which nobody
    has waited in time. An event whose run cannot be changed now stays due. Afterwards polls the tasks of MCP
    servers, because a server may be slow.
    """
    alias, settled, locked = settings.DATABASE, set[UUID](), set[UUID]()
    due = list(Event.objects.using(alias).due().order_by("due_at").values_list("pk", "run_id", "name"))
    if any(run_id is None for _pk, run_id, _name in due):
        in_transaction(alias, partial(delete_rows, Event.objects.using(alias).due().filter(run=None)))
    for pk, run_id, name in due:
        if run_id is None or run_id in locked or name == TASK:
            continue
        if len(settled) == DUE_AT_ONCE:  # events that fail are not counted, or they would fill every sweep
            break

        def change(run: Run, batch: Batch, pk: UUID = pk) -> None:
            settled.discard(pk)  # if the previous try was rolled back
            if (event := Event.objects.using(alias).due().filter(pk=pk).first()) is None:
                return
            call = batch.state.run.calls.get(event.call_id)
            batch.closed = call is None or not call.is_open
            if batch.closed:
                Event.objects.using(alias).filter(pk=pk).update(settled_at=Now(), payload=None)
            if event.delivered_at is not None:  # evidence beside the result, if the call has one by now
                waits.deliver(batch, event, event.payload, event.actor)
            elif call is not None and call.is_pending:
                batch.needs_due_event = True
                waits.end(batch, call, None)
            settled.add(pk)

        try:
            if name in (CHILD, DEFERRED):
                event = Event.objects.using(alias).get(pk=pk)
                (family.attend if name == CHILD else family.tell)(event)
                settled.add(pk)
            else:
                write(run_id, change)
        except (DatabaseError, InterfaceError):
            raise
        except Exception as error:  # locked, or a journal that was altered: no other event waits for it
            logger.warning("Event put off id=%s", pk, exc_info=True)
            settled.discard(pk)
            if isinstance(error, JournalLockedError):
                locked.add(run_id)
    return len(settled) + (poll_tasks() if any(name == TASK for _pk, _run, name in due) else 0)


def poll_tasks() -> int:
    """Poll up to POLLED_AT_ONCE tasks that are due, all at once; return how many calls got a result.

    Polls only for agents of this process. An answer that does not come in POLL_SECONDS is dropped.
    """
    alias, served, settled = settings.DATABASE, Q(pk=None), set[UUID]()
    for agent in registered():
        served |= Q(run__agent=agent.name, run__version=agent.version)
    due = Event.objects.using(alias).due().filter(served, name=TASK).select_related("run__session")
    polls = [_poll(alias, event, settled) for event in due.order_by("due_at")[:POLLED_AT_ONCE]]
    begun = [answer for each in polls if (answer := _go_on(each))]
    rest(alias)
    wait(begun, POLL_SECONDS)
    for each in polls:
        _go_on(each)
    return len(settled)


def _go_on(polled: Iterator[Future[Answer]]) -> Future[Answer] | None:
    """Take the next step of a poll; log its error, except of the database, because other polls go on."""
    try:
        return next(polled, None)
    except (DatabaseError, InterfaceError):
        raise
    except Exception:
        logger.warning("Poll put off", exc_info=True)
        return None


def _poll(alias: str, event: Event, settled: set[UUID]) -> Iterator[Future[Answer]]:
    """Poll a task in a thread, and yield the answer to come; then give the call its result, if there is one.

    Sets the time of the next poll first; does nothing if another sweep polls. The result is `unknown` if the
    server does not know the task, or if the wait is over.
    """
    now, run, store = clock.now(alias), event.run, DatabaseStore(alias)
    if run is None or event.waits_since is None:
        return
    mine = Event.objects.using(alias).unsettled().filter(pk=event.pk)
    seen, claimed = event.due_at, now + min(max((now - event.waits_since) / 10, LEAST), MOST)
    if in_transaction(alias, lambda: mine.filter(due_at=seen).update(due_at=claimed)) != 1:
        return
    state, agent = store.load(run.session_id, run.pk), get_agent(run.agent, run.version)
    call = state.run.calls[event.call_id]
    tool, offload = agent.tools.get(call.tool), Offload(f"{run.session_id}/{call.id}-{call.attempt}")
    context = Driver(agent, store, state, session_key=run.session.key).context(call.id, call.tool, call)

    def ask() -> Answer:
        if tool is None or tool.poll is None:  # the agent has changed
            return Pending()
        try:
            said = tool.poll(context, event.key)
        except McpError as error:
            return failed(tool, call.declares, context.run_id, error)
        except Exception as error:
            logger.warning("No answer about the task of event=%s: %s", event.pk, error)
            return Pending()
        if isinstance(said, Pending | Unknown):
            return said
        output = tool.output(said)
        offload({"content": output.content, **output.flags})  # before the transaction
        return Observation(output.content, flags=output.flags)

    future = in_thread(alias, call.tool, ask)
    yield future
    answer = future.result() if future.done() else Pending()
    until, now = events.moment(call.event["until"]) if call.event else None, clock.now(alias)
    if isinstance(answer, Pending) and (until is None or now < until):
        paced = claimed if answer._every is None else now + timedelta(seconds=answer._every)
        due_at = min(paced, until or paced)
        in_transaction(alias, lambda: mine.filter(due_at=claimed).update(due_at=due_at))
        return

    def change(run: Run, batch: Batch) -> None:
        settled.discard(event.pk)  # if the previous try was rolled back
        call = batch.state.run.calls.get(event.call_id)
        if run.is_ended or call is None or not call.is_pending:  # another sweep was faster, or a person
            return
        if not isinstance(answer, Observation):
            in_doubt.surface(batch, call, None, answer.reason if isinstance(answer, Unknown) else "")
        elif answer.in_doubt and call.declares == "reconcile":
            in_doubt.raised(batch, call, str(answer.content))
            mine.update(settled_at=Now())
        else:
            tool_calls.add_result(batch, call, answer, offload=offload)
        settled.add(event.pk)

    write(run.pk, change)
