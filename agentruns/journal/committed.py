"""The last row of each session that this process has seen committed: a journal without it was rewound.

A failover to an asynchronous replica, or a restored backup, takes acknowledged rows back. The rewound
database looks intact, so only the memory of a process can tell.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from agentruns.models import Message, Tombstone

MOST = 10_000  # sessions; the one that was driven longest ago is forgotten first


class LastRow(NamedTuple):
    """The number and the time of a session's last row; a row that was altered keeps its time."""

    seq: int
    at: datetime


_last: dict[UUID, LastRow] = {}
_positions: dict[str, int] = {}  # the highest in the log of each database's server, on its timeline


def went_back(alias: str, position: int) -> bool:
    """Tell whether a server is at a lower position than it was; take the position as the known one."""
    before, _positions[alias] = _positions.get(alias, 0), position
    return position < before


def remember(session_id: UUID, row: LastRow) -> None:
    """Keep the last committed row of a session."""
    _last.pop(session_id, None)
    _last[session_id] = row
    if len(_last) > MOST:
        _last.pop(next(iter(_last)), None)


def forget(session_id: UUID | None = None) -> None:
    """Forget a session whose loss is recorded, or every session, as a test does that empties the database."""
    if session_id is None:
        _last.clear()
        _positions.clear()
    else:
        _last.pop(session_id, None)


def last_row(session_id: UUID) -> LastRow | None:
    """Find the last row of a session that this process has seen committed."""
    return _last.get(session_id)


def is_lost(alias: str, session_id: UUID) -> bool:
    """Ask the database whether that row is gone, and its session was not pruned."""
    if (known := _last.get(session_id)) is None:
        return False
    row = Message.objects.using(alias).filter(session_id=session_id, seq=known.seq, created_at=known.at)
    return not row.exists() and not Tombstone.objects.using(alias).filter(pk=session_id).exists()
