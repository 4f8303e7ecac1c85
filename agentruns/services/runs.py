"""Runs as callers know them: start, run, resume, find. A caller who waits drives the run itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Q
from django.utils.translation import gettext as _

from agentruns.agents import output
from agentruns.agents.agent import Agent, get_agent
from agentruns.conf import settings
from agentruns.engine import in_doubt, leases
from agentruns.engine.driver import Driver
from agentruns.engine.leases import Lease
from agentruns.engine.loop import drive, drive_run
from agentruns.engine.wakeup import notify_on_commit
from agentruns.engine.worker import advance, agent_for
from agentruns.exceptions import (
    MemoryStoreNotDurableError,
    NotDurableError,
    RunStateError,
    SessionAccessDeniedError,
    SessionBusyError,
    UnknownAgentError,
)
from agentruns.journal import events, payloads
from agentruns.journal.connection import require_no_transaction
from agentruns.journal.store import Batch, DatabaseStore, MemoryStore, SessionState, Store, load
from agentruns.models import Approval, Definition, PrunedKey, Run, Session
from agentruns.models.querysets import RunQuerySet
from agentruns.models.tombstone import forgotten
from agentruns.services import permissions
from agentruns.services.write import find_run, lock_session, require_no_record, write
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.db import in_transaction, later, readable, reading, uptime
from agentruns.utils.failpoints import reached
from agentruns.utils.ids import uuid7


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run, or its present state.

    `messages` is in the provider's form; `pending` holds the Approvals that wait for people, `orphans` the
    ids of the calls whose outcome is in doubt.
    """

    status: str
    output: Any = None  # text, or a value of the agent's output_type
    run_id: str | None = None
    session_key: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    error: str = ""


def start_run(
    agent: Agent | str,
    text: str,
    session: str,
    *,
    actor: Any = None,
    idempotency_key: str | None = None,
    store: Store | None = None,
) -> Run:
    """Queue a run and return it; a worker drives it after the caller's transaction commits.

    The same task asked for twice is the same run (docs: idempotency keys). Raises SessionBusyError,
    SessionAccessDeniedError, RunStateError for a key used for another task or session, NotDurableError.
    """
    _require_durable(store)
    return get_or_start(agent, text, session or "", actor=actor, idempotency_key=idempotency_key)[0]


def get_or_start(
    agent: Agent | str,
    text: str,
    session: str | None,
    *,
    actor: Any = None,
    idempotency_key: str | None = None,
) -> tuple[Run, bool]:
    """Return the run of a task, and whether this call started it. Errors as `start_run`.

    Without a session a new run gets one of its own, and a key's run is returned whatever its session is.
    """
    request = RunRequest(
        agent=get_agent(agent),
        text=text,
        session=str(uuid7()) if session is None else session,
        names_session=session is not None,
        actor=actor,
        key=idempotency_key or "",
    )
    submission = submit(request)
    return submission.run, submission.is_new


def run_agent(
    agent: Agent | str,
    text: str,
    session: str | None = None,
    *,
    store: Store | None = None,
    actor: Any = None,
    idempotency_key: str | None = None,
) -> RunResult:
    """Run an agent in this process until the run ends or waits, and return its result.

    Without a session nothing is stored and no database is touched. With one, a call repeated after a
    crash goes on with the same run. Raises SessionBusyError, NotDurableError inside a transaction,
    MemoryStoreNotDurableError, DurableConfigMismatchError.
    """
    agent = get_agent(agent)
    if session is None:
        return _run_stateless(agent, text, actor)
    _require_durable(store)
    alias = settings.DATABASE
    require_no_transaction(alias)
    request = RunRequest(agent=agent, text=text, session=session, actor=actor, key=idempotency_key or "")
    submission = submit(request, leased=True)
    run, lease = submission.run, submission.lease
    if lease is not None:
        state = drive_run(run, agent, lease, store=store, state=submission.state)
        return reading(alias, lambda: result_of(run.pk, state))
    held = run.status == Run.Status.ORPHANED
    may_surface = permissions.may(actor, "agentruns.resume_run")
    # A repeated call never un-pauses, and tells the model of a call in doubt only for who may resume.
    if run.is_ended or run.status == Run.Status.PAUSED or (held and not may_surface):
        return result_of(run.pk)
    return _go_on(run, actor, drive=True, writes=held, tell_model=may_surface, store=store)


