"""One reader for what runs wait for, for the console and the commands alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, Min, Q
from django.db.models.functions import Now

from agentruns.conf import settings
from agentruns.journal import events
from agentruns.models import Approval, Control, Message, Run
from agentruns.models.definition import definition_body
from agentruns.models.querysets import ACTIVE, RunQuerySet
from agentruns.utils import clock

FOR_PEOPLE = (Run.Status.AWAITING_APPROVAL, Run.Status.ORPHANED, Run.Status.PAUSED)
ORPHAN, UNCLEARED, APPROVAL, PAUSED = "orphan", "uncleared", "approval", "paused"
SILENT, BACKOFF, BLOCKED = "silent", "back-off", "blocked"
CLEARING = (events.TOOL_RESULT, events.APPROVAL_DECIDED, events.ORPHAN_RESOLVED)  # rows that say which
EXEMPT = ("safe_to_retry", "reconcile", "transactional")  # what a tool declares that needs no person


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One thing that a run waits for; `approval_id` or `call_id` names what a person can act on.

    `text` is as it was written, fit for no page yet: the evidence of a call in doubt, or the error that it
    ended with, the title of an approval, why a run is paused or blocked.
    """

    kind: str
    run_id: UUID
    call_id: str = ""
    tool: str = ""
    attempt: int = 0
    text: str = ""
    approval_id: UUID | None = None
    until: datetime | None = None  # of a back-off
    gates_tool: bool = False  # each further call of the tool asks a person until this one is cleared


def waits(alias: str, runs: Iterable[Run]) -> dict[UUID, list[Wait]]:
    """Return what each run waits for, calls in doubt first, by two queries for any number of runs.

    A run that ended, or that goes on by itself, is not among them.
    """
    runs = list(runs)
    stopped = [run for run in runs if run.status in FOR_PEOPLE]
    found: dict[UUID, list[Wait]] = defaultdict(list)
    if stopped:
        for wait in (*_orphans(alias, stopped), *_approvals(alias, stopped)):
            found[wait.run_id].append(wait)
    for run in runs:
        own = _own(run)
        if own is not None:
            found[run.pk].append(own)
    return found


def uncleared(alias: str, run: Run) -> list[Wait]:
    """Return the calls of the run's session that have a result and may have happened, and nobody cleared.

    None of an imported one, which takes no verdict.
    """
    rows = Message.objects.using(alias).filter(session_id=run.session_id, session__imported_at=None)
    rows = rows.filter(kind__in=CLEARING)
    found = uncleared_in(map(_read, rows.order_by("seq").values_list(*events.Row._fields)))
    tools = definition_body(alias, run.definition_id).get("tools", {}) if found else {}
    return [
        Wait(
            kind=UNCLEARED,
            run_id=row.run_id,
            call_id=row.call_id,
            tool=row.tool_name,
            text=str(row.payload["content"]) if row.payload.get("in_doubt") else "",
            gates_tool=row.tool_name in tools and not any(tools[row.tool_name].get(name) for name in EXEMPT),
        )
        for row in found
    ]


def uncleared_in(rows: Iterable[events.Row]) -> list[events.Row]:
    """Return the results that leave a doubt and were not cleared by a later row; rows are in order."""
    found: dict[str, events.Row] = {}
    for row in rows:
        if row.kind == events.TOOL_RESULT and events.leaves_doubt(row.payload):
            found[row.call_id] = row
        elif row.kind == events.APPROVAL_DECIDED:
            for call_id in row.payload.get("settles", ()):
                found.pop(call_id, None)
        elif row.kind == events.ORPHAN_RESOLVED and row.payload["verdict"] in events.CLEARING:
            found.pop(row.call_id, None)
    return list(found.values())


def is_live(run: Run) -> bool:
    """Return whether a worker holds the run at this moment."""
    expires = run.lease_expires_at
    return run.status == Run.Status.RUNNING and expires is not None and expires > clock.now(settings.DATABASE)


def is_stalled(run: Run) -> bool:
    """Return whether the run should be running and no worker holds it."""
    return run.status == Run.Status.RUNNING and not is_live(run)


def backs_off(run: Run) -> bool:
    """Return whether the run waits for a while because its model failed."""
    until = run.not_before
    return run.status == Run.Status.QUEUED and until is not None and until > clock.now(settings.DATABASE)


