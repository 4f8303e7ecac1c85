from __future__ import annotations

import json
import sys
from typing import Any

from agentruns.management.base import AgentRunsCommand, argument, usage
from agentruns.management.timeline import run_record
from agentruns.services.transfer import import_run


class Command(AgentRunsCommand):
    help = (
        "Store a run, with its session's whole journal, from the output of export_run --true-values. Refused "
        "unless each row is intact. It is a record: it can be read, verified, replayed and forked, never "
        "resumed; a run that has not ended is closed here, and may go on at its origin."
    )

    arguments = (
        argument("file", "The export, or - for standard input.", metavar="FILE"),
        argument("--scope", "The scope of its session here (the export's).", metavar="S"),
    )

    def act(self, *, file: str, scope: str | None, **options: Any) -> None:
        try:
            lines = sys.stdin if file == "-" else open(file, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            usage(f"{file} cannot be read: {error.strerror}.")
        with lines:
            run = import_run((json.loads(line) for line in lines if line.strip()), scope=scope)
        rows = run.session.next_seq - 1
        text = f"Imported run {run.pk} ({run.status}): session {run.session.key!r}, {rows} rows, intact."
        self.tell(run_record(run), text)
