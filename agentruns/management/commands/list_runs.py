from __future__ import annotations

from itertools import islice
from typing import Any

from agentruns import list_runs
from agentruns.conf import settings
from agentruns.engine import turns
from agentruns.journal.masking import masked_runs
from agentruns.management.base import AgentRunsCommand, argument, moment, shortened, table
from agentruns.management.timeline import run_record
from agentruns.models import Run


class Command(AgentRunsCommand):
    help = "List runs, newest first."

    arguments = (
        argument("--status", choices=Run.Status.values, help="Only runs with this status."),
        argument("--agent", help="Only runs of this agent."),
    )

    def act(self, *, status: str | None, agent: str | None, **options: Any) -> None:
        runs = list_runs(status=status, agent=agent).select_related("session").iterator(chunk_size=200)
        rows: list[tuple[object, ...]] = []
        while some := list(islice(runs, 200)):
            later = turns.reasons(settings.DATABASE, some)
            for run in masked_runs(some):
                run.blocked_reason = later.get(run.pk, run.blocked_reason)
                if self.json:
                    self.say_json(run_record(run))
                    continue
                task, at = shortened(run.input, 50), moment(run.updated_at)
                why = shortened(run.blocked_reason, 70)
                rows.append((run.pk, run.status, run.agent, run.session.key, at, task, why))
        none = "There are no such runs." if status or agent else "There are no runs yet."
        heading = ("RUN", "STATUS", "AGENT", "SESSION", "UPDATED (UTC)", "INPUT", "WHY IT WAITS")
        self.tell(None, *(table([heading, *rows]) if rows else [none]))
