"""The helpdesk's tickets over HTTP, every fault at every request of each: `python -m tests.e2e.faulty`.

A process of its own in the demo project. Prints one JSON line for each ticket worked on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from tests.e2e import claude
from tests.fake_anthropic import FakeAnthropic
from tests.waiting import wait_for

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
HARMLESS = "slow"  # the reply comes all the same
REFUSED = "400"  # the provider refuses the conversation


def is_fatal(plan: tuple[str, ...]) -> bool:
    """Tell whether a run ends: its first two requests have nothing yet that it could leave out."""
    return REFUSED in plan[:2]


def plans(requests: int) -> Iterator[tuple[str, ...]]:
    """List what the requests of each run of a ticket meet: faults that it outlives, or a refusal."""
    outlived = [name for name in FAULTS if name != REFUSED]
    for first in range(len(outlived)):
        yield tuple(outlived[(first + position) % len(outlived)] for position in range(requests))
    for position in range(requests):
        plan = ("",) * position + (REFUSED,)
        yield plan if is_fatal(plan) else plan + ("",) * (requests - position - 1)


def met(plan: tuple[str, ...]) -> list[str]:
    """List what each request of a run meets, in order: a kind of fault, or nothing."""
    requests: list[str] = []
    for name in plan:
        fault = FAULTS.get(name)
        requests += [str(fault["kind"])] * fault.get("times", 1) if fault else []
        requests += [""] if name != HARMLESS and not (name == REFUSED and is_fatal(plan)) else []
    return requests


def main() -> None:
    with FakeAnthropic(claude.script) as fake:
        os.environ |= {**fake.environment(), "MODEL": claude.MODEL}
        import django

        django.setup()
        from agentruns.conf import settings

        settings.BACKOFF_SECONDS = (0.01, 0.02)
        from project.helpdesk.models import Ticket

        for ticket in Ticket.objects.exclude(number=6).order_by("number"):  # that of another agent
            for plan in plans(len(claude.transcript(ticket.number)["turns"])):
                work(fake, ticket, plan)


def work(fake: FakeAnthropic, ticket: Any, plan: tuple[str, ...]) -> None:
    """Work on a ticket whose requests meet the faults of a plan."""
    from project.helpdesk import ledger

    ledger.path().unlink(missing_ok=True)  # else nothing would be left to refund
    before = len(fake.calls)
    for position, name in enumerate(plan):
        if name:
            fake.fault(at=before + len(met(plan[:position])) + 1, **FAULTS[name])
    run = drive(ticket, f"{ticket.session_key} {', '.join(plan)}")
    line = {
        "ticket": ticket.number,
        "plan": plan,
        "met": [call.fault for call in fake.calls[before:]],
        "status": run.status,
        "failed": run.messages.filter(kind="model_failed").count(),
        "effects": [[one["kind"], one["key"]] for one in ledger.lines() if one["session"] == run.session.key],
        "problems": [str(problem) for problem in problems_of(run)],
    }
    print(json.dumps(line), flush=True)


def drive(ticket: Any, session: str) -> Any:
    """Do what an operator does, until the run has ended: sweep, approve, resume what is paused."""
    from agentruns import approve, get_run, resume_run, run_agent
    from agentruns.services.sweep import sweep

    result = run_agent("helpdesk", ticket.as_task(), session, idempotency_key=session)

    def ended() -> Any:
        run = get_run(result.run_id)
        for card in run.approvals.pending():
            approve(card.pk, None, digest=card.digest)
        if run.status == "paused":
            resume_run(run.pk)
        sweep(run_id=run.pk)
        run.refresh_from_db()
        return run if run.is_ended else None

    return wait_for(ended, f"the end of {session}")


def problems_of(run: Any) -> list[Any]:
    from agentruns.journal.verify import problems

    return list(problems(run.session_id))


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
    sys.exit(main())
