"""Anchors in a file: AGENTRUNS_ANCHOR = "agentruns.contrib.anchor.append_to_file".

Let it lie where the database's owner cannot write, such as on a file system that only appends (`chattr +a`).
"""

from __future__ import annotations

import os
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from agentruns.conf import settings
from agentruns.journal.anchor import line_of


def append_to_file(session_id: UUID, seq: int, head: str) -> None:
    """Append an anchor to AGENTRUNS_ANCHOR_FILE, and return once the disk has it. Raises OSError."""
    if not settings.ANCHOR_FILE:
        raise ImproperlyConfigured("AGENTRUNS_ANCHOR_FILE is not set.")
    file = os.open(settings.ANCHOR_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line_of(session_id, seq, head).encode())  # one write: no other's line gets between
        os.fsync(file)
    finally:
        os.close(file)
