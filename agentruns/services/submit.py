"""A caller's request for a task, and its run, which is created or exists already."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple, Unpack
from uuid import UUID

from django.conf import settings as django_settings
from django.db import IntegrityError, connections, transaction
from django.db.models import Q, QuerySet
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from agentruns.agents import content
from agentruns.agents.agent import Agent, CommonOptions, get_agent
from agentruns.conf import settings
from agentruns.engine import leases
from agentruns.engine.leases import Lease
from agentruns.engine.wakeup import CHANNEL, notify_on_commit
from agentruns.exceptions import (
    JournalConflictError,
    JournalUnreadableError,
    NotDurableError,
    RunStateError,
    SessionAccessDeniedError,
    SessionBusyError,
)
from agentruns.journal import events, payloads, timeline
from agentruns.journal.copies import last_task, title_of
from agentruns.journal.deciders import requester_ids, restore
from agentruns.journal.read import run_rows
from agentruns.journal.store import Batch, SessionState, load
from agentruns.journal.submission import begin
from agentruns.models import Control, Definition, PrunedKey, Run, Session, SessionBearer, Tombstone
from agentruns.models.tombstone import forgotten
from agentruns.providers import attachments
from agentruns.services import api_tokens, permissions
from agentruns.services.quotas import count_start, start_limit
from agentruns.services.rendering import put_away, rendered, renders
from agentruns.services.sessions import NOBODY, Owner, checked_context, place, require_writable
from agentruns.services.write import find_run, lock_session, require_no_record, require_task
from agentruns.utils import json as canonical
from agentruns.utils.bounds import check_name
from agentruns.utils.db import RACES, close_stale, in_transaction, short_lock_waits, uptime
from agentruns.utils.failpoints import reached
from agentruns.utils.ids import uuid7


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The request for a task, by a caller of any service."""

    agent: Agent
    text: str
    session: str
    scope: str = ""
    names_session: bool = True  # else the session's name was generated, and the run may be in another
    actor: Any = None
    owner: Owner = NOBODY
    context: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    not_before: datetime | None = None  # no part of the task
    again: Run | None = None  # the ended run that this repeats, in its session and for its owner
    session_id: UUID | None = None  # for a session that the request may create
    # Members of the `user` row if the text is stored in a file or the input is blocks.
    stored: dict[str, Any] | None = None
    run_id: UUID = field(default_factory=uuid7)  # for a run that the request may create
    rendered: dict[str, Any] = field(default_factory=dict)  # members of its first row
    # For a message: finds, in the locked session, the run that has the message already or accepts it.
    join: Callable[[Session, RunRequest], Run | None] | None = None

    def __post_init__(self) -> None:
        events.is_program(self.actor)  # raises for what is no actor

    def is_for(self, run: Run) -> bool:
        """Check whether `run` has the same agent, input and context, and repeats the same run, if any."""
        if self.again is not None and (run.origin_id, run.origin_seq) != (self.again.pk, None):
            return False
        same = run.agent == self.agent.name and run.input == self.text
        if not same and run.agent == self.agent.name and self.stored and payloads.has_blocks(self.stored):
            # The text describes blocks, perhaps under a key that the project has given up.
            blocks, keys = self.stored["content"], django_settings.SECRET_KEY_FALLBACKS
            same = any(content.described(blocks, key) == run.input for key in keys)
        return same and canonical.dumps(run.context) == canonical.dumps(self.context)

    def require_home(self, state: SessionState) -> None:
        """Raise SessionAccessDeniedError unless the session's first row has this key, scope and owner.

        The session was found by its columns, but the journal decides whose conversation it is.
        """
        owner = self.owner.ref()
        if state.home not in (None, (self.session, self.scope, owner and owner["id"])):
            text = _(
                "Session %(session)r has another key, scope or owner in its journal: a column was altered. "
                "Run manage.py verify_journal --repair, then try again."
            )
            raise SessionAccessDeniedError(text % {"session": self.session})


def request_for(
    agent: Agent | str, given: content.Input, session: Session | str, **options: Unpack[CommonOptions]
) -> RunRequest:
    """Build the request from a caller's arguments; raises as `place`, `read_input`, `checked_context`."""
    actor, owner = options.get("actor"), options.get("owner")
    whose = actor if owner is None else owner
    name, scope = place(session, options.get("scope"), whose)
    agent = get_agent(agent)
    text, stored = read_input(given, agent)
    return RunRequest(
        agent=agent,
        text=text,
        stored=stored,
        session=name,
        scope=scope,
        actor=actor,
        owner=Owner.of_row(session) if isinstance(actor, SessionBearer) else Owner.of(whose),
        context=checked_context(options.get("context")),
        key=options.get("idempotency_key") or "",
    )


