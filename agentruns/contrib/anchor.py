"""Anchors in a file: set AGENTRUNS_ANCHOR = "agentruns.contrib.anchor.append_to_file".

Keep the file where the database's owner cannot change it. On Linux, `chattr +a` lets a file only grow.
"""

from __future__ import annotations

import os
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from agentruns.conf import settings
from agentruns.journal.anchor import line_of


def append_to_file(session_id: UUID, seq: int, head: str) -> None:
    """Append an anchor to AGENTRUNS_ANCHOR_FILE, and sync the file to the disk.

    Raises ImproperlyConfigured if that setting is empty, and OSError if the file cannot be written.
    """
    if not settings.ANCHOR_FILE:
        raise ImproperlyConfigured("AGENTRUNS_ANCHOR_FILE is not set.")
    file = os.open(settings.ANCHOR_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line_of(session_id, seq, head).encode())  # in one write, so that lines never mix
        os.fsync(file)
    finally:
        os.close(file)
