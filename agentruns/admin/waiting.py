"""What runs wait for, in words: the queries, a constant number of them for any number of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q, TextField
from django.db.models.functions import Cast
from django.utils import timezone
from django.utils.translation import gettext as _

from agentruns.admin.text import plain
from agentruns.admin.times import ago
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.models import Approval, Control, Message, Run
from agentruns.models.definition import definition_body

EXEMPT = ("safe_to_retry", "reconcile", "transactional")  # what a tool declares that needs no person
MAY_HOLD = (Run.Status.AWAITING_APPROVAL, Run.Status.ORPHANED, Run.Status.PAUSED)


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing a run waits for; `approval` or `call` names what a person can act on."""

    text: str
    run: UUID | None = None
    approval: UUID | None = None
    call: str = ""
    tool: str = ""
    attempt: int = 0
    evidence: str = ""

    @property
    def is_doubt(self) -> bool:
        """Whether nobody knows what became of the call."""
        return bool(self.call) and self.approval is None


def reasons(alias: str, runs: Iterable[Run]) -> dict[UUID, list[Reason]]:
    """Return what each run waits for, calls in doubt first; nothing for one that ended or goes on."""
    runs = list(runs)
    held = [run for run in runs if run.status in MAY_HOLD]
    found: dict[UUID, list[Reason]] = defaultdict(list)
    if held:
        for run_id, reason in _orphans(alias, held):
            found[run_id].append(reason)
        for run_id, reason in _approvals(alias, held):
            found[run_id].append(reason)
    for run in runs:
        text = _own_reason(run)
        if text:
            found[run.pk].append(Reason(text))
    return found


def summary(found: list[Reason]) -> str:
    """Return the reasons of one run on one line."""
    if len(found) < 2:
        return found[0].text if found else ""
    return _("%(first)s (and %(count)d more)") % {"first": found[0].text, "count": len(found) - 1}


def is_live(run: Run) -> bool:
    """Whether a worker holds the run at this moment."""
    expires = run.lease_expires_at
    return run.status == Run.Status.RUNNING and expires is not None and expires > timezone.now()


def backs_off(run: Run) -> bool:
    """Whether the run waits for a while because its model failed."""
    return run.status == Run.Status.QUEUED and run.not_before is not None and run.not_before > timezone.now()


def cancel_request(alias: str, run: Run) -> tuple[str, datetime] | None:
    """Return who asked for the run to be cancelled, and when."""
    rows = Message.objects.using(alias).own().filter(run_id=run.pk, kind=events.RUN_CANCEL_REQUESTED)
    row = rows.order_by("seq").values_list("payload", "created_at").first()
    if row is None:
        return None
    actor = row[0].get("actor") or {}
    return plain(actor.get("name") or _("the program")), row[1]


def uncleared(alias: str, run: Run) -> list[Reason]:
    """Return the calls of the run's session that the model was told of as unknown, and nobody cleared."""
    session = Message.objects.using(alias).filter(session_id=run.session_id)
    unknown = Q(kind=events.TOOL_RESULT, text__contains='"outcome":"unknown"')
    rows = session.annotate(text=Cast("payload", TextField())).filter(
        unknown | Q(kind=events.ORPHAN_RESOLVED)
    )
    found: dict[str, Reason] = {}
    fields = ("run_id", "kind", "call_id", "tool_name", "payload")
    for row in rows.order_by("seq").values(*fields):
        if row["kind"] == events.ORPHAN_RESOLVED and row["payload"]["verdict"] in events.CLEARING:
            found.pop(row["call_id"], None)
        elif row["kind"] == events.TOOL_RESULT and row["payload"]["outcome"] == "unknown":
            found[row["call_id"]] = _uncleared(run, row)
    return list(found.values())


def sweeper_seen(alias: str) -> datetime | None:
    """Return when a worker's sweep was last seen."""
    seen: datetime | None = (
        Control.objects.using(alias).sweepers().order_by("-seen_at").values_list("seen_at", flat=True).first()
    )
    return seen


def _approvals(alias: str, runs: list[Run]) -> Iterable[tuple[UUID, Reason]]:
    pending = Approval.objects.using(alias).pending().filter(run_id__in=[run.pk for run in runs])
    fields = pending.order_by("requested_at").values_list("run_id", "id", "title", "call_id")
    for run_id, approval_id, title, call_id in fields:
        text = _("Waits for approval: %(title)s") % {"title": plain(title)}
        yield run_id, Reason(text, run_id, approval_id, call=call_id)


def _orphans(alias: str, runs: list[Run]) -> Iterable[tuple[UUID, Reason]]:
    open_calls = {(run.pk, call_id) for run in runs for call_id in run.pending_calls}
    rows = Message.objects.using(alias).filter(
        run_id__in=[run.pk for run in runs], kind__in=(events.ORPHAN_FOUND, events.ORPHAN_RESOLVED)
    )
    last: dict[tuple[UUID, str], dict[str, Any]] = {}
    fields = ("run_id", "kind", "call_id", "tool_name", "attempt", "payload")
    for row in rows.order_by("seq").values(*fields):
        last[row["run_id"], row["call_id"]] = row
    for (run_id, call_id), row in last.items():
        is_held = row["kind"] == events.ORPHAN_FOUND and row["payload"].get("action") == "held"
        if is_held and (run_id, call_id) in open_calls:
            yield run_id, _orphan(row)


def _orphan(row: dict[str, Any]) -> Reason:
    tool = plain(row["tool_name"])
    return Reason(
        _("A call of %(tool)s is in doubt") % {"tool": tool},
        row["run_id"],
        call=row["call_id"],
        tool=tool,
        attempt=row["attempt"],
        evidence=plain(row["payload"].get("evidence", "")),
    )


def _uncleared(run: Run, row: dict[str, Any]) -> Reason:
    tool = plain(row["tool_name"])
    text = _("A call of %(tool)s was told to the model as unknown; nobody has cleared it.")
    body = definition_body(settings.DATABASE, run.definition_id)
    policy = body.get("tools", {}).get(row["tool_name"])
    if policy is not None and not any(policy.get(name) for name in EXEMPT):
        text += " " + _("Until then each further call of %(tool)s asks a person.")
    return Reason(text % {"tool": tool}, row["run_id"], call=row["call_id"], tool=tool)


def _own_reason(run: Run) -> str:
    if run.status == Run.Status.PAUSED:
        return _("Paused: %(reason)s") % {"reason": plain(run.blocked_reason or "-")}
    if run.status == Run.Status.RUNNING and not is_live(run):
        return _("Its worker is silent; the next sweep takes it over")
    if run.status != Run.Status.QUEUED:
        return ""
    if run.not_before is not None and backs_off(run):
        return _("The model failed; tried again %(when)s") % {"when": ago(run.not_before)}
    return plain(run.blocked_reason)
