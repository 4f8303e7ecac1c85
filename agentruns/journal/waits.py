"""The rows of Event beside the journal: they change in the transaction of the rows that say the same."""

from __future__ import annotations

from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce, Now

from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.events import Row
from agentruns.models import Event, Run
from agentruns.models.event import CHILD, DEFERRED, EventQuerySet, child_ended

KINDS = (events.EVENT_AWAITED, events.EVENT_DELIVERED)
# Rows of a run that its child runs follow
FOLLOWED = (events.RUN_CANCEL_REQUESTED, events.RUN_PAUSED, events.RUN_RESUMED, *events.CLOSING)


def concerns(batch: Batch) -> bool:
    """Check whether a batch begins or ends a wait, so that rows of Event change with it."""
    run, rows = batch.state.run, batch.rows
    if any(row.kind in KINDS for row in rows):
        return True
    if not run.parent and not any(call.awaits or call.event for call in run.calls.values()):
        return False
    own = any(_opened(batch, row) or _settles(batch, row) for row in rows)
    return own or _ends_child(batch) or _moves_children(batch)


def _ends_child(batch: Batch) -> bool:
    return bool(batch.state.run.parent) and any(row.kind in events.CLOSING for row in batch.rows)


def _moves_children(batch: Batch) -> bool:
    calls = batch.state.run.calls.values()
    has_children = any(call.child and call.event and call.deferred is None for call in calls)
    return has_children and any(row.kind in FOLLOWED for row in batch.rows)


def _opened(batch: Batch, row: Row) -> tuple[str, str] | None:
    """Name the event that a call may wait for from a row on: its start, or a Pending that came too late."""
    call = batch.state.run.calls.get(row.call_id)
    if call is None or not call.awaits:
        return None
    if row.kind == events.TOOL_STARTED:
        return call.awaits, row.payload["key"]
    late = events.LATE_RESULT.of(row)
    return (call.awaits, late["pending"]) if late and late.get("pending") and call.is_open else None


def _settles(batch: Batch, row: Row) -> bool:
    call = batch.state.run.calls.get(row.call_id) if row.kind == events.TOOL_RESULT else None
    return call is not None and call.deferred is None and bool(call.awaits or call.event)


def project(alias: str, batch: Batch) -> None:
    """Change the rows of Event as a batch's rows say, after these are stored.

    Raises JournalConflictError if a row of Event is not as the writer knew it; the writer then reads it again
    and builds another batch. With `batch.needs_due_event`, the database's clock has to say that the wait is
    over, and nobody may have delivered the event.
    """
    run_id, scope, events_of = batch.state.run.run_id, batch.state.run.scope, Event.objects.using(alias)
    delivered = {row.call_id for row in batch.rows if row.kind == events.EVENT_DELIVERED}

    def require(rows: EventQuerySet, what: str, **columns: object) -> None:
        if rows.update(**columns) != 1:
            raise JournalConflictError(f"Run {run_id}: the event is not {what} any more.")

    def begin(name: str, key: str, call_id: str) -> EventQuerySet:
        """Make the row, unless somebody did; select it if it is this call's, or nobody's."""
        row = Event(scope=scope, name=name, key=key, run_id=run_id, call_id=call_id)
        events_of.bulk_create([row], ignore_conflicts=True)
        mine = Q(run_id=run_id, call_id=call_id) | Q(run=None)
        return events_of.named(scope, name, key).unsettled().filter(mine)

    for row in batch.rows:
        its_events = events_of.filter(run_id=run_id, call_id=row.call_id)
        if opened := _opened(batch, row):  # the sweep settles an event that came before
            rows = begin(*opened, row.call_id).filter(run=None)
            rows.update(run_id=run_id, call_id=row.call_id, due_at=Now())
        elif awaited := events.EVENT_AWAITED.of(row):
            came = row.call_id in delivered
            rows = begin(awaited["name"], awaited["key"], row.call_id).filter(delivered_at__isnull=not came)
            due = events.moment(awaited["until"])
            if "every" in awaited:
                due = min(filter(None, (due, row.created_at + timedelta(seconds=awaited["every"]))))
            columns = {"call_id": row.call_id, "waits_since": row.created_at, "due_at": due}
            require(rows, "free", run_id=run_id, **columns)
        elif delivery := events.EVENT_DELIVERED.of(row):
            is_late, is_stored = delivery.get("late", False), "at" in delivery
            rows = its_events.named(scope, delivery["name"], delivery["key"])
            rows = rows.filter(settled_at__isnull=not is_late, delivered_at__isnull=not is_stored)
            came_at = Coalesce(F("delivered_at"), Now())
            require(rows, "undelivered", delivered_at=came_at, actor=delivery["actor"])
        elif _settles(batch, row):
            if batch.needs_due_event:
                require(its_events.due().filter(delivered_at=None), "due", settled_at=Now())
            # An event that came, and that the journal does not have yet, stays due: it is evidence.
            is_told = Q() if row.call_id in delivered else Q(delivered_at=None)
            if batch.state.run.calls[row.call_id].child:
                # The child of a run that ends without it is to be cancelled: its event is settled after that.
                is_told = Q(delivered_at__isnull=False) if batch.state.run.ended else Q()
            its_events.unsettled().filter(is_told).update(settled_at=Now(), payload=None)
    if _ends_child(batch):
        name = DEFERRED if batch.state.run.parent.get("deferred") else CHILD
        mine = events_of.named(scope, name, str(run_id)).unsettled()
        mine.update(delivered_at=Now(), due_at=batch.at)

        def tell() -> None:
            child_ended.send_robust(sender=Run, run_id=run_id)

        transaction.on_commit(tell, using=alias, robust=True)
    if _moves_children(batch):
        events_of.unsettled().filter(name=CHILD, run_id=run_id, delivered_at=None).update(due_at=batch.at)
