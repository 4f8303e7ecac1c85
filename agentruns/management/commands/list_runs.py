"""`manage.py list_runs`: list runs, newest first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from agentruns import list_runs
from agentruns.journal.masking import masked_runs
from agentruns.management.base import AgentRunsCommand, argument
from agentruns.management.terminal import moment, shortened, table
from agentruns.management.timeline import run_record
from agentruns.models import Run


class Command(AgentRunsCommand):
    help = "List runs, newest first."

    arguments = (
        argument("--status", choices=Run.Status.values, help="Only runs with this status."),
        argument("--agent", help="Only runs of this agent."),
    )

    def act(self, *, status: str | None, agent: str | None, **options: Any) -> None:
        runs = list_runs(status=status, agent=agent).select_related("session")
        if self.json:
            for run in _shown(runs):
                self.say_json(run_record(run))
            return
        heading = ("RUN", "STATUS", "AGENT", "SESSION", "UPDATED (UTC)", "INPUT")
        rows = [
            (run.pk, run.status, run.agent, run.session.key, moment(run.updated_at), shortened(run.input, 50))
            for run in _shown(runs)
        ]
        none = "There are no such runs." if status or agent else "There are no runs yet."
        self.tell(None, *(table([heading, *rows]) if rows else [none]))


def _shown(runs: Any) -> Iterator[Run]:
    """Yield runs with masked texts, read in chunks of 200."""
    found = runs.iterator(chunk_size=200)
    while some := list(islice(found, 200)):
        yield from masked_runs(some)
