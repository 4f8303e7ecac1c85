"""`manage.py replay_run ID`: go through a run again on its recorded replies and results."""

from __future__ import annotations

import json as json_text
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from agentruns.management.base import WRONG, AgentRunsCommand
from agentruns.services.history import replay_run
from agentruns.utils.redaction import redacted


class Command(AgentRunsCommand):
    help = (
        "Compare each request that a run's agent would send now with the recorded one, up to the first "
        "difference. With --model, ask that model until its reply differs. Nothing is executed or stored. "
        "Exit 1 if something differs."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("run_id", metavar="ID", help="The run's id.")
        parser.add_argument("--model", metavar="M", help="Ask this model; 'own' is the agent's current one.")

    def act(self, *, run_id: str, model: str | None, json: bool, **options: Any) -> None:
        report = replay_run(run_id, model=model)
        record = redacted(report.record())
        if json:
            self.say_json(record)
        else:
            self._tell(record)
        if not report.is_equal:
            raise CommandError("The replay differs.", returncode=WRONG)

    def _tell(self, record: dict[str, Any]) -> None:
        for note in record["notes"]:
            self.say(f"note: {note}")
        for step in record["steps"]:
            self.say(f"seq {step['seq']:<5} reply {step['step'] + 1}: {_short(step['then'])}")
            if step["now"] is not None:
                self.say(f"{'now':>10} reply {step['step'] + 1}: {_short(step['now'])}")
        found = record["difference"]
        if found is None:
            self.say("Nothing differs.")
            return
        self.say(f"The first difference: seq {found['seq']}, {found['path']}")
        for name in ("then", "now"):
            self.say(f"  {name}: {json_text.dumps(found[name], ensure_ascii=False)}")


def _short(said: dict[str, Any]) -> str:
    calls = ", ".join(
        f"{call['name']}({json_text.dumps(call['input'], ensure_ascii=False)})" for call in said["calls"]
    )
    return " ".join(filter(None, (said["text"], calls))) or f"nothing ({said['stop_reason']})"
