"""Tool calls, which only this module runs: checks, starts, calls of handlers, and results."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any

from agentruns.engine import children, gate, handler, holds, in_doubt, waits
from agentruns.engine.driver import Driver
from agentruns.engine.handler import Interrupted, Observation, store_late_result
from agentruns.engine.wakeup import notify_on_commit
from agentruns.exceptions import LeaseLostError
from agentruns.journal import events, outbox, telemetry
from agentruns.journal.batch import Batch
from agentruns.journal.connection import replace_broken, rest
from agentruns.journal.deciders import assign, lapsed, restore, void, withdrawn
from agentruns.journal.fold import Call
from agentruns.journal.store import card_columns
from agentruns.models import Approval
from agentruns.models.statuses import ApprovalStatus, GateVerdict, Orphan, Outcome, Verdict
from agentruns.tools import NotOccurred, Occurred, Pending
from agentruns.tools.context import NotEntered
from agentruns.tools.refusals import NOTHING_HAPPENED
from agentruns.utils.db import uptime
from agentruns.utils.failpoints import reached

CHANGED = "{tool} has changed since this was approved: {why}. Edit the arguments, or deny the call."
STRICTER = "The gate of {tool} has changed since this was approved: {why}."
REFUSED = "Not executed: {why}. Nothing happened."
MAY_BE_LOST = "It may have been started in rows that the database has lost (the run was held after that)."
RETURNED_LATE = "Said not to have happened, but its handler has returned without an error."
TIMED_OUT = "The handler did not return within {seconds} s."
# After the commit of these rows the project's own code runs, and may take long or die.
ANNOUNCED = {*outbox.EVENTS, *telemetry.EVENT_ATTRIBUTES}
CONFLICTS = 5  # times that a transactional call enters again after a conflict with another transaction
PARALLEL = 8  # threads for the parallel calls of one reply; further calls wait for their turn


def execute(driver: Driver, ready: list[Call]) -> None:
    """Run the first `ready` call with its parallel group, or refuse, settle, reconcile or doubt the call.

    Releases the lease for a while if an earlier attempt of the call may still run.
    """
    call = ready[0]
    if call.decision:
        driver.commit(lambda batch: in_doubt.decided(batch, batch.state.run.calls[call.id]))
    elif call.is_contradicted:
        _doubt(driver, call, RETURNED_LATE, recovery_failed=True)
    elif declared := _doubted_since(driver, call):
        _doubt(driver, call, MAY_BE_LOST, declared=declared, untrusted=_distrusts(driver, call))
    elif driver.run.is_after_unknown(call):
        driver.commit(lambda batch: in_doubt.cancel(batch, batch.state.run.calls[call.id]))
    elif (refusal := _refusal(driver, call)) and call.is_started:
        # The call may have happened, so a refusal must not become its result.
        _doubt(driver, call, f"It cannot go on here: {refusal}.", recovery_failed=True)
    elif refusal:
        unfit = gate.misfit(driver.agent, call.tool, call.arguments)

        def refuse(batch: Batch) -> None:
            again = batch.state.run.calls[call.id]
            if unfit and again.approval is not None and again.approval.status == ApprovalStatus.APPROVED:
                why = CHANGED.format(tool=call.tool, why=unfit)  # no approval is lost without a person
                holds.ask_again(driver, batch, again, again.approval, why)
            elif again.is_open:
                batch.result(again, REFUSED.format(why=refusal), Outcome.ERROR, is_error=True)
                start_next(driver, batch)

        driver.commit(refuse)
    elif call.orphan in (Orphan.RECONCILE, Orphan.NOT_OCCURRED) and (left := _seconds_left(driver, call)):
        # Reconciling or retrying the call while its previous attempt runs could double the effect.
        if driver.lease is None or left == math.inf:
            _doubt(driver, call, "The handler is still at work in this process.", recovery_failed=True)
        else:
            driver.lease.release(delay=left)
            driver.released = True
    elif call.orphan == Orphan.RECONCILE:
        _reconcile(driver, call)
    elif why := gate.stricter(driver, call):
        # Before the transaction, as it calls users' code.
        tool = driver.agent.tools[call.tool]
        asked = None if call.approval else gate.request(driver, tool, call, why)
        now = holds.held(driver, tool, call.id, call.arguments) if call.approval else None

        def ask(batch: Batch) -> None:
            again = batch.state.run.calls[call.id]
            if again.is_open and asked is not None and again.approval is None:
                batch.add(events.APPROVAL_REQUESTED, asked, call=again)
            elif again.approval is not None and again.approval.status == ApprovalStatus.APPROVED:
                text = STRICTER.format(tool=call.tool, why=why)
                holds.ask_again(driver, batch, again, again.approval, text, now)

        driver.commit(ask)
    elif call.child:  # child runs of one reply go on side by side, but not past other calls
        own = [*takewhile(lambda each: each.child and _may_run(driver, each), ready)]
        _run(driver, own if own and all(each.deferred is None for each in own) else [call])
    else:
        beside = [each for each in ready if each.parallel and _may_run(driver, each)] if call.parallel else []
        _run(driver, beside or [call])


def _seconds_left(driver: Driver, call: Call) -> float:
    """Compute the seconds that a call's previous attempt may still run; inf if it runs in this process."""
    abandoned = driver.abandoned.get((call.id, call.attempt))
    if abandoned is not None and not abandoned.done():
        return math.inf
    timeout, started_at = call.timeout, call.started_at
    if call.may_be_lost and not call.attempt and call.tool in driver.agent.tools:
        timeout, started_at = driver.agent.tools[call.tool].timeout, driver.run.restored_at
    if timeout is None or started_at is None or driver.lease is None:
        return 0.0  # without a lease no other process ever had the run
    return max(0.0, (started_at + timedelta(seconds=timeout) - driver.now()).total_seconds())


