"""The verdicts that staff may give on a call in doubt: their effects, forms and results. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.forms import RESULT_LENGTH, VerdictForm
from agentruns.admin.html import Body, ago, body, exact, plain, pretty
from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.masking import carries_mask
from agentruns.models import Message, Run
from agentruns.tools.card import MASK
from agentruns.utils import clock

if TYPE_CHECKING:
    from agentruns.admin.runs.calls import CallHistory


@dataclass(slots=True)
class Choice:
    """One verdict: its heading, its effect, what the model will read, or why it cannot be given."""

    verdict: str
    heading: str
    button: str
    effect: list[str]
    model_reads: list[Body] = field(default_factory=list)
    why_not: str = ""
    tone: str = "plain"


def choices(found: CallHistory, *, others: int) -> list[Choice]:
    """Return the verdicts that can be given; `others` counts what else the run waits for."""
    return [_occurred(found, others), _not_occurred(found, others), _unknown(found)]


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
    lines = initial["result"].count("\n") + 1
    form.fields["result"].widget.attrs["rows"] = min(max(lines, 2), 16)
    return form


def prefilled(found: CallHistory) -> str:
    """Return what the handler returned after all, fit for a form; "" if nothing, or if it is too long."""
    late = found.returned
    if late is None:
        return ""
    text = plain(text_of(late.payload.get("content"))).strip()
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


def text_of(value: Any) -> str:
    """Return a result as text: itself, or as JSON for people to read; not fit for a page by itself."""
    return value if isinstance(value, str) else pretty(value)


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
    said = str(_SAID[verdict])
    if found.is_uncleared:
        still = _("The doubt is lifted.") if verdict != "unknown" else _("The doubt stays.")
        return f"{said} {still}"
    if verdict == "occurred":
        said = _("%(said)s The result is stored as %(kind)s.") % {"said": said, "kind": kind_of(result)}
    if run.status == Run.Status.QUEUED:
        return f"{said} " + _("A worker picks up the run.")
    return said


def _occurred(found: CallHistory, others: int) -> Choice:
    if found.is_uncleared:
        effect = [_only_recorded(), _lifts(found)]
    else:
        effect = [
            _("It is not run again. The model is told exactly the result that you enter."),
            _goes_on(found.run, others),
        ]
        if found.call.edited:
            effect.insert(1, _("The model reads the arguments that a person set before it."))
    if found.returned is not None:
        effect.append(
            _("The result above is what the tool returned. Unchanged, it is stored exactly so, as %s.")
            % kind_of(found.returned.payload.get("content"))
        )
    return Choice("occurred", _("It happened"), _("It happened"), effect, tone="good")


def _not_occurred(found: CallHistory, others: int) -> Choice:
    choice = Choice("not_occurred", _("It did not happen"), _("It did not happen"), [], tone="waits")
    if found.returned is not None:
        choice.why_not = _("The tool returned without an error, so it did happen.")
    if found.is_uncleared:
        again = _("It is not run again; to have it done, give the agent a new task.")
        choice.effect = [_only_recorded(), again, _lifts(found)]
        return choice
    choice.button = _("It did not happen: run it again")
    choice.effect = [
        _("A worker runs it again as attempt %d, with the same key, %s.")
        % (found.call.attempt + 1, _when_again(found)),
        _("The model is told the result of that attempt, and nothing of this one."),
        _("If it did happen after all, it happens twice, unless the outside system knows the key."),
    ]
    if _is_paused(found.run):
        choice.effect.append(_goes_on(found.run, others))
    return choice


def _unknown(found: CallHistory) -> Choice:
    if found.is_uncleared:
        effect = list(filter(None, [_("Only your note is recorded. The doubt stays."), _asks(found)]))
        return Choice("unknown", _("Still unknown"), _("Still unknown: record the note"), effect)
    tool = plain(found.call.tool)
    reads = [body(_("Told to the model, as an error"), in_doubt.UNKNOWN.format(tool=tool))]
    effect = [_("The model decides what to do: check, ask, or stop.")]
    if found.later:
        effect.append(_("Later calls of the same reply are not run, and their approvals are cancelled."))
        reads.append(body(_("Not run"), "\n".join(found.later)))
        reads.append(body(_("Told to the model of each of these"), in_doubt.AFTER_UNKNOWN))
    effect += [text for text in (_asks(found), _goes_on(found.run, 0)) if text]
    return Choice("unknown", _("Unknown"), _("Unknown: tell the model"), effect, reads)


def _when_again(found: CallHistory) -> str:
    moment = found.safe_from
    if moment is None or moment <= clock.now(settings.DATABASE):
        return _("as soon as one is free")
    return _("not before %(when)s (%(ago)s), when the time of this attempt is over") % {
        "when": exact(moment),
        "ago": ago(moment),
    }


def _goes_on(run: Run, others: int) -> str:
    if _is_paused(run):
        return _("The run stays paused until somebody resumes it.")
    if others:
        return _("The run then goes on, unless something else in it waits for a person.")
    return _("A worker then picks up the run.")


def _is_paused(run: Run) -> bool:
    return run.status == Run.Status.ORPHANED and bool(run.blocked_reason)


def _lifts(found: CallHistory) -> str:
    if found.call.declares != "nothing":
        return _("The doubt is lifted.")
    return _("The doubt is lifted: further calls of %(tool)s ask nobody on its account.") % {
        "tool": plain(found.call.tool)
    }


def _asks(found: CallHistory) -> str:
    if found.call.declares != "nothing":
        return ""
    return _("Until somebody clears it, each further call of %(tool)s in this session asks a person.") % {
        "tool": plain(found.call.tool)
    }


def _only_recorded() -> str:
    return _("This is only recorded: nothing runs, and what the model was told stays.")


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_SAID = {
    "occurred": gettext_lazy("Recorded: it happened."),
    "not_occurred": gettext_lazy("Recorded: it did not happen."),
    "unknown": gettext_lazy("Recorded: unknown."),
}
_JSON_KINDS = {
    dict: gettext_lazy("a JSON object"),
    list: gettext_lazy("a JSON array"),
    int: gettext_lazy("a number"),
    float: gettext_lazy("a number"),
}
