"""Forks: a task continued from a row of its journal in a new session, or run again from the start."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, get_agent
from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.engine.rendering import renders
from agentruns.exceptions import JournalConflictError, RunStateError, SessionBusyError
from agentruns.journal import events, payloads
from agentruns.journal.batch import Batch
from agentruns.journal.copies import happened_at, original, task_of
from agentruns.journal.deciders import restore
from agentruns.journal.doubts import did_nothing
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, RunState, fold
from agentruns.journal.read import NAMING, definition_body, read_rows, rows_until
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run, Session
from agentruns.models.statuses import ApprovalStatus, Orphan, Outcome
from agentruns.services import permissions
from agentruns.services.runs import requests
from agentruns.services.runs.control import agent_again
from agentruns.services.runs.requests import RunRequest, new_session, rendered, request_again
from agentruns.services.runs.sessions import Owner, checked_context
from agentruns.services.runs.submit import begin_run, run_of_key, start_limit, submit
from agentruns.services.runs.write import find_run, lock_session, require_conversation, require_task
from agentruns.utils.bounds import NAME_LENGTH, check_name
from agentruns.utils.db import in_transaction
from agentruns.utils.ids import uuid7

NOT_EXECUTED = "Not executed in this fork."
CHUNK = 200  # rows of one INSERT: databases limit the values of a statement


def fork_run(
    run_id: UUID | str,
    at: int,
    *,
    text: str | None = None,
    agent: Agent | str | None = None,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    session: str | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a new run, in a new session, that continues from the row `at` of a run's journal.

    Copies the rows up to `at`. A call that is open at `at` gets its result if there is one by now; otherwise
    it ends as unknown if it may have happened, or as cancelled. The fork belongs to `owner`, or to the actor
    if `owner` is None, or to the origin's owner if the actor is the program. The fork has the origin's scope
    and context unless others are given. A repeated call with the same key returns the same fork. Raises
    RunStateError if there is no such row, if no `text` is given and the task was erased or nothing is left to
    do, or if the key belongs to another run; SessionBusyError if `session` exists; DurableRunNotFoundError,
    UnknownAgentError, PermissionDeniedError, QuotaExceededError, PayloadError.
    """
    permissions.require_somebody(actor)
    alias, origin = settings.DATABASE, permissions.require(actor, "fork", find_run(run_id))
    permissions.require_visible(actor, origin)  # the owner of a fork reads all of its history
    permissions.require_whole(actor, origin, at)
    if text is not None and not text.strip():
        raise ValueError(_("The text is empty; say what the agent is to do, or leave it out."))
    require_conversation(origin.session)
    rows, whose = rows_until(alias, origin, at), Owner.of(actor if owner is None else owner)
    new_id, has_context = uuid7(), context is not None
    suffix = f" (fork {new_id.hex[-8:]})"
    request = RunRequest(
        agent=get_agent(agent) if agent is not None else agent_again(origin),
        text=task_of(rows) if text is None else text,
        session=session or origin.session.key[: NAME_LENGTH - len(suffix)] + suffix,
        names_session=bool(session),
        scope=origin.scope if scope is None else scope,
        priority=origin.priority,
        actor=actor,
        owner=Owner.of_row(origin) if whose.id is None else whose,
        context=checked_context(context) if has_context else origin.context,
        key=idempotency_key or "",
        session_id=uuid7(),
        run_id=new_id,
    )
    names = {"session": request.session, "scope": request.scope, "idempotency key": request.key}
    for what, name in names.items():
        check_name(what, name)
    with permissions.discreet(actor):
        if renders(request.agent) and made_before(alias, request, origin, at) is None:
            # Instructions and tools that the same function of the agent made are reused, unless erased.
            made: dict[str, Any] = {}
            gone = any(row.is_erased and row.kind in NAMING and row.run_id == origin.pk for row in rows)
            if request.agent.name == origin.agent and not gone:
                mine, now = fold(origin.pk, rows), request.agent.definition()
                then = definition_body(alias, mine.definition)
                if mine.instructions is not None and now["instructions"] == then["instructions"]:
                    made["instructions"] = payloads.instructions_of(mine)
                if mine.tools is not None and now.get("tools_for") == then.get("tools_for"):
                    made["tools"] = mine.tools
            request = rendered(replace(request, rendered=made), origin=origin)
        request = requests.put_away(request, request.session_id or uuid7(), has_text=text is not None)
        given = {"has_text": text is not None, "has_context": has_context}
        run = in_transaction(alias, lambda: make_fork(alias, origin, rows, request, **given))
    run.is_new = run.pk == new_id
    return run


