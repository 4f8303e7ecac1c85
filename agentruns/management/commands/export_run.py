from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from agentruns.management.base import RUN_OR_CUSTOMER, AgentRunsCommand, argument, flag, usage
from agentruns.services.transfer import export_run


class Command(AgentRunsCommand):
    help = (
        "Print a run with its session's whole journal as JSON Lines, for docs/verify_export.py. "
        "Without sensitive arguments, and redacted by AGENTRUNS_REDACT."
    )

    arguments = (
        *RUN_OR_CUSTOMER,
        argument("--folder", "Write each session of a customer into this folder.", metavar="DIR"),
        flag("--true-values", "Print every row as it is stored, with its secrets."),
    )

    def act(self, *, run_id: str | None, true_values: bool, folder: str | None, **options: Any) -> bool:
        if (run_id is None) != (folder is not None):
            usage("Give the ID of a run, or a customer and the --folder for its exports.")

        private = partial(os.open, mode=0o600)  # only the file's owner reads it

        def export(pk: str) -> bool:
            with (
                open(Path(folder, f"{pk}.jsonl"), "w", opener=private)
                if folder
                else nullcontext(self.stdout) as file
            ):
                for line in export_run(pk, true_values=true_values):
                    # In ASCII, so that no text acts on a terminal, and each is unchanged once decoded.
                    file.write(json.dumps(line) + "\n")
            return True

        return self.each_run(run_id, export, options, per="session_id")
