"""What the journal knows of one call: for the card on which staff say what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.journal import card
from agentruns.admin.text import Fact, plain, visible
from agentruns.admin.times import EMPTY, ago, dated, exact
from agentruns.journal import events
from agentruns.journal.copies import original
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, fold
from agentruns.journal.masking import Sensitive, masked
from agentruns.models import Message, Run
from agentruns.tools.card import MASK, call_text
from agentruns.utils.redaction import redacted

CALL_LENGTH = 36


@dataclass(frozen=True, slots=True)
class History:
    """A call, the rows that are about it, and what its reply asks for after it that has no result yet."""

    run: Run
    call: Call
    rows: list[Row]
    later: list[str]

    @property
    def seq(self) -> int:
        """The last row that is about the call: whoever saw it knows all there is to know."""
        return self.rows[-1].seq

    @property
    def is_held(self) -> bool:
        """Whether the run waits for staff to say what became of the call."""
        return self.call.is_open and self.call.orphan == "held"

    @property
    def is_told(self) -> bool:
        """Whether its outcome was recorded as unknown, and nobody has cleared it."""
        return self.call.outcome == "unknown" and not self._cleared

    @property
    def in_doubt(self) -> bool:
        """Whether a verdict is to be given."""
        return self.is_held or self.is_told

    @property
    def _cleared(self) -> bool:
        """Whether a verdict came in after the outcome was recorded as unknown."""
        result = self.last(events.TOOL_RESULT)
        verdicts = self.all(events.ORPHAN_RESOLVED)
        return result is not None and any(
            row.seq > result.seq and row.payload["verdict"] in events.CLEARING for row in verdicts
        )

    def all(self, *kinds: str) -> list[Row]:
        """Return the rows of some kinds, in order."""
        return [row for row in self.rows if row.kind in kinds]

    def last(self, kind: str) -> Row | None:
        """Return the last row of a kind."""
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def returned(self) -> Row | None:
        """What its handler returned without an error after all: evidence that it happened."""
        reports = self.all(events.LATE_RESULT)
        sound = [one for one in reports if not one.payload.get("never_entered") and not _is_error(one)]
        return sound[-1] if sound else None

    @property
    def safe_from(self) -> datetime | None:
        """From when on the last attempt cannot be at work any more, by the time its tool gave it."""
        if self.call.timeout is None or self.call.started_at is None:
            return None
        return self.call.started_at + timedelta(seconds=self.call.timeout)


def history(alias: str, run: Run, call_id: str, sensitive: Sensitive) -> History | None:
    """Return what is known of a call, `sensitive` arguments masked; None where the run has no such call."""
    if not 0 < len(call_id) <= CALL_LENGTH or not call_id.isprintable():
        return None
    about = Message.objects.using(alias).filter(run_id=run.pk)
    rows = _rows(about.filter(call_id=call_id).order_by("seq"), sensitive)
    if not rows:
        return None
    replies = about.filter(kind=events.ASSISTANT, seq__lt=rows[0].seq).order_by("-seq")[:1]
    for reply in _rows(replies, sensitive):
        call = fold(
            run.pk, [original(reply), *(original(row) for row in rows if row.kind in _FOLDED)]
        ).calls.get(call_id)
        if call is not None:
            return History(run, call, rows, _later(run, reply, call))
    return None


def title(found: History) -> str:
    """Return in one line what the call was; not fit for a page by itself."""
    approval = found.call.approval
    return approval.title if approval is not None else _text(found.call.tool, found.call.arguments)


def facts(found: History) -> list[Fact]:
    """Return what an operator needs to look in the outside world."""
    call, started = found.call, found.last(events.TOOL_STARTED)
    key = started.payload.get("key") if started else None
    limit = _("%(seconds)g s") % {"seconds": call.timeout} if call.timeout else _("not limited")
    return [
        Fact(_("Idempotency key"), format_html('<code class="ar-copy">{}</code>', key or EMPTY)),
        Fact(_("Started"), dated(call.started_at)),
        Fact(_("Attempt"), call.attempt or EMPTY),
        Fact(_("Worker"), _("epoch %(epoch)d") % {"epoch": started.epoch} if started else EMPTY),
        Fact(_("Time given to the tool"), limit),
        Fact(_("The tool declares"), _DECLARES.get(call.declares, plain(call.declares or EMPTY))),
        Fact(_("Approved by"), _approved_by(call)),
        Fact(_("Requester"), visible(found.run.owner_name or EMPTY)),
        Fact(_("Session"), visible(found.run.session.key)),
        Fact(_("Call"), format_html('<code class="ar-copy">{}</code>', call.id)),
    ]


def findings(found: History) -> list[tuple[SafeString | str, SafeString, str]]:
    """Return what recovery found, each time: when, what, and what then became of the call."""
    return [
        (
            dated(row.created_at),
            visible(row.payload.get("evidence") or EMPTY),
            str(_ACTIONS.get(row.payload.get("action", ""), "")),
        )
        for row in found.all(events.ORPHAN_FOUND)
    ]


def became(found: History) -> list[str]:
    """Return, in sentences, what became of the call and who said so."""
    call, result = found.call, found.last(events.TOOL_RESULT)
    said = [verdict(row) for row in found.all(events.ORPHAN_RESOLVED)[-1:]]
    if result is not None and call.outcome == "unknown":
        cleared = _("Nobody has cleared it.") if found.is_told else _("The doubt is lifted.")
        return [told(result), *said, cleared]
    if result is not None:
        text = _("%(outcome)s, on %(when)s.")
        return [*said, text % {"outcome": card(result).title, "when": _moment(result)}]
    if found.is_held:
        return []
    return [*said, _open(call)]


def verdict(row: Row) -> str:
    """Return who gave a verdict, when, and which."""
    text = _VERDICTS.get(row.payload["verdict"])
    name = plain((row.payload.get("actor") or {}).get("name") or _("the program"))
    return str(text or "%(name)s, %(when)s") % {"name": name, "when": _moment(row)}


def told(row: Row) -> str:
    """Return when and by whom an outcome was recorded as unknown."""
    actor = row.payload.get("actor") or {}
    if not actor.get("name"):
        return _("Its outcome was recorded as unknown on %(when)s.") % {"when": _moment(row)}
    return _("%(name)s had its outcome told to the model as unknown on %(when)s.") % {
        "name": plain(actor["name"]),
        "when": _moment(row),
    }


def lateness(found: History, late: Row) -> str:
    """Return what a report that came too late says: of which attempt, and why it was no result."""
    doubts = [row for row in found.all(events.ORPHAN_FOUND) if row.attempt == late.attempt]
    starts = [row for row in found.all(events.TOOL_STARTED) if row.attempt == late.attempt]
    in_one_drive = bool(doubts and starts) and doubts[0].epoch == starts[0].epoch
    if _is_error(late):
        return _("Its handler raised an error, too late to count. It may have happened all the same.")
    if in_one_drive:
        return _("Its handler returned after its time was over. This is evidence that it happened:")
    return _("Its handler returned after its worker had lost the run. This is evidence that it happened:")


def _rows(queryset: Any, sensitive: Sensitive) -> list[Row]:
    found = (Row(*values) for values in queryset.values_list(*Row._fields))
    upcast = (row._replace(payload=events.upcast(row.kind, row.payload)) for row in found)
    return [masked(row, sensitive) for row in upcast]


def _later(run: Run, reply: Row, call: Call) -> list[str]:
    """What its reply asks for after it and would not be run if the model were told that it is unknown."""
    still_open = set(run.pending_calls)
    return [
        _text(later["tool"], later["arguments"])
        for later in reply.payload["calls"][call.ordinal + 1 :]
        if later["id"] in still_open and not later["parallel"]
    ]


def _text(tool: str, arguments: dict[str, Any]) -> str:
    hidden = [name for name, value in arguments.items() if value == MASK]
    return call_text(tool, redacted(arguments), hidden)


def _approved_by(call: Call) -> SafeString | str:
    if call.approval is None:
        return _("nobody: no approval was needed")
    if not call.approval.names:
        return EMPTY
    return format_html("{}, {}", visible(", ".join(call.approval.names)), dated(call.approval.decided_at))


def _open(call: Call) -> str:
    if call.attempt == 0:
        return _("It has not been started.")
    if call.is_contradicted:
        return _("Its handler has returned since. The next worker puts it before a person again.")
    text = _OPEN.get(call.orphan)
    if text is not None:
        return str(text)
    return _("Attempt %(attempt)d has started and has no result yet.") % {"attempt": call.attempt}


def _is_error(row: Row) -> bool:
    return bool(row.payload.get("is_error"))


def _moment(row: Row) -> str:
    return f"{exact(row.created_at)} ({ago(row.created_at)})"


# Rows of the call that say how it stands; requests for more time and the like are passed over.
_FOLDED = (
    events.APPROVAL_REQUESTED,
    events.APPROVAL_DECIDED,
    events.TOOL_STARTED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
)
_DECLARES = {
    "nothing": gettext_lazy("nothing: it is not repeated by itself, and nothing can be asked about it"),
    "safe_to_retry": gettext_lazy("safe to retry"),
    "reconcile": gettext_lazy("reconcile: the outside system is asked by the key"),
    "transactional": gettext_lazy("transactional"),
}
_ACTIONS = {
    "held": gettext_lazy("held for a person"),
    "surfaced": gettext_lazy("told to the model as unknown"),
    "retry": gettext_lazy("repeated, because the tool says that is safe"),
    "reconcile": gettext_lazy("the outside system is asked"),
}
_OPEN = {
    "not_occurred": gettext_lazy("A worker runs it again, with the same key."),
    "retry": gettext_lazy("A worker repeats it: its tool says that is safe."),
    "reconcile": gettext_lazy("A worker asks the outside system what became of it."),
}
_VERDICTS = {
    "occurred": gettext_lazy("%(name)s said on %(when)s that it happened."),
    "not_occurred": gettext_lazy("%(name)s said on %(when)s that it did not happen."),
    "unknown": gettext_lazy("%(name)s said on %(when)s that it is unknown."),
}