def resume_run(run_id: UUID | str, actor: Any = None, *, drive: bool = True) -> RunResult:
    """Resume a run: unpause it, and surface its calls in doubt to the model instead of holding them.

    Ends a back-off too. `drive=False` records and queues only. A run that waits for approval is returned as
    it is. Raises SessionBusyError when it is live elsewhere, RunStateError when it has ended,
    DurableConfigMismatchError, PermissionDeniedError.
    """
    run = find_run(run_id)
    permissions.require(actor, "agentruns.resume_run", run)
    return _go_on(run, actor, drive=drive, writes=True, tell_model=True)


def surface_orphans(run_id: UUID | str, actor: Any) -> Run:
    """Surface the calls in doubt to the model as unknown, and queue the run.

    A pause stays. Raises RunStateError when the run has ended, PermissionDeniedError.
    """
    run = find_run(run_id)
    permissions.require(actor, "agentruns.resume_run", run)
    return write(run.pk, lambda run, batch: _resume(run, batch, actor, unpauses=False), takes_lease=True)


def get_run(run_id: UUID | str) -> Run:
    """Return a run; DurableRunNotFoundError if there is none."""
    return find_run(run_id)


def list_runs(status: str | None = None, agent: str | None = None, owner: Any = None) -> RunQuerySet:
    """Return runs, newest updated first."""
    runs = Run.objects.using(settings.DATABASE).order_by("-updated_at", "-id")
    if status is not None:
        runs = runs.filter(status=status)
    if agent is not None:
        runs = runs.filter(agent=agent)
    if owner is not None:
        # A visitor has no id, and nobody's runs are not theirs.
        runs = runs.none() if owner.pk is None else runs.filter(owner_id=owner.pk)
    return runs


def result_of(run_id: UUID, state: SessionState | None = None) -> RunResult:
    """Return the result of a run so far; a `state` that is not the newest is read anew."""
    alias = settings.DATABASE
    run = Run.objects.using(alias).select_related("session").get(pk=run_id)
    if state is None or state.next_seq != run.session.next_seq:
        state = load(alias, run.session_id, run.pk)
    pending = [
        call for call in state.run.calls.values() if call.approval and call.approval.status == "pending"
    ]
    cards = Approval.objects.using(alias).filter(run=run, status=Approval.Status.PENDING)
    return RunResult(
        status=run.status,
        output=_output_of(run),
        run_id=str(run.pk),
        session_key=run.session.key,
        messages=state.settled_messages(),
        usage=run.usage,
        pending=list(cards.order_by("requested_at")) if pending else [],
        orphans=[call.id for call in state.run.open_calls() if call.orphan == "held"],
        error=run.error,
    )


def _output_of(run: Run) -> Any:
    """Return the output as a value of the agent's `output_type` if this process has the agent."""
    try:
        agent = get_agent(run.agent, run.version)
    except UnknownAgentError:
        return run.output
    return run.output if agent.output_type is None else output.value_of(agent.output_type, run.output)


def _go_on(
    run: Run, actor: Any, *, drive: bool, writes: bool, tell_model: bool, store: Store | None = None
) -> RunResult:
    alias = settings.DATABASE
    if run.status == Run.Status.AWAITING_APPROVAL:
        return result_of(run.pk)
    if drive and not run.is_ended:
        require_no_transaction(alias)
        agent_for(run, alias)
    if writes:
        run = write(run.pk, lambda run, batch: _resume(run, batch, actor), takes_lease=True)
    if drive and not run.is_ended and not advance(run, alias, store=store, caller=actor, asked=tell_model):
        _refuse_live(find_run(run.pk))
    return reading(alias, lambda: result_of(run.pk))


def _resume(run: Run, batch: Batch, actor: Any, *, unpauses: bool = True) -> None:
    state = batch.state.run
    if run.is_ended:
        raise RunStateError(
            _("Run %(run)s has ended (%(status)s); it cannot be resumed. Start a new run for a new task.")
            % {"run": run.pk, "status": run.get_status_display()}
        )
    if not batch.epoch:
        _refuse_live(run)
    # A run whose journal could not be read was paused without a row.
    held = state.paused or state.pause_requested or run.status == Run.Status.PAUSED
    batch.unpaused = unpauses and bool(held)
    payload = {"actor": events.actor_ref(actor), "epoch": batch.epoch, "reason": "asked to go on"}
    batch.add(events.RUN_RESUMED, {**payload, "unpause": batch.unpaused})
    for call in state.open_calls():
        if not call.is_open:
            continue
        if call.attempt > 0 and not call.orphan:
            in_doubt.orphan(batch, call, tell_model=True, actor=actor)
        elif call.orphan == "held":
            in_doubt.surface(batch, call, actor)


