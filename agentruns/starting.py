"""Starting a run: the session, the idempotency key, and the same task asked for twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Q
from django.utils.translation import gettext as _

from agentruns import draining, payloads, people, transitions
from agentruns.agents import Agent
from agentruns.clocks import later, uptime
from agentruns.conf import settings
from agentruns.crashpoints import reached
from agentruns.dispatch import ring_on_commit
from agentruns.exceptions import NotDurableError, RunStateError, SessionAccessDeniedError, SessionBusyError
from agentruns.ids import uuid7
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.conversation import SessionState
from agentruns.leases import Lease
from agentruns.models import PrunedKey, Run, Session
from agentruns.models.definition import store_definition
from agentruns.models.tombstone import forgotten
from agentruns.retries import in_transaction
from agentruns.stores import DatabaseStore

NAME_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a caller asked for."""

    agent: Agent
    text: str
    session: str
    actor: Any = None
    key: str = ""
    again: Run | None = None  # the ended run that this repeats, in its session and for its owner
    session_id: UUID | None = None  # of a session that this may have to make
    stored: dict[str, Any] | None = None  # what the `user` row holds in place of a text that was put away

    def is_for(self, run: Run) -> bool:
        """Whether `run` is the same agent and input, and repeats the same run where this repeats one."""
        if self.again is not None and (run.origin_id, run.origin_seq) != (self.again.pk, None):
            return False
        return run.agent == self.agent.name and run.input == self.text


class Placed(NamedTuple):
    """The run of an order: made for it, leased if that was asked, or found.

    `state` is that of a run just made and leased: to read it again would be to read what was just written.
    """

    run: Run
    is_new: bool = False
    lease: Lease | None = None
    state: SessionState | None = None


def place(order: Order, *, leased: bool = False) -> Placed:
    """Insert the run, or find the one that this order is already.

    Rows join the caller's transaction: if that rolls back, nothing happened.
    """
    if not order.session:
        raise NotDurableError(
            "A durable run needs a session: pass the caller's own key, such as 'ticket-42'."
        )
    if not order.text.strip():
        raise ValueError("The input is empty; say what the agent is to do.")
    for what, name in (("session", order.session), ("idempotency key", order.key)):
        check_name(what, name)
    people.require_somebody(order.actor)
    alias = settings.DATABASE
    owner = uuid7().hex if leased and not draining.is_asked(alias) else ""
    order = _put_away(alias, order)

    def action() -> Placed:
        placed = _place(alias, order, owner)
        if placed.run.status == Run.Status.QUEUED:
            ring_on_commit(alias, placed.run.pk)
        reached("before_start_commit")
        return placed

    placed = in_transaction(alias, action)
    reached("after_start")
    return placed


def _put_away(alias: str, order: Order) -> Order:
    """Store a long text before any transaction; inside the caller's own it stays in its row.

    A text that was given before is most likely that of a run that is there.
    """
    if not payloads.may_be_large(order.text) or connections[alias].in_atomic_block:
        return order
    given = Run.objects.using(alias).filter(session__key=order.session, input=order.text)
    if order.again is None and given.exists():
        return order
    found = Session.objects.using(alias).filter(key=order.session).values_list("pk", flat=True).first()
    session_id = found or uuid7()
    stored = payloads.put(f"{session_id}/input", order.text)
    return replace(order, session_id=session_id, stored=stored or None)


def check_name(what: str, name: str) -> None:
    """Raise ValueError for a name of a session or a key that some database would refuse or cut.

    TypeError for one that is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"The {what} must be a text, not {name!r}.")
    # Databases disagree about these: what one stores another refuses, or cuts.
    if len(name) > NAME_LENGTH or not name.isprintable():
        raise ValueError(
            f"The {what} must be at most {NAME_LENGTH} printable characters, not {len(name)}: {name[:50]!r}."
        )


def _place(alias: str, order: Order, owner: str) -> Placed:
    found = _by_key(alias, order, _owner_id(alias, order)) if order.key else None
    if found is not None:
        return _found(alias, found, owner)
    session, is_ours = _session(alias, order)
    if not is_ours:  # a row that this transaction inserted is locked, and nobody else has seen it
        transitions.lock_session(alias, session.pk)
        found = _by_key(alias, order, session.owner_id) or _unfinished(alias, session, order)
    if found is not None:
        _forget_if_empty(alias, session)
        return _found(alias, found, owner)
    run, lease = _new_run(alias, session, order, owner)
    # DO NOTHING, so that losing a race for the key leaves the caller's transaction usable.
    Run.objects.using(alias).bulk_create([run], ignore_conflicts=True)
    may_have_lost = not is_ours or order.key
    if may_have_lost and not Run.objects.using(alias).filter(pk=run.pk).exists():
        found = _by_key(alias, order, session.owner_id)
        if found is None:
            text = _("Session %(session)r was taken by another run; try again.")
            raise SessionBusyError(text % {"session": order.session})
        _forget_if_empty(alias, session)
        return _found(alias, found, owner)
    store = DatabaseStore(alias)
    state = SessionState(session.pk, run.pk) if is_ours else store.load(session.pk, run.pk)
    batch = Batch(state, lease.epoch if lease else 0)
    write_start(batch, order)
    store.append(batch)
    if lease is None:
        return Placed(transitions.find_run(run.pk), is_new=True)
    return Placed(run, is_new=True, lease=lease, state=state)


def _found(alias: str, run: Run, owner: str) -> Placed:
    if not owner or run.lease_owner != owner:
        return Placed(run)
    # Made by this very call: the commit went through, only its acknowledgement was lost.
    return Placed(run, is_new=True, lease=_first_lease(alias, run))


def _first_lease(alias: str, run: Run) -> Lease:
    return Lease(alias, run.pk, run.session_id, epoch=1, deadline=uptime() + settings.LEASE_SECONDS)


def _forget_if_empty(alias: str, session: Session) -> None:
    """Take back a session made for an order that turned out to be a run of another session."""
    unused = Session.objects.using(alias).filter(pk=session.pk, next_seq=1)
    if not Run.objects.using(alias).filter(session_id=session.pk).exists():
        unused.delete()


def _owner_id(alias: str, order: Order) -> Any:
    """Return whose run this is: the actor's, or for the program that of the session's owner."""
    if order.again is not None:
        return order.again.owner_id
    if order.actor is not None:
        return order.actor.pk
    return Session.objects.using(alias).filter(key=order.session).values_list("owner_id", flat=True).first()


def _by_key(alias: str, order: Order, owner_id: Any) -> Run | None:
    """Return the run an idempotency key already stands for."""
    if not order.key:
        return None
    run = Run.objects.using(alias).filter(owner_id=owner_id, idempotency_key=order.key).first()
    if run is None:
        # Whose a pruned session was the program cannot look up any more; anybody else is told of theirs only.
        refuse_pruned(alias, order.key, owner_id, order.session if order.actor is None else "")
        return None
    if not order.is_for(run):
        raise RunStateError(
            f"Idempotency key {order.key!r} belongs to run {run.pk} of agent {run.agent!r} with another "
            "input or origin. Use a new key for a new task."
        )
    return run


def refuse_pruned(alias: str, key: str, owner_id: Any, session: str = "") -> None:
    """Raise RunStateError for a key of a run that was pruned: the owner's, or one of the session named."""
    same = Q(owner_id=owner_id)
    if session:
        same |= Q(tombstone__key__in=[session, forgotten(session)])
    keys = PrunedKey.objects.using(alias).filter(same, key__in=[key, forgotten(key)])
    pruned = keys.values_list("run_id", flat=True).first()
    if pruned is not None:
        raise RunStateError(
            f"Idempotency key {key!r} belongs to run {pruned}, which was pruned. Its task was done; "
            "use a new key for a new task."
        )


