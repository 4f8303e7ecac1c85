"""The five tickets over HTTP, with one fault at each request in turn: `python -m tests.e2e.faulty`.

A process of its own in the demo project. Prints one JSON line for each ticket worked on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from agentruns.testing.fake_anthropic import FakeAnthropic
from tests.e2e import claude

FAULTS: dict[str, dict[str, Any]] = {
    "429 with Retry-After": {"kind": 429, "retry_after_ms": 20},
    "529 with Retry-After": {"kind": 529, "retry_after_ms": 20},
    "500": {"kind": 500},
    "529 three times": {"kind": 529, "times": 3},
    "error event mid-stream": {"kind": "error"},
    "dropped before the answer": {"kind": "drop"},
    "dropped mid-stream": {"kind": "drop", "after": 3},
    "truncated": {"kind": "truncate"},
    "corrupt chunk": {"kind": "corrupt"},
    "empty answer": {"kind": "empty"},
    "slow": {"kind": "slow", "delay": 0.01},
    "401": {"kind": 401},
    "400": {"kind": 400},
}
PATIENCE = 30  # seconds for one ticket


def main() -> None:
    with FakeAnthropic(claude.script) as fake:
        os.environ |= {**fake.environment(), "MODEL": claude.MODEL}
        import django

        django.setup()
        from django.conf import settings

        settings.AGENTRUNS_BACKOFF_SECONDS = (0.01, 0.02)
        for name, fault in FAULTS.items():
            for position in range(1, 5):
                work(fake, name, fault, position)


def work(fake: FakeAnthropic, name: str, fault: dict[str, Any], position: int) -> None:
    """Work on every ticket that makes so many requests."""
    from project.helpdesk import ledger
    from project.helpdesk.models import Ticket

    ledger.path().unlink(missing_ok=True)  # else nothing would be left to refund
    for ticket in Ticket.objects.order_by("number"):
        if position > len(claude.transcript(ticket.number)["turns"]):
            continue
        before = len(fake.calls)
        fake.fault(at=before + position, **fault)
        run = drive(ticket, f"{ticket.session_key} {name} {position}")
        line = {
            "fault": name,
            "position": position,
            "ticket": ticket.number,
            "status": run.status,
            "faults": sum(bool(call.fault) for call in fake.calls[before:]),
            "failed": run.messages.filter(kind="model_failed").count(),
            "effects": [
                [one["kind"], one["key"]] for one in ledger.lines() if one["session"] == run.session.key
            ],
            "problems": [str(problem) for problem in problems_of(run)],
        }
        print(json.dumps(line), flush=True)


def drive(ticket: Any, session: str) -> Any:
    """Do what an operator does, until the run has ended: sweep, approve, resume what is paused."""
    from agentruns import approve, get_run, resume_run, run_agent
    from agentruns.sweep import sweep

    result = run_agent("helpdesk", ticket.as_task(), session, idempotency_key=session)
    give_up = time.monotonic() + PATIENCE
    while not (run := get_run(result.run_id)).is_ended:
        assert time.monotonic() < give_up, (session, run.status, run.blocked_reason)
        for card in run.approvals.pending():
            approve(card.pk, None, digest=card.digest)
        if run.status == "paused":
            resume_run(run.pk)
        sweep(run_id=run.pk)
        time.sleep(0.01)
    return run


def problems_of(run: Any) -> list[Any]:
    from agentruns.journal.verify import problems

    return list(problems(run.session_id))


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
    sys.exit(main())
