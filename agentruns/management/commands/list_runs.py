from __future__ import annotations

from itertools import islice
from typing import Any

from agentruns import list_runs
from agentruns.conf import settings
from agentruns.journal.masking import MOST_READ, masks_of
from agentruns.management.base import AgentRunsCommand, argument, moment, shortened, table
from agentruns.management.timeline import run_record, waits_for
from agentruns.models import Run
from agentruns.services.runs import waiting


class Command(AgentRunsCommand):
    help = "List runs, newest first."

    arguments = (
        argument("--status", "Only runs with this status.", choices=Run.Status.values),
        argument("--agent", "Only runs of this agent."),
    )

    def act(self, *, status: str | None, agent: str | None, **options: Any) -> None:
        runs = list_runs(status=status, agent=agent).select_related("session").iterator(chunk_size=200)
        rows: list[tuple[object, ...]] = []
        while some := list(islice(runs, 200)):
            masks = masks_of(some, size=MOST_READ)
            awaited = waiting.waits(settings.DATABASE, some, masks)
            for run in (masks[run.session_id].run(run) for run in some):
                waits = awaited.get(run.pk, [])
                in_turn = (wait.text for wait in waits if wait.kind == waiting.IN_TURN)
                run.blocked_reason = next(in_turn, run.blocked_reason)
                if self.json:
                    self.say_json(run_record(run, waits))
                    continue
                why = "; ".join(dict.fromkeys(filter(None, [run.blocked_reason, *map(waits_for, waits)])))
                task, at = shortened(run.input, 50), moment(run.updated_at)
                rows.append((run.pk, run.status, run.agent, run.session.key, at, task, shortened(why, 70)))
        none = "There are no such runs." if status or agent else "There are no runs yet."
        heading = ("RUN", "STATUS", "AGENT", "SESSION", "UPDATED (UTC)", "INPUT", "WHY IT WAITS")
        self.tell(None, *(table([heading, *rows]) if rows else [none]))
