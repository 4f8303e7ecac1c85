"""`manage.py export_run ID`: a run for an auditor, as JSON Lines."""

from __future__ import annotations

import json as json_text
from argparse import ArgumentParser
from typing import Any

from agentruns.management.base import AgentRunsCommand
from agentruns.services.transfer import export_run


class Command(AgentRunsCommand):
    help = (
        "Print a run with its session's whole journal as JSON Lines, for docs/verify_export.py. "
        "Sensitive arguments and what AGENTRUNS_REDACT takes out are left out."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("run_id", metavar="ID", help="The run's id.")
        parser.add_argument(
            "--true-values", action="store_true", help="Every row as it is stored, secrets and all."
        )

    def act(self, *, run_id: str, true_values: bool, **options: Any) -> None:
        for line in export_run(run_id, true_values=true_values):
            # ASCII: no terminal acts on what a model wrote, and each text comes back as it was.
            self.stdout.write(json_text.dumps(line))
        self.stdout.flush()
