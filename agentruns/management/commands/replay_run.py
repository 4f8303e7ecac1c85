"""`manage.py replay_run ID`: repeat a run's requests, and compare them with the recorded requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError

from agentruns.management.base import RUN_ID, WRONG, AgentRunsCommand, argument
from agentruns.services.history import replay_run
from agentruns.utils.redaction import redacted


class Command(AgentRunsCommand):
    help = (
        "Compare each request that a run's agent would send now with the recorded one, up to the first "
        "difference. With --model, ask that model until its reply differs. Nothing is executed or stored. "
        "Exit 1 if something differs."
    )

    arguments = (
        RUN_ID,
        argument("--model", metavar="M", help="Ask this model; 'own' is the agent's current one."),
    )

    def act(self, *, run_id: str, model: str | None, **options: Any) -> None:
        report = replay_run(run_id, model=model)
        record = redacted(report.record())
        self.tell(record, *_lines(record))
        if not report.is_equal:
            raise CommandError("The replay differs.", returncode=WRONG)


def _lines(record: dict[str, Any]) -> Iterator[str]:
    for note in record["notes"]:
        yield f"note: {note}"
    for step in record["steps"]:
        yield f"seq {step['seq']:<5} reply {step['step'] + 1}: {_short(step['then'])}"
        if step["now"] is not None:
            yield f"{'now':>10} reply {step['step'] + 1}: {_short(step['now'])}"
    found = record["difference"]
    if found is None:
        yield "Nothing differs."
        return
    yield f"The first difference: seq {found['seq']}, {found['path']}"
    for name in ("then", "now"):
        yield f"  {name}: {json.dumps(found[name], ensure_ascii=False)}"


def _short(said: dict[str, Any]) -> str:
    inputs = [json.dumps(call["input"], ensure_ascii=False) for call in said["calls"]]
    calls = ", ".join(f"{call['name']}({text})" for call, text in zip(said["calls"], inputs, strict=True))
    return " ".join(filter(None, (said["text"], calls))) or f"nothing ({said['stop_reason']})"