def request_again(run: Run, agent: Agent, actor: Any, **changes: Any) -> RunRequest:
    """Build a request for a run's task once more: in its session, for its owner, with its context."""
    of_run = {"text": run.input, "session": run.session.key, "scope": run.scope, "context": run.context}
    return RunRequest(agent=agent, actor=actor, owner=Owner.of_row(run), **of_run | changes)


def read_input(given: content.Input, agent: Agent) -> tuple[str, dict[str, Any] | None]:
    """Convert an input to text and, for blocks, to members of its row; raises ContentError.

    ContentError is also raised for a file that a model of the agent would refuse.
    """
    if isinstance(given, str):
        return given, None
    made = content.packed(content.checked(given))
    files = [block for block in made["content"] if block["type"] != "text"]
    attachments.require_taken(files, agent.file_limits)
    return content.described(made["content"]), made


def checked_time(moment: datetime | None) -> datetime | None:
    """Convert the time at which a run may start to UTC. Raises TypeError, ValueError."""
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise TypeError(f"not_before must be a datetime, not {moment!r}.")
    if moment.utcoffset() is None:
        raise ValueError(f"not_before must be aware: {moment!r} does not say of which time zone it is.")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"not_before must be a time in UTC as well, not {moment!r}.") from None


class Submission(NamedTuple):
    """The run of a request; if it is new, with its `state`, and with its `lease` if one was requested."""

    run: Run
    is_new: bool = False
    lease: Lease | None = None
    state: SessionState | None = None


def submit(request: RunRequest, *, leased: bool = False) -> Submission:
    """Create the run of a request, or find it; its rows join the caller's transaction."""
    if not request.session:
        raise NotDurableError(
            "A durable run needs a session: pass the caller's own key, such as 'ticket-42'."
        )
    if not request.text.strip():
        raise ValueError("The input is empty; say what the agent is to do.")
    check_name("idempotency key", request.key)
    permissions.require_somebody(request.actor)
    alias = settings.DATABASE
    if renders(request.agent):  # before any transaction, unless the run or another unfinished one exists
        runs = Run.objects.using(alias).filter(scope=request.scope)
        there = runs.unfinished().filter(session__key=request.session)
        keyed = runs.filter(owner_id=request.owner.id, idempotency_key=request.key)
        if not there.exists() and not (request.key and keyed.exists()):
            request = rendered(request)
    request = _put_away(alias, request)
    owner, limit = uuid7().hex if leased else "", start_limit(request.actor, request.agent)
    is_plain = request.again is None and request.join is None
    with permissions.discreet(request.actor):
        submission = _unlocked(alias, request, owner, limit) if is_plain else None
        if submission is None:
            try:
                submission = in_transaction(alias, lambda: _submit(alias, request, owner, limit))
            except (IntegrityError, JournalConflictError) as error:  # a caller's transaction is not retried
                raise taken(request) from error
    reached("after_start")
    return submission


def _unlocked(alias: str, request: RunRequest, owner: str, limit: int | None) -> Submission | None:
    """Create or find a run without a lock; None if another transaction or a check interferes.

    Outside a transaction, and if starts are not counted, the creation is one statement on PostgreSQL, which
    stores nothing if another run was faster. Otherwise this creates only runs in new sessions.
    """
    connection = connections[alias]
    is_one = connection.vendor == "postgresql" and limit is None and connection.get_autocommit()
    # Unreadable: it may have been pruned while it was read.
    with suppress(*RACES, RunStateError, JournalUnreadableError), ExitStack() as stack:
        if not is_one:
            stack.enter_context(transaction.atomic(using=alias))
            stack.enter_context(short_lock_waits(alias))
        try:
            return _begin(alias, new_session(request), request, owner, limit)
        except JournalConflictError:
            if not is_one:
                raise
        return _submit(alias, request, owner, limit, locks=False)
    close_stale(alias)
    return None


