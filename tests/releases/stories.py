"""The lives of the recorded runs. Imports nothing that a recorded release did not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from django.contrib.auth.models import User

from agentruns import (
    answer,
    approve,
    cancel_run,
    deny,
    erase_payload,
    export_run,
    fork_run,
    pause_run,
    start_run,
)
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.releases import agents

Write = Callable[[Run], None]


def all_of_them() -> dict[str, Callable[[Write], None]]:
    """Return the stories by the name of their file."""
    declared = agents.declare()
    ann, _ = User.objects.get_or_create(username="ann", is_superuser=True)
    started = partial(_started, declared)
    return {
        "completed": lambda write: write(_decided(started("completed", "decided"), ann)),
        "failed": lambda write: write(started("failed", "refuses")),
        "orphaned": lambda write: write(started("orphaned", "wires")),
        "awaiting": lambda write: write(started("awaiting", "asks")),
        "approved": lambda write: write(_approved(started("approved", "asks"), ann)),
        "paused": lambda write: write(pause_run(started("paused", "asks").pk, None, reason="lunch")),
        "cancelled": lambda write: write(cancel_run(started("cancelled", "asks").pk, ann, reason="no more")),
        "at-work": lambda write: _at_work(declared, write),
        "voided": lambda write: write(_voided(started("voided", "asks"))),
        "erased": lambda write: write(_erased(_decided(started("erased", "decided"), ann), ann)),
        "forked": lambda write: write(_forked(started("origin", "finds"))),
    }


def exported(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's export."""
    return export_run(run.pk, true_values=True)


def tables(run: Run) -> dict[str, Any]:
    """Return the rows that the release keeps of a run beside its journal."""
    return {
        "session": type(run.session).objects.filter(pk=run.session_id).values().get(),
        "runs": list(Run.objects.filter(session_id=run.session_id).values()),
        "approvals": list(Approval.objects.filter(run_id=run.pk).order_by("pk").values()),
    }


def _started(declared: dict[str, Any], key: str, name: str) -> Run:
    run = start_run(declared[name], "Refund A1", key, idempotency_key=key)
    sweep()
    return Run.objects.get(pk=run.pk)


def _decided(run: Run, ann: User) -> Run:
    first, second, third = Approval.objects.filter(run=run).order_by("requested_at", "pk")
    approve(first.pk, ann, digest=first.digest, arguments={"number": "A1", "cents": 10}, reason="more")
    deny(second.pk, ann, "not this one")
    answer(third.pk, ann, "it was refunded by hand")
    sweep()  # to the offer, for which there is no time
    sweep()
    sweep()
    return Run.objects.get(pk=run.pk)


def _approved(run: Run, ann: User) -> Run:
    approve(Approval.objects.get(run=run).pk, ann, reason="fine")
    return Run.objects.get(pk=run.pk)


def _voided(run: Run) -> Run:
    bea = User.objects.create(username="bea", is_superuser=True)
    approve(Approval.objects.get(run=run).pk, bea)
    User.objects.filter(pk=bea.pk).update(is_active=False)
    sweep()
    return Run.objects.get(pk=run.pk)


def _erased(run: Run, ann: User) -> Run:
    reply = run.messages.filter(kind="assistant").earliest("seq")
    erase_payload(run.pk, reply.seq, ann, "request 17")
    return Run.objects.get(pk=run.pk)


def _at_work(declared: dict[str, Any], write: Write) -> None:
    """The worker dies inside the handler: this is what it leaves."""
    agents.while_at_work.append(lambda: write(Run.objects.get(session__key="at-work")))
    _started(declared, "at-work", "finds")


def _forked(run: Run) -> Run:
    started = run.messages.filter(kind="tool_started").order_by("seq").values_list("seq", flat=True)[0]
    fork = fork_run(run.pk, started, text="Do not look again.")
    sweep()
    return Run.objects.get(pk=fork.pk)
