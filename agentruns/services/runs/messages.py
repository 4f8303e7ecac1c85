"""Messages to a session: its open run reads them before it ends, or they become the task of a new run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, get_agent
from agentruns.conf import settings
from agentruns.content import Input
from agentruns.exceptions import PermissionDeniedError, RunStateError, SessionBusyError
from agentruns.journal import events, payloads
from agentruns.journal.batch import Batch
from agentruns.journal.policy import visible_runs
from agentruns.journal.read import read_rows
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run, Session, SessionBearer, Tombstone
from agentruns.models.statuses import UNFINISHED
from agentruns.models.tombstone import forgotten, keyed, names_of
from agentruns.services import permissions
from agentruns.services.runs.requests import RunRequest, request_for, taken, user_row
from agentruns.services.runs.sessions import Owner, no_session, place, require_known_scope, require_writable
from agentruns.services.runs.submit import count_start, start_limit, submit
from agentruns.services.runs.write import find_run
from agentruns.utils import json as canonical
from agentruns.utils.db import reading

MOST_UNREAD = 32


def send_message(
    session: Session | str,
    content: Input,
    *,
    agent: Agent | str | None = None,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Send a message to a session, and return the run that reads it.

    An open run reads the message before it ends, whatever it waits for now. Without an open run the message
    is the task of a new run, as by `start_run`, with the agent and context of the session's last run unless
    others are given. Equal texts are two messages, unless they have the same key. The model is told if the
    program is the actor; pass the `actor` whose words these are: a user, or the SessionBearer of a Session.
    Raises SessionBusyError if
    another agent's run is open; RunStateError if the run is being cancelled or has 32 unread messages, if the
    session was pruned, or if the key belongs to another message; PermissionDeniedError; else as `start_run`.
    """
    whose = actor if owner is None else owner
    key, home = place(session, scope, whose)
    writer = Owner.of_row(session) if isinstance(actor, SessionBearer) else Owner.of(whose)
    sessions = Session.objects.using(settings.DATABASE).filter(scope=home, key=key)
    stored = reading(settings.DATABASE, sessions.first)
    if stored is not None:
        require_writable(stored, writer, actor, begins=agent is None)
    elif agent is None and scope is None and events.is_program(whose):
        require_known_scope(key, home)
    stored = stored or Session(scope=home, key=key)
    given: dict[str, Any] = {"actor": actor, "owner": writer, "context": context, "key": idempotency_key}
    return send(stored, content, agent=agent, **given)


def send(
    session: Session,
    content: Input,
    *,
    agent: Agent | str | None,
    actor: Any,
    owner: Owner,
    context: dict[str, Any] | None = None,
    key: str | None = None,
    refusal: str = "",
    about: events.About | None = None,
    is_current: Callable[[], bool] = lambda: True,
) -> Run:
    """Send a message; return the run that reads it, which `is_new` if this call sent it.

    Raises as `send_message`.
    `refusal` is the reason why no new run may start, or "". The caller has checked the session's `owner`.
    Raises SessionBusyError unless `is_current`, which is called under the session's lock.
    """
    last = last_run(session, key, actor)
    if agent is None and last is None:
        _refuse_pruned(session)
        raise no_session(session.key, begins=True)
    if last is not None and not isinstance(actor, SessionBearer):
        permissions.require(actor, "message", last)
    if context is None and last is not None:
        context = last.context
    agent, seen = get_agent(agent or (last.agent if last else "")), None
    if permissions.hides(actor):
        open_runs = visible_runs(actor).filter(session_id=session.pk, status__in=UNFINISHED)
        seen = {*open_runs.values_list("pk", flat=True)}
    permissions.require_somebody(actor)
    sending = _Sending(refusal, start_limit(actor, agent), seen, is_current)
    request = request_for(agent, content, session, actor=actor, context=context, idempotency_key=key)
    priority = last.priority if last else None
    request = replace(request, owner=owner, priority=priority, join=sending.join, about=about)
    run = submit(request).run
    run.is_new = run.is_new or sending.is_new or run.pk == request.run_id
    return run


def last_run(session: Session, key: str | None = None, actor: Any = None) -> Run | None:
    """Find the session's newest run that `actor` may see; prefer the run with the idempotency key `key`."""
    runs = Run.objects.using(settings.DATABASE).filter(session_id=session.pk).select_related("session")
    if permissions.hides(actor):
        runs = runs.filter(pk__in=visible_runs(actor).filter(session_id=session.pk))
    last = runs.order_by("-created_at", "-id")
    return (key and last.filter(idempotency_key__in=names_of(key)).first()) or last.first()