def run_again(
    run_id: UUID | str,
    actor: Any = None,
    *,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a new run of an ended run's task, in its session and for its owner, and return it.

    The model sees the earlier run. The new run has that run's context unless another is given. Raises
    RunStateError if the run has not ended or its task was erased, SessionBusyError, DurableRunNotFoundError,
    UnknownAgentError, PermissionDeniedError.
    """
    run = permissions.require(actor, "fork", find_run(run_id))
    if not run.is_ended:
        text = _("Run %(run)s is %(status)s: it goes on by itself. Cancel it first, or fork it.")
        raise RunStateError(text % {"run": run.pk, "status": run.get_status_display()})
    changes: dict[str, Any] = {} if context is None else {"context": checked_context(context)}
    asked = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, kind=events.USER).order_by("seq")
    changes["text"] = task_of(read_rows(asked))
    request = request_again(run, agent_again(run), actor, key=idempotency_key or "", again=run, **changes)
    return submit(request).run


class Effect(NamedTuple):
    """A call that happened or may have happened; `is_final` is True unless its tool is transactional."""

    call_id: str
    tool: str
    arguments: dict[str, Any]
    at: datetime
    is_final: bool


def effects(alias: str, run: Run, after: int = 0) -> list[Effect]:
    """List a run's effects after row `after` that a fork there may repeat, except of tools safe to retry."""
    rows = Message.objects.using(alias).filter(run_id=run.pk, seq__gt=after)
    kinds = (events.ASSISTANT, events.TOOL_STARTED, events.APPROVAL_VOIDED, events.TOOL_RESULT)
    rows = rows.filter(kind__in=kinds)
    asked: dict[str, dict[str, Any]] = {}
    elsewhere: list[Effect] = []  # of deferred calls, which their own runs make
    effects_of: dict[str, Effect] = {}
    for row in read_rows(rows.order_by("seq")):
        payload, call_id = row.payload, row.call_id
        if row.kind == events.ASSISTANT:
            asked |= {call["id"]: call["arguments"] for call in payload["calls"]}
        elif row.kind == events.TOOL_STARTED:
            if call_id in asked and payload["declares"] != "safe_to_retry":
                is_final, at = payload["declares"] != "transactional", happened_at(payload, row.created_at)
                effects_of[call_id] = Effect(call_id, row.tool_name, asked[call_id], at, is_final)
        elif "deferred" in payload:
            effects_of.pop(call_id, None)
            for child in Run.objects.using(alias).filter(pk=payload["deferred"]["run"]):
                elsewhere += effects(alias, child)
        elif "edited" in payload and call_id in effects_of:
            effects_of[call_id] = effects_of[call_id]._replace(arguments=payload["edited"])
        elif did_nothing(payload) or "renews" in payload:
            effects_of.pop(call_id, None)
    return [*effects_of.values(), *elsewhere]


class Fate(NamedTuple):
    """The end that a fork gives to a call open at the cut: a copied `result`, or only an `outcome`."""

    call: Call
    outcome: str
    result: Row | None = None
    open_in: UUID | None = None  # the run that may yet execute it


def fates(alias: str, run: Run, state: RunState, at: int) -> list[Fate]:
    """Decide how each call open at row `at` ends in a fork: with its result so far, unknown or cancelled."""
    calls, home = state.open_calls(), run
    if not calls:
        return []
    messages = Message.objects.using(alias)
    replies = messages.filter(run_id=run.pk, kind=events.ASSISTANT, seq__lte=at)
    seq = replies.aggregate(last=Max("seq"))["last"] or 0
    while home.origin_seq is not None and seq <= home.origin_seq:  # the last reply is only a copy there
        origin = Run.objects.using(alias).filter(pk__in=[home.origin_id]).first()
        if origin is None:  # pruned, and with it the outcome of the calls
            return [Fate(call, Outcome.UNKNOWN) for call in calls]
        home = origin
    results, now = {}, deepcopy(state)
    after = messages.filter(run_id=home.pk, seq__gt=at, call_id__in=[call.id for call in calls])
    for row in read_rows(after.order_by("seq")):
        now.apply(row)
        if row.kind == events.TOOL_RESULT:
            results[row.call_id] = row
    if was_held(alias, home):
        for call in now.open_calls():
            call.may_be_lost = True
    settled: list[Fate] = []
    for call in (now.calls[each.id] for each in calls):
        result = results.get(call.id)
        # The origin may have committed the effect of a transactional tool, or may yet.
        in_flight = call.declares == "transactional" and call.is_open and call.orphan != Orphan.NOT_OCCURRED
        if call.approval is not None:  # one that waits again was rolled back, and is asked about anew
            in_flight = in_flight and call.approval.status == ApprovalStatus.CONSUMED
        # In an import even calls that had not started when it was exported are unknown.
        if result is not None and (call.attempt or call.outcome == Outcome.UNKNOWN):
            settled.append(Fate(call, call.outcome, result))
        elif call.may_have_happened or in_flight:
            settled.append(Fate(call, Outcome.UNKNOWN))
        else:
            settled.append(Fate(call, Outcome.CANCELLED, open_in=home.pk if call.is_open else None))
    return settled


def was_held(alias: str, run: Run) -> bool:
    """Check whether a run was ever held because rows of its journal were lost or may be lost."""
    rows = Message.objects.using(alias).filter(run_id=run.pk, kind=events.RUN_PAUSED)
    return any(row.payload.get("restored") for row in rows)


def make_fork(
    alias: str, origin: Run, rows: list[Row], request: RunRequest, *, has_text: bool, has_context: bool
) -> Run:
    """Store a fork in the open transaction, or find it if it was made already; return its run.

    `rows` were read before the transaction. If `has_text` is False, the task is the last task in `rows`; if
    `has_context` is False, the context is the origin's. Raises RunStateError if the task was erased or there
    is nothing to do, SessionBusyError if the session exists or rows were just erased, QuotaExceededError.
    """
    at = rows[-1].seq
    if (run := made_before(alias, request, origin, at)) is not None:
        return run
    # Locked, because the files of a fork would be deleted if its origin were pruned meanwhile.
    lock_session(alias, origin.session_id)
    origin = restore(find_run(origin.pk))
    # Content that was erased since the rows were read must not be written again.
    erased = Message.objects.using(alias).filter(session_id=origin.session_id, content__isnull=True)
    if erased.filter(seq__lte=at).count() != sum(row.is_erased for row in rows):
        if request.rendered or (has_context and request.context):  # may repeat it
            text = _("Rows of run %(run)s were erased just now; try again.")
            raise SessionBusyError(text % {"run": origin.pk})
        rows = rows_until(alias, origin, at)
    if not has_context:
        request = replace(request, context=origin.context)
    if not has_text:
        require_task(origin, rows)
    pages = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    past = RunState(origin.pk)  # folds the rows of all runs; only its calls are meaningful

    def write(batch: Batch, page: list[Row]) -> None:
        for row in page:
            past.apply(original(row))
            copy(batch, row)
        if page is pages[-1]:
            write_end(batch, origin, rows, past, request, has_text)

    limit = start_limit(request.actor, request.agent)
    try:
        with transaction.atomic(using=alias):  # losing a race leaves the caller's transaction usable
            submission = begin_run(
                alias, new_session(request), request,
                limit=limit, write=lambda batch, request: write(batch, pages[0]),
                origin_id=origin.pk, origin_seq=at,
            )  # fmt: skip
    except (IntegrityError, JournalConflictError) as error:
        if (run := made_before(alias, request, origin, at)) is not None:
            return run
        text = f"Idempotency key {request.key!r} was taken by another run; try again."
        sessions = Session.objects.using(alias).filter(scope=request.scope, key=request.session)
        if not request.key or sessions.exists():
            text = f"There is a session {request.session!r} already; a fork needs a new one."
        raise SessionBusyError(text) from error
    for page in pages[1:]:
        batch = Batch(submission.state)  # type: ignore[arg-type] # which a new run has
        write(batch, page)
        DatabaseStore(alias).append(batch)
    return find_run(request.run_id)


def made_before(alias: str, request: RunRequest, origin: Run, at: int) -> Run | None:
    """Find the fork that this call or a call with its key made; RunStateError if the key is another run's."""
    runs = Run.objects.using(alias).select_related("session")
    if (run := runs.filter(pk=request.run_id).first() or run_of_key(alias, request)) is None:
        return None
    if (run.origin_id, run.origin_seq) != (origin.pk, at):
        what = f"which is not a fork of run {origin.pk} at row {at}"
    elif (run.agent, run.input, run.context) != (request.agent.name, request.text, request.context):
        what = "a fork at that row with another agent, text or context"
    elif request.names_session and request.session != run.session.key:
        what = f"a fork in session {run.session.key!r}, not in {request.session!r}"
    else:
        return run
    text = f"Idempotency key {request.key!r} belongs to run {run.pk}, {what}. Use a new key."
    raise RunStateError(text, str(run.pk))


def write_end(
    batch: Batch, origin: Run, rows: list[Row], past: RunState, request: RunRequest, has_text: bool
) -> None:
    """Add the results of the calls that were open at the cut, and the fork's own first rows.

    Raises RunStateError if nothing is left to do and `has_text` is false.
    """
    alias, at = settings.DATABASE, rows[-1].seq
    read: list[str] = []  # whose results come without their starts
    for call, outcome, result, open_in in fates(alias, origin, past, at):
        if result is not None:
            copy(batch, result)
            read += [call.tool] if call.untrusted else []
            continue
        content = in_doubt.unknown_text(call) if outcome == Outcome.UNKNOWN else NOT_EXECUTED
        fate: events.ToolResult = {"content": content, "is_error": True, "outcome": outcome}
        if open_in is not None:
            fate["open_in"] = str(open_in)
        fate["copied"] = {"run": str(origin.pk), "seq": at}
        batch.add(events.TOOL_RESULT, fate, call_id=call.id, tool_name=call.tool, attempt=call.attempt)
    settled = batch.state.conversation.settled_messages()
    asks = past.stop_reason == "pause_turn" or (bool(settled) and settled[-1]["role"] == "user")
    if not asks and not has_text:
        text = _("Run %(run)s has nothing left to do at row %(seq)s: say in a text what to do.")
        raise RunStateError(text % {"run": origin.pk, "seq": at})
    mine, begun = fold(origin.pk, rows), requests.first_row(request, origin)
    steps = mine.inherited + mine.step
    begun["origin"] = {"run": str(origin.pk), "seq": at, "hash": rows[-1].hash, "steps": steps}
    if mine.restored_at or was_held(alias, origin):
        begun["origin"]["restored"] = True
    if new := [name for name in dict.fromkeys(read) if name not in batch.state.read]:
        begun["origin"]["untrusted"] = new
    batch.add(events.RUN_STARTED, begun)
    if has_text:
        batch.add(events.USER, requests.user_row(request))


def copy(batch: Batch, row: Row) -> None:
    """Add a copy of a row to the batch, with the run, number, hash and time of the original."""
    before = row.payload.get(events.COPIED) or {}
    at = before.get("at") or events.timestamp(row.created_at)
    batch.copy(row, {"run": str(row.run_id), "seq": row.seq, "hash": row.hash, "at": at})
