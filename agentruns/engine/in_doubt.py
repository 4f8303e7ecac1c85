"""Unfinished calls: how they are classified after a crash, and which results they get if the run ends."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from agentruns.engine.gate import DENIED, DENIED_BY_RULE
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.fold import Call
from agentruns.models.statuses import Orphan, Outcome

DOUBTFUL = (
    " Whether it took effect is not known: it may have happened zero or one times. Do not repeat it blindly: "
    "check the outcome first, ask a person, or stop."
)
UNKNOWN = "The call of {tool} was interrupted." + DOUBTFUL
NOT_DELIVERED = "The call of {tool} has run, but the event that brings its result has not come." + DOUBTFUL
AFTER_UNKNOWN = "Not run: an earlier call's outcome is unknown."
RAISED = "The handler of attempt {attempt} raised: {error}"
ENDS_LATER = "cancel requested; it ends after its child runs"
RUN_ENDED = "Not executed: the run ended first."
EXPIRED = "Not executed: nobody answered the request for approval in time. This is not a failure of the tool."

SHOWN = 500  # characters of an error as evidence
LONGEST_ERROR = 10_000  # characters of an error that waits to be a result


def decided(batch: Batch, call: Call) -> None:
    """Add the result of an open call that was denied or answered, or whose approval expired."""
    approval = call.approval
    if approval is None or not call.is_open:
        return
    denied = (DENIED_BY_RULE if approval.rule else DENIED).format(reason=approval.reason)
    said: dict[str, str] = {Outcome.DENIED: denied, Outcome.ANSWERED: approval.text, Outcome.EXPIRED: EXPIRED}
    batch.result(call, said[call.decision], call.decision, actor=approval.actor)


def unknown(batch: Batch, call: Call, actor: Any, why: str = "") -> None:
    """Add the result `unknown` of a call; `why` replaces the usual reason."""
    batch.result(call, unknown_text(call, why), Outcome.UNKNOWN, is_error=True, actor=events.actor_ref(actor))


def unknown_text(call: Call, why: str = "") -> str:
    """Build the error text, as JSON, that the model gets for a call whose outcome is unknown."""
    text = f"{why}{DOUBTFUL}" if why else (NOT_DELIVERED if call.event else UNKNOWN).format(tool=call.tool)
    about = {"toolName": call.tool, "toolCallId": call.provider_id}
    return json.dumps({"kind": ToolDurabilityError.kind, "error": text, **about})


def surface(batch: Batch, call: Call, actor: Any, why: str = "") -> None:
    """Add the result `unknown` of a call, and `stop` the later calls of its reply that are not parallel."""
    unknown(batch, call, actor, why)
    later = [each for each in batch.state.run.calls.values() if each.ordinal > call.ordinal]
    stop(batch, [each for each in later if not each.parallel])


def raised(batch: Batch, call: Call, error: str) -> None:
    """Put a call in doubt because its handler raised `error`; the tool's `reconcile` is called next."""
    evidence = RAISED.format(attempt=call.attempt, error=error[:SHOWN])
    _found(batch, call, Orphan.RECONCILE, evidence, raised=error[:LONGEST_ERROR])


def _found(
    batch: Batch, call: Call, action: str, evidence: str, raised: str = "", untrusted: bool = False
) -> None:
    payload: events.OrphanFound = {
        "action": action,
        "declares": call.declares,
        "evidence": evidence,
        "started_at": events.timestamp(call.started_at) if call.started_at else None,
    }
    if raised:
        payload["raised"] = raised
    if untrusted:
        payload["untrusted"] = True
    batch.add(events.ORPHAN_FOUND, payload, call=call, attempt=call.attempt)


def stop(batch: Batch, calls: list[Call]) -> None:
    """Add results to the open calls in `calls`, because of a doubt about another call.

    A call with a decision gets the result of the decision; any other call is cancelled. A call that may have
    happened stays open.
    """
    for call in calls:
        if call.is_open and call.decision:
            decided(batch, call)
        elif call.is_open and not call.may_have_happened:
            cancel(batch, call)


def cancel(batch: Batch, call: Call) -> None:
    """Add the result `cancelled` of a call, because an earlier call has an unknown outcome."""
    batch.result(call, AFTER_UNKNOWN, Outcome.CANCELLED, is_error=True)


def settle(batch: Batch, but: Collection[Call] = ()) -> None:
    """Add a result to every open call of a run that ends, except calls in `but`.

    The outcome is unknown if the call may have happened, else cancelled.
    """
    for call in (each for each in batch.state.run.open_calls() if each not in but):
        if call.may_have_happened:
            unknown(batch, call, None)
        else:
            batch.result(call, RUN_ENDED, Outcome.CANCELLED, is_error=True)


def close_cancelled(batch: Batch, actor: Any, reason: str, *, waits: bool = True) -> None:
    """Settle the open calls and end the run as cancelled.

    A run whose child runs are open waits for their end, unless `waits` is False.
    """
    children = batch.state.run.open_children() if waits else []
    settle(batch, children)
    if children:
        who = events.actor_ref(actor)  # a row, whatever was settled: the lease is given back with it
        batch.add(events.RUN_RESUMED, events.RunResumed(actor=who, epoch=batch.epoch, reason=ENDS_LATER))
        return
    batch.add(events.RUN_CANCELLED, events.RunCancelled(actor=events.actor_ref(actor), reason=reason))


def close_failed(batch: Batch, kind: str, text: str) -> None:
    """Settle the open calls and end the run as failed."""
    settle(batch)
    batch.add(events.RUN_FAILED, events.RunFailed(error={"type": kind, "text": text}))


def orphan(
    batch: Batch,
    call: Call,
    *,
    tell_model: bool,
    actor: Any,
    evidence: str = "",
    recovery_failed: bool = False,
    declared: str = "",
    untrusted: bool = False,
) -> None:
    """Record a call as in doubt: to be retried, reconciled, held for staff or surfaced to the model.

    The tool's declaration when the call started decides; `declared` replaces it if no start is stored, and
    `untrusted` says in place of the start that the call reads text of outsiders.
    `recovery_failed` holds the call whatever was declared. `tell_model` surfaces a call that would be held.
    `evidence` describes the doubt; the default says that the attempt left no result. Records nothing for a
    transactional call, which simply runs again, unless `recovery_failed`.
    """
    if call.declares == "transactional" and not recovery_failed:
        return  # no result was committed, so nothing happened: it simply runs again
    recovers = {"safe_to_retry": Orphan.RETRY, "reconcile": Orphan.RECONCILE}
    action = Orphan.HELD if recovery_failed else recovers.get(call.declares or declared, Orphan.HELD)
    is_told = action == Orphan.HELD and tell_model
    evidence = evidence or f"Attempt {call.attempt} started and left no result."
    _found(batch, call, Orphan.SURFACED if is_told else action, evidence, untrusted=untrusted)
    if is_told:
        surface(batch, call, actor)
