"""Is the journal what it should be: chain, sequence, pairing, and the columns that are folded from it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from agentruns import canonical
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.fold import ACTIVE, RunState, fold
from agentruns.journal.read import FIELDS
from agentruns.models import Approval, Message, Run, Session

# Approval columns that are folded from the journal.
CARD = ("status", "title", "digest", "arguments", "approved_count")


def problems(session_id: UUID, alias: str | None = None) -> list[str]:
    """Return what is wrong with a session's journal and its projections, the first bad row first."""
    alias = alias or settings.DATABASE
    session = Session.objects.using(alias).get(pk=session_id)
    raw = Message.objects.using(alias).filter(session_id=session_id).order_by("seq").values_list(*FIELDS)
    rows = [Row(*values) for values in raw]
    found = _chain(session, rows)
    if found:  # what is folded from an altered journal means nothing
        return found
    for run in Run.objects.using(alias).filter(session_id=session_id).order_by("created_at"):
        state = fold(run.pk, rows)
        found += _columns(run, state)
        found += _cards(alias, run, state)
    return found + _pairing(rows)


def _chain(session: Session, rows: list[Row]) -> list[str]:
    """Compare every hash, and the head the session remembers, which shows a cut-off tail."""
    prev = canonical.GENESIS
    for seq, row in enumerate(rows, 1):
        if row.seq != seq:
            return [f"Session {session.key}: seq {seq} is missing; the next row is {row.seq}."]
        if row.prev_hash != prev:
            return [f"Session {session.key}: seq {seq} does not follow the row before it."]
        if row.hash != events.row_hash(session.pk, row, canonical.dumps(row.payload)):
            return [f"Session {session.key}: seq {seq} ({row.kind}) was altered."]
        prev = row.hash
    if session.next_seq != len(rows) + 1 or session.head != prev:
        return [
            f"Session {session.key}: its head is seq {session.next_seq - 1}, the journal ends at {len(rows)}."
        ]
    return []


def _columns(run: Run, state: RunState) -> list[str]:
    folded = state.columns()
    stored: dict[str, Any] = {name: getattr(run, name) for name in folded}
    if stored["status"] in (Run.Status.QUEUED, Run.Status.RUNNING):
        stored["status"] = ACTIVE
    return [
        f"Run {run.pk}: {name} is {stored[name]!r}, the journal says {value!r}."
        for name, value in folded.items()
        if stored[name] != value
    ]


def _cards(alias: str, run: Run, state: RunState) -> list[str]:
    found = []
    stored = {card.call_id: card for card in Approval.objects.using(alias).filter(run=run)}
    for call in state.calls.values():
        if call.card is None:
            continue
        card = stored.get(call.id)
        if card is None:
            found.append(f"Run {run.pk}: approval {call.card.id} is missing.")
            continue
        seen = call.card
        folded = (seen.status, seen.title, seen.digest, call.arguments, len(seen.given))
        columns = tuple(getattr(card, name) for name in CARD)
        if folded != columns:
            found.append(f"Approval {card.pk} is {columns!r}, the journal says {folded!r}.")
    return found


def _pairing(rows: list[Row]) -> list[str]:
    """Every start has its intent, every result its intent, and no call has two results."""
    intents: set[str] = set()
    results: set[str] = set()
    found = []
    for row in rows:
        if row.kind == events.ASSISTANT:
            intents |= {call["id"] for call in row.payload["calls"]}
        elif row.kind in (events.TOOL_STARTED, events.TOOL_RESULT) and row.call_id not in intents:
            found.append(f"seq {row.seq}: {row.kind} of call {row.call_id}, which no reply asked for.")
        elif row.kind == events.TOOL_RESULT and row.call_id in results:
            found.append(f"seq {row.seq}: a second result of call {row.call_id}.")
        if row.kind == events.TOOL_RESULT:
            results.add(row.call_id)
    return found
