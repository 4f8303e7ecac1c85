"""The only place that runs a tool: validate, gate, start, call, record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction

from agentruns import gate, handlers, recovery
from agentruns.crashpoints import reached
from agentruns.driver import Driver
from agentruns.exceptions import LeaseLostError
from agentruns.handlers import Interrupted, Observation
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.calls import Call
from agentruns.late import store_late_result
from agentruns.leases import uptime
from agentruns.tools import InvalidArguments, NotOccurred, Occurred, Tool, ToolContext

logger = logging.getLogger("agentruns.executor")

NOT_AS_APPROVED = "Not executed: {why}. Nothing happened."
ROLLED_BACK = " Everything the tool wrote was rolled back: nothing happened."


def execute(driver: Driver, ready: list[Call]) -> None:
    """Bring the first of the calls that can go on, or its group of parallel ones, to a result."""
    call = ready[0]
    if call.decision:
        driver.commit(lambda batch: _each(batch, [call], recovery.decided))
        return
    refusal = _refusal(driver, call)
    if refusal and call.is_started:  # it may have happened: that it cannot go on here is no result
        _orphan(driver, call, f"It cannot go on here: {refusal}.", asked=True)
        return
    if refusal:
        text = NOT_AS_APPROVED.format(why=refusal)
        driver.commit(lambda batch: _refuse(driver, batch, call.id, text))
        return
    if call.orphan == "reconcile":
        _reconcile(driver, call)
        return
    group = [call]
    if call.parallel:
        group = [one for one in ready if one.parallel and _may_run(driver, one)]
    _start(driver, group)
    if driver.released or driver.run.ended:
        return
    if not all((one.id, driver.run.calls[one.id].attempt) in driver.started for one in group):
        return  # a cancel or a pause came in before the start was stored
    if len(group) > 1:
        _run_parallel(driver, [driver.run.calls[one.id] for one in group])
    else:
        _run_one(driver, driver.run.calls[call.id])


def start_next(driver: Driver, batch: Batch) -> None:
    """Let the next ungated call's `tool_started` travel in this batch: one commit less per call.

    A gated call starts in a commit of its own, so that nothing refusable can take a result down with it.
    """
    run = batch.state.run
    if run.cancel_requested or run.pause_requested or driver.should_stop():
        return
    ready = run.next_calls()
    if not ready or ready[0].parallel or ready[0].verdict != "run" or ready[0].attempt:
        return
    if _may_run(driver, ready[0]):
        _write_start(driver, batch, ready[0])


def _may_run(driver: Driver, call: Call) -> bool:
    return not call.decision and call.orphan != "reconcile" and not _refusal(driver, call)


def _refusal(driver: Driver, call: Call) -> str:
    """Return why the call may not run, or "": everything is checked again, and in doubt it does not run."""
    tool = driver.agent.tools.get(call.tool)
    if tool is None:
        return f"there is no tool {call.tool!r} any more"
    try:
        arguments = tool.effective(call.arguments)
    except InvalidArguments as error:
        return str(error)
    if gate.call_digest(tool.name, arguments) != call.digest:
        return "the arguments are not the ones that were recorded"
    if call.verdict == "refuse" or (call.verdict == "ask" and call.card is None):
        return "the gate did not let it through"
    if call.card is not None:
        if call.card.digest != call.digest or call.card.status not in ("approved", "consumed"):
            return f"its approval is {call.card.status}"
        if call.card.status == "consumed" and call.attempt == 0:
            return "its approval was used already"
    entered = (call.id, call.attempt) in driver.started
    if call.is_started and not entered and call.orphan not in ("retry", "reconcile"):
        return "it was started before and nobody knows what became of it"
    return ""


def _start(driver: Driver, group: list[Call]) -> None:
    """Journal that the handlers are about to be entered, unless that travelled with an earlier row."""
    if all((call.id, call.attempt) in driver.started for call in group):
        return

    def build(batch: Batch) -> None:
        run = batch.state.run
        if run.cancel_requested or run.pause_requested:
            return
        for call in group:
            _write_start(driver, batch, run.calls[call.id])

    driver.commit(build)


def _write_start(driver: Driver, batch: Batch, call: Call) -> None:
    card = call.card
    payload: dict[str, Any] = {
        "key": call.idempotency_key(batch.state.run.run_id),
        "digest": call.digest,
        "declares": driver.agent.tools[call.tool].recovery,
    }
    if card is not None:
        payload |= {"approval": str(card.id), "approved_by": card.names}
    consumes = card.id if card is not None and card.status == "approved" else None
    batch.add(events.TOOL_STARTED, payload, call=call, attempt=call.attempt + 1, consumes=consumes)


def _run_one(driver: Driver, call: Call) -> None:
    tool, context = driver.agent.tools[call.tool], _context(driver, call)
    reached("before_tool")
    try:
        driver.hold_lease()
    except LeaseLostError:
        store_late_result(driver, call, {"never_entered": True})
        raise
    driver.started.discard((call.id, call.attempt))
    if tool.transactional:
        _run_transactional(driver, tool, context, call)
        return
    try:
        observation = _observe(driver, tool, context, call)
    except Interrupted as interruption:
        _orphan(driver, call, str(interruption))
        return
    reached("after_tool")
    _record(driver, call, observation)


def _record(driver: Driver, call: Call, observation: Observation, *, joined: bool = False) -> None:
    """Store a result; what cannot be stored because the run was taken over becomes a `late_result`."""

    def build(batch: Batch) -> None:
        observation.write(batch, call.id)
        start_next(driver, batch)

    if joined:  # the caller's transaction holds the effect too: a lost lease rolls both back
        driver.commit(build, joined=True)
        return
    reached("before_result_commit")
    try:
        driver.commit(build)
    except LeaseLostError:
        store_late_result(
            driver,
            call,
            {"content": observation.content, "is_error": observation.is_error, **observation.flags},
        )
        raise
    reached("after_result")


def _observe(driver: Driver, tool: Tool, context: ToolContext, call: Call) -> Observation:
    """Enter the handler within the tool's time; raise Interrupted when its outcome is not known."""
    if tool.timeout is None:
        return handlers.call(tool, context, call.arguments)
    future = handlers.in_thread(driver.alias, tool, context, call.arguments)
    try:
        return future.result(timeout=tool.timeout)
    except TimeoutError:
        if future.done():
            raise
        future.add_done_callback(lambda done: _late(driver, call, done))
        raise Interrupted(f"The handler did not return within {tool.timeout} s.") from None