def cancel_request(alias: str, run: Run) -> tuple[str, datetime] | None:
    """Return who asked for the run to be cancelled, "" for the program, and when."""
    rows = Message.objects.using(alias).own().filter(run_id=run.pk, kind=events.RUN_CANCEL_REQUESTED)
    row = rows.order_by("seq").values_list("payload", "created_at").first()
    return (_actor(row[0]), row[1]) if row else None


def pause_of(alias: str, run: Run) -> tuple[bool, tuple[str, datetime] | None]:
    """Return whether a run is paused, and who asked when for a pause that its worker has not made yet."""
    kinds = (events.RUN_PAUSE_REQUESTED, events.RUN_PAUSED, events.RUN_RESUMED)
    rows = Message.objects.using(alias).own().filter(run_id=run.pk, kind__in=kinds).order_by("-seq")
    for kind, payload, at in rows.values_list("kind", "payload", "created_at"):
        if events.COPIED in payload or (kind == events.RUN_RESUMED and not payload.get("unpause")):
            continue
        if kind == events.RUN_PAUSE_REQUESTED:
            return False, (_actor(payload), at)
        return kind == events.RUN_PAUSED, None
    return False, None


def sweeper_seen(alias: str) -> datetime | None:
    """Return when a worker's sweep was last seen."""
    seen = Control.objects.using(alias).sweepers().order_by("-seen_at").values_list("seen_at", flat=True)
    return seen.first()


def standing(alias: str, run_id: UUID | str | None = None) -> dict[str, Any]:
    """Return how many runs are leased and until when the first, wait for a person, or could not be taken."""
    runs = Run.objects.using(alias)
    if run_id is not None:
        runs = runs.filter(pk=run_id)
    leased = runs.filter(Q(status__in=ACTIVE), lease_expires_at__gte=Now())
    return {
        **leased.aggregate(leased=Count("pk"), leased_until=Min("lease_expires_at")),
        "for_people": runs.filter(status__in=FOR_PEOPLE).count(),
        "unserved": unserved(runs).count(),
    }


def unserved(runs: RunQuerySet) -> RunQuerySet:
    """Return those of the runs that no process that looked could take."""
    return runs.filter(status=Run.Status.QUEUED).exclude(blocked_reason="")


def _orphans(alias: str, runs: list[Run]) -> Iterator[Wait]:
    open_calls = {(run.pk, call_id) for run in runs for call_id in run.pending_calls}
    kinds = (events.ORPHAN_FOUND, events.ORPHAN_RESOLVED)
    rows = Message.objects.using(alias).filter(run_id__in=[run.pk for run in runs], kind__in=kinds)
    last = {}
    for row in map(_read, rows.order_by("seq").values_list(*events.Row._fields)):
        last[row.run_id, row.call_id] = row
    for key, row in last.items():
        waits_for_people = row.kind == events.ORPHAN_FOUND and row.payload.get("action") == "held"
        if waits_for_people and key in open_calls:
            yield Wait(
                kind=ORPHAN,
                run_id=row.run_id,
                call_id=row.call_id,
                tool=row.tool_name,
                attempt=row.attempt,
                text=row.payload.get("evidence", ""),
            )


def _approvals(alias: str, runs: list[Run]) -> Iterator[Wait]:
    pending = Approval.objects.using(alias).pending().filter(run_id__in=[run.pk for run in runs])
    fields = ("run_id", "pk", "call_id", "tool_name", "title")
    for run_id, pk, call_id, tool, title in pending.order_by("requested_at").values_list(*fields):
        yield Wait(kind=APPROVAL, run_id=run_id, approval_id=pk, call_id=call_id, tool=tool, text=title)


def _own(run: Run) -> Wait | None:
    if run.status == Run.Status.PAUSED:
        return Wait(kind=PAUSED, run_id=run.pk, text=run.blocked_reason)
    if is_stalled(run):
        return Wait(kind=SILENT, run_id=run.pk)
    if backs_off(run):
        return Wait(kind=BACKOFF, run_id=run.pk, until=run.not_before)
    if run.status == Run.Status.QUEUED and run.blocked_reason:
        return Wait(kind=BLOCKED, run_id=run.pk, text=run.blocked_reason)
    return None


def _read(values: tuple[Any, ...]) -> events.Row:
    row = events.Row(*values)
    return row._replace(payload=events.upcast(row.kind, row.payload))


def _actor(payload: dict[str, Any]) -> str:
    return str((payload.get("actor") or {}).get("name") or "")