def _put_away(alias: str, request: RunRequest) -> RunRequest:
    """Store files and long texts before any transaction; inside a caller's, texts stay in their rows."""
    # A text that was submitted before most likely belongs to an existing run.
    is_files = payloads.has_blocks(request.stored)
    texts = (request.text, request.rendered.get("instructions", ""))
    if not is_files and (not any(map(payloads.may_be_large, texts)) or connections[alias].in_atomic_block):
        return request
    sessions = Session.objects.using(alias).filter(scope=request.scope, key=request.session)
    given = Run.objects.using(alias).filter(session__in=sessions, input=request.text)
    if request.again is None and request.join is None and not request.rendered and given.exists():
        return request
    session_id = sessions.values_list("pk", flat=True).first() or uuid7()
    name = f"{session_id}/input"
    if request.stored is not None:
        stored = payloads.put_blocks(name, request.stored)
    else:
        stored = payloads.put(name, request.text)
    made = put_away(request.rendered, session_id)
    return replace(request, session_id=session_id, stored=stored or None, rendered=made)


def _submit(
    alias: str, request: RunRequest, owner: str, limit: int | None, *, locks: bool = True
) -> Submission:
    run = _by_key(alias, request)
    if run is None and request.rendered:  # by this very call: only its acknowledgement was lost
        run = Run.objects.using(alias).select_related("session").filter(pk=request.run_id).first()
    session = None if run else _session(alias, request, locks=locks)
    if session is not None or request.join is not None:
        session = session or new_session(request)
        run = run or _unfinished(alias, session, request)
    if run is not None:
        if run.status == Run.Status.QUEUED:
            notify_on_commit(alias, run.pk)
        reached("before_start_commit")
        # If this call has the lease, it made the run, and only the acknowledgement of its commit was lost.
        lease = _first_lease(alias, run) if owner and run.lease_owner == owner else None
        return Submission(run, is_new=lease is not None, lease=lease)
    if request.again is not None:  # a content that was erased meanwhile is not written again
        rows = run_rows(alias, request.again.pk)
        require_task(request.again, rows)
        before, left = request.again.context, restore(find_run(request.again.pk)).context
        if before != left and (request.rendered or request.context != before):
            raise taken(request)
        if before != left:
            request = replace(request, context=left)
        if (task := last_task(rows)) is not None and payloads.has_blocks(task.payload):
            request = replace(request, stored={name: task.payload[name] for name in ("content", "stored")})
    if renders(request.agent) and not request.rendered:  # the other run has ended just now
        raise taken(request)
    if owner and locks and (leases.is_draining(alias) or timeline.moved(alias).exists()):
        owner = ""
    return _begin(alias, session or new_session(request), request, owner, limit)


def _begin(alias: str, session: Session, request: RunRequest, owner: str, limit: int | None) -> Submission:
    """Store a run and its first rows, in a locked session or with a new one.

    Raises JournalConflictError or IntegrityError if another run was faster, or if this process drains.
    """
    agent, connection = request.agent, connections[alias]
    api_tokens.require_requester(agent, session)
    is_one, is_new, run_id = connection.get_autocommit(), session._state.adding, request.run_id
    state = SessionState(session.pk, run_id, session.secret) if is_new else load(alias, session.pk, run_id)
    if not session.title:  # made for a token, before it had a task
        if is_one:
            raise JournalConflictError(f"Session {session.key!r} has no title: that is given under a lock.")
        Session.objects.using(alias).filter(pk=session.pk, title="").update(title=title_of(request.text))
    batch = Batch(state, 1 if owner else 0)
    write_start(batch, request)
    session.next_seq, session.head = state.next_seq, state.head
    origin_id = request.again.pk if request.again else None
    columns = {**state.run.columns(), "status": Run.Status.QUEUED.value}
    columns |= {"created_at": batch.at, "updated_at": batch.at}
    if owner:
        columns |= {"status": Run.Status.RUNNING.value, "lease_owner": owner, "lease_epoch": 1}
    run = new_run(session, request, origin_id=origin_id, **columns)
    definition = Definition(hash=agent.definition_hash, body=agent.definition(), created_at=batch.at)
    lease = _first_lease(alias, run) if owner else None
    # The rows that must not be there for a run to begin
    unless: list[QuerySet[Any]] = [leases.drain_requests(alias)] if owner else []
    if owner and connection.vendor == "postgresql":
        unless.append(timeline.moved(alias))
    if request.session_id is not None:
        unless.append(_has_pruned_folder(alias, request))
    if request.key:
        unless += _uses_of_key(alias, request)
    if is_one:  # then it is committed with the statement
        reached("before_start_commit")
    stored = begin(
        connection, run, definition, batch,
        unless=unless,
        lease=settings.LEASE_SECONDS if owner else 0,
        doorbell=CHANNEL if is_one and not owner else "",
    )  # fmt: skip
    if not stored:
        raise JournalConflictError(f"Session {session.key!r} was taken by another run.")
    for row in (session, run):
        row._state.adding, row._state.db = False, alias
    count_start(alias, request.actor, limit)
    if lease is None:
        notify_on_commit(alias, run.pk)
    if not is_one:
        reached("before_start_commit")
    return Submission(run, is_new=True, lease=lease, state=state)


