from __future__ import annotations

from typing import Any

from agentruns.journal.masking import mask_of
from agentruns.management.base import RUN_ID, AgentRunsCommand, argument, usage
from agentruns.management.timeline import run_record
from agentruns.services.runs.forks import fork_run


class Command(AgentRunsCommand):
    help = (
        "Queue a new run, in a session of its own, from a copy of a run's journal up to a row. No effect is "
        "repeated: a call open there gets the result that it has by now, or is settled as cancelled, or as "
        "unknown if it has started."
    )

    arguments = (
        RUN_ID,
        argument("--at", type=int, required=True, metavar="SEQ", help="The last row to copy."),
        argument("--text", help="Next message to the agent; required if nothing is left to do."),
        argument("--agent", help="Go on with another agent."),
        argument("--session", metavar="KEY", help="The new session's key (generated)."),
        argument("--scope", metavar="S", help="The new session's scope (that of the origin)."),
        argument("--idempotency-key", metavar="K", help="The same key stands for the same fork."),
    )

    def act(self, *, run_id: str, at: int, **options: Any) -> None:
        given = {name: options[name] for name in ("text", "agent", "session", "scope", "idempotency_key")}
        try:
            fork = fork_run(run_id, at, **given)
        except ValueError as error:
            usage(str(error))
        text = f"Forked run {run_id} at row {at}: run {fork.pk} is queued in session {fork.session.key!r}."
        self.tell(run_record(mask_of(fork).run(fork)), text)
