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
        argument("--at", "The last row to copy.", type=int, required=True, metavar="SEQ"),
        argument("--text", "Next message to the agent; required if nothing is left to do."),
        argument("--agent", "Go on with another agent."),
        argument("--session", "The new session's key (generated).", metavar="KEY"),
        argument("--scope", "The new session's scope (that of the origin).", metavar="S"),
        argument("--idempotency-key", "The same key stands for the same fork.", metavar="K"),
    )

    def act(self, *, run_id: str, at: int, **options: Any) -> None:
        given = {name: options[name] for name in ("text", "agent", "session", "scope", "idempotency_key")}
        try:
            fork = fork_run(run_id, at, **given)
        except ValueError as error:
            usage(str(error))
        text = f"Forked run {run_id} at row {at}: run {fork.pk} is queued in session {fork.session.key!r}."
        self.tell(run_record(mask_of(fork).run(fork)), text)
