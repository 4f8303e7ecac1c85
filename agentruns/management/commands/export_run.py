"""`manage.py export_run ID`: print a run for an auditor, as JSON Lines."""

from __future__ import annotations

import json
from typing import Any

from agentruns.management.base import RUN_ID, AgentRunsCommand, flag
from agentruns.services.transfer import export_run


class Command(AgentRunsCommand):
    help = (
        "Print a run with its session's whole journal as JSON Lines, for docs/verify_export.py. "
        "Without sensitive arguments, and redacted by AGENTRUNS_REDACT."
    )

    arguments = (
        RUN_ID,
        flag("--true-values", "Print every row as it is stored, with its secrets."),
    )

    def act(self, *, run_id: str, true_values: bool, **options: Any) -> None:
        for line in export_run(run_id, true_values=true_values):
            # In ASCII, so that no text acts on a terminal, and each is unchanged once decoded.
            self.stdout.write(json.dumps(line))
        self.stdout.flush()
