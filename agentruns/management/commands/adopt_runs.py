from __future__ import annotations

from typing import Any

from agentruns.conf import settings
from agentruns.journal.events import Program
from agentruns.management.base import AgentRunsCommand, argument, user_named
from agentruns.models import Run
from agentruns.services.runs.control import adopt_all


class Command(AgentRunsCommand):
    help = (
        "Let each unfinished run that check_runs lists for an agent adopt the agent's present definition. "
        "Exit 1 if one did not."
    )

    arguments = (
        argument("agent", "The agent's name.", metavar="AGENT"),
        argument("--definition", "Only of this one, or of its beginning.", default="", metavar="HASH"),
        argument("--user", "The user who adopts (the program).", metavar="NAME"),
        argument("--reason", "Kept in the journal.", required=True, metavar="TEXT"),
    )

    def act(self, *, agent: str, definition: str, user: str | None, reason: str, **options: Any) -> bool:
        actor, done, refused = user_named(user) if user else Program("adopt_runs"), 0, 0
        runs = Run.objects.using(settings.DATABASE).filter(agent=agent)
        runs = runs.filter(definition__hash__startswith=definition)
        for run_id, why in adopt_all(runs, actor, reason=reason):
            self.tell({"run": run_id, "adopted": not why, "why": why}, f"Run {run_id}: {why or 'adopted'}")
            done, refused = done + (not why), refused + bool(why)
        self.tell(None, f"Adopted: {done}. Not adopted: {refused}.")
        return bool(refused)