def _run(driver: Driver, group: list[Call]) -> None:
    """Start and run the calls of a group; void lapsed approvals instead, or pause if a tool is not ready."""
    # An approval counts while its givers may give it, by users' code: not in the transaction of the start.
    lost: dict[str, dict[str, str]] = {}
    for call in group:
        given = call.approval.given if call.approval else []
        if call.approval is None or call.approval.status != ApprovalStatus.APPROVED or not any(given):
            continue
        approvals = Approval.objects.using(driver.alias).select_related("run__session")
        approval = approvals.get(pk=call.approval.id)
        assign(approval, card_columns(call, call.approval))
        restore(approval.run, driver.run)
        if reasons := lapsed(approval, given, call.arguments, call.approval.by):
            lost[call.id] = reasons
        driver.mend()

    def withdraw(batch: Batch, lost: dict[str, dict[str, str]]) -> None:
        for call_id, reasons in lost.items():
            void(batch, batch.state.run.calls[call_id], reasons)

    if lost:
        driver.commit(partial(withdraw, lost=lost))
        return
    # The `ready` function of each tool is called once in a drive; its objection makes the run wait.
    for call in group if driver.store.durable and group[0].deferred is None else ():
        ready = driver.agent.tools[call.tool].ready
        if ready is None or ready in driver.ready:
            continue
        try:
            objection = ready(driver.context(call.id, call.tool, call))
        finally:
            driver.mend()
        if objection:
            driver.commit(partial(pause, reason=objection))
            return
        driver.ready.add(ready)

    plans: dict[str, children.Plan] = {}
    for call in group if group[0].child else ():
        plan = children.plan(driver, call, len(plans))
        if isinstance(plan, str):
            _record(driver, call, Observation(REFUSED.format(why=plan), is_error=True))
            return
        plans[call.id] = plan

    def start(batch: Batch) -> None:
        run = batch.state.run
        if run.cancel_requested or run.pause_requested:
            return
        withdraw(batch, {call.id: withdrawn(driver.alias, run.calls[call.id].approval) for call in group})
        if batch.rows:
            return
        for call in group:
            again = run.calls[call.id]
            if again.is_open and not again.is_contradicted:  # an event may have settled it meanwhile
                _write_start(driver, batch, run.calls[call.id])
                if call.id in plans:
                    children.add(batch, plans[call.id], driver.agent.definition())

    if plans:
        reached("before_children")
    # Journal that the handlers are about to be entered, unless an earlier batch did.
    if not all((call.id, call.attempt) in driver.started for call in group):
        if not holds.still(driver, group):  # last, as it may change at any time
            return
        driver.commit(start)
    if plans:
        reached("after_children")
        driver.started -= {(call.id, call.attempt + 1) for call in group}  # no handler is entered
        for plan in plans.values():
            notify_on_commit(driver.alias, plan.run_id)
    if plans or driver.released or driver.run.ended:
        return
    calls = driver.run.calls
    if not all(call.id in calls and (call.id, calls[call.id].attempt) in driver.started for call in group):
        return  # a cancel or a pause came before the start was stored, or another worker went on
    if len(group) > 1:
        _run_parallel(driver, [calls[call.id] for call in group])
    else:
        _run_one(driver, calls[group[0].id])


