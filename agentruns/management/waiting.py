"""Lines that say what runs wait for and the step that comes next: a path in the admin, or a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings
from django.urls import NoReverseMatch, reverse

from agentruns.journal.masking import mask_of, masked_runs
from agentruns.management.terminal import moment, shortened
from agentruns.models import Approval, Run
from agentruns.services import waiting

MOST = 10


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
    runs = waiting.unserved(Run.objects.using(alias)).select_related("session").order_by("created_at")
    found = masked_runs((runs if run_id is None else runs.filter(pk=run_id))[: MOST + 1])
    for run in found[:MOST]:
        yield f"Session {run.session.key}: {shortened(run.blocked_reason, 300)}"
    if len(found) > MOST:
        yield "and more"


def lines(alias: str, run_ids: Iterable[UUID]) -> Iterator[str]:
    """Yield a line for each of these runs that waits for a person, at most ten."""
    stopped = Run.objects.using(alias).filter(pk__in=list(run_ids), status__in=waiting.FOR_PEOPLE)
    runs = masked_runs(stopped.select_related("session").order_by("created_at"))
    waits = waiting.waits(alias, runs[:MOST])
    for run in runs[:MOST]:
        first = waits[run.pk][0] if waits[run.pk] else None
        if first is not None and first.kind == waiting.ORPHAN:
            why, step = f"did {first.tool} happen?", verdict(run.pk, first.call_id)
        elif first is not None and first.approval_id is not None:
            why, step = f"{first.tool} waits for approval.", decision(first.approval_id)
        else:
            step = page("run_change", run.pk) or f"manage.py show_run {run.pk}"
            why = f"{run.status}: {shortened(run.blocked_reason) or 'see why'}"
        yield f"Run {run.pk} in session {run.session.key}: {why} {step}"
    if len(runs) > MOST:
        yield f"and {len(runs) - MOST} more"


def decision(approval_id: UUID) -> str:
    """Return where an approval is decided."""
    return page("approval_change", approval_id) or f"manage.py approve_call {approval_id} --user NAME"


def verdict(run_id: UUID | str, call_id: str) -> str:
    """Return where a person says what became of a call in doubt."""
    return page("run_call", run_id, call_id) or (
        f'agentruns.resolve_orphan("{run_id}", "{call_id}", ...) in manage.py shell'
    )


def to_resume(run: Run) -> str:
    """Return why a run is paused, and the step that lets it go on once that is put right."""
    step = page("run_change", run.pk)
    how = f"press Resume on {step}" if step else f'agentruns.resume_run("{run.pk}", ...) in manage.py shell'
    run = mask_of(run).run(run)
    reason = shortened(run.blocked_reason).removesuffix(".") or "no reason was given"
    return f"Held: {reason}. Put that right, then {how}"


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
