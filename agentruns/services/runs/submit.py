"""The run of a caller's request, created or found; and the limit of starts in an hour."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Unpack
from uuid import UUID

from django.db import IntegrityError, connections, transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from agentruns import exceptions
from agentruns.agents.agent import Agent, CommonOptions
from agentruns.conf import settings
from agentruns.content import Input
from agentruns.engine import leases, turns
from agentruns.engine.rendering import renders
from agentruns.engine.wakeup import CHANNEL, notify_on_commit
from agentruns.exceptions import JournalConflictError, QuotaExceededError, RunStateError, SessionBusyError
from agentruns.journal import payloads, timeline
from agentruns.journal.batch import Batch, SessionState, load
from agentruns.journal.copies import last_task, title_of
from agentruns.journal.deciders import restore
from agentruns.journal.policy import limits_of
from agentruns.journal.read import run_rows
from agentruns.journal.store import begin
from agentruns.models import ApiToken, Definition, Run, Session, SessionBearer, StartCount
from agentruns.models.tombstone import PrunedKey, Tombstone, forgotten, names_of
from agentruns.services import permissions
from agentruns.services.api_tokens import VALID
from agentruns.services.runs import requests
from agentruns.services.runs.requests import RunRequest, new_session, rendered, taken
from agentruns.services.runs.sessions import require_writable
from agentruns.services.runs.write import (
    find_run,
    lock_session,
    require_conversation,
    require_no_record,
    require_task,
)
from agentruns.tools.options import REQUESTER
from agentruns.utils.bounds import check_name
from agentruns.utils.db import RACES, close_stale, in_transaction, short_lock_waits, uptime
from agentruns.utils.failpoints import reached
from agentruns.utils.ids import uuid7

HOUR = timedelta(hours=1)  # of a quota


class Submission(NamedTuple):
    """The run of a request. A new run comes with its `state`, and with its `lease` if one was requested."""

    run: Run
    lease: leases.Lease | None = None
    state: SessionState | None = None


def get_or_start(
    agent: Agent | str,
    text: Input,
    session: Session | str | None,
    *,
    not_before: datetime | None = None,
    **options: Unpack[CommonOptions],
) -> Run:
    """Start a task's run, or find it; only the former `is_new`. Options and errors as `start_run`.

    If `session` is None, a new run gets a new session, and a run with the key is found in any session.
    """
    request = requests.request_for(agent, text, str(uuid7()) if session is None else session, **options)
    if session is None and request.key:  # the same session and call keys if a restore loses the run
        request = replace(request, session=str(UUID(requests.derived(request, "session")[:32])))
    given = {"names_session": session is not None, "not_before": requests.checked_time(not_before)}
    return submit(replace(request, **given)).run  # type: ignore[arg-type]


def submit(request: RunRequest, *, leased: bool = False) -> Submission:
    """Create or find the run of a request; if `leased`, a new run comes with the lease to drive it.

    New rows are part of a caller's transaction. Raises as `start_run`, SessionBusyError if it lost a race.
    """
    if not request.session:
        text = "A durable run needs a session: pass the caller's own key, such as 'ticket-42'."
        raise exceptions.NotDurableError(text)
    if not request.text.strip():
        raise ValueError("The input is empty; say what the agent is to do.")
    check_name("idempotency key", request.key)
    permissions.require_somebody(request.actor)
    alias = settings.DATABASE
    connection, runs = connections[alias], Run.objects.using(alias).filter(scope=request.scope)
    is_plain = request.again is None and request.join is None
    if renders(request.agent):  # before any transaction, unless the run or another unfinished one exists
        there = runs.unfinished().filter(session__key=request.session)
        keyed, _pruned = uses_of_key(alias, request)
        if not there.exists() and not (request.key and keyed.exists()):
            request = rendered(request)
    texts = (request.text, request.rendered.get("instructions", ""))
    is_large = any(map(payloads.may_be_large, texts)) and not connection.in_atomic_block
    if is_large or payloads.has_blocks(request.stored):
        sessions = Session.objects.using(alias).filter(scope=request.scope, key=request.session)
        # A text that was submitted before most likely belongs to an existing run.
        given = runs.filter(session__in=sessions, input=request.text)
        if not is_plain or request.rendered or not given.exists():
            request = requests.put_away(request, sessions.values_list("pk", flat=True).first() or uuid7())
    owner, limit = uuid7().hex if leased else "", start_limit(request.actor, request.agent)
    submission: Submission | None = None
    with permissions.discreet(request.actor):
        # The lock of an agent's limit comes after that of the session.
        if is_plain and not (leased and turns.limit_of(request.agent.name)):
            # First try without a lock. If starts are not counted, PostgreSQL begins any run by one statement,
            # which stores nothing if another run was faster. Otherwise only a run in a new session can begin
            # without a lock.
            is_one = connection.vendor == "postgresql" and limit is None and connection.get_autocommit()
            # Unreadable: it may have been pruned while it was read.
            with suppress(*RACES, RunStateError, exceptions.JournalUnreadableError):
                with ExitStack() as stack:
                    if not is_one:
                        stack.enter_context(transaction.atomic(using=alias))
                        stack.enter_context(short_lock_waits(alias))
                    try:
                        made = begin_run(alias, new_session(request), request, owner, limit)
                    except JournalConflictError:
                        if not is_one:
                            raise
                        made = find_or_begin(alias, request, owner, limit, locks=False)
                submission = made  # only after the commit
            if submission is None:
                close_stale(alias)
        if submission is None:
            try:
                submission = in_transaction(alias, lambda: find_or_begin(alias, request, owner, limit))
            except (IntegrityError, JournalConflictError) as error:  # a caller's transaction is not retried
                raise taken(request) from error
    reached("after_start")
    return submission


def find_or_begin(
    alias: str, request: RunRequest, owner: str, limit: int | None, *, locks: bool = True
) -> Submission:
    """Find the run of a request, or begin it in the request's session, which is locked first if `locks`.

    `owner` is the owner of a new run's lease ("": no lease). Raises RunStateError if the key belongs to
    another task or session, SessionBusyError if another run is in the way, else as `begin_run`.
    """
    run, session = run_of_key(alias, request), None
    if run is not None:
        require_no_record(run.session)
        belongs = f"Idempotency key {request.key!r} belongs to run {run.pk} of"
        if not request.is_for(run):
            what = f"agent {run.agent!r} with another input, context or origin. Use a new key for a new task."
            raise RunStateError(f"{belongs} {what}", str(run.pk))
        if request.names_session and run.session.key != request.session:
            what = f"session {run.session.key!r}, not of {request.session!r}."
            what += " Use a new key for a task in another session."
            raise RunStateError(f"{belongs} {what}", str(run.pk))
    elif request.rendered:  # by this very call: only its acknowledgement was lost
        run = Run.objects.using(alias).select_related("session").filter(pk=request.run_id).first()
    sessions = Session.objects.using(alias).filter(scope=request.scope, key=request.session)
    while run is None and (session := sessions.first()) is not None:
        if request.again is None:
            require_writable(session, request.owner, request.actor)
        require_no_record(session)
        require_conversation(session)
        if not locks or lock_session(alias, session.pk):
            break
    # A pruned session took along what was stored in its folder.
    folder = Tombstone.objects.using(alias).filter(pk__in=[request.session_id] if request.session_id else [])
    if run is None and session is None and folder.exists():
        text = _("Session %(session)r was pruned just now; try again.")
        raise SessionBusyError(text % {"session": request.session})
    if run is None and (session is not None or request.join is not None):
        session = session or new_session(request)
        run = unfinished_run(alias, session, request)
    if run is not None:
        if run.status == Run.Status.QUEUED:
            notify_on_commit(alias, run.pk)
        reached("before_start_commit")
        # If this call has the lease, it made the run, and only the acknowledgement of its commit was lost.
        lease = first_lease(alias, run) if owner and run.lease_owner == owner else None
        run.is_new = lease is not None
        return Submission(run, lease)
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
    if owner and turns.is_full(alias, request.agent.name):
        owner = ""
    return begin_run(alias, session or new_session(request), request, owner, limit)


def begin_run(
    alias: str,
    session: Session,
    request: RunRequest,
    owner: str = "",
    limit: int | None = None,
    *,
    write: Callable[[Batch, RunRequest], None] = requests.write_start,
    **columns: Any,
) -> Submission:
    """Store a run and its first rows, which `write` adds, in a locked session or with a new one.

    `columns` are further columns of the run. Raises JournalConflictError or IntegrityError if another run was
    faster, or if a lease is requested (`owner`) and this process drains; RunStateError as
    `require_requester`; QuotaExceededError.
    """
    agent, connection = request.agent, connections[alias]
    require_requester(agent, session)
    is_one, is_new, run_id = connection.get_autocommit(), session._state.adding, request.run_id
    state = SessionState(session.pk, run_id, session.secret) if is_new else load(alias, session.pk, run_id)
    if not session.title:  # made for a token, before it had a task
        if is_one:
            raise JournalConflictError(f"Session {session.key!r} has no title: that is given under a lock.")
        Session.objects.using(alias).filter(pk=session.pk, title="").update(title=title_of(request.text))
    batch = Batch(state, 1 if owner else 0)
    write(batch, request)
    session.next_seq, session.head = state.next_seq, state.head
    columns |= {**state.run.columns(), "status": Run.Status.QUEUED.value}
    columns |= {"created_at": batch.at, "updated_at": batch.at}
    if request.again is not None:
        columns["origin_id"] = request.again.pk
    if owner:
        columns |= {"status": Run.Status.RUNNING.value, "lease_owner": owner, "lease_epoch": 1}
    made: dict[str, Any] = {"idempotency_key": request.key, "scope": request.scope, "priority": request.rank}
    made |= {"agent": agent.name, "version": agent.version, "definition_id": agent.definition_hash}
    made |= {"owner_id": session.owner_id, "owner_name": session.owner_name, "context": request.context}
    made |= {"input": request.text, "title": title_of(request.text), "not_before": request.not_before}
    run = Run(id=run_id, session=session, **made | columns)
    definition = Definition(hash=agent.definition_hash, body=agent.definition(), created_at=batch.at)
    lease = first_lease(alias, run) if owner else None
    # The rows that must not be there for a run to begin
    unless: list[QuerySet[Any]] = [leases.drain_requests(alias)] if owner else []
    if owner and connection.vendor == "postgresql":
        unless.append(timeline.moved(alias))
    if request.session_id is not None:
        unless.append(Tombstone.objects.using(alias).filter(pk=request.session_id))
    if request.key:
        unless += uses_of_key(alias, request)
    if is_one:  # then it is committed with the statement
        reached("before_start_commit")
    seconds = settings.LEASE_SECONDS if owner else 0
    doorbell = CHANNEL if is_one and not owner else ""
    if not begin(connection, run, definition, batch, unless=unless, lease=seconds, doorbell=doorbell):
        raise JournalConflictError(f"Session {session.key!r} was taken by another run.")
    for row in (session, run):
        row._state.adding, row._state.db = False, alias
    count_start(alias, request.actor, limit)
    if lease is None:
        notify_on_commit(alias, run.pk)
    if not is_one:
        reached("before_start_commit")
    run.is_new = True
    return Submission(run, lease, state)


def require_requester(agent: Agent, session: Session) -> None:
    """Raise RunStateError if calls need the requester, and the session has no owner and no valid token."""
    asking = sorted(tool.name for tool in agent.tools.values() if tool.approvers == REQUESTER)
    tokens = ApiToken.objects.using(settings.DATABASE).filter(VALID, session_id=session.pk)
    if asking and session.owner_id is None and not tokens.exists():
        text = _(
            "Agent %(agent)s has calls that the requester confirms (%(tools)s), and session %(session)r "
            "has neither an owner nor a session token: nobody could. Start it for a user, or make a "
            "token with agentruns.session_token first."
        )
        raise RunStateError(text % {"agent": agent.name, "tools": ", ".join(asking), "session": session.key})


def first_lease(alias: str, run: Run) -> leases.Lease:
    """Build the lease of the process that created a run."""
    deadline = uptime() + settings.LEASE_SECONDS
    return leases.Lease(alias, run.pk, run.session_id, epoch=1, owner=run.lease_owner, deadline=deadline)


def run_of_key(alias: str, request: RunRequest) -> Run | None:
    """Find the run with the request's idempotency key, or None; RunStateError if a pruned run had the key."""
    if not request.key:
        return None
    runs, pruned = uses_of_key(alias, request)
    if (run := runs.select_related("session").first()) is None:
        refuse_pruned(request.key, pruned)
    return run


