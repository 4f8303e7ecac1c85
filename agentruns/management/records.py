"""A run under the names of its fields, as the commands print it for programs."""

from __future__ import annotations

from typing import Any

from agentruns.models import Run
from agentruns.utils.redaction import redact, redacted

FIELDS = (
    "agent",
    "version",
    "status",
    "input",
    "step",
    "usage",
    "output",
    "error",
    "lease_expires_at",
    "not_before",
    "attempts",
    "blocked_reason",
    "created_at",
    "updated_at",
)
TEXTS = ("input", "output", "error", "blocked_reason")


def run_record(run: Run) -> dict[str, Any]:
    """Return a run as JSON, its texts redacted; `owner` is a name."""
    return {
        "id": str(run.pk),
        "session": redact(run.session.key),
        "owner": redact(run.owner_name) or None,
        "definition": run.definition_id,
        "origin": str(run.origin_id) if run.origin_id else None,
        "origin_seq": run.origin_seq,
        **{name: getattr(run, name) for name in FIELDS},
        **{name: redacted(getattr(run, name)) for name in TEXTS},
    }
