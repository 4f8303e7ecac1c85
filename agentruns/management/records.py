"""A run under the names of its fields, as the commands print it for programs."""

from __future__ import annotations

from typing import Any

from agentruns.models import Run

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


def run_record(run: Run) -> dict[str, Any]:
    """Return a run as JSON; `owner` is a name."""
    return {
        "id": str(run.pk),
        "session": run.session.key,
        "owner": run.owner_name or None,
        "definition": run.definition_id,
        **{name: getattr(run, name) for name in FIELDS},
    }
