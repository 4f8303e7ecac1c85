from __future__ import annotations

from typing import Any

from agentruns.conf import settings
from agentruns.management.base import AgentRunsCommand
from agentruns.models import Run
from agentruns.services.runs.control import by_definition

SERVE = "Serve the old definition beside the new one under its own version, or run manage.py adopt_runs."


class Command(AgentRunsCommand):
    help = (
        "Before a deploy, with the new code: list the unfinished runs that this code cannot continue, by "
        "definition. Changes nothing. Exit 1 if there are some."
    )

    def act(self, **options: Any) -> bool:
        found, total = by_definition(Run.objects.using(settings.DATABASE)), 0
        for about in found:
            counts = ", ".join(f"{count} {status}" for status, count in about["runs"].items())
            name = "{agent} version {version} ({definition:.12})".format_map(about)
            self.tell(about, f"{name}: {counts}. {about['reason']}.".replace("..", "."))
            total += sum(about["runs"].values())
        none = "This code can continue every unfinished run."
        self.tell(None, f"Runs that this code cannot continue: {total}. {SERVE}" if found else none)
        return bool(found)
