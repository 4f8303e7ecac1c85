"""The spans of a run's timeline, read from its journal rows. Pure: rows in, spans and marks out.

A row that newer code wrote, or whose partner is missing, costs its own span and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from agentruns.admin.html import plain
from agentruns.admin.runs.steps import outcome_words, row_card
from agentruns.journal import events
from agentruns.journal.events import COPIED, Row
from agentruns.tools.card import one_line

MODEL, TOOLS, PEOPLE, IDLE = "model", "tools", "people", "idle"
TAKEN_OVER = ("lease expired", "the last drive failed")
NOTICED = timedelta(milliseconds=10)  # shorter than that nobody waited
LONGEST_DELAY = timedelta(days=366)


@dataclass(slots=True)
class Span:
    """Something that took time; `seq` is the row that says so, `end` is None while it goes on.

    `is_work` is time that somebody worked, as far as the journal can tell it from waiting.
    """

    lane: str
    what: str
    start: datetime
    seq: int
    end: datetime | None = None
    outcome: str = ""
    tone: str = "plain"
    is_work: bool = False
    required: int = 1
    given: int = 0

    def close(self, end: datetime, outcome: str, tone: str = "plain") -> None:
        """Set its end and its outcome; where two clocks disagree it ended when it began."""
        self.end, self.outcome, self.tone = max(end, self.start), outcome, tone


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment."""

    at: datetime
    what: str
    seq: int
    tone: str


@dataclass(slots=True)
class History:
    """The spans and marks of the rows read so far."""

    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    tools: dict[str, Span] = field(default_factory=dict)  # by call, the attempt that goes on
    people: dict[tuple[str, str], Span] = field(default_factory=dict)  # what people are asked
    since: datetime | None = None  # when the last row came that let the run go on
    seq: int = 0  # of that row
    queued: bool = True  # whether a worker had to be found after that row
    taken_at: datetime | None = None
    backoff: Span | None = None
    replies: int = 0

    def add(self, lane: str, what: str, start: datetime, row: Row, **values: Any) -> Span:
        """Add a span that a row begins or ends."""
        span = Span(lane, what, start, row.seq, **values)
        self.spans.append(span)
        return span

    def ask(self, about: str, row: Row, what: str) -> Span:
        """Add a wait for people that begins with a row."""
        span = self.people[about, row.call_id] = self.add(PEOPLE, what, row.created_at, row)
        return span

    def mark(self, row: Row, tone: str, what: str = "") -> None:
        """Add a mark for a row, by default with the title of its card."""
        self.marks.append(Mark(row.created_at, what or _title(row), row.seq, tone))

    def queue(self, row: Row) -> None:
        """Add the time from a decision to a worker's row."""
        if row.epoch and self.queued and self.since and row.created_at - self.since >= NOTICED:
            self.add(IDLE, _("Queued for a worker"), self.since, row).close(row.created_at, "")


def read(rows: Iterable[Row], now: datetime, doing: str = "") -> History:
    """Return spans and marks; `doing` says what a run that has not ended does: model, queue, silent."""
    history = History()
    for row in rows:
        if COPIED in _payload(row):  # the history of another run
            continue
        apply = _READ.get(row.kind)
        if apply is not None:
            apply(history, row)
        if row.kind in _GOES_ON:
            _goes_on(history, row)
    _go_on_now(history, now, doing)
    return history


def _goes_on(history: History, row: Row) -> None:
    delay = _payload(row).get("retry_in") if row.kind == events.MODEL_FAILED else None
    history.since, history.seq, history.queued = row.created_at, row.seq, row.epoch == 0
    if isinstance(delay, int | float) and delay > 0:
        until = row.created_at + min(timedelta(seconds=min(delay, 1e9)), LONGEST_DELAY)
        history.backoff = history.add(IDLE, _("Back-off after the model failed"), row.created_at, row)
        history.backoff.close(until, "")
        history.since, history.queued = until, True


def _end_backoff(history: History, row: Row) -> None:
    """A person may have ended the back-off before its time."""
    backoff, history.backoff = history.backoff, None
    if backoff is not None and backoff.end is not None and backoff.end > row.created_at:
        backoff.close(row.created_at, _("ended early"))
        history.since = backoff.end


def _go_on_now(history: History, now: datetime, doing: str) -> None:
    since = history.since
    if since is None or not doing or history.tools:
        return
    if history.backoff is not None and since > now:
        history.backoff.end = None
        return
    lane = MODEL if doing == "model" else IDLE
    words = {"model": _("The model is asked"), "queue": _("Queued for a worker")}
    what = words.get(doing, _("Its worker has fallen silent"))
    tone = "bad" if doing == "silent" else "plain"
    history.spans.append(Span(lane, what, since, history.seq, tone=tone, is_work=doing == "model"))


def _asked(history: History, row: Row, outcome: str, tone: str) -> None:
    """The model was at work until this row."""
    _end_backoff(history, row)
    history.replies += 1
    if history.since is None:
        return
    what = _("Model request %(number)d") % {"number": history.replies}
    if history.queued:
        what = _("%(what)s, time in the queue included") % {"what": what}
    span = history.add(MODEL, what, history.since, row, is_work=not history.queued)
    span.close(row.created_at, outcome, tone)


def _assistant(history: History, row: Row) -> None:
    calls = _payload(row).get("calls")
    asked = len(calls) if isinstance(calls, list) else 0
    words = ngettext("asked for %(count)d call", "asked for %(count)d calls", asked) % {"count": asked}
    _asked(history, row, words if asked else _("replied"), "good")


def _model_failed(history: History, row: Row) -> None:
    error = _payload(row).get("error")
    kind = error.get("type", "") if isinstance(error, dict) else ""
    _asked(history, row, _("failed: %(error)s") % {"error": one_line(plain(kind))}, "bad")