def uses_of_key(alias: str, request: RunRequest) -> tuple[QuerySet[Run], QuerySet[PrunedKey]]:
    """Select the run and the pruned runs that have the request's idempotency key."""
    owner_id, scope = request.owner.id, request.scope
    # The program may have started the pruned run for an owner; users find only their own runs.
    session = request.session if request.actor is None else ""
    keys = names_of(request.key)  # a hash is of a run whose key was erased
    runs = Run.objects.using(alias).filter(owner_id=owner_id, scope=scope, idempotency_key__in=keys)
    return runs, pruned_keys(alias, request.key, owner_id, scope, session)


def pruned_keys(alias: str, key: str, owner_id: Any, scope: str, session: str = "") -> QuerySet[PrunedKey]:
    """Select the pruned runs in `scope`, of this owner or of this session, that had the idempotency key."""
    same = Q(owner_id=owner_id)
    if session:
        same |= Q(tombstone__key__in=[session, forgotten(session)])
    return PrunedKey.objects.using(alias).filter(same, key__in=names_of(key), tombstone__scope=scope)


def refuse_pruned(key: str, pruned: QuerySet[PrunedKey]) -> None:
    """Raise RunStateError if one of the pruned runs had the idempotency key."""
    if (run_id := pruned.values_list("run_id", flat=True).first()) is not None:
        which = f"{run_id}, which was pruned. Its task was done; use a new key for a new task."
        raise RunStateError(f"Idempotency key {key!r} belongs to run {which}")


