"""What was decided about the same tool before, and whether the very same call was made already."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import waiting
from agentruns.admin.text import plain
from agentruns.admin.times import ago
from agentruns.journal import events
from agentruns.journal.copies import happened_at
from agentruns.models import Approval, Message, Run
from agentruns.tools.card import one_line

LATEST = 200  # decisions and calls that are looked at: a page must not cost what the history is long
SHOWN = 3
WORDS: dict[str, Any] = {
    "approved": gettext_lazy("approved"),
    "consumed": gettext_lazy("approved"),
    "denied": gettext_lazy("denied"),
    "answered": gettext_lazy("answered"),
    "expired": gettext_lazy("expired"),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning in red, with the run it is about."""

    text: Any
    run_id: UUID | None = None


def precedents(approvals: Any, approval: Approval) -> tuple[str, list[str]]:
    """Return "12 approved, 1 denied" for the tool, and the reasons of the latest denials."""
    decided = approvals.filter(tool_name=approval.tool_name, status__in=WORDS)
    latest = decided.exclude(pk=approval.pk).order_by("-requested_at")
    fields = ("status", "decided_by_name", "reason", "decided_at")
    rows = list(latest.values_list(*fields)[:LATEST])
    counts = Counter(str(WORDS[status]) for status, *_rest in rows)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    denials = [_denial(*row[1:]) for row in rows if row[0] == "denied"]
    if len(rows) == LATEST:
        summary = _("of the last %(count)d: %(summary)s") % {"count": LATEST, "summary": summary}
    return summary, denials[:SHOWN]


def _denial(name: str, reason: str, when: datetime | None) -> str:
    return _("%(name)s denied one %(ago)s: %(reason)s") % {
        "name": plain(name or _("the program")),
        "ago": ago(when) if when else "",
        "reason": one_line(plain(reason)),
    }


def flags(alias: str, approval: Approval) -> list[Flag]:
    """Return what should make a person stop: the same call was made before, or one like it is in doubt."""
    found = [*_same_here(alias, approval), *_same_elsewhere(alias, approval)]
    return [*found[:SHOWN], *_in_doubt(alias, approval)]


def _same_here(alias: str, approval: Approval) -> list[Flag]:
    rows = Message.objects.using(alias).filter(
        session_id=approval.run.session_id, kind=events.TOOL_STARTED, tool_name=approval.tool_name
    )
    latest = rows.exclude(call_id=approval.call_id).order_by("-seq")
    started: dict[str, tuple[UUID, datetime]] = {}
    for run_id, call_id, payload, when in latest.values_list("run_id", "call_id", "payload", "created_at")[
        :LATEST
    ]:
        if payload.get("digest") == approval.digest:
            started.setdefault(call_id, (run_id, happened_at(payload, when)))
    text = _("This exact call was started in this session before, %(ago)s.")
    return [Flag(text % {"ago": ago(when)}, run_id) for run_id, when in started.values()]


def _same_elsewhere(alias: str, approval: Approval) -> list[Flag]:
    same = Approval.objects.using(alias).filter(digest=approval.digest, status=Approval.Status.CONSUMED)
    others = same.exclude(run__session_id=approval.run.session_id).order_by("-decided_at")
    text = _("This exact call was approved and started in another session, %(ago)s, by %(name)s.")
    return [
        Flag(text % {"ago": ago(when) if when else "", "name": plain(name or _("the program"))}, run_id)
        for run_id, when, name in others.values_list("run_id", "decided_at", "decided_by_name")[:SHOWN]
    ]


def _in_doubt(alias: str, approval: Approval) -> list[Flag]:
    held = Run.objects.using(alias).filter(status=Run.Status.ORPHANED).order_by("-updated_at")
    found = waiting.reasons(alias, held.defer("input", "output", "error")[:LATEST])
    text = _("A call of this tool is in doubt: nobody knows whether it happened.")
    return [
        Flag(text, run_id)
        for run_id, reasons in found.items()
        if any(reason.approval is None and reason.tool == plain(approval.tool_name) for reason in reasons)
    ][:SHOWN]