def _run_transactional(driver: Driver, tool: Tool, context: ToolContext, call: Call) -> None:
    """Commit the handler's ORM writes and its result together, or neither."""
    try:
        observation = _in_transaction(driver, tool, context, call)
    except LeaseLostError:
        raise
    except Exception as error:
        # A lost acknowledgement, an on_commit hook of the handler's, a broken block: the journal says which.
        if _is_stored(driver, call):
            logger.exception("After the commit of run=%s call=%s", context.run_id, call.id)
            return
        if isinstance(error, OperationalError | InterfaceError | MemoryError):
            raise
        observation = Observation(f"{type(error).__name__}: {error}" + ROLLED_BACK, is_error=True)
    if observation.is_error:
        _record(driver, call, observation)
    else:
        reached("after_result")


def _in_transaction(driver: Driver, tool: Tool, context: ToolContext, call: Call) -> Observation:
    alias = driver.alias
    try:
        with transaction.atomic(using=alias, durable=True):
            connection = connections[alias]
            if connection.vendor == "postgresql" and len(connection.atomic_blocks) == 1:
                # At a stricter level every heartbeat in between would fail the guard for ever.
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            with handlers.refuse_other_writes(alias):
                observation = handlers.call(tool, context, call.arguments)
            if observation.is_error:
                raise _RollBack(observation)
            reached("before_result_commit")
            _record(driver, call, observation, joined=True)
    except _RollBack as rolled_back:
        return rolled_back.observation
    return observation


