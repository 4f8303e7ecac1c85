"""What runs wait for, and the step that comes next, as lines: a path in the admin, or a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings
from django.db.models import Count, Min, Q
from django.db.models.functions import Now
from django.urls import NoReverseMatch, reverse

from agentruns.journal import events
from agentruns.management.terminal import moment, shortened
from agentruns.models import Approval, Message, Run
from agentruns.models.querysets import ACTIVE, RunQuerySet

PEOPLE = (Run.Status.AWAITING_APPROVAL, Run.Status.ORPHANED, Run.Status.PAUSED)
MOST = 10


def standing(alias: str, run_id: UUID | str | None = None) -> dict[str, Any]:
    """Return how many runs a process holds, until when the first, wait for a person, or nobody could take."""
    runs = Run.objects.using(alias)
    if run_id is not None:
        runs = runs.filter(pk=run_id)
    leased = runs.filter(Q(status__in=ACTIVE), lease_expires_at__gte=Now())
    held = leased.aggregate(leased=Count("pk"), leased_until=Min("lease_expires_at"))
    waits = {"for_people": runs.filter(status__in=PEOPLE).count(), "unserved": _unserved(runs).count()}
    return {**held, **waits}


def idle(stands: dict[str, Any]) -> str:
    """Return why nothing can go on."""
    said, until = ["Nothing can go on now."], f"{moment(stands['leased_until'])} UTC"
    if stands["leased"] == 1:
        said.append(
            f"1 run is held by a live lease until {until}; if its process died it is taken over then."
        )
    elif stands["leased"]:
        said.append(
            f"{stands['leased']} runs are held by live leases, the first until {until}; "
            "a run whose process died is taken over then."
        )
    if stands["for_people"]:
        one, number = stands["for_people"] == 1, stands["for_people"]
        listed = page("run_changelist")
        where = f"{listed}?status=person" if listed else "manage.py list_runs"
        said.append(f"{'1 run waits' if one else f'{number} runs wait'} for a person ({where}).")
    if stands["unserved"]:
        said.append("No process that looked could take these:")
    return " ".join(said)


def unserved(alias: str, run_id: UUID | str | None = None) -> Iterator[str]:
    """Yield a line for each run that no process that looked could take, at most ten."""
    runs = _unserved(Run.objects.using(alias)).select_related("session").order_by("created_at")
    found = list((runs if run_id is None else runs.filter(pk=run_id))[: MOST + 1])
    for run in found[:MOST]:
        yield f"Session {run.session.key}: {shortened(run.blocked_reason, 300)}"
    if len(found) > MOST:
        yield "and more"


def _unserved(runs: RunQuerySet) -> RunQuerySet:
    return runs.filter(status=Run.Status.QUEUED).exclude(blocked_reason="")


def lines(alias: str, run_ids: Iterable[UUID]) -> Iterator[str]:
    """Yield a line for each of these runs that waits for a person, at most ten."""
    waiting = Run.objects.using(alias).filter(pk__in=list(run_ids), status__in=PEOPLE)
    runs = list(waiting.select_related("session").order_by("created_at"))
    shown = runs[:MOST]
    doubts, cards = _doubts(alias, shown), _cards(alias, shown)
    for run in shown:
        if run.pk in doubts:
            call_id, tool = doubts[run.pk]
            why, step = f"did {tool} happen?", verdict(run.pk, call_id)
        elif run.pk in cards:
            why, step = f"{cards[run.pk].tool_name} waits for approval.", decision(cards[run.pk])
        else:
            step = page("run_change", run.pk) or f"manage.py show_run {run.pk}"
            why = f"{run.status}: {shortened(run.blocked_reason) or 'see why'}"
        yield f"Run {run.pk} in session {run.session.key}: {why} {step}"
    if len(runs) > MOST:
        yield f"and {len(runs) - MOST} more"


def decision(approval: Approval) -> str:
    """Return where an approval is decided."""
    return page("approval_change", approval.pk) or f"manage.py approve_call {approval.pk} --user NAME"


def verdict(run_id: UUID | str, call_id: str) -> str:
    """Return where a person says what became of a call in doubt."""
    return page("run_call", run_id, call_id) or (
        f'agentruns.resolve_orphan("{run_id}", "{call_id}", ...) in manage.py shell'
    )


def to_resume(run: Run) -> str:
    """Return why a run is paused, and the step that lets it go on once that is put right."""
    step = page("run_change", run.pk)
    how = f"press Resume on {step}" if step else f'agentruns.resume_run("{run.pk}", ...) in manage.py shell'
    return f"Held: {shortened(run.blocked_reason) or 'no reason was given'}. Put that right, then {how}"


def to_decide(approval: Approval) -> str:
    """Return the steps by which an approval is decided and carried out."""
    command = f"manage.py approve_call {approval.pk} --user NAME; then manage.py resume_runs."
    if page("approval_change", approval.pk):
        return f"Decide in the admin under Approvals, or: {command}"
    return f"Decide: {command}"


def page(name: str, *args: Any) -> str:
    """Return the path of one of the admin's pages, "" in a project without."""
    if not getattr(django_settings, "ROOT_URLCONF", None):
        return ""
    try:
        return reverse(f"admin:agentruns_{name}", args=args)
    except NoReverseMatch:
        return ""


def _doubts(alias: str, runs: list[Run]) -> dict[UUID, tuple[str, str]]:
    """Return the first call that each run is held for, with its tool."""
    held: dict[UUID, dict[str, str]] = {run.pk: {} for run in runs if run.status == Run.Status.ORPHANED}
    rows = Message.objects.using(alias).filter(run_id__in=held)
    found = rows.filter(kind__in=(events.ORPHAN_FOUND, events.ORPHAN_RESOLVED)).order_by("seq")
    for run_id, call_id, tool, payload in found.values_list("run_id", "call_id", "tool_name", "payload"):
        held[run_id].pop(call_id, None)
        if payload.get("action") == "held":
            held[run_id][call_id] = tool
    return {run_id: next(iter(calls.items())) for run_id, calls in held.items() if calls}


def _cards(alias: str, runs: list[Run]) -> dict[UUID, Approval]:
    """Return the card that each run has waited for longest."""
    pending = Approval.objects.using(alias).pending().filter(run_id__in=[run.pk for run in runs])
    return {card.run_id: card for card in pending.order_by("-requested_at")}