def _approval_requested(history: History, row: Row) -> None:
    required = _payload(row).get("required")
    span = history.ask("approval", row, _("Approval of %(tool)s") % {"tool": plain(row.tool_name)})
    span.required = required if isinstance(required, int) else 1


def _approval_decided(history: History, row: Row) -> None:
    span, payload = history.people.get(("approval", row.call_id)), _payload(row)
    if span is None:
        return
    if payload.get("verb") == "approve":
        span.given = 1 if "arguments" in payload else span.given + 1  # an edit voids what others approved
        if span.given < span.required:
            return
    shown = row_card(row)
    del history.people["approval", row.call_id]
    span.close(row.created_at, shown.title, shown.tone)


def _tool_started(history: History, row: Row) -> None:
    history.queue(row)
    _left(history, row, history.taken_at or row.created_at)
    what = plain(row.tool_name)
    if row.attempt > 1:
        what = _("%(tool)s, attempt %(number)d") % {"tool": what, "number": row.attempt}
    history.tools[row.call_id] = history.add(TOOLS, what, row.created_at, row)


def _tool_result(history: History, row: Row) -> None:
    payload, span = _payload(row), history.tools.pop(row.call_id, None)
    title, tone = outcome_words(payload.get("outcome"), in_doubt=payload.get("in_doubt", False))
    if span is not None:
        span.close(row.created_at, title, tone)
        span.is_work = True
    else:
        history.queue(row)
    for about in ("approval", "doubt"):
        if waited := history.people.pop((about, row.call_id), None):
            waited.close(row.created_at, title, tone)


def _left(history: History, row: Row, at: datetime) -> None:
    span = history.tools.pop(row.call_id, None)
    if span is not None:
        span.close(at, _("left no result"), "bad")


def _orphan_found(history: History, row: Row) -> None:
    tool = plain(row.tool_name)
    _left(history, row, row.created_at)
    history.mark(row, "bad", _("Call of %(tool)s in doubt") % {"tool": tool})
    if _payload(row).get("action") == "held":
        history.ask("doubt", row, _("Verdict on %(tool)s") % {"tool": tool})


def _orphan_resolved(history: History, row: Row) -> None:
    span = history.people.pop(("doubt", row.call_id), None)
    if span is not None:
        span.close(row.created_at, _title(row))
    else:
        history.mark(row, "plain")


def _late_result(history: History, row: Row) -> None:
    history.mark(row, "waits", _("Late report of %(tool)s") % {"tool": plain(row.tool_name)})
    span = history.tools.pop(row.call_id, None)
    if span is not None:
        span.close(row.created_at, _("returned too late"), "bad")


def _run_paused(history: History, row: Row) -> None:
    why = one_line(plain(_payload(row).get("reason") or "-"))
    if ("pause", "") not in history.people:
        history.people["pause", ""] = history.add(
            PEOPLE, _("Paused: %(reason)s") % {"reason": why}, row.created_at, row
        )


def _run_resumed(history: History, row: Row) -> None:
    payload = _payload(row)
    reason = payload.get("reason")
    _end_backoff(history, row)
    paused = history.people.pop(("pause", ""), None) if payload.get("unpause") else None
    if paused is not None:
        paused.close(row.created_at, _title(row))
    if reason not in TAKEN_OVER:
        return
    history.taken_at = row.created_at
    history.mark(row, "bad", _("Taken over: %(reason)s") % {"reason": reason})
    if history.since is not None and not history.tools:
        span = history.add(IDLE, _("No word of the worker"), history.since, row)
        span.close(row.created_at, _("taken over"), "bad")


def _closed(history: History, row: Row) -> None:
    tone = {events.RUN_COMPLETED: "good", events.RUN_FAILED: "bad"}.get(row.kind, "plain")
    words = {events.RUN_COMPLETED: _("Completed"), events.RUN_FAILED: _("Failed")}
    what = words.get(row.kind, _("Cancelled"))
    _end_backoff(history, row)
    for span in [*history.tools.values(), *history.people.values()]:
        span.close(row.created_at, what, tone)
    history.tools, history.people = {}, {}
    history.mark(row, tone, what)


def _control(history: History, row: Row) -> None:
    history.mark(row, "waits")


def _title(row: Row) -> str:
    return row_card(row).title


def _payload(row: Row) -> dict[str, Any]:
    return row.payload if isinstance(row.payload, dict) else {}


_READ: dict[str, Callable[[History, Row], None]] = {
    events.ASSISTANT: _assistant,
    events.MODEL_FAILED: _model_failed,
    events.APPROVAL_REQUESTED: _approval_requested,
    events.APPROVAL_DECIDED: _approval_decided,
    events.TOOL_STARTED: _tool_started,
    events.TOOL_RESULT: _tool_result,
    events.ORPHAN_FOUND: _orphan_found,
    events.ORPHAN_RESOLVED: _orphan_resolved,
    events.LATE_RESULT: _late_result,
    events.RUN_PAUSED: _run_paused,
    events.RUN_RESUMED: _run_resumed,
    events.RUN_CANCEL_REQUESTED: _control,
    events.RUN_PAUSE_REQUESTED: _control,
    events.RUN_ADOPTED: _control,
    **dict.fromkeys(events.CLOSING, _closed),
}
# A row of these lets the run go on; others only inform.
_GOES_ON = {
    events.RUN_STARTED, events.USER, events.ASSISTANT, events.MODEL_FAILED, events.APPROVAL_DECIDED,
    events.TOOL_STARTED, events.TOOL_RESULT, events.ORPHAN_RESOLVED, events.RUN_RESUMED,
}  # fmt: skip
