"""The world outside the database: the effects of the payment provider and the mail provider.

A file with one JSON line per effect. Each line is on the disk before the provider answers, so it survives a
SIGKILL of the calling worker. These providers do not deduplicate: a second request moves the money a second
time. The caller has to prevent that.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.utils import timezone

SLOW_SECONDS = 600


class LedgerError(ValueError):
    """Raised if the ledger has a line that is no effect."""


def path() -> Path:
    """Build the path of the ledger's file."""
    return Path(settings.DATA_DIR) / "effects.jsonl"


def record(kind: str, key: str, *, session: str, **facts: Any) -> dict[str, Any]:
    """Write an effect to the ledger, and return its line; late if HELPDESK_HOLD names this effect."""
    line = {
        "at": timezone.now().isoformat(timespec="milliseconds"),
        "kind": kind,
        "key": key,
        "session": session,
        **facts,
        "pid": os.getpid(),
    }
    file = os.open(path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)
    if os.environ.get("HELPDESK_HOLD") == f"{kind}:{session}":
        time.sleep(SLOW_SECONDS)  # the effect is done, but its acknowledgement arrives late
    return line


def lines() -> list[dict[str, Any]]:
    """Read all effects in the order in which they happened; raises LedgerError."""
    if not path().exists():
        return []
    return [_effect(number, line) for number, line in enumerate(path().read_bytes().splitlines(), 1)]


def find(key: str, kind: str) -> dict[str, Any] | None:
    """Find the effect with this idempotency key, as a provider's API would; None if it never happened."""
    return next((line for line in lines() if line["key"] == key and line["kind"] == kind), None)


def _effect(number: int, line: bytes) -> dict[str, Any]:
    try:
        effect = json.loads(line)
        if {"kind", "key", "session"} <= effect.keys():
            return dict(effect)
    except (ValueError, AttributeError):
        pass
    raise LedgerError(
        f"Line {number} of {path()} is not an effect. Was it edited? Repair it, or delete the whole folder."
    )