def _doubted_since(driver: Driver, call: Call) -> str:
    """Find the declaration of a call's tool if the call is in doubt because its start may be lost; else "".

    A call of a tool with `reconcile` is in doubt. A call of a tool without a declaration is in doubt until
    enough people have approved the call after the loss.
    """
    if not call.may_be_lost or call.attempt or call.orphan or call.verdict == GateVerdict.REFUSE:
        return ""
    tool = driver.agent.tools.get(call.tool)
    declared = tool.recovery if tool else "nothing"
    wanted = call.approval.required if call.approval else 1
    is_due = declared == "reconcile" or (declared == "nothing" and call.asked_since < wanted)
    return declared if is_due else ""


def start_next(driver: Driver, batch: Batch) -> None:
    """Add the `tool_started` row of the next call to this batch, to save a commit.

    Only for the first attempt of a call that is not parallel and needs no approval. The tool's `ready`, if
    any, must have passed in this drive: an objection must not undo the result in this batch. Adds nothing
    after an announced row, because no call may count as started while notifiers run. Adds nothing while
    another call runs, or if the run is to pause, to be cancelled or to stop.
    """
    run = batch.state.run
    if run.cancel_requested or run.pause_requested or driver.should_stop():
        return
    if any(row.kind in ANNOUNCED for row in batch.rows):
        return
    if any(call.is_started for call in run.open_calls()):
        return  # the rest of a parallel group still runs, and much may happen before it ends
    call = next(iter(run.next_calls()), None)
    if call is None or call.parallel or call.child or call.verdict != GateVerdict.RUN or call.attempt:
        return
    if _may_run(driver, call) and driver.agent.tools[call.tool].ready in {None, *driver.ready}:
        _write_start(driver, batch, call)


def _may_run(driver: Driver, call: Call) -> bool:
    is_free = not call.decision and call.orphan != Orphan.RECONCILE and not _doubted_since(driver, call)
    is_judged = call.attempt > 0 or not call.adopted
    return is_free and is_judged and not driver.run.is_after_unknown(call) and not _refusal(driver, call)


def _refusal(driver: Driver, call: Call) -> str:
    """Check a call again before it runs, and explain why it may not run; "" if it may."""
    entered = (call.id, call.attempt) in driver.started  # started just now by this driver, after all checks
    if not entered:
        if call.tool in driver.agent.tools and gate.is_off(driver, call.tool):
            return gate.OFF
        if unfit := gate.misfit(driver.agent, call.tool, call.arguments):
            return unfit
        if gate.call_digest(driver.state.secret, call.tool, call.arguments) != call.digest:
            return "the arguments are not the ones that were recorded"
    if call.verdict == GateVerdict.REFUSE or (call.verdict == GateVerdict.ASK and call.approval is None):
        return "the gate did not let it through"
    if call.approval is not None:
        lets_run = (ApprovalStatus.APPROVED, ApprovalStatus.CONSUMED)
        if call.approval.digest != call.digest or call.approval.status not in lets_run:
            return f"its approval is {call.approval.status}"
        if call.approval.status == ApprovalStatus.CONSUMED and call.attempt == 0:
            return "its approval was used already"
    tool = driver.agent.tools[call.tool]
    if call.verdict == GateVerdict.RUN and not call.attempt and (since := gate.run_since(driver, tool)):
        return f"{since} Ask for it again, and a person decides"
    if call.is_started and not entered and call.orphan not in (Orphan.RETRY, Orphan.RECONCILE):
        return "it was started before and nobody knows what became of it"
    return ""


