"""The last row of each session that this process has seen committed: a journal without it was rewound.

A failover to an asynchronous replica, or a restored backup, takes acknowledged rows back. The rewound
database looks intact, so only the memory of a process can tell.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

MOST = 10_000  # sessions; the one that was driven longest ago is forgotten first


class LastRow(NamedTuple):
    """The number and the time of a session's last row; a row that was altered keeps its time.

    `restored_at` is when a run of the session was last held for lost rows.
    """

    seq: int
    at: datetime
    restored_at: datetime | None


_last: dict[UUID, LastRow] = {}
_positions: dict[str, int] = {}  # the highest in the log of each database's server, on its timeline


def position(alias: str) -> int:
    """Find the highest position that a server was seen at."""
    return _positions.get(alias, 0)


def take_position(alias: str, position: int) -> None:
    """Take a position as the known one."""
    _positions[alias] = position


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
