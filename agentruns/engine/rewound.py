"""Holding a run whose journal lost rows that this process had seen committed: nothing is built on it."""

from __future__ import annotations

from django.db.models import F

from agentruns.engine.leases import SERVICE, Lease, take
from agentruns.journal import committed, events
from agentruns.journal.batch import Batch
from agentruns.journal.connection import own_alias
from agentruns.journal.fold import RunState
from agentruns.journal.store import DatabaseStore
from agentruns.models import Run, Session
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.rewound")

LOST = (
    "{rewound}: the database lost rows that a worker had seen committed, row {seq} the last of them (by a "
    "failover to a replica that was behind, or a restored backup). What the lost rows said happened.{calls} "
    "See docs/databases.md, 'Rows that vanish'."
)


def hold(lease: Lease, before: RunState | None = None) -> None:
    """Pause a run for staff because its journal lost rows, even if another process has the lease by now.

    If the run itself is lost, pauses the unfinished run of its session. `before` is the state that this
    process knew; the reason of the pause names the calls in `before` whose start is lost.
    """
    alias, known = own_alias(lease.alias), committed.last_row(lease.session_id)
    started = [call for call in before.calls.values() if call.attempt] if before else []

    def action() -> bool:
        its = Session.objects.using(alias).filter(pk=lease.session_id)
        if not its.update(next_seq=F("next_seq")):  # locks it
            return False
        # The run itself may be gone, and an earlier one of its session unfinished again.
        its_run = Run.objects.using(alias).unfinished().filter(session_id=lease.session_id).first()
        if its_run is None or not (epoch := take(alias, its_run.pk, by_force=True)):
            return False
        store = DatabaseStore(alias)
        batch = Batch(store.load(lease.session_id, its_run.pk), epoch, owner=SERVICE)
        batch.release = True
        left = batch.state.run.calls
        gone = [call for call in started if call.id not in left or left[call.id].attempt < call.attempt]
        calls = "".join(f" Its start may be lost: {call.tool} (key {call.key})." for call in gone)
        reason = LOST.format(rewound=Run.REWOUND, seq=known.seq if known else "?", calls=calls)
        batch.add(events.RUN_PAUSED, {"reason": reason, "restored": True})
        store.append(batch)
        return True

    held = in_transaction(alias, action)
    committed.forget(lease.session_id)
    became = "it is held for staff" if held else "it has ended, or is gone altogether"
    logger.critical("The journal was rewound run=%s session=%s: %s", lease.run_id, lease.session_id, became)