def pause(batch: Batch, reason: str) -> None:
    """Add the row that pauses the run until a person continues it."""
    batch.add(events.RUN_PAUSED, events.RunPaused(reason=reason))


def _distrusts(driver: Driver, call: Call) -> bool:
    """Check whether a call reads text that its agent does not trust; a deferred call reads in its own run."""
    tool = driver.agent.tools.get(call.tool)
    is_read_here = tool is not None and tool.untrusted and call.deferred is None
    return is_read_here and call.tool not in driver.agent.trusts


def _write_start(driver: Driver, batch: Batch, call: Call) -> None:
    approval, tool = call.approval, driver.agent.tools[call.tool]
    payload: events.ToolStarted = {
        "key": call.idempotency_key(batch.state.run.task),
        "digest": call.digest,
        "declares": tool.recovery,
        "timeout": tool.timeout,
    }
    if tool.awaits and call.deferred is None:
        payload["awaits"] = tool.awaits
    if _distrusts(driver, call):
        payload["untrusted"] = True
    if approval is not None:
        payload |= {"approval": str(approval.id), "approved_by": approval.names}
    is_approved = approval is not None and approval.status == ApprovalStatus.APPROVED
    consumes = (approval.renewed or approval.id) if approval is not None and is_approved else None
    batch.add(events.TOOL_STARTED, payload, call=call, attempt=call.attempt + 1, consumes=consumes)


def _run_one(driver: Driver, call: Call) -> None:
    tool, context = driver.agent.tools[call.tool], driver.context(call.id, call.tool, call)
    observation: Observation | None
    conflicts = 0
    reached("before_tool")
    while True:
        try:
            driver.hold_lease()
        except Exception:
            store_late_result(driver, [call], {"never_entered": True})
            raise
        driver.started.discard((call.id, call.attempt))
        if gate.is_off(driver, call.tool):
            _refuse_off(driver, call)
            return
        replace_broken(driver.alias)
        driver.allow(tool)
        rest(driver.alias)  # the handler may wait for another run of this process
        try:
            if tool.transactional:
                record = partial(_record, driver, call, joined=True)
                observation = handler.run_transactional(driver, tool, context, call, record)
                if observation is not None and observation.may_pass and conflicts < CONFLICTS:
                    conflicts += 1  # all is rolled back: the same attempt enters again
                    time.sleep(random.uniform(0, 0.05 * 2**conflicts))  # noqa: S311 - spreads load
                    continue
                if observation is not None and observation.held is not None:
                    holds.ask_anew(driver, {call.id: observation.held})
                    return
            elif tool.timeout is None:
                try:
                    observation = handler.enter(tool, context, call.arguments)
                finally:
                    driver.mend()
            else:
                enter = partial(handler.enter, tool, context, call.arguments)
                future = handler.in_thread(driver.alias, tool.name, enter)
                try:
                    wait([future], timeout=tool.timeout)
                except (Exception, KeyboardInterrupt):  # also a worker's time limit: it goes on without us
                    _abandon(driver, call, future)
                    raise
                if not future.done():
                    _abandon(driver, call, future)
                    raise Interrupted(TIMED_OUT.format(seconds=tool.timeout))
                observation = future.result()
            break
        except NotEntered:  # the lease ran out before the handler was entered: extend it, or find it lost
            continue
        except Interrupted as interruption:
            # A transactional handler whose outcome is unknown has ended its transaction by itself.
            _doubt(driver, call, str(interruption), recovery_failed=tool.transactional)
            return
    if observation is None:  # the result was committed together with what the handler wrote
        reached("after_result")
        return
    reached("after_tool")
    _record(driver, call, observation, asks=observation.in_doubt and tool.recovery == "reconcile")