def _refuse_live(run: Run) -> None:
    if run.status != Run.Status.RUNNING or run.lease_expires_at is None:
        return
    raise SessionBusyError(
        _(
            "Run %(run)s is live in another process until %(time)s at least. Wait for it, or cancel it; if "
            "that process died, the run can be taken over then."
        )
        % {"run": run.pk, "time": readable(run.lease_expires_at)},
        str(run.pk),
        run.lease_expires_at,
    )


def _require_durable(store: Store | None) -> None:
    alias = getattr(store, "alias", settings.DATABASE)
    if alias != settings.DATABASE:
        raise NotDurableError(
            f"The store writes to database {alias!r}, but sessions and runs live in AGENTRUNS_DATABASE = "
            f"{settings.DATABASE!r}. Use that one, or leave the store out."
        )
    if store is not None and not store.durable:
        raise MemoryStoreNotDurableError(
            "A session was given together with a store that forgets everything when the process ends. "
            "Leave the store out to use the database, or leave the session out to run statelessly."
        )


def _run_stateless(agent: Agent, text: str, actor: Any) -> RunResult:
    if not text.strip():
        raise ValueError("The input is empty; say what the agent is to do.")
    asking = [tool.name for tool in agent.tools.values() if tool.requires_approval is True]
    if asking:
        raise NotDurableError(
            f"Agent {agent.name!r} has tools that always need approval ({', '.join(asking)}); in a "
            "stateless run nobody can be asked. Pass a session."
        )
    run_id = uuid7()
    state = SessionState(run_id, run_id)
    driver = Driver(agent, MemoryStore(), state)
    driver.commit(
        lambda batch: write_start(batch, RunRequest(agent=agent, text=text, session="", actor=actor))
    )
    drive(driver)
    return RunResult(
        status=driver.run.status,
        output=output.value_of(agent.output_type, driver.run.output),
        messages=driver.state.settled_messages(),
        usage=driver.run.usage,
        error=driver.run.error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The task that a caller asks for."""

    agent: Agent
    text: str
    session: str
    names_session: bool = True  # else its name was made up for a run that may be there already
    actor: Any = None
    key: str = ""
    again: Run | None = None  # the ended run that this repeats, in its session and for its owner
    session_id: UUID | None = None  # of a session that this may have to make
    stored: dict[str, Any] | None = None  # what the `user` row holds in place of a text that was put away

    def is_for(self, run: Run) -> bool:
        """Tell whether `run` has the same agent and input, and repeats the same run if this repeats one."""
        if self.again is not None and (run.origin_id, run.origin_seq) != (self.again.pk, None):
            return False
        return run.agent == self.agent.name and run.input == self.text


class Submission(NamedTuple):
    """The run of a request: created for it, leased if requested, or found.

    `state` is set for a run just created, so that nobody reads what was just written.
    """

    run: Run
    is_new: bool = False
    lease: Lease | None = None
    state: SessionState | None = None


def submit(request: RunRequest, *, leased: bool = False) -> Submission:
    """Create the run of a request, or find it if it was created before.

    Rows join the caller's transaction: if that rolls back, nothing happened.
    """
    if not request.session:
        raise NotDurableError(
            "A durable run needs a session: pass the caller's own key, such as 'ticket-42'."
        )
    if not request.text.strip():
        raise ValueError("The input is empty; say what the agent is to do.")
    for what, name in (("session", request.session), ("idempotency key", request.key)):
        check_name(what, name)
    if request.actor is not None:
        permissions.require_somebody(request.actor)
    alias = settings.DATABASE
    owner = uuid7().hex if leased and not leases.is_draining(alias) else ""
    request = _put_away(alias, request)

    def action() -> Submission:
        submission = _submit(alias, request, owner)
        if submission.run.status == Run.Status.QUEUED:
            notify_on_commit(alias, submission.run.pk)
        reached("before_start_commit")
        return submission

    submission = in_transaction(alias, action)
    reached("after_start")
    return submission


def _put_away(alias: str, request: RunRequest) -> RunRequest:
    """Store a long text in a file before any transaction; inside the caller's own it stays in its row.

    A text that was submitted before most likely belongs to an existing run.
    """
    if not payloads.may_be_large(request.text) or connections[alias].in_atomic_block:
        return request
    given = Run.objects.using(alias).filter(session__key=request.session, input=request.text)
    if request.again is None and given.exists():
        return request
    found = Session.objects.using(alias).filter(key=request.session).values_list("pk", flat=True).first()
    session_id = found or uuid7()
    stored = payloads.put(f"{session_id}/input", request.text)
    return replace(request, session_id=session_id, stored=stored or None)


def check_name(what: str, name: str) -> None:
    """Check the name of a session or a key; ValueError if some database would refuse or cut it.

    Raises TypeError if it is not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"The {what} must be a text, not {name!r}.")
    # Databases disagree about these: what one stores another refuses, or cuts.
    if len(name) > NAME_LENGTH or not name.isprintable():
        raise ValueError(
            f"The {what} must be at most {NAME_LENGTH} printable characters, not {len(name)}: {name[:50]!r}."
        )