def unfinished_run(alias: str, session: Session, request: RunRequest) -> Run | None:
    """Find the session's unfinished run, or call `join`; SessionBusyError for another task or key."""
    if request.join is not None:
        return request.join(session, request)
    run = Run.objects.using(alias).unfinished().select_related("session").filter(session=session).first()
    if run is None or (request.is_for(run) and (not request.key or run.idempotency_key in ("", request.key))):
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


def start_limit(actor: Any, agent: Agent) -> int | None:
    """Find how many runs the actor may start in an hour; None if there is no limit.

    Only users and visitors have a limit. An actor that is neither, such as the program, has none.
    """
    is_counted = isinstance(actor, SessionBearer) or getattr(actor, "pk", None) is not None
    return limits_of(actor, agent).runs if is_counted else None


def count_start(alias: str, actor: Any, limit: int | None) -> None:
    """Count a run or message toward the hourly `limit` of a user or visitor; count nothing if it is None.

    The starts of all agents count; an hour begins with its first start. Raises QuotaExceededError.
    """
    if limit is None:
        return
    user_id = actor.actor_id if isinstance(actor, SessionBearer) else str(actor.pk)
    if not (seconds := StartCount.count_one(alias, user_id, limit, HOUR)):
        return
    text = _("%(name)s may start %(limit)s runs in an hour. Start the next one in %(seconds)s s.")
    facts = {"name": actor.get_username(), "limit": limit, "seconds": seconds}
    raise QuotaExceededError(text % facts, seconds)
