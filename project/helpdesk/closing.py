"""The end of the story: the ledger, the state of the tickets, and how to continue in the console."""

from __future__ import annotations

from django.utils import timezone

from agentruns.models import Run
from project.helpdesk import audit, words
from project.helpdesk.models import Ticket
from project.helpdesk.narrator import Narrator
from project.helpdesk.past import FIRST
from project.helpdesk.preparation import NAME, PASSWORD
from project.helpdesk.story import run_of

URL = "http://127.0.0.1:8000/admin/"


def close(narrator: Narrator) -> list[str]:
    """Print the ledger and the tickets; return the mismatches between ledger and journal."""
    tickets = list(Ticket.objects.filter(number__lt=FIRST))
    findings, effects = audit.findings(), audit.table([ticket.session_key for ticket in tickets])
    narrator.heading("The effects ledger: what really happened outside")
    narrator.columns([("SESSION", "EFFECT", "WHAT", "KEY", "BY PROCESS", "HAPPENED"), *effects])
    _tickets(narrator, tickets)
    if not findings:
        _invite(narrator, {effect[-1] for effect in effects})
    return findings


def _tickets(narrator: Narrator, tickets: list[Ticket]) -> None:
    narrator.heading("Where the tickets stand")
    rows = []
    for ticket in tickets:
        run = run_of(ticket)
        if run is not None:
            rows.append(
                (ticket.session_key, run.status, _waits_for(run) or f"ticket {ticket.status}", run.pk)
            )
    narrator.columns([("SESSION", "RUN IS", "NOTE", "RUN"), *rows])


def _waits_for(run: Run) -> str:
    if run.status == Run.Status.AWAITING_APPROVAL:
        return "; ".join(f"{card.title}?" for card in run.approvals.pending())
    if run.status == Run.Status.ORPHANED:
        return "Did the interrupted call happen?"
    if run.status == Run.Status.QUEUED and run.not_before:
        return f"the model is asked again after {timezone.localtime(run.not_before):%H:%M:%S}"
    return words.short(run.blocked_reason or run.error, 60)


def _invite(narrator: Narrator, often: set[str]) -> None:
    if often == {audit.ONCE}:
        verdict = "Every effect happened once, and every result in the journal has its effect."
    elif often:
        verdict = "Nothing happened twice unless a person ordered it, and every result has its effect."
    else:
        verdict = "Nothing happened outside, and the journal claims nothing else."
    waiting = Run.objects.filter(status__in=["awaiting-approval", "orphaned", "paused"]).exists()
    narrator.out("")
    narrator.out(narrator.style.SUCCESS(verdict))
    narrator.out("Run the demo again as often as you like: what is done stays done.")
    narrator.out("")
    narrator.out("Yours to decide, in the console:" if waiting else "Nothing waits for you. The console:")
    narrator.columns([("make console", ""), (URL, f"user {NAME}, password {PASSWORD}")])