def write_start(batch: Batch, request: RunRequest) -> None:
    """Add the first two rows of a run; raises as `require_home`."""
    request.require_home(batch.state)
    begun = first_row(request)
    unread = chain.from_iterable(batch.state.asking.values())  # the run answers these as well
    asked = (request.owner.id, getattr(request.actor, "pk", None), *filter(None, unread))
    begun["requesters"] = requester_ids(*asked, origin=request.again)
    if request.not_before:
        begun["not_before"] = events.timestamp(request.not_before)
    if request.again:
        begun["origin"] = {"run": str(request.again.pk)}
    batch.add(events.RUN_STARTED, begun)
    batch.add(events.USER, user_row(request))


def first_row(request: RunRequest) -> events.RunStarted:
    """Build the payload of a run's `run_started` row."""
    begun: events.RunStarted = {
        "agent": request.agent.name,
        "version": request.agent.version,
        "definition": request.agent.definition_hash,
        "actor": events.actor_ref(request.actor),
        "idempotency_key": request.key,
        "session": request.session,
        "scope": request.scope,
        "owner": request.owner.ref(),
        **request.rendered,  # type: ignore[typeddict-item]
    }
    if request.context:
        begun["context"] = request.context
    if request.key:  # the same for the same task, should a restore lose the run; another in another database
        place = [Control.objects.using(settings.DATABASE).identity(), request.scope, str(request.owner.id)]
        begun["task"] = canonical.digest([*place, request.session, request.key])
    return begun


def user_row(request: RunRequest) -> dict[str, Any]:
    """Build the payload of the request's `user` row."""
    stored = request.stored or {}
    if payloads.has_blocks(stored):
        return stored
    return {**stored, "content": [{"type": "text", "text": stored.get("content", request.text)}]}


def taken(request: RunRequest) -> SessionBusyError:
    """Build the error for a request that lost a race against another request."""
    text = _("Session %(session)r was taken by another run; try again.")
    return SessionBusyError(text % {"session": request.session})


def new_run(session: Session, request: RunRequest, **columns: Any) -> Run:
    """Build the run of a request in its session."""
    agent = request.agent
    made: dict[str, Any] = {"idempotency_key": request.key, "input": request.text}
    made |= {"agent": agent.name, "version": agent.version, "definition_id": agent.definition_hash}
    made |= {"owner_id": session.owner_id, "owner_name": session.owner_name}
    made |= {"scope": request.scope, "context": request.context, "not_before": request.not_before}
    return Run(id=request.run_id, session=session, title=title_of(request.text), **made | columns)


def _first_lease(alias: str, run: Run) -> Lease:
    deadline = uptime() + settings.LEASE_SECONDS
    return Lease(alias, run.pk, run.session_id, epoch=1, owner=run.lease_owner, deadline=deadline)


def _by_key(alias: str, request: RunRequest) -> Run | None:
    """Find the run that has the request's idempotency key; RunStateError if that is another task."""
    if not request.key:
        return None
    runs, _ = _uses_of_key(alias, request)
    run = runs.select_related("session").first()
    if run is None:
        session = request.session if request.actor is None else ""
        refuse_pruned(alias, request.key, request.owner.id, request.scope, session)
        return None
    require_no_record(run.session)
    belongs = f"Idempotency key {request.key!r} belongs to run {run.pk} of"
    if not request.is_for(run):
        what = f"agent {run.agent!r} with another input, context or origin. Use a new key for a new task."
        raise RunStateError(f"{belongs} {what}", str(run.pk))
    if request.names_session and run.session.key != request.session:
        what = f"session {run.session.key!r}, not of {request.session!r}."
        raise RunStateError(f"{belongs} {what} Use a new key for a task in another session.", str(run.pk))
    return run


