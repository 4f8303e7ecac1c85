from __future__ import annotations

import json
from functools import partial
from typing import Any

from django.core.management.base import CommandError

from agentruns.management.base import RUN_OR_CUSTOMER, WRONG, AgentRunsCommand, argument
from agentruns.services.history import replay_run
from agentruns.utils.redaction import redacted


class Command(AgentRunsCommand):
    help = (
        "Compare each request that a run's agent would send now with the recorded one, up to the first "
        "difference. With --model, ask that model until its reply differs. Nothing is executed or stored. "
        "Exit 1 if something differs."
    )

    arguments = (
        *RUN_OR_CUSTOMER,
        argument("--model", "Ask this model; 'own' is the agent's current one.", metavar="M"),
    )

    def act(self, *, run_id: str | None, model: str | None, **options: Any) -> None:
        if self.each_run(run_id, partial(self.replay, model=model), options):
            raise CommandError("The replay differs.", returncode=WRONG)

    def replay(self, run_id: str, model: str | None) -> bool:
        """Replay a run and print the report; return False if something differs."""
        report = replay_run(run_id, model=model)
        record, lines = redacted(report.record()), list[str]()
        lines += [f"note: {note}" for note in record["notes"]]
        for step in record["steps"]:
            lines.append(f"seq {step['seq']:<5} reply {step['step'] + 1}: {_short(step['then'])}")
            if step["now"] is not None:
                lines.append(f"{'now':>10} reply {step['step'] + 1}: {_short(step['now'])}")
        if (difference := record["difference"]) is None:
            lines.append("Nothing differs.")
        else:
            lines.append(f"The first difference: seq {difference['seq']}, {difference['path']}")
            for name in ("then", "now"):
                lines.append(f"  {name}: {json.dumps(difference[name], ensure_ascii=False)}")
        self.tell(record, *lines)
        return report.is_equal


def _short(said: dict[str, Any]) -> str:
    inputs = [json.dumps(call["input"], ensure_ascii=False) for call in said["calls"]]
    calls = ", ".join(f"{call['name']}({text})" for call, text in zip(said["calls"], inputs, strict=True))
    return " ".join(filter(None, (said["text"], calls))) or f"nothing ({said['stop_reason']})"
