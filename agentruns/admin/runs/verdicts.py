"""The verdicts that staff may give on a call in doubt: their forms and results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.forms import RESULT_LENGTH, VerdictForm
from agentruns.admin.html import as_text, bare, plain_line
from agentruns.admin.runs.steps import mask_for, verdict_words
from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.masking import carries_mask
from agentruns.journal.read import read_rows
from agentruns.models import Message, Run
from agentruns.tools.card import MASK

EARLIER = 5  # results of the tool that are looked at

if TYPE_CHECKING:
    from agentruns.admin.runs.calls import CallHistory


def blank(found: CallHistory, verdict: str = "", data: Any = None, *, keeps: Any = None) -> VerdictForm:
    """Return the form of a verdict on the call as it is now; what was typed before is kept."""
    initial = {"seq": str(found.seq), "result": prefilled(found), **(keeps or {})}
    form = VerdictForm(
        data,
        initial=initial,
        verdict=verdict,
        is_uncleared=found.is_uncleared,
        needs_result=found.waits and found.returned is None,
    )
    form.fields["result"].help_text = "" if found.returned else example(found)
    lines = initial["result"].count("\n") + 1
    form.fields["result"].widget.attrs["rows"] = min(max(lines, 2), 16)
    return form


def example(found: CallHistory) -> str:
    """Return what a result looks like: the last one of the tool in the session, or one made up."""
    rows = Message.objects.using(settings.DATABASE).filter(session_id=found.run.session_id)
    results = rows.filter(kind=events.TOOL_RESULT, tool_name=found.call.tool).order_by("-seq")[:EARLIER]
    for row in map(mask_for(found.run).row, read_rows(results)):
        if row.payload.get("outcome") == "ok":
            text = plain_line(as_text(row.payload.get("content")))
            return _("An earlier call of it returned: %(result)s") % {"result": text}
    return _('For example: done by hand, or {"status": "sent"}')


def prefilled(found: CallHistory) -> str:
    """Return what the handler returned after all, fit for a form; "" if nothing, or if it is too long."""
    late = found.returned
    if late is None:
        return ""
    text = bare(as_text(late.payload.get("content"))).strip()
    return text if len(text) <= RESULT_LENGTH else ""


def entered(found: CallHistory, text: str) -> Any:
    """Return the result that a person means: what was pre-filled and left alone is what was returned.

    Text that is a JSON object, array or number is taken as that, anything else as it stands.
    """
    late = found.returned
    if late is not None and text == prefilled(found):
        rows = Message.objects.using(settings.DATABASE).filter(run_id=found.run.pk, seq=late.seq)
        return rows.get().payload.get("content")  # not as the page masks it
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number or isinstance(value, dict | list) else text


def is_whole(found: CallHistory, form: VerdictForm) -> bool:
    """Return whether the result holds no mask in place of a returned value; else the form says so."""
    late, text = found.returned, form.cleaned_data["result"]
    if late is None or form.cleaned_data["verdict"] != "occurred" or text == prefilled(found):
        return True
    is_masked = MASK in text and MASK in prefilled(found)
    if is_masked or carries_mask(text, "content", {"content": late.payload.get("content")}):
        form.add_error("result", _("Part of it is hidden here. Leave it as it is, or write your own."))
        return False
    return True


def kind_of(value: Any) -> str:
    """Return how a result is stored, in words."""
    if isinstance(value, str):
        return _("text")
    return str(_JSON_KINDS.get(type(value), _("JSON")))


def is_same(found: CallHistory, row: Row, user: Any, given: dict[str, Any]) -> bool:
    """Return whether a verdict that stands is the very one `user` sends again."""
    payload = row.payload
    mine = str((payload.get("actor") or {}).get("id")) == str(user.pk)
    if not mine or (payload["verdict"], payload["evidence"]) != (given["verdict"], given.get("evidence")):
        return False
    if given["verdict"] != "occurred":
        return True
    result = found.last(events.TOOL_RESULT)
    stored = payload.get("result") if "result" in payload else result and result.payload["content"]
    return bool(stored == given["result"])


def done(found: CallHistory, run: Run, verdict: str, result: Any) -> str:
    """Return what a verdict just recorded means; `found` is the call as it was before."""
    said = _("Recorded: %(verdict)s.") % {"verdict": verdict_words(verdict)}
    if found.is_uncleared:
        still = _("The doubt is lifted.") if verdict != "unknown" else _("The doubt stays.")
        return f"{said} {still}"
    if verdict == "occurred":
        said = _("%(said)s The result is stored as %(kind)s.") % {"said": said, "kind": kind_of(result)}
    if run.status == Run.Status.QUEUED:
        return f"{said} " + _("A worker picks up the run.")
    return said


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_JSON_KINDS = {
    dict: gettext_lazy("a JSON object"),
    list: gettext_lazy("a JSON array"),
    int: gettext_lazy("a number"),
    float: gettext_lazy("a number"),
}
