"""The last row of each session that this process has seen committed: a journal without it was rewound.

A failover to an asynchronous replica, or a restored backup, takes acknowledged rows back. The rewound
database looks intact, so only the memory of a process can tell.
"""

from __future__ import annotations

from uuid import UUID

from agentruns.models import Message, Tombstone

MOST = 10_000  # sessions; the one that was driven longest ago is forgotten first

_last: dict[UUID, tuple[int, str]] = {}


def remember(session_id: UUID, seq: int, row_hash: str) -> None:
    """Keep the number and the hash of the last committed row of a session."""
    _last.pop(session_id, None)
    _last[session_id] = seq, row_hash
    if len(_last) > MOST:
        _last.pop(next(iter(_last)), None)


def forget(session_id: UUID) -> None:
    """Forget a session whose loss is recorded: its journal goes on from what is left."""
    _last.pop(session_id, None)


def last_row(session_id: UUID) -> tuple[int, str] | None:
    """Find the number and the hash of the last row of a session that this process has seen committed."""
    return _last.get(session_id)


def is_lost(alias: str, session_id: UUID) -> bool:
    """Ask the database whether that row is gone, and its session was not pruned."""
    if (known := _last.get(session_id)) is None:
        return False
    row = Message.objects.using(alias).filter(session_id=session_id, seq=known[0], hash=known[1])
    return not row.exists() and not Tombstone.objects.using(alias).filter(pk=session_id).exists()