class _RollBack(Exception):
    """Leaves a transactional tool's block without its writes."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self.observation = observation


def _is_stored(driver: Driver, call: Call) -> bool:
    if driver.lease is None:
        return False
    driver.reread(None, patient=True, give_up=uptime())
    return not driver.run.calls[call.id].is_open


def _run_parallel(driver: Driver, group: list[Call]) -> None:
    """Run reads together in threads; only this thread appends, as their results land."""
    driver.hold_lease()
    waiting: dict[Future[Observation], Call] = {}
    for call in group:
        driver.started.discard((call.id, call.attempt))
        tool = driver.agent.tools[call.tool]
        waiting[handlers.in_thread(driver.alias, tool, _context(driver, call), call.arguments)] = call
    limits = [driver.agent.tools[call.tool].timeout for call in group]
    longest = None if None in limits else max(limit for limit in limits if limit)
    try:
        for future in as_completed(list(waiting), timeout=longest):
            call = waiting.pop(future)
            try:
                observation = future.result()
            except Interrupted as interruption:
                _orphan(driver, call, str(interruption))
            else:
                _record(driver, call, observation)
    except TimeoutError:
        for call in waiting.values():
            _orphan(driver, call, f"The handler did not return within {longest} s.")


def _late(driver: Driver, call: Call, future: Future[Observation]) -> None:
    if future.exception() is None:
        observation = future.result()
        store_late_result(driver, call, {"content": observation.content, "is_error": observation.is_error})


def _orphan(driver: Driver, call: Call, evidence: str, *, asked: bool = False) -> None:
    """Treat a call of unknown outcome in a live drive as a sweep would."""
    surfaces = driver.agent.on_orphan == "surface" or not driver.store.durable

    def build(batch: Batch) -> None:
        again = batch.state.run.calls[call.id]
        recovery.orphan(batch, again, surfaces=surfaces, actor=None, evidence=evidence, asked=asked)
        batch.failed_drive = again.orphan in ("retry", "reconcile")

    driver.commit(build)


def _reconcile(driver: Driver, call: Call) -> None:
    """Ask the outside world, by idempotency key, whether the call happened."""
    tool = driver.agent.tools[call.tool]
    verdict = tool.run_reconcile(_context(driver, call), call.arguments)
    actor = {"id": "", "name": "reconcile"}
    if not isinstance(verdict, Occurred | NotOccurred):
        _orphan(driver, call, f"reconcile does not know: {verdict.reason}", asked=True)
        return

    def build(batch: Batch) -> None:
        again = batch.state.run.calls[call.id]
        word = "occurred" if isinstance(verdict, Occurred) else "not_occurred"
        payload = {"verdict": word, "actor": actor, "channel": "reconcile"}
        batch.add(events.ORPHAN_RESOLVED, payload, call=again, attempt=again.attempt)
        if isinstance(verdict, Occurred):
            batch.result(again, verdict.result, "ok", reconciled=True)
            start_next(driver, batch)

    driver.commit(build)
    reached("after_repair")


def _context(driver: Driver, call: Call) -> ToolContext:
    return gate.context_for(
        driver,
        call.id,
        call.tool,
        attempt=call.attempt,
        key=call.idempotency_key(driver.run.run_id),
        approved_by=tuple(call.card.names) if call.card else (),
    )


def _each(batch: Batch, calls: list[Call], write: Callable[[Batch, Call], None]) -> None:
    for call in calls:
        again = batch.state.run.calls[call.id]
        if again.is_open:
            write(batch, again)


def _refuse(driver: Driver, batch: Batch, call_id: str, text: str) -> None:
    call = batch.state.run.calls[call_id]
    if call.is_open:
        batch.result(call, text, "error", is_error=True)
        start_next(driver, batch)
