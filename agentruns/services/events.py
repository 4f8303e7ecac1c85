"""Events: their delivery to the calls that wait for them, and the end of waits for which no event comes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.engine import waits
from agentruns.exceptions import (
    DurableRunNotFoundError,
    JournalLockedError,
    PermissionDeniedError,
    RunStateError,
)
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.policy import Occurrence
from agentruns.models import Event, Run
from agentruns.models.event import CHILD
from agentruns.models.statuses import DeliveryStatus
from agentruns.services import permissions
from agentruns.services.runs import family
from agentruns.services.runs.write import find_run, write
from agentruns.tools import to_jsonable
from agentruns.utils import json as canonical
from agentruns.utils.bounds import EVENT_LENGTH, OWN_EVENTS, check_name
from agentruns.utils.db import TRIES, delete_rows, in_transaction, later
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.events")

DUE_AT_ONCE = 100  # waits that one sweep ends
DAY = 86_400  # seconds


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
        try:
            if event is not None and event.run_id is not None:
                return _deliver(event, event.run_id, content, who)
            if (delivery := in_transaction(alias, store)) is not None:
                return delivery
        except DurableRunNotFoundError:  # pruned just now, and its events with it
            continue
    raise JournalLockedError(f"Event {name}: too many others changed it. Nothing was stored; try again.")


def _deliver(event: Event, run_id: UUID, content: Any, who: events.Actor | None) -> Delivery:
    """Deliver an event to its run; do nothing if it was delivered before, also by another key of its call."""
    status = DeliveryStatus.DUPLICATE

    def change(run: Run, batch: Batch) -> None:
        nonlocal status
        its_events = Event.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=event.call_id)
        again = its_events.filter(pk=event.pk).first()
        if again is None:
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
    """Settle up to DUE_AT_ONCE events that are due by the database's clock; return how many.

    Ends waits whose time is over, gives calls what was stored for them, and deletes events for which nobody
    has waited in time. An event whose run cannot be changed now stays due.
    """
    alias, settled, locked = settings.DATABASE, set[UUID](), set[UUID]()
    due = list(Event.objects.using(alias).due().order_by("due_at").values_list("pk", "run_id", "name"))
    if any(run_id is None for _pk, run_id, _name in due):
        in_transaction(alias, partial(delete_rows, Event.objects.using(alias).due().filter(run=None)))
    for pk, run_id, name in due:
        if run_id is None or run_id in locked:
            continue
        if len(settled) == DUE_AT_ONCE:  # events that fail are not counted, or they would fill every sweep
            break

        def change(run: Run, batch: Batch, pk: UUID = pk) -> None:
            settled.discard(pk)  # if the previous try was rolled back
            event = Event.objects.using(alias).due().filter(pk=pk).first()
            if event is None:
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
            if name == CHILD:
                family.attend(Event.objects.using(alias).get(pk=pk))
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
    return len(settled)