def _session(alias: str, order: Order) -> tuple[Session, bool]:
    """Return the order's session, and whether it was made for it just now."""
    owner = order.actor
    name = owner.get_username() if owner is not None else ""
    made = Session(
        id=order.session_id or uuid7(),
        key=order.session,
        owner_id=owner.pk if owner is not None else None,
        owner_name=name,
    )
    sessions = Session.objects.using(alias)
    sessions.bulk_create([made], ignore_conflicts=True)
    session = sessions.get(key=order.session)
    if order.again is None and owner is not None and session.owner_id != owner.pk:
        raise SessionAccessDeniedError(f"There is no session {order.session!r}.")
    return session, session.pk == made.pk and order.session_id is None


def _unfinished(alias: str, session: Session, order: Order) -> Run | None:
    """Return the session's unfinished run if this order is that run; refuse if it is another."""
    run = Run.objects.using(alias).unfinished().filter(session=session).first()
    if run is None:
        return None
    keys_differ = bool(order.key and run.idempotency_key and order.key != run.idempotency_key)
    if order.is_for(run) and not keys_differ:
        return run
    if order.is_for(run):
        why = _("another idempotency key")
    else:
        why = _("another agent or input") if order.again is None else _("another task")
    text = _(
        "Session %(session)r has the unfinished run %(run)s (%(status)s) with %(why)s. "
        "Wait for it, cancel it, or use another session."
    )
    told = {"session": session.key, "run": run.pk, "status": run.status, "why": why}
    raise SessionBusyError(text % told, str(run.pk), run.lease_expires_at)


def _new_run(alias: str, session: Session, order: Order, owner: str) -> tuple[Run, Lease | None]:
    agent = order.agent
    store_definition(alias, agent)
    run = Run(
        session=session,
        owner_id=session.owner_id,
        owner_name=session.owner_name,
        agent=agent.name,
        version=agent.version,
        definition_id=agent.definition_hash,
        idempotency_key=order.key,
        input=order.text,
        origin_id=order.again.pk if order.again else None,
        **_leased_columns(owner),
    )
    return run, _first_lease(alias, run) if owner else None


def _leased_columns(owner: str) -> dict[str, Any]:
    """Return what makes a new run one that its maker drives at once."""
    if not owner:
        return {}
    return {
        "status": Run.Status.RUNNING,
        "lease_owner": owner,
        "lease_epoch": 1,
        "lease_expires_at": later(settings.LEASE_SECONDS),
    }


def write_start(batch: Batch, order: Order) -> None:
    """Add the first two rows of a run."""
    begun = first_row(order.agent, order.actor, order.key, order.session)
    if order.again:
        begun["origin"] = {"run": str(order.again.pk)}
    batch.add(events.RUN_STARTED, begun)
    batch.add(events.USER, user_row(order.text, order.stored or {}))


def first_row(agent: Agent, actor: Any, key: str, session: str) -> dict[str, Any]:
    """Return the payload of the row that a run begins with; `key` is the idempotency key."""
    return {
        "agent": agent.name,
        "version": agent.version,
        "definition": agent.definition_hash,
        "actor": events.actor_ref(actor),
        "idempotency_key": key,
        "session": session,
    }


def user_row(text: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the payload of the row with what the user says; `stored` is what stands for a long text."""
    return {**stored, "content": [{"type": "text", "text": stored.get("content", text)}]}