@dataclass(slots=True)
class _Sending:
    """The sending of one message. A repeated transaction may find that the message is stored already."""

    refusal: str
    limit: int | None
    seen: set[UUID] | None  # open runs that the sender may see (None: all), found before the transaction
    is_current: Callable[[], bool]
    tried: list[str] = field(default_factory=list)  # hashes of the rows that may hold the message
    is_new: bool = False

    def join(self, session: Session, request: RunRequest) -> Run | None:
        """Append the message to the locked session's open run; return the run, or None if a run must start.

        If the message is stored already, finds its run. Raises RunStateError for another message's key or a
        pruned session, for a run that is being cancelled or has 32 unread messages; PermissionDeniedError if
        no run may start; SessionBusyError if the open run has another agent, or the sender may not see it;
        QuotaExceededError, SessionAccessDeniedError.
        """
        runs = Run.objects.using(settings.DATABASE).filter(session_id=session.pk)
        if runs.filter(pk=request.run_id).exists():  # committed, only the acknowledgement was lost
            return find_run(request.run_id)
        # Begun by another sender of the same message, while this one waited for the session's lock.
        begun = runs.filter(idempotency_key__in=names_of(request.key)).first() if request.key else None
        if begun is not None:
            if not request.is_for(begun):
                raise taken(request)
            return find_run(begun.pk)
        rows = Message.objects.using(settings.DATABASE).filter(session_id=session.pk, kind=events.USER)
        for row in read_rows(rows.own().order_by("seq")) if request.key or self.tried else ():
            if row.hash in self.tried:
                return find_run(row.run_id)
            kept = row.payload.get("idempotency_key", row.payload.get("key_hash"))
            if request.key and kept in names_of(request.key):
                stored = row.payload.get("stored")
                if row.is_erased:  # nobody can tell whether it was another text
                    is_same = True
                elif isinstance(stored, dict):
                    is_same = stored["sha256"] == canonical.sha256(request.text)
                else:
                    is_same = payloads.said_in(row.run_id, row.seq, row.payload) == request.text
                if not is_same:
                    text = _(
                        "Idempotency key %(key)r belongs to another message of run %(run)s. Use a new one."
                    )
                    raise RunStateError(text % {"key": request.key, "run": row.run_id}, str(row.run_id))
                self.is_new = False
                return find_run(row.run_id)
        if not self.is_current():
            raise SessionBusyError(_("What the message tells was changed just now; try again."))
        run = runs.unfinished().first()
        if run is None:
            if session.next_seq == 1:
                _refuse_pruned(session)
            if self.refusal:
                raise PermissionDeniedError(self.refusal)
            return None
        facts = {"run": run.pk, "session": session.key, "status": run.get_status_display()}
        if self.seen is not None and run.pk not in self.seen:
            raise SessionBusyError(str(taken(request)), str(run.pk))
        if run.agent != request.agent.name:
            text = _(
                "Session %(session)r has the unfinished run %(run)s (%(status)s) with another agent. "
                "Wait for it, cancel it, or use another session."
            )
            raise SessionBusyError(text % facts, str(run.pk), run.lease_expires_at)
        store = DatabaseStore(settings.DATABASE)
        state = store.load(session.pk, run.pk)
        request.require_home(state)
        if state.run.cancel_requested:
            text = _("Run %(run)s (%(status)s) is being cancelled. Send it again when that has ended.")
            raise RunStateError(text % facts, str(run.pk))
        if len(state.unread) >= MOST_UNREAD:
            text = _(
                "Run %(run)s (%(status)s) has %(most)s messages that it has not read. Send the next one when "
                "it has gone on, or cancel it."
            )
            raise RunStateError(text % {**facts, "most": MOST_UNREAD}, str(run.pk))
        count_start(settings.DATABASE, request.actor, self.limit)
        batch = Batch(state)
        payload = user_row(request)
        payload["reason"] = events.MESSAGE
        if request.key:
            payload["idempotency_key"], payload["key_hash"] = request.key, keyed(request.key)
        row = batch.add(events.USER, payload)
        self.tried.append(row.hash)
        store.append(batch)
        self.is_new = True
        return find_run(run.pk)


def _refuse_pruned(session: Session) -> None:
    """Raise RunStateError if a session with this key and scope was pruned."""
    keys = [session.key, forgotten(session.key)]
    if Tombstone.objects.using(settings.DATABASE).filter(scope=session.scope, key__in=keys).exists():
        text = _("Session %(session)r was pruned. Start a run in it to begin a new conversation.")
        raise RunStateError(text % {"session": session.key})
