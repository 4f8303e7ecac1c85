"""Looking back: what a run was at any row of its journal."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from agentruns import transitions
from agentruns.conf import settings
from agentruns.journal.calls import Call
from agentruns.journal.conversation import SessionState
from agentruns.journal.events import timestamp
from agentruns.journal.fold import RunState
from agentruns.journal.read import rows_until
from agentruns.masking import Sensitive, hide


def state_at(run_id: UUID | str, seq: int) -> RunState:
    """Return what the run was right after the row `seq` of its session's journal: the fold up to there.

    Raises DurableRunNotFoundError, and RunStateError for a row before its first or after its last one.
    """
    return session_at(run_id, seq).run


def session_at(run_id: UUID | str, seq: int) -> SessionState:
    """Return the same with the conversation: `settled_messages()` is what the model was sent, or would be.

    Errors as `state_at`.
    """
    run = transitions.find_run(run_id)
    state = SessionState(run.session_id, run.pk)
    for row in rows_until(settings.DATABASE, run, seq):
        state.apply(row)
    return state


def record(state: RunState, sensitive: Sensitive) -> dict[str, Any]:
    """Return a state as JSON, sensitive arguments masked; whoever shows it redacts it."""
    columns = state.columns()
    return {
        "run": str(state.run_id),
        "seq": state.seq,
        "agent": state.agent,
        **{name: columns[name] for name in ("version", "status", "step", "usage", "output", "error")},
        "definition": state.definition,
        "paused": state.paused,
        "pause_requested": state.pause_requested,
        "cancel_requested": state.cancel_requested,
        "model_failures": state.failures,
        "calls": [_call(call, state.run_id, sensitive) for call in state.calls.values()],
    }


def _call(call: Call, run_id: UUID, sensitive: Sensitive) -> dict[str, Any]:
    card = call.card
    return {
        "id": call.id,
        "tool": call.tool,
        "arguments": hide(call.arguments, sensitive.get(call.tool, ())),
        "digest": call.digest,
        "idempotency_key": call.idempotency_key(run_id),
        "attempt": call.attempt,
        "started_at": timestamp(call.started_at) if call.started_at else None,
        "outcome": call.outcome or None,
        "in_doubt": call.orphan == "held" and call.is_open,
        "approval": {"id": str(card.id), "status": card.status, "approved_by": card.names} if card else None,
    }