def _refuse_off(driver: Driver, call: Call) -> None:
    """Refuse the first attempt of a call whose tool was switched off; put a later attempt in doubt."""
    if call.attempt > 1:  # the outcome of the attempt before is unknown
        _doubt(driver, call, f"It cannot go on here: {gate.OFF}.", recovery_failed=True)
    else:
        _record(driver, call, Observation(REFUSED.format(why=gate.OFF), is_error=True))


def _record(
    driver: Driver, call: Call, observation: Observation, *, joined: bool = False, asks: bool = False
) -> None:
    """Store the result of a call; if this fails, store a `late_result` and raise the error.

    With `asks`, stores the handler's error as a doubt, because the handler may have acted; `reconcile` is
    called next. With `joined`, stores the result in the open transaction of the handler, and never a
    `late_result`.
    """
    offload = driver.offload(call)
    if not driver.store.durable:  # a stateless run has no doubts: it only tells the model of the error
        observation.in_doubt = False

    def build(batch: Batch) -> None:
        again = batch.state.run.calls[call.id]
        if not again.is_open:  # its event was delivered while the handler was at work
            if observation.pending is None:
                late: events.LateResult = {**observation.facts(), "worker_epoch": batch.epoch}  # type: ignore
                batch.add(events.LATE_RESULT, late, call=again, attempt=call.attempt, offload=offload)
        elif observation.pending is not None:
            waits.begin(driver, batch, again, observation.pending)
        elif asks:
            in_doubt.raised(batch, again, str(observation.content))
            return
        else:
            duration = round(observation.seconds * 1000, 3)
            add_result(batch, again, observation, duration_ms=duration, offload=offload)
            if joined:  # a start must be committed where no handler can take it back
                return
        start_next(driver, batch)

    if joined:  # the caller's transaction has the effect too: a lost lease rolls both back
        driver.commit(build, joined=True)
        return
    reached("before_result_commit")
    try:
        driver.commit(build)
    except Exception:  # the lease is lost, or the database refuses for good: keep what is known
        store_late_result(driver, [call], observation.facts(), offload)
        raise
    reached("after_result")


def add_result(batch: Batch, call: Call, observation: Observation, **more: Any) -> None:
    """Add the result of a call as observed, with further options of `Batch.result`."""
    more |= {**observation.flags, "in_doubt": True} if observation.in_doubt else observation.flags
    is_error = observation.is_error
    outcome = Outcome.ERROR if is_error else Outcome.OK
    batch.result(call, observation.content, outcome, is_error=is_error, **more)
    if observation.in_doubt:
        # Cancel the reply's other calls to the tool, which were let through before the doubt arose.
        in_doubt.stop(batch, [each for each in batch.state.run.calls.values() if each.tool == call.tool])


def _abandon(driver: Driver, call: Call, future: Future[Observation]) -> None:
    """Mark a call as given up, and store a `late_result` once the handler's future is done.

    The row has the outcome of the handler, or says that the handler was never entered.
    """
    driver.abandoned[call.id, call.attempt] = future

    def late(done: Future[Observation]) -> None:
        if isinstance(error := done.exception(), NotEntered):
            store_late_result(driver, [call], {"never_entered": True})
        elif error is None:
            store_late_result(driver, [call], done.result().facts())

    future.add_done_callback(late)


def _run_parallel(driver: Driver, group: list[Call]) -> None:
    """Run parallel calls in threads, and store each result from this thread as it arrives."""
    queue = deque(group)
    running: dict[Future[Observation], tuple[Call, float | None]] = {}  # with the time when it is too late
    try:
        while queue or running:
            while queue and len(running) < PARALLEL:
                driver.hold_lease()
                call = queue.popleft()
                driver.started.discard((call.id, call.attempt))
                if gate.is_off(driver, call.tool):
                    _refuse_off(driver, call)
                    continue
                tool = driver.agent.tools[call.tool]
                driver.allow(tool)
                enter = partial(handler.enter, tool, driver.context(call.id, call.tool, call), call.arguments)
                future = handler.in_thread(driver.alias, tool.name, enter)
                running[future] = (call, uptime() + tool.timeout if tool.timeout else None)
            ends = [end for _, end in running.values() if end is not None]
            left = max(0.0, min(ends) - uptime()) if ends else None
            rest(driver.alias)
            wait(running, timeout=left, return_when=FIRST_COMPLETED)
            for future, (call, end) in list(running.items()):
                if future.done():
                    del running[future]
                    try:
                        _record(driver, call, future.result())
                    except NotEntered:  # as in `_run_one`
                        queue.appendleft(call)
                    except Interrupted as interruption:
                        _doubt(driver, call, str(interruption))
                elif end is not None and uptime() >= end:
                    del running[future]
                    _abandon(driver, call, future)
                    _doubt(driver, call, TIMED_OUT.format(seconds=driver.agent.tools[call.tool].timeout))
    except (Exception, KeyboardInterrupt) as error:  # the other handlers go on without this drive
        for future, (call, _) in running.items():
            _abandon(driver, call, future)
        if isinstance(error, LeaseLostError):
            store_late_result(driver, list(queue), {"never_entered": True})
        raise