def _submit(alias: str, request: RunRequest, owner: str) -> Submission:
    found = _by_key(alias, request, _owner_id(alias, request)) if request.key else None
    if found is not None:
        return _found(alias, found, owner)
    session, is_ours = _session(alias, request)
    if not is_ours:  # a row that this transaction inserted is locked, and nobody else has seen it
        lock_session(alias, session.pk)
        found = _by_key(alias, request, session.owner_id) or _unfinished(alias, session, request)
    if found is not None:
        _forget_if_empty(alias, session)
        return _found(alias, found, owner)
    run, lease = _new_run(alias, session, request, owner)
    # DO NOTHING, so that losing a race for the key leaves the caller's transaction usable.
    Run.objects.using(alias).bulk_create([run], ignore_conflicts=True)
    may_have_lost = not is_ours or request.key
    if may_have_lost and not Run.objects.using(alias).filter(pk=run.pk).exists():
        found = _by_key(alias, request, session.owner_id)
        if found is None:
            text = _("Session %(session)r was taken by another run; try again.")
            raise SessionBusyError(text % {"session": request.session})
        _forget_if_empty(alias, session)
        return _found(alias, found, owner)
    store = DatabaseStore(alias)
    state = SessionState(session.pk, run.pk) if is_ours else store.load(session.pk, run.pk)
    batch = Batch(state, lease.epoch if lease else 0)
    write_start(batch, request)
    store.append(batch)
    if lease is None:
        _catch_up(run, batch)
    return Submission(run, is_new=True, lease=lease, state=state)


def _catch_up(run: Run, batch: Batch) -> None:
    """Give a run just inserted the columns that its first rows have changed, without reading them back."""
    run.status, run.updated_at = Run.Status.QUEUED.value, batch.rows[-1].created_at
    run.session.next_seq, run.session.head = batch.state.next_seq, batch.state.head


def _found(alias: str, run: Run, owner: str) -> Submission:
    if not owner or run.lease_owner != owner:
        return Submission(run)
    # Made by this very call: the commit went through, only its acknowledgement was lost.
    return Submission(run, is_new=True, lease=_first_lease(alias, run))


def _first_lease(alias: str, run: Run) -> Lease:
    return Lease(alias, run.pk, run.session_id, epoch=1, deadline=uptime() + settings.LEASE_SECONDS)


def _forget_if_empty(alias: str, session: Session) -> None:
    """Delete a session made for a request whose run turned out to be in another session."""
    unused = Session.objects.using(alias).filter(pk=session.pk, next_seq=1)
    if not Run.objects.using(alias).filter(session_id=session.pk).exists():
        unused.delete()


def _owner_id(alias: str, request: RunRequest) -> Any:
    """Return the owner of the run: the actor, or for the program the session's owner."""
    if request.again is not None:
        return request.again.owner_id
    if request.actor is not None:
        return request.actor.pk
    return Session.objects.using(alias).filter(key=request.session).values_list("owner_id", flat=True).first()


