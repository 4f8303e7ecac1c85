"""Changes of a run by a service: lock, read, decide and append, all in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from uuid import UUID

from django.db.models import F, Q
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.engine.leases import SERVICE, take
from agentruns.engine.wakeup import notify_on_commit
from agentruns.exceptions import DurableRunNotFoundError, JournalLockedError, RunStateError
from agentruns.journal.batch import Batch
from agentruns.journal.copies import last_task
from agentruns.journal.deciders import restore
from agentruns.journal.events import Row
from agentruns.journal.fold import RunState
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run, Session
from agentruns.models.statuses import RunStatus
from agentruns.utils.db import in_transaction, readable
from agentruns.utils.redaction import bound


class Unchanged(Exception):
    """No row was added: the lease that was taken is given back with the transaction."""


def find_run(run_id: UUID | str) -> Run:
    """Find a run, with its session; raises DurableRunNotFoundError."""
    try:
        # With its session, because a project's router might send a later query for it to a replica.
        return Run.objects.using(settings.DATABASE).select_related("session").get(pk=UUID(str(run_id)))
    except (Run.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(_("There is no run %(run)s.") % {"run": run_id}) from None


def require_no_record(session: Session) -> None:
    """Raise RunStateError for an imported session, because nothing is ever added to it."""
    if session.imported_at is not None:
        text = _(
            "Session %(session)r was imported (%(when)s): it is a record, to be read, verified, replayed "
            "and forked. To go on from one of its runs, fork it."
        )
        raise RunStateError(text % {"session": session.key, "when": readable(session.imported_at)})


def asked_in(session: Session) -> str:
    """Find the key of the session that asked for the deferred call in this session; "" for any other."""
    if session.key != str(session.pk):  # as the sessions of all child runs have it
        return ""
    rows = Message.objects.using(settings.DATABASE).filter(session_id=session.pk, seq=1)
    facts = rows.values_list("facts", flat=True).first() or {}
    return str(facts.get("parent", {}).get("deferred", ""))


def require_conversation(session: Session) -> None:
    """Raise RunStateError for the session of a deferred call, in which nothing but this call happens."""
    if key := asked_in(session):
        text = _("Session %(session)r has a deferred call only. Write to the conversation: session %(key)r.")
        raise RunStateError(text % {"session": session.key, "key": key})


def require_unfinished(run: Run, what: str) -> None:
    """Raise RunStateError if the run has ended; `what` says what it cannot be any more."""
    if run.is_ended:
        text = _("Run %(run)s has ended (%(status)s); it cannot be %(what)s any more.")
        raise RunStateError(text % {"run": run.pk, "status": run.get_status_display(), "what": what})


def require_task(run: Run, rows: Iterable[Row]) -> None:
    """Raise RunStateError if the last task in these rows was erased, because it cannot be repeated."""
    task = last_task(rows)
    if task is not None and task.is_erased:
        text = _("The task of run %(run)s was erased (row %(seq)s). Start a run, or fork it with a new text.")
        raise RunStateError(text % {"run": run.pk, "seq": task.seq})


def write(
    run_id: UUID,
    change: Callable[[Run, Batch], None],
    *,
    takes_lease: bool = False,
    by_force: Callable[[RunState], bool] = lambda state: False,
    guard: Q | None = None,
    closed: bool = False,
) -> Run:
    """Lock a run, let `change` add rows to its journal, store them and return the run.

    `change` gets the run with owner, requesters, scope, context and definition from its rows. `takes_lease`
    takes the lease if it is free; `change` may then add engine rows. `batch.epoch` is 0 if the lease is not
    free or the run has ended. A live worker keeps its lease, unless `by_force` returns True for the state.
    `guard` and `closed` are set on the batch. If `change` raises or adds no row, nothing is stored. Raises
    RunStateError for an imported run, DurableRunNotFoundError, JournalLockedError. May run inside the
    caller's transaction; outside of one, serialization failures and deadlocks are retried.
    """
    alias = settings.DATABASE
    tried: list[str] = []

    def action() -> Run:
        run = find_run(run_id)
        require_no_record(run.session)
        if not lock_session(alias, run.session_id):
            find_run(run_id)  # raises: it was pruned just now
        if Message.objects.using(alias).filter(session_id=run.session_id, hash__in=tried).exists():
            return run  # the commit went through, only its acknowledgement was lost
        store = DatabaseStore(alias)
        state = store.load(run.session_id, run.pk)
        epoch = take(alias, run.pk, by_force=by_force(state.run)) if takes_lease else 0
        run = restore(find_run(run_id), state.run)
        batch = Batch(state, epoch, owner=SERVICE)
        batch.release, batch.guard, batch.closed = bool(epoch), guard, closed
        change(run, batch)
        if batch.rows:
            tried.append(batch.rows[0].hash)
            store.append(batch)
        elif epoch:
            raise Unchanged
        if batch.state.run.status == RunStatus.ACTIVE:
            notify_on_commit(alias, run.pk)
        return find_run(run_id)

    with bound(run_id):
        try:
            return in_transaction(alias, action)
        except Unchanged:
            return find_run(run_id)
        except JournalLockedError as error:
            raise JournalLockedError(f"Run {run_id}: {error}", run_id=str(run_id)) from error


def lock_session(alias: str, session_id: UUID) -> bool:
    """Lock a session for the open transaction; return False if the session is gone."""
    # By an UPDATE, which locks on every database; SELECT does not.
    return Session.objects.using(alias).filter(pk=session_id).update(next_seq=F("next_seq")) == 1
