"""Reading the journal back."""

from __future__ import annotations

from uuid import UUID

from agentruns.journal import events
from agentruns.journal.conversation import SessionState
from agentruns.journal.events import Row
from agentruns.models import Message

FIELDS = Row._fields


def session_rows(alias: str, session_id: UUID, after: int = 0) -> list[Row]:
    """Return a session's rows in order, upcast to today's form."""
    return _rows(Message.objects.using(alias).filter(session_id=session_id, seq__gt=after))


def run_rows(alias: str, run_id: UUID, after: int = 0, limit: int | None = None) -> list[Row]:
    """Return one run's rows in order, upcast to today's form."""
    rows = Message.objects.using(alias).filter(run_id=run_id, seq__gt=after)
    return _rows(rows, limit)


def load(alias: str, session_id: UUID, run_id: UUID) -> SessionState:
    """Rebuild everything a driver knows from the session's rows."""
    state = SessionState(session_id, run_id)
    for row in session_rows(alias, session_id):
        state.apply(row)
    return state


def _rows(queryset: object, limit: int | None = None) -> list[Row]:
    values = queryset.order_by("seq").values_list(*FIELDS)  # type: ignore[attr-defined]
    found = (Row(*value) for value in (values[:limit] if limit else values))
    return [row._replace(payload=events.upcast(row.kind, row.payload)) for row in found]