def _by_key(alias: str, request: RunRequest, owner_id: Any) -> Run | None:
    """Return the run that an idempotency key stands for already."""
    if not request.key:
        return None
    runs = Run.objects.using(alias).select_related("session")
    run = runs.filter(owner_id=owner_id, idempotency_key=request.key).first()
    if run is None:
        # The program cannot look up the owner of a pruned session; others learn of their own only.
        refuse_pruned(alias, request.key, owner_id, request.session if request.actor is None else "")
        return None
    require_no_record(run.session)
    if not request.is_for(run):
        raise RunStateError(
            f"Idempotency key {request.key!r} belongs to run {run.pk} of agent {run.agent!r} with another "
            "input or origin. Use a new key for a new task."
        )
    if request.names_session and run.session.key != request.session:
        raise RunStateError(
            f"Idempotency key {request.key!r} belongs to run {run.pk} of session {run.session.key!r}, not of "
            f"{request.session!r}. Use a new key for a task in another session."
        )
    return run


def refuse_pruned(alias: str, key: str, owner_id: Any, session: str = "") -> None:
    """Raise RunStateError for the key of a pruned run: of this owner, or of this session."""
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


def _session(alias: str, request: RunRequest) -> tuple[Session, bool]:
    """Return the request's session, and whether it was created just now."""
    owner = request.actor
    name = owner.get_username() if owner is not None else ""
    made = Session(
        id=request.session_id or uuid7(),
        key=request.session,
        owner_id=owner.pk if owner is not None else None,
        owner_name=name,
    )
    sessions = Session.objects.using(alias)
    sessions.bulk_create([made], ignore_conflicts=True)
    session = sessions.get(key=request.session)
    if request.again is None and owner is not None and session.owner_id != owner.pk:
        raise SessionAccessDeniedError(f"There is no session {request.session!r}.")
    require_no_record(session)
    return session, session.pk == made.pk and request.session_id is None


def _unfinished(alias: str, session: Session, request: RunRequest) -> Run | None:
    """Return the session's unfinished run if the request is for it; raise SessionBusyError if not."""
    run = Run.objects.using(alias).unfinished().select_related("session").filter(session=session).first()
    if run is None:
        return None
    keys_differ = bool(request.key and run.idempotency_key and request.key != run.idempotency_key)
    if request.is_for(run) and not keys_differ:
        return run
    if request.is_for(run):
        why = _("another idempotency key")
    else:
        why = _("another agent or input") if request.again is None else _("another task")
    text = _(
        "Session %(session)r has the unfinished run %(run)s (%(status)s) with %(why)s. "
        "Wait for it, cancel it, or use another session."
    )
    names = {"session": session.key, "run": run.pk, "status": run.status, "why": why}
    raise SessionBusyError(text % names, str(run.pk), run.lease_expires_at)


def _new_run(alias: str, session: Session, request: RunRequest, owner: str) -> tuple[Run, Lease | None]:
    agent = request.agent
    store_definition(alias, agent)
    run = Run(
        session=session,
        owner_id=session.owner_id,
        owner_name=session.owner_name,
        agent=agent.name,
        version=agent.version,
        definition_id=agent.definition_hash,
        idempotency_key=request.key,
        input=request.text,
        origin_id=request.again.pk if request.again else None,
        **_leased_columns(owner),
    )
    return run, _first_lease(alias, run) if owner else None


def store_definition(alias: str, agent: Agent) -> None:
    """Store the definition of an agent, unless it is stored already."""
    definition = Definition(hash=agent.definition_hash, body=agent.definition())
    Definition.objects.using(alias).bulk_create([definition], ignore_conflicts=True)


def _leased_columns(owner: str) -> dict[str, Any]:
    """Return the columns of a new run that its creator drives at once."""
    if not owner:
        return {}
    return {
        "status": Run.Status.RUNNING,
        "lease_owner": owner,
        "lease_epoch": 1,
        "lease_expires_at": later(settings.LEASE_SECONDS),
    }


def write_start(batch: Batch, request: RunRequest) -> None:
    """Add the first two rows of a run."""
    begun = first_row(request.agent, request.actor, request.key, request.session)
    if request.again:
        begun["origin"] = {"run": str(request.again.pk)}
    batch.add(events.RUN_STARTED, begun)
    batch.add(events.USER, user_row(request.text, request.stored or {}))


def first_row(agent: Agent, actor: Any, key: str, session: str) -> events.RunStarted:
    """Return the payload of a run's first row; `key` is the idempotency key."""
    return {
        "agent": agent.name,
        "version": agent.version,
        "definition": agent.definition_hash,
        "actor": events.actor_ref(actor),
        "idempotency_key": key,
        "session": session,
    }


def user_row(text: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the payload of the `user` row; `stored` stands for a long text."""
    return {**stored, "content": [{"type": "text", "text": stored.get("content", text)}]}
