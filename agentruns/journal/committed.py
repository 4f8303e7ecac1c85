"""The last row of each session that this process has seen committed: a journal without it was rewound.

A failover to an asynchronous replica, or a restored backup, takes acknowledged rows back. The rewound
database looks intact, so only the memory of a process can tell.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

MOST = 10_000  # sessions; beyond this the session driven longest ago is forgotten


class LastRow(NamedTuple):
    """The number and the time of a session's last row. Even a row that was altered keeps its time.

    `restored_at` is when a run of the session was last held for lost rows.
    """

    seq: int
    at: datetime
    restored_at: datetime | None


_last: dict[UUID, LastRow] = {}
_positions: dict[str, int] = {}  # alias -> the highest log position seen, on its server's timeline


def position(alias: str) -> int:
    """Look up the highest log position that was seen of a database's server; 0 if none was seen."""
    return _positions.get(alias, 0)


def take_position(alias: str, position: int) -> None:
    """Set the highest known log position of a database's server."""
    _positions[alias] = position


def remember(session_id: UUID, row: LastRow) -> None:
    """Store `row` as the last row of a session that this process has seen committed."""
    _last.pop(session_id, None)
    _last[session_id] = row
    if len(_last) > MOST:
        _last.pop(next(iter(_last)), None)


def forget(session_id: UUID | None = None) -> None:
    """Forget the last row of a session whose loss is recorded; without `session_id` forget everything."""
    if session_id is None:
        _last.clear()
        _positions.clear()
    else:
        _last.pop(session_id, None)


def last_row(session_id: UUID) -> LastRow | None:
    """Look up the last row of a session that this process has seen committed; None if there is none."""
    return _last.get(session_id)
