"""What a run called: how often each call was started, by whose leave, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from agentruns.admin.journal import OUTCOMES
from agentruns.admin.overview import RunOverview
from agentruns.admin.text import plain, pretty, visible
from agentruns.admin.times import stamp
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.events import Row, upcast
from agentruns.journal.masking import masked
from agentruns.models import Message, Run

KINDS = (
    events.ASSISTANT,
    events.APPROVAL_DECIDED,
    events.TOOL_STARTED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
)
ROWS = 500
ARGUMENTS = 300  # characters of them in the table


@dataclass(slots=True)
class Effect:
    """One call: when it was started, who had decided on it, what its result says. Fit for a page."""

    call: str
    tool: SafeString
    arguments: SafeString
    started: list[tuple[str, SafeString | str]] = field(default_factory=list)  # row, when
    decided: list[tuple[SafeString, SafeString | str]] = field(default_factory=list)  # who did what, when
    key: str = ""
    outcome: str = ""
    tone: str = "plain"
    returned_late: bool = False
    url: str = ""


class RunEffects(RunOverview):
    """The table of what was called, for the admin of runs."""

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the table."""
        rows = Message.objects.using(settings.DATABASE).own().filter(run_id=run.pk, kind__in=KINDS)
        newest = [Row(*values) for values in rows.order_by("-seq").values_list(*Row._fields)[: ROWS + 1]]
        sensitive = self.sensitive(run)
        found = effects(
            masked(row._replace(payload=upcast(row.kind, row.payload)), sensitive)
            for row in reversed(newest[:ROWS])
        )
        for one in found:
            one.url = self.url(request, "call", run.pk, one.call)
        return {
            **super().sections(request, run),
            "effects": found,
            "effects_told": told(found),
            "effects_cut": len(newest) > ROWS,
        }


def effects(rows: Iterable[Row]) -> list[Effect]:
    """Return the calls that rows of one run tell of, in the order in which they were asked for."""
    found: dict[str, Effect] = {}
    for row in rows:
        if events.COPIED in row.payload:
            continue
        if row.kind == events.ASSISTANT:
            for call in row.payload["calls"]:
                shown = plain(pretty(call["arguments"]))
                cut = shown if len(shown) <= ARGUMENTS else f"{shown[:ARGUMENTS]}…"
                found[call["id"]] = Effect(call["id"], visible(call["tool"]), visible(cut))
        elif row.call_id in found:
            _note(found[row.call_id], row)
    return list(found.values())


def told(found: list[Effect]) -> str:
    """Return in one sentence how often something was started."""
    starts = sum(len(one.started) for one in found)
    calls = ngettext("%(count)d call", "%(count)d calls", len(found)) % {"count": len(found)}
    again = sum(len(one.started) > 1 for one in found)
    text = ngettext(
        "The model asked for %(calls)s; a tool was started %(count)d time.",
        "The model asked for %(calls)s; tools were started %(count)d times.",
        starts,
    ) % {"calls": calls, "count": starts}
    if not again:
        return text + " " + _("No call was started twice.") if starts else text
    return f"{text} " + ngettext(
        "%(count)d call was started more than once.", "%(count)d calls were started more than once.", again
    ) % {"count": again}


def _note(effect: Effect, row: Row) -> None:
    payload = row.payload
    if row.kind == events.TOOL_STARTED:
        effect.started.append((str(row.seq), stamp(row.created_at)))
        effect.key = plain(payload["key"])
    elif row.kind == events.APPROVAL_DECIDED:
        who = (payload.get("actor") or events.PROGRAM)["name"]
        text = _("%(verb)s by %(who)s") % {"verb": _verb(payload), "who": who}
        effect.decided.append((visible(text), stamp(row.created_at)))
    elif row.kind == events.TOOL_RESULT:
        title, effect.tone = OUTCOMES.get(payload["outcome"], (payload["outcome"], "plain"))
        effect.outcome = plain(title)
    elif row.kind == events.LATE_RESULT and not payload.get("never_entered"):
        effect.returned_late = True


def _verb(payload: dict[str, Any]) -> str:
    if payload["verb"] == "approve" and "arguments" in payload:
        return _("edited and approved")
    words = {
        "approve": _("approved"),
        "deny": _("denied"),
        "answer": _("answered"),
        "expire": _("expired"),
    }
    return words.get(payload["verb"], str(payload["verb"]))
