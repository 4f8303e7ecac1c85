"""The loop that takes a run from step to step, by its folded state, until it ends or waits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.db.models import F

from agentruns.agents import output, prices
from agentruns.agents.agent import Agent, unpriced
from agentruns.conf import settings
from agentruns.engine import budgets, children, gate, handler, in_doubt, rules, tool_calls, turns
from agentruns.engine.drafts import STOPPED, Reply, drafting
from agentruns.engine.driver import Driver
from agentruns.engine.leases import SERVICE, DrainCheck, Lease, keeper, take
from agentruns.exceptions import JournalRewoundError, JournalUnreadableError, LeaseLostError, PayloadError
from agentruns.journal import conversation, events, telemetry
from agentruns.journal.batch import Batch, SessionState, seen_committed
from agentruns.journal.connection import own_alias, own_connection, rest
from agentruns.journal.fold import RunState, text_of
from agentruns.journal.store import DatabaseStore, Store
from agentruns.models import Run, Session
from agentruns.models.run import FAILED_DRIVE, TURN
from agentruns.models.statuses import RunStatus
from agentruns.providers.base import (
    FULL_WINDOW,
    Model,
    ModelReply,
    ModelRequest,
    ProviderError,
    call_model,
    usage_of,
)
from agentruns.providers.blocks import open_turn
from agentruns.providers.names import model_identity, provider_of, resolve
from agentruns.tools.card import one_line
from agentruns.utils.db import cannot_pass, close_stale, in_transaction, reading, uptime
from agentruns.utils.failpoints import reached
from agentruns.utils.redaction import bound, get_logger

logger = get_logger("agentruns.engine")

MAX_PAUSE_TURNS = 10
LONGEST_WAIT = 3600.0
EXHAUSTED = "attempts_exhausted"  # reason of a pause, before the error that ended the last attempt
FAILING = {
    "refusal": "The model refused.",
    "content_filter": "The provider's content filter stopped the reply.",
}
SHORTER = "Long results, files and old reasoning are left out. {why}"
REFUSED = (
    ". The provider refuses this conversation.{where} Leave out the reply, file or result that "
    "it does not accept: on the run's page, by leave_out() or by the API. Then the run goes on."
)
CUT = ("max_tokens", FULL_WINDOW)
FINAL = ("end_turn", "stop_sequence", "tool_use", *CUT)
LOST = (
    "{rewound}: the database lost rows that a worker had seen committed, row {seq} the last of them (by a "
    "failover to a replica that was behind, or a restored backup). What the lost rows said happened.{calls} "
    "See docs/databases.md, 'Rows that vanish'."
)


def drive_run(
    run: Run,
    agent: Agent,
    lease: Lease,
    *,
    store: Store | None = None,
    state: SessionState | None = None,
    caller: Any = None,
    asked: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> SessionState | None:
    """Drive a run whose lease this process holds; return the state of its session at the end.

    `state` is the session's state if the caller has just written it. Returns None, with a log record, if the
    lease was lost or the run must wait for another worker or for staff. If the state cannot be loaded, gives
    the lease back and raises the error. See `drive` for the other arguments.
    """
    store = store or DatabaseStore(lease.alias)
    with bound(lease.run_id, lease.epoch), own_connection(lease.alias):
        try:
            if state is None:
                state = reading(own_alias(lease.alias), lambda: store.load(lease.session_id, lease.run_id))
        except BaseException as error:
            is_damaged = isinstance(error, JournalUnreadableError)
            with suppress(DatabaseError, InterfaceError):  # an unreachable database frees it by expiry
                if is_damaged and lease.attempts + 1 >= settings.MAX_ATTEMPTS:
                    lease.release(failed=True, why=f"{EXHAUSTED}: {error}", status=Run.Status.PAUSED)
                else:
                    _back_off(lease, lease.attempts, error)
            raise
        if state.is_rewound:
            hold_rewound(lease)
            return None
        if state.run.definition != agent.definition_hash:  # adopted just before the claim
            logger.info("Released run=%s: it goes on under definition %s", run.pk, state.run.definition)
            lease.release()
            return None
        stops = DrainCheck(lease.alias, should_stop, agent.name)
        driver = Driver(agent, store, state, lease=lease, session_key=run.session.key, should_stop=stops)
        if run.blocked_reason.startswith(FAILED_DRIVE):
            driver.last_error = run.blocked_reason.removeprefix(FAILED_DRIVE)
        try:
            drive(driver, caller=caller, asked=asked)
        except LeaseLostError as error:
            logger.warning("Lease lost run=%s epoch=%s: %s", run.pk, lease.epoch, error)
            return None
        return driver.state


def drive(driver: Driver, *, caller: Any = None, asked: bool = False) -> None:
    """Drive the run step by step until it ends, waits or is stopped.

    With `asked`, the user `caller` (None: the program itself) requested this drive. Then calls in doubt of
    tools without a declaration are surfaced to the model, not held for staff. After an exception, counts an
    attempt, releases the lease or pauses the run, and raises the exception. A LeaseLostError is only raised.
    If the journal was rewound, the run is held for staff.
    """
    lease = driver.lease
    with (
        bound(driver.run.run_id, lease.epoch if lease else 0),
        telemetry.span("drive", lambda: _facts(driver, driver.agent.model)) as attributes,
    ):
        try:
            with keeper.keeping(lease) if lease else nullcontext():
                if lease is not None:
                    _recover(driver, caller, asked)
                while not driver.released and not driver.run.ended:
                    _step(driver)
        except BaseException as error:
            if lease is not None and not driver.released:
                alias, is_known = own_alias(lease.alias), isinstance(error, JournalRewoundError)
                with suppress(DatabaseError, InterfaceError):  # an unreachable database frees it by expiry
                    close_stale(alias)
                    if is_known or driver.is_rewound():
                        hold_rewound(lease, driver.before)
                    elif not isinstance(error, LeaseLostError):
                        _pause_after(driver, error)
                        if not driver.released:
                            _back_off(lease, driver.attempts, error)
            driver.released = driver.released or isinstance(error, LeaseLostError)
            raise
        finally:
            attributes.update(status=driver.run.status, steps=driver.run.step)


def _back_off(lease: Lease, attempts: int, error: BaseException) -> None:
    """Give the lease of a failed drive back, with a delay that grows with `attempts`, and store the error.

    Without a delay if a person or the system stops the process.
    """
    if isinstance(error, Exception):
        why = FAILED_DRIVE + one_line(handler.described(error), 500)
        lease.release(failed=True, delay=backoff(attempts, None), why=why)
    else:
        lease.release(failed=True)


def _pause_after(driver: Driver, error: BaseException) -> None:
    """Pause the run if `error` ended its last permitted drive, or if the database can never store the change.

    Does nothing if a call has started, because recovery must classify that call first, or if the lease is
    lost.
    """
    last = driver.attempts + 1 >= settings.MAX_ATTEMPTS
    if not isinstance(error, Exception) or not (last or cannot_pass(error)):
        return

    def build(batch: Batch) -> None:
        reason = EXHAUSTED if last else "cannot be stored"
        tool_calls.pause(batch, f"{reason}: {one_line(handler.described(error), 500)}")
        batch.failed_drive = True

    with suppress(Exception):  # the lease is lost, or there is no way to store even that
        driver.reread([], patient=False, give_up=uptime())
        if not any(call.is_started and not call.is_pending for call in driver.run.open_calls()):
            driver.commit(build)


def _recover(driver: Driver, caller: Any, asked: bool) -> None:
    """Classify the calls that an earlier drive left open, or end the run if a cancel was requested.

    Adds a row that the run was resumed if its lease was taken over or a call was left open. `caller` is the
    actor in the rows. With `asked`, tells the model about the calls, whatever the agent's `on_orphan` says.
    """

    def build(batch: Batch) -> None:
        run, lease = batch.state.run, driver.lease
        begun = [call for call in run.open_calls() if call.attempt > 0 and not call.is_pending]
        left = [call for call in begun if not call.orphan]
        if asked:
            driver.caller = caller
            driver.asked_about = {(call.id, call.attempt) for call in begun}
        if lease is not None and (lease.took_over or left):
            reason = "lease expired" if lease.took_over else "the last drive failed"
            who = events.actor_ref(caller)
            batch.add(events.RUN_RESUMED, events.RunResumed(actor=who, epoch=lease.epoch, reason=reason))
        if run.cancel_requested:
            in_doubt.close_cancelled(batch, None, "cancel requested")
            return
        tell_model = asked or driver.agent.on_orphan == "surface"
        for call in left:
            if batch.state.run.calls[call.id].is_open:
                in_doubt.orphan(batch, call, tell_model=tell_model, actor=caller)

    driver.commit(build)
    reached("after_repair")


def _step(driver: Driver) -> None:
    """Drive the run one step: end it, pause it, release it, run its next calls, or request a reply."""
    for alias in {driver.alias, own_alias(driver.alias)}:
        close_stale(alias)
    run, ready = driver.run, driver.run.next_calls()
    # A stop between a journaled start and its handler would leave a call in doubt although it never ran.
    may_stop = not any((call.id, call.attempt) in driver.started for call in run.open_calls())
    if run.cancel_requested and may_stop:
        driver.commit(lambda batch: in_doubt.close_cancelled(batch, None, "cancel requested"))
    elif run.pause_requested and may_stop:
        driver.commit(lambda batch: tool_calls.pause(batch, "pause requested"))
    elif driver.attempts >= settings.MAX_ATTEMPTS:
        error = driver.last_error or run.failure
        reason = f"{EXHAUSTED}: {error}" if error else EXHAUSTED  # a process that dies leaves no error
        driver.commit(lambda batch: tool_calls.pause(batch, reason))
    elif not (ready or run.status == RunStatus.ACTIVE):
        # A service has added a row meanwhile, such as the result that a call waited for.
        seq, status = driver.state.next_seq, run.status
        driver.released = driver.lease is None or driver.lease.release(status=status, next_seq=seq)
        if not driver.released:
            driver.reread([], patient=False, give_up=uptime() + settings.LEASE_SECONDS)
    elif driver.should_stop() and may_stop:
        # Between two steps, so that the run costs no attempt.
        if driver.lease is not None:
            driver.lease.release()
        driver.released = True
    elif ready:
        tool_calls.execute(driver, ready)
    elif run.parent.get("deferred"):  # its only call has a result
        reached("before_finish")
        driver.commit(children.finish)
        reached("after_finish")
    elif budgets.is_used_up(driver):
        return
    elif not (lacking := unpriced(driver.agent, is_limited="cost_budget" in run.limits)):
        with drafting(driver) as draft:
            _ask(driver, draft)
    elif driver.store.durable:  # its cost budget could not be kept
        driver.commit(lambda batch: tool_calls.pause(batch, f"no_price: {lacking}"))
    else:
        driver.commit(lambda batch: in_doubt.close_failed(batch, "no_price", lacking))


def _ask(driver: Driver, draft: Reply | None) -> None:
    """Request the next reply and store it with the gate's verdicts; a reply without calls may end the run.

    Pauses the run instead if a stored file of the conversation cannot be read.
    """
    agent = driver.agent
    try:
        request = ModelRequest(
            model=model_identity(agent.model),
            system=driver.instructions,
            messages=driver.state.conversation.messages(None, agent.file_limits, driver.bounds),
            tools=list(driver.tool_schemas),
            params=dict(agent.model_params or {}),
            run_id=str(driver.run.run_id),
            step=driver.run.inherited + driver.run.step,
            output_schema=output.schema_of(agent.output_type) if agent.output_type else None,
            on_text=draft,
        )
        # The last row that this request sends: after a reply that the provider cut off, messages wait.
        read = (driver.state.conversation.held_back() or driver.state.next_seq) - 1
        sent = driver.state.conversation.fingerprint()
    except PayloadError as error:  # a request without the file's content would be another question
        reason = f"payload: {error}"
        driver.commit(lambda batch: tool_calls.pause(batch, reason))
        return
    if _waits(driver, agent.model):
        return
    reached("before_model")
    reply, identity = _reply(driver, request, draft)
    if reply is None:
        return
    reached("after_model")
    content, intents, left_out = gate.judge(driver, reply)
    answers = rules.choose(driver, intents)

    def build(batch: Batch) -> None:
        rules.place(answers)
        payload: events.Assistant = {
            "content": content, "calls": [intent.record() for intent in intents], "sent": sent, "read": read,
            "stop_reason": reply.stop_reason, "model": reply.model, "request_id": reply.request_id,
            "usage": reply.usage,
        }  # fmt: skip
        payload |= used(reply.usage, reply.model, identity)  # type: ignore[typeddict-item]
        if left_out:
            payload["left_out"] = left_out
        if identity != request.model:
            payload["fallback"] = identity
        if agent.unjournaled_readers:
            payload["untrusted"] = agent.unjournaled_readers
        batch.add(events.ASSISTANT, payload)
        gate.write(batch, intents)
        rules.write(batch, answers)
        if intents and reply.stop_reason in FINAL:
            tool_calls.start_next(driver, batch)
        elif not batch.state.run.cancel_requested:
            _finish(driver, batch, reply)
        if not batch.state.run.ended:
            budgets.warn(driver, batch)
        batch.charged, batch.cost = driver.charged, prices.stored(Decimal(payload.get("cost", "0")))

    ends = not intents and reply.stop_reason in FINAL
    if ends:
        reached("before_finish")
    driver.commit(build)
    reached("after_finish" if ends else "after_reply")


def _reply(driver: Driver, request: ModelRequest, draft: Reply | None) -> tuple[ModelReply | None, str]:
    """Request a reply, from the fallback if the first model is overloaded; return (reply, model's identity).

    The reply is None if no request succeeded. Journals each failure; raises other exceptions of a model.
    """
    overload: ProviderError | None = None
    for model in driver.agent.models:
        identity = model_identity(model)
        asked = request
        if model is not driver.agent.model and _waits(driver, model):
            return None, identity
        if model is not driver.agent.model:  # another provider has other parameters
            same = provider_of(model) == provider_of(driver.agent.model)
            params = {name: each for name, each in request.params.items() if same or name == "max_tokens"}
            asked = replace(request, model=identity, params=params)
        if (fitting := budgets.prepared(driver, asked, model)) is None:
            return None, identity
        try:
            rest(driver.alias)
            with telemetry.span("model", partial(_facts, driver, model)) as attributes:
                reply = call_model(resolve(model), fitting, partial(_require_wanted, driver, draft))
                facts = {"response_model": reply.model, "usage": reply.usage}
                attributes.update(stop_reason=reply.stop_reason, **facts)
            return reply, identity
        except ProviderError as error:
            other = driver.agent.fallback if model is driver.agent.model and error.is_overload else None
            is_stopped = draft is not None and draft.is_stopped
            if overload is not None and error.disposition != "retry" and not is_stopped:
                # The first model's overload would only delay the run: an error of the fallback does no more.
                error.disposition, error.retry_after = "retry", overload.retry_after
            # Rows that came during the request are in no state before the commit.
            driver.commit(partial(_provider_failed, driver, error, identity, other, driver.run.seq))
            if other is None or driver.run.cancel_requested or driver.run.pause_requested:
                return None, identity
            if driver.should_stop() or budgets.is_used_up(driver):
                return None, identity  # the next step stops the run
            overload = error
            if draft is not None:
                draft.pieces.clear()
        except Exception as error:
            driver.commit(partial(_model_raised, driver, error))
            raise
    raise AssertionError("A fallback has no fallback.")


def _waits(driver: Driver, model: Model | str) -> bool:
    """Count a request toward AGENTRUNS_RATE; if the rate is used up, give the lease back and return True.

    A stateless run neither counts nor waits, because it uses no database.
    """
    if driver.lease is None or not settings.RATE:
        return False
    seconds, why = turns.spend(own_alias(driver.alias), model)
    if why:
        driver.lease.release(delay=seconds, why=TURN + why)
        driver.released = True
    return bool(why)


def _require_wanted(driver: Driver, draft: Reply | None) -> None:
    """Raise ProviderError if nobody waits for the reply that is being requested."""
    lease = driver.lease
    is_over = lease is not None and (lease.lost.is_set() or lease.cancelled.is_set())
    if is_over or (draft is not None and draft.is_stopped):
        raise ProviderError(STOPPED, disposition="pause", type="reply_stopped")
    if driver.is_cancelled("", 0):
        raise ProviderError(
            f"No reply within {settings.TOOL_TIMEOUT:g} s.", disposition="retry", type="timeout"
        )


def used(usage: dict[str, Any], *models: str) -> dict[str, Any]:
    """Build the members `usage` and, if the model has a price, `cost`, because later prices may differ."""
    cost = prices.cost_of(usage, *models)
    return {"usage": usage} if cost is None else {"usage": usage, "cost": prices.amount(cost)}


def _facts(driver: Driver, model: Model | str) -> dict[str, Any]:
    """Build the attributes of a drive or of a request for a telemetry listener."""
    agent, run, lease = driver.agent, driver.run, driver.lease
    return {
        "run_id": str(run.run_id),
        "session_key": driver.session_key,
        "epoch": lease.epoch if lease else 0,
        "took_over": lease.took_over if lease else False,
        "agent": agent.name,
        "version": agent.version,
        "model": model_identity(model),
        "provider": provider_of(model),
        "step": run.step,
    }


def _finish(driver: Driver, batch: Batch, reply: ModelReply) -> None:
    """Complete or fail a run after a reply that leaves no call to run, unless the model must reply again."""
    stop = reply.stop_reason
    if stop == "pause_turn":  # the provider wants its own turn back, unchanged
        if batch.state.run.pauses >= MAX_PAUSE_TURNS:
            in_doubt.close_failed(batch, "pause_turn", f"{MAX_PAUSE_TURNS} replies paused in a row.")
    elif stop in FINAL and batch.state.unread:  # the next reply answers these
        return
    elif stop in FINAL:
        payload: events.RunCompleted = {"output": text_of(reply.content)}
        if not payload["output"].strip():  # then what the model wrote last since the user last spoke
            messages = batch.state.conversation.settled_messages()
            turn = (each for each in messages[open_turn(messages) :] if each["role"] == "assistant")
            if said := [text for each in turn if (text := text_of(each["content"]).strip())]:
                payload = {"output": said[-1], "earlier": True}
        output_type = driver.agent.output_type
        problem = output.problem_with(output_type, payload["output"]) if output_type else ""
        if problem and batch.state.run.corrections:
            text = f"The answer does not fit output_type, also when asked again:\n{problem}"
            in_doubt.close_failed(batch, "OutputInvalidError", text)
        elif problem:  # the model may correct its answer once
            text = output.CORRECTION.format(problem=problem)
            blocks = [{"type": "text", "text": text}]
            batch.add(events.USER, events.User(content=blocks, reason=events.OUTPUT_INVALID))
        else:
            if stop in CUT:
                payload["truncated"] = True
            batch.add(events.RUN_COMPLETED, payload)
    else:
        text = FAILING.get(str(stop), f"The model stopped with an unknown stop_reason {stop!r}.")
        in_doubt.close_failed(batch, str(stop), text)


def _provider_failed(
    driver: Driver,
    error: ProviderError,
    identity: str,
    fallback: Model | str | None,
    until: int,
    batch: Batch,
) -> None:
    """Add the rows for a failed request to the model, and back off, pause or fail as the error demands.

    If there is a `fallback`, which is requested at once, only journal the failure. If the provider refuses
    the conversation, the next request is a shorter one, once. `until` is the last row that was sent.
    """
    kind = error.type or "ProviderError"
    text = str(error).removeprefix(f"{kind}: ")  # some texts begin with the type
    said = events.Error(type=error.type or type(error).__name__, text=str(error))
    failed = events.ModelFailed(error=said, attempt=batch.state.run.failures + 1)
    failed |= {"code": error.code, "status": error.status, "request_id": error.request_id}
    if usage := usage_of(error):
        failed |= used(usage, identity)  # type: ignore[typeddict-item]
        batch.charged, batch.cost = driver.charged, prices.stored(Decimal(failed.get("cost", "0")))
    if fallback is not None:
        failed["fallback"] = model_identity(fallback)
    elif error.disposition == "retry" and driver.store.durable:
        failed["retry_in"] = batch.delay = _delay(driver, batch, error.retry_after)
    batch.add(events.MODEL_FAILED, failed)
    if fallback is not None or batch.delay is not None:
        return
    run, is_durable, reason = batch.state.run, driver.store.durable, f"{kind}: {text}"
    omission = events.LeftOut(actor=None, reason=SHORTER.format(why=reason), bound=conversation.BOUND)
    if is_durable and run.cancel_requested and (error.is_refusal or error.disposition == "pause"):
        return  # a cancelled run ends at the next step
    if error.is_refusal and batch.state.conversation.is_shorter_after(omission, str(run.run_id)):
        batch.add(events.LEFT_OUT, omission)  # the one automatic attempt: a second would change nothing
    elif error.is_refusal and run.acted and is_durable:
        seq = error.place and batch.state.conversation.row_at(*error.place)
        reason = reason.rstrip(".") + REFUSED.format(where=f" It names row {seq}." if seq else "")
        batch.add(events.RUN_PAUSED, events.RunPaused(reason=reason, refused=True))
    elif error.disposition == "pause" and is_durable:
        tool_calls.pause(batch, reason)
    else:
        if error.is_refusal:  # the session's next task goes on without this one
            own = events.LeftOut(actor=None, reason=reason, seq=run.first_seq, until=until)
            batch.add(events.LEFT_OUT, own)
        in_doubt.close_failed(batch, kind, text)


def _model_raised(driver: Driver, error: Exception, batch: Batch) -> None:
    """Journal an exception of the model object itself; the drive fails, which counts as an attempt."""
    batch.failed_drive, batch.delay = True, _delay(driver, batch, None)
    said = events.Error(type=type(error).__name__, text=handler.words(error))
    attempt, delay = batch.state.run.failures + 1, batch.delay
    batch.add(events.MODEL_FAILED, events.ModelFailed(error=said, attempt=attempt, retry_in=delay))


def _delay(driver: Driver, batch: Batch, retry_after: float | None) -> float:
    """Compute the back-off in seconds, up to the run's deadline; 0 if a pause or a cancel was requested."""
    if batch.state.run.cancel_requested or batch.state.run.pause_requested:
        return 0.0
    delay = backoff(batch.state.run.failures, retry_after)
    deadline = budgets.limits_of(driver.agent.definition(), batch.state.run)["deadline"]
    if deadline is None:
        return delay
    return max(0.0, min(delay, float(deadline) - batch.state.run.elapsed(driver.now()).total_seconds()))


def backoff(failures: int, retry_after: float | None) -> float:
    """Compute a back-off in seconds: exponential with jitter, but at least min(retry_after, LONGEST_WAIT)."""
    first, longest = settings.BACKOFF_SECONDS
    delay = min(longest, first * 2 ** min(failures, 30))
    jittered = random.uniform(delay / 2, delay)  # noqa: S311 - spreads load, hides nothing
    asked = retry_after if retry_after is not None and math.isfinite(retry_after) else 0.0
    return max(jittered, min(asked, LONGEST_WAIT))


def hold_rewound(lease: Lease, before: RunState | None = None) -> None:
    """Pause a run for staff because its journal lost rows, even if another process has the lease by now.

    If the run itself is lost, pauses the unfinished run of its session. Without such a run, only logs.
    `before` is the state that this process knew; the reason of the pause names the calls in `before` whose
    start is lost.
    """
    alias, known = own_alias(lease.alias), seen_committed.get(lease.session_id)
    started = [call for call in before.calls.values() if call.attempt] if before else []

    def action() -> bool:
        its = Session.objects.using(alias).filter(pk=lease.session_id)
        if not its.update(next_seq=F("next_seq")):  # locks it
            return False
        # The run itself may be gone, and an earlier run of its session may be unfinished again.
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
        batch.add(events.RUN_PAUSED, events.RunPaused(reason=reason, restored=True))
        store.append(batch)
        return True

    held = in_transaction(alias, action)
    seen_committed.pop(lease.session_id, None)
    became = "it is held for staff" if held else "it has ended, or is gone altogether"
    logger.critical("The journal was rewound run=%s session=%s: %s", lease.run_id, lease.session_id, became)
