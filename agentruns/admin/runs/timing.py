"""The time that each step of a run took, and the wait before it, from its journal rows, in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import log10
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.html import duration
from agentruns.journal import events
from agentruns.journal.events import Row

NOTICED = timedelta(seconds=1)  # a shorter gap is not worth a line
# Reasons in a journal why another worker took a run over -> words for people.
TAKEN_OVER = {
    "lease expired": gettext_lazy("Its worker fell silent; another one took the run over."),
    "the last drive failed": gettext_lazy("Its worker failed; another one took the run over."),
}
# Kind of row that ends something -> kind of row that began it.
BEGINS = {
    events.TOOL_RESULT: events.TOOL_STARTED,
    events.LATE_RESULT: events.TOOL_STARTED,
    events.APPROVAL_DECIDED: events.APPROVAL_REQUESTED,
    events.ORPHAN_RESOLVED: events.ORPHAN_FOUND,
    events.RUN_RESUMED: events.RUN_PAUSED,
}
WAITS = {
    events.APPROVAL_REQUESTED: gettext_lazy("waited %(time)s for an approval"),
    events.ORPHAN_FOUND: gettext_lazy("waited %(time)s for a verdict"),
    events.RUN_PAUSED: gettext_lazy("paused for %(time)s"),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """The wait before a row, and the time of the step that the row ends; `bar` is its logarithm, 0 to 6."""

    waited: str = ""
    took: str = ""
    bar: str = ""


def timings(rows: Iterable[Row]) -> dict[int, Timing]:
    """Compute the timing of each row that a run wrote itself, by seq. The first such row has none."""
    by_seq: dict[int, Timing] = {}
    begun: dict[tuple[str, str], datetime] = {}
    before: Row | None = None
    for row in rows:
        if events.COPIED in row.payload:  # the history of another run
            continue
        begin = BEGINS.get(row.kind, "")
        since = begun.pop((begin, row.call_id), None)
        if before is not None:
            by_seq[row.seq] = _timing(row, before, begin, since)
        begun[row.kind, row.call_id] = row.created_at
        if row.kind == events.ORPHAN_FOUND:  # a later row is no result of this attempt
            begun.pop((events.TOOL_STARTED, row.call_id), None)
        before = row
    return by_seq


def _timing(row: Row, before: Row, begin: str, since: datetime | None) -> Timing:
    gap = max(row.created_at - before.created_at, timedelta())
    if row.kind in (events.ASSISTANT, events.MODEL_FAILED):
        planned = before.payload.get("retry_in") if before.kind == events.MODEL_FAILED else None
        seconds = max(planned, 0) if isinstance(planned, int | float) else 0
        delay = timedelta(seconds=min(gap.total_seconds(), seconds))
        queued = "" if before.epoch else _("%(time)s, time in the queue included")
        return _took(gap - delay, queued, _waited(_("waited %(time)s for the next attempt"), delay))
    if begin == events.TOOL_STARTED:
        return _took(row.created_at - since) if since else Timing()
    if row.kind == events.RUN_RESUMED and since is None:
        silent = str(row.payload.get("reason")) in TAKEN_OVER
        why = _("no word of its worker for %(time)s") if silent else _("waited %(time)s to be resumed")
        return Timing(_waited(why, gap))
    if begin or before.kind in WAITS:
        return Timing(_waited(WAITS[begin or before.kind], row.created_at - (since or before.created_at)))
    return Timing(_waited(_("waited %(time)s for a worker"), gap) if row.epoch and not before.epoch else "")


def _waited(template: Any, length: timedelta) -> str:
    return str(template) % {"time": duration(length)} if length >= NOTICED else ""


def _took(length: timedelta, template: str = "", waited: str = "") -> Timing:
    length = max(length, timedelta())  # clocks may disagree
    bar = min(log10(max(length / timedelta(milliseconds=1), 1)), 6)
    return Timing(waited, (template or "%(time)s") % {"time": duration(length)}, f"{bar:.1f}")
