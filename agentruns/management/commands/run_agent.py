"""`manage.py run_agent AGENT "text"`: drive one run in this process, and print its journal as it grows."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from agentruns import get_run, run_agent
from agentruns.agents.agent import get_agent
from agentruns.agents.output import shown
from agentruns.conf import settings
from agentruns.exceptions import SessionBusyError
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.masking import masked, sensitive_of
from agentruns.management import timeline, waiting
from agentruns.management.base import AgentRunsCommand, usage, user_named
from agentruns.management.terminal import escaped
from agentruns.management.timeline import Follower
from agentruns.models import Run
from agentruns.services.runs import RunResult
from agentruns.utils.ids import uuid7
from agentruns.utils.redaction import redact, redacted

EXIT = {
    "completed": 0,
    "failed": 1,
    "awaiting-approval": 3,
    "orphaned": 3,
    "paused": 3,
    "queued": 4,
    "running": 4,
    "cancelled": 5,
}
BUSY, INTERRUPTED = 4, 130


class Command(AgentRunsCommand):
    help = (
        "Run an agent until the run ends or waits. Exit code: 0 completed, 1 failed, 3 waiting for a person, "
        "4 queued or live elsewhere, 5 cancelled. The same command again continues the same run. After a "
        "crash it tells the model that the outcome of a call in doubt is unknown, and goes on; resume_runs "
        "would leave the call to a person."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("agent", metavar="AGENT", help="The agent's name.")
        parser.add_argument("text", help="The task.")
        parser.add_argument("--session", metavar="KEY", help="The session's key (a new one).")
        parser.add_argument(
            "--idempotency-key",
            metavar="K",
            help="The same key is the same run, also after it completed.",
        )
        parser.add_argument("--user", metavar="NAME", help="The user who owns the run.")

    def act(self, *, agent: str, text: str, json: bool, **options: Any) -> None:
        if not text.strip():
            usage("The text is empty; say what the agent is to do.")
        actor = user_named(options["user"]) if options["user"] is not None else None
        session = options["session"] or _session_of(options["idempotency_key"], actor) or f"run-{uuid7()}"
        found = get_agent(agent)
        self.sensitive = sensitive_of(found.definition())
        self.unknown: list[str] = []
        try:
            with Follower(settings.DATABASE, session, self._print_json if json else self._print):
                result = run_agent(
                    found, text, session, actor=actor, idempotency_key=options["idempotency_key"]
                )
        except SessionBusyError as error:
            self.stderr.write(escaped(error))
            sys.exit(BUSY)
        except KeyboardInterrupt:
            self.stderr.write("Interrupted. The same command again, or resume_runs, goes on with the run.")
            sys.exit(INTERRUPTED)
        self._end(result, json=json)
        if EXIT[result.status]:
            sys.exit(EXIT[result.status])

    def _print(self, row: Row) -> None:
        self.say(timeline.line(masked(row, self.sensitive)))
        if row.kind == events.TOOL_RESULT and events.leaves_doubt(row.payload):
            self.unknown.append(row.call_id)

    def _print_json(self, row: Row) -> None:
        self.say_json(timeline.as_dict(masked(row, self.sensitive)))

    def _end(self, result: RunResult, *, json: bool) -> None:
        """Print the run's status, and the steps by which a person lets it go on."""
        if json:
            texts = {"session": result.session_key, "output": shown(result.output), "error": result.error}
            self.say_json({"run": result.run_id, "status": result.status, **redacted(texts)})
            return
        self.say()
        self.say(f"Run {result.run_id} in session {result.session_key} is {result.status}.")
        for approval in result.pending:
            self.say(f"Waits for a person: {approval.title} (approval {approval.pk})")
            self.say(waiting.to_decide(approval))
        for call in result.orphans:
            self.say(f"Waits for a person: did call {call} happen?")
            self.say(f"Say what became of it: {waiting.verdict(str(result.run_id), call)}")
        if result.status == Run.Status.PAUSED:
            self.say(waiting.to_resume(get_run(str(result.run_id))))
        if self.unknown:
            calls, them = (
                ("1 call", "it") if len(self.unknown) == 1 else (f"{len(self.unknown)} calls", "them")
            )
            self.say(
                f"The outcome of {calls} is unknown, and the model is told so. Say what became of {them}:"
            )
        for call in self.unknown:
            self.say(waiting.verdict(str(result.run_id), call))
        for text in redact(shown(result.output) or result.error).splitlines():
            self.say(text)


def _session_of(key: str | None, actor: Any) -> str | None:
    """Return the session of the run that a key stands for already."""
    runs = Run.objects.using(settings.DATABASE).filter(owner=actor, idempotency_key=key)
    return runs.values_list("session__key", flat=True).first() if key else None