def _uses_of_key(alias: str, request: RunRequest) -> tuple[QuerySet[Run], QuerySet[PrunedKey]]:
    owner_id, scope = request.owner.id, request.scope
    # The program may have started it for an owner; others learn of their own only.
    session = request.session if request.actor is None else ""
    runs = Run.objects.using(alias).filter(owner_id=owner_id, scope=scope, idempotency_key=request.key)
    return runs, _pruned(alias, request.key, owner_id, scope, session)


def _pruned(alias: str, key: str, owner_id: Any, scope: str, session: str) -> QuerySet[PrunedKey]:
    same = Q(owner_id=owner_id)
    if session:
        same |= Q(tombstone__key__in=[session, forgotten(session)])
    return PrunedKey.objects.using(alias).filter(same, key__in=[key, forgotten(key)], tombstone__scope=scope)


def refuse_pruned(alias: str, key: str, owner_id: Any, scope: str, session: str = "") -> None:
    """Raise RunStateError if a pruned run of this owner, or of this session, had the idempotency key."""
    pruned = _pruned(alias, key, owner_id, scope, session).values_list("run_id", flat=True).first()
    if pruned is not None:
        raise RunStateError(
            f"Idempotency key {key!r} belongs to run {pruned}, which was pruned. Its task was done; "
            "use a new key for a new task."
        )


def _session(alias: str, request: RunRequest, *, locks: bool) -> Session | None:
    """Find the request's session, and lock it if `locks`; None if there is none."""
    sessions = Session.objects.using(alias).filter(scope=request.scope, key=request.session)
    while (session := sessions.first()) is not None:
        if request.again is None:
            require_writable(session, request.owner, request.actor)
        require_no_record(session)
        if not locks or lock_session(alias, session.pk):
            return session
    if _has_pruned_folder(alias, request).exists():  # what was stored goes with the session
        text = _("Session %(session)r was pruned just now; try again.")
        raise SessionBusyError(text % {"session": request.session})
    return None


def _has_pruned_folder(alias: str, request: RunRequest) -> QuerySet[Tombstone]:
    """Select the tombstone of the session in whose folder the request's texts and files were stored."""
    tombstones = Tombstone.objects.using(alias)
    return tombstones.none() if request.session_id is None else tombstones.filter(pk=request.session_id)


def derived(request: RunRequest, what: str) -> str:
    """Derive 32 bytes, in hex, from a caller's idempotency key and the project's SECRET_KEY."""
    session = request.session if what == "secret" else ""
    text = canonical.dumps([request.scope, str(request.owner.id), session, request.key])
    return salted_hmac(f"agentruns.{what}", text, algorithm="sha256").hexdigest()


def new_session(request: RunRequest) -> Session:
    """Build the new session of a request."""
    # If a restore loses the task and the caller repeats it, its calls have the same digests and keys.
    made = {"secret": derived(request, "secret")} if request.key else {}
    return Session(
        **made,
        id=request.session_id or uuid7(),
        scope=request.scope,
        key=request.session,
        title=title_of(request.text),
        **request.owner.columns(),
    )


def _unfinished(alias: str, session: Session, request: RunRequest) -> Run | None:
    """Find the session's unfinished run if the request is for it; SessionBusyError if it is not."""
    if request.join is not None:
        return request.join(session, request)
    run = Run.objects.using(alias).unfinished().select_related("session").filter(session=session).first()
    if run is None:
        return None
    keys_differ = bool(request.key and run.idempotency_key and request.key != run.idempotency_key)
    if request.is_for(run) and not keys_differ:
        return run
    if request.is_for(run):
        why = _("another idempotency key")
    else:
        why = _("another agent, input or context") if request.again is None else _("another task")
    text = _(
        "Session %(session)r has the unfinished run %(run)s (%(status)s) with %(why)s. "
        "Wait for it, cancel it, or use another session."
    )
    names = {"session": session.key, "run": run.pk, "status": run.status, "why": why}
    raise SessionBusyError(text % names, str(run.pk), run.lease_expires_at)


def store_definition(alias: str, agent: Agent) -> None:
    """Store the definition of an agent, unless it is stored already."""
    definition = Definition(hash=agent.definition_hash, body=agent.definition())
    Definition.objects.using(alias).bulk_create([definition], ignore_conflicts=True)