def _doubt(driver: Driver, call: Call, evidence: str, **more: Any) -> None:
    """Journal during a drive that a call is in doubt, as `_recover` does after a crash.

    `more` are further options of `in_doubt.orphan`.
    """
    asked = (call.id, call.attempt) in driver.asked_about
    tell_model = asked or driver.agent.on_orphan == "surface" or not driver.store.durable
    actor = driver.caller if asked else None
    driver.started.discard((call.id, call.attempt))

    def build(batch: Batch) -> None:
        again = batch.state.run.calls[call.id]
        if not again.is_open:  # its event was delivered meanwhile
            return
        in_doubt.orphan(batch, again, tell_model=tell_model, actor=actor, evidence=evidence, **more)
        batch.failed_drive = again.orphan in (Orphan.RETRY, Orphan.RECONCILE)

    driver.commit(build)


def _reconcile(driver: Driver, call: Call) -> None:
    """Call the tool's `reconcile` to learn whether the call happened, and store the verdict or the doubt.

    An open call that did not happen runs again, unless its handler had raised an error.
    """
    tool = driver.agent.tools[call.tool]
    driver.abandoned.pop((call.id, call.attempt), None)  # else `covers` would refuse
    while True:
        driver.hold_lease()
        with suppress(NotEntered):  # as in `_run_one`
            context = driver.context(call.id, call.tool, call)
            rest(driver.alias)  # other runs of this process go on meanwhile
            verdict = handler.reconcile(driver.alias, tool, context, call.arguments)
            break
    actor, offload = events.Actor(id="", name="reconcile"), driver.offload(call)
    if not isinstance(verdict, Occurred | NotOccurred | Pending):
        before = in_doubt.RAISED.format(attempt=call.attempt, error=call.raised[: in_doubt.SHOWN])
        evidence = f"reconcile does not know: {verdict.reason}"
        evidence = f"{before}\n{evidence}" if call.raised else evidence
        _doubt(driver, call, evidence, recovery_failed=True)
        return

    def build(batch: Batch) -> None:
        again = batch.state.run.calls[call.id]
        if not again.is_open:  # its event was delivered meanwhile
            return
        word = Verdict.NOT_OCCURRED if isinstance(verdict, NotOccurred) else Verdict.OCCURRED
        payload = events.OrphanResolved(verdict=word, actor=actor, channel="reconcile")
        batch.add(events.ORPHAN_RESOLVED, payload, call=again, attempt=again.attempt)
        if isinstance(verdict, Pending):  # it began, and its event is still to come
            waits.begin(driver, batch, again, verdict)
            start_next(driver, batch)
        elif isinstance(verdict, Occurred):
            facts = events.ResultFacts(reconciled=True)
            if again.raised:
                facts["raised"] = again.raised
            if verdict._stored is not None:
                facts["stored"] = verdict._stored  # type: ignore[typeddict-item]
            batch.result(again, verdict.result, Outcome.OK, offload=offload, **facts)
            start_next(driver, batch)
        elif again.raised:  # not run again, because an error that always comes would repeat for ever
            text = again.raised + NOTHING_HAPPENED
            batch.result(again, text, Outcome.ERROR, is_error=True, reconciled=True)
            start_next(driver, batch)

    driver.commit(build)
    reached("after_repair")
