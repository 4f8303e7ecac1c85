"""Journal rows as cards: the event, its time, and the person or program behind it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from agentruns.admin.html import EMPTY, Body, Fact, as_text, body, plain, pretty, spoken, stamp, visible
from agentruns.admin.runs.timing import TAKEN_OVER, Timing
from agentruns.conf import settings
from agentruns.content import IMAGES, PLAIN, described
from agentruns.journal import events, fold
from agentruns.journal.events import Row
from agentruns.journal.payloads import has_blocks, names_in
from agentruns.models import Message, Run

TEXT_LIMIT = 4_000
BRIEF = 90  # characters beside the title of a step
PAYLOAD_LIMIT = 20_000
DIGEST = re.compile("[0-9a-f]{64}")
_HANDLER = re.compile(r"\b(the|its) handler\b", re.IGNORECASE)

# The rows that say how a call stands.
OF_A_CALL = (
    events.APPROVAL_DECIDED,
    events.APPROVAL_VOIDED,
    events.TOOL_STARTED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
)
Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class File:
    """A stored file, of which a card shows only the beginning."""

    size: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture or document of a row; the run's page serves it by its SHA-256."""

    name: str
    about: str
    sha256: str
    is_picture: bool


@dataclass(slots=True)
class RowCard:
    """One journal row on the page; every text is fit for a page."""

    seq: str
    title: str
    tone: str
    at: SafeString | str
    tool: SafeString
    call: str
    attempt: int
    who: SafeString
    payload: Body
    facts: list[Fact] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    call_url: str = ""
    approval: str = ""
    file: File | None = None
    files: list[Shown] = field(default_factory=list)
    timing: Timing | None = None
    limit: int | None = TEXT_LIMIT
    brief: SafeString | str = ""
    person: SafeString | str = ""


def row_card(row: Row, *, whole: bool = False) -> RowCard:
    """Build the card of a row; a row of newer code shows at least its payload.

    Cut long texts unless `whole`; the page must then offer the whole row elsewhere.
    """
    name = actor_name(row.payload)
    result = RowCard(
        seq=str(row.seq),
        title=plain(row.kind),
        tone="plain",
        at=stamp(row.created_at),
        tool=visible(row.tool_name),
        call=row.call_id,
        attempt=row.attempt,
        who=visible(name or (_("worker") if row.epoch else _("the program"))),
        payload=body(row.kind, pretty(row.payload), None if whole else PAYLOAD_LIMIT),
        file=file_of(row.payload),
        files=shown_files(row.payload),
        limit=None if whole else TEXT_LIMIT,
        person=visible(name),
        approval=row.payload.get("approval", "") if row.kind == events.APPROVAL_REQUESTED else "",
    )
    describe = _DESCRIBE.get(row.kind)
    if describe is not None:
        try:
            describe(result, row.payload)
        except (AttributeError, KeyError, TypeError, ValueError):
            result.facts, result.bodies, result.brief = [], [], ""
    if not result.brief and row.kind in _TOLD_BY_FACTS and result.facts:
        result.brief = format_html("{}", result.facts[0].value)
    if events.COPIED in row.payload:
        # A fork copied the row from its origin: nothing happened twice.
        source, result.tone = row.payload[events.COPIED], "copied"
        if not isinstance(source, dict) or "hash" not in source:
            result.title = _("%(title)s, at the fork") % {"title": result.title}
            return result
        result.title = _("Copied: %(title)s") % {"title": result.title}
        names = {"run": str(source["run"])[:13], "seq": source["seq"]}
        result.who = visible(_("run %(run)s, row %(seq)s") % names)
        try:
            result.at = stamp(events.moment(source.get("at")))
        except (TypeError, ValueError):
            result.at = ""
    return result


def file_of(payload: Payload) -> File | None:
    """Find the file that has a row's full content, or None."""
    stored = payload.get("stored")
    if not isinstance(stored, dict) or not names_in(payload):
        return None
    return File(filesizeformat(stored.get("size", 0)), plain(stored.get("sha256", "")))


def shown_files(payload: Payload) -> list[Shown]:
    """List the files that the blocks of a row name, except those hidden from the reader."""
    blocks = payload["content"] if has_blocks(payload) and isinstance(payload["content"], list) else []
    return [
        Shown(
            plain(block.get("name") or block.get("media_type", PLAIN)),
            f"{plain(block.get('media_type', PLAIN))}, {filesizeformat(block.get('size', 0))}",
            block["sha256"],
            block.get("media_type") in IMAGES,
        )
        for block in blocks
        if DIGEST.fullmatch(str(block.get("sha256")))
    ]


def _said(payload: Payload) -> Any:
    """Extract a row's content; of a list of blocks, leave out the files, which the card lists separately."""
    content = payload.get("content")
    if not has_blocks(payload) or not isinstance(content, list):
        return content
    left = [block for block in content if block.get("type") == "text" or "sha256" not in block]
    return described(left)


def returned(row: Row) -> str:
    """Format the result of a call as text."""
    content = row.payload.get("content")
    if has_blocks(row.payload) and isinstance(content, list):
        content = fold.text_of(content)
    return spoken(content) or EMPTY


def actor_name(payload: Payload) -> str:
    """Find the name of a row's actor; "" if the row has no actor, as for the program itself."""
    given = payload.get("actor")
    return str(given.get("name") or "") if isinstance(given, dict) else ""


def actor(row: Row) -> str:
    """Name the actor of a row for a page; "the program" if the row has no actor."""
    return plain(actor_name(row.payload) or _("the program"))


def _add(card: RowCard, label: str, value: object) -> None:
    if value not in (None, "", [], {}):
        card.facts.append(Fact(label, visible(value)))


def _say(card: RowCard, label: str, text: object) -> None:
    if text not in (None, "", [], {}):
        shown = as_text(text)
        card.bodies.append(body(label, shown, card.limit))
        line = body("", " ".join(shown[: 4 * BRIEF].split()), BRIEF)
        card.brief = card.brief or format_html("{}…" if line.left_out else "{}", line.inline)


def _run_started(card: RowCard, payload: Payload) -> None:
    card.title = _("Run started")
    agent = format_html("{} {}", visible(payload["agent"]), visible(payload["version"]))
    card.facts.append(Fact(_("Agent"), agent))
    _add(card, _("Session"), payload.get("session"))
    _add(card, _("Idempotency key"), payload.get("idempotency_key"))
    _add(card, _("Tools of this run"), ", ".join(payload.get("tools", [])))
    _say(card, _("Instructions of this run"), payload.get("instructions"))


def _user(card: RowCard, payload: Payload) -> None:
    if payload.get("reason") == events.OUTPUT_INVALID:
        card.title, card.tone = _("Answer sent back: not of the required form"), "bad"
        _say(card, _("Told to the model"), fold.text_of(payload["content"]))
        return
    is_message = payload.get("reason") == events.MESSAGE
    card.title, card.tone = _("Message") if is_message else _("Task given"), "said"
    card.who = visible(actor_name(payload) if is_message else "")
    label = _("Input, its beginning") if card.file else _("Input")
    _say(card, label, _said(payload) if has_blocks(payload) else fold.text_of(payload["content"]))


def _assistant(card: RowCard, payload: Payload) -> None:
    calls, usage = payload["calls"], payload.get("usage") or {}
    card.tone = "said"
    card.title = _("Model replied")
    if calls:
        asked = ngettext("Model asked for %(count)d call", "Model asked for %(count)d calls", len(calls))
        card.title = asked % {"count": len(calls)}
    _say(card, _("It said"), fold.text_of(payload["content"]))
    for call in calls:
        verdict = _VERDICTS.get(call["verdict"], call["verdict"])
        label = _("%(tool)s: %(verdict)s") % {"tool": call["tool"], "verdict": verdict}
        _say(card, label, pretty(call["arguments"]))
    if payload.get("stop_reason") not in ("end_turn", "tool_use"):
        _add(card, _("Stopped because"), payload.get("stop_reason"))
    _add(card, _("Model"), payload.get("model"))
    _add(card, _("Tokens"), ", ".join(f"{name} {amount}" for name, amount in usage.items()))
    _add(card, _("Cost"), payload.get("cost"))


def _approval_decided(card: RowCard, payload: Payload) -> None:
    card.title, card.tone = verb_words(payload["verb"])
    if "arguments" in payload:
        card.title = _("Approved with edited arguments")
        _say(card, _("Edited arguments"), payload["arguments"])
    _add(card, _("Reason"), payload.get("reason"))
    _add(card, _("Settles the doubt about"), ", ".join(payload.get("settles", ())))
    _say(card, _("Answer"), payload.get("text"))
    _add(card, _("Via"), payload.get("channel"))


def _stating(title: Any, tone: str = "plain", *names: str) -> Callable[[RowCard, Payload], None]:
    def describe(card: RowCard, payload: Payload) -> None:
        card.title, card.tone = str(title), tone
        for name in names or ("reason",):
            value = payload.get(name)
            shown = TAKEN_OVER.get(value, value) if name == "reason" and isinstance(value, str) else value
            _add(card, str(_LABELS[name]), ", ".join(map(str, shown)) if isinstance(shown, list) else shown)

    return describe


def _tool_result(card: RowCard, payload: Payload) -> None:
    in_doubt, is_started = payload.get("in_doubt", False), bool(card.attempt)
    card.title, card.tone = outcome_words(payload["outcome"], in_doubt=in_doubt, is_started=is_started)
    if payload.get("reconciled"):
        _add(card, _("Known from"), _("the outside system, asked by idempotency key"))
    _add(card, _("Not as annotated"), payload.get("misfit"))
    _say(card, _("Arguments a person set"), payload.get("edited"))
    label = _("Told to the model, its beginning") if card.file else _("Told to the model")
    _say(card, label, _said(payload))


def _model_failed(card: RowCard, payload: Payload) -> None:
    card.title, card.tone = _("Model call failed"), "bad"
    _add(card, _("Attempt"), payload.get("attempt"))
    _add(card, _("HTTP status"), payload.get("status"))
    _add(card, _("Request"), payload.get("request_id"))
    if payload.get("retry_in") is not None:
        _add(card, _("Next attempt in"), f"{payload['retry_in']:.1f} s")
    _add(card, _("Asked instead"), payload.get("fallback"))
    _add(card, _("Cost"), payload.get("cost"))
    _say(card, payload["error"]["type"], payload["error"]["text"])


def _late_result(card: RowCard, payload: Payload) -> None:
    card.title, card.tone = _("Late report of a worker that had lost the run"), "waits"
    if payload.get("never_entered"):
        _add(card, _("Report"), _("the tool never started: nothing happened"))
    label = _("The tool returned, its beginning") if card.file else _("The tool returned")
    _say(card, label, _said(payload))


def _orphan_found(card: RowCard, payload: Payload) -> None:
    card.title, card.tone = _("Call in doubt"), "bad"
    if known := payload.get("evidence"):
        card.facts.append(Fact(_("Evidence"), evidence(known)))
    _say(card, _("The tool raised"), payload.get("raised"))
    _add(card, _("What becomes of it"), ORPHAN_ACTIONS.get(payload["action"], payload["action"]))


def _orphan_resolved(card: RowCard, payload: Payload) -> None:
    card.title = _("Verdict: %(verdict)s") % {"verdict": verdict_words(payload["verdict"])}
    _add(card, _("Evidence"), payload.get("evidence"))
    _add(card, _("Via"), payload.get("channel"))
    _say(card, _("Result"), payload.get("result"))


def _run_completed(card: RowCard, payload: Payload) -> None:
    card.title, card.tone = _("Completed"), "good"
    if payload.get("truncated"):
        _add(card, _("Cut off"), _("the reply reached the limit of tokens"))
    _say(card, _("Output"), payload.get("output"))


def _run_failed(card: RowCard, payload: Payload) -> None:
    card.title, card.tone = _("Failed"), "bad"
    _say(card, payload["error"]["type"], payload["error"]["text"])


def starts(run: Run, times: Counter[str] | None, *, none_twice: bool) -> list[str]:
    """Describe how often tools were started, and with `none_twice` that no call ran twice.

    `times` is the number of starts of each call, if that is known already.
    """
    if times is None:
        rows = Message.objects.using(settings.DATABASE).own().filter(run_id=run.pk, kind=events.TOOL_STARTED)
        times = Counter(rows.values_list("call_id", flat=True))
    if not times:
        return []
    total, again = times.total(), sum(count > 1 for count in times.values())
    text = ngettext("A tool was started %(count)d time.", "Tools were started %(count)d times.", total)
    lines = [text % {"count": total}]
    if again:
        twice = ngettext(
            "%(count)d call was started more than once.",
            "%(count)d calls were started more than once.",
            again,
        )
        lines.append(twice % {"count": again})
    if none_twice:
        twice = _("No effect of this session ran twice with equal arguments.")
        lines += [twice, _("Elsewhere, only approved calls are compared.")]
    return [" ".join(lines)]


def evidence(text: str) -> str:
    """Reword the engine's evidence about a call in doubt for people."""
    return plain(_HANDLER.sub(r"\1 tool", text, count=1))


def verb_words(verb: Any) -> tuple[str, str]:
    """Describe a decision for a page, as (words, tone of the badge)."""
    words, tone = _VERBS.get(verb, (plain(verb), "plain"))
    return str(words), tone


def verdict_words(verdict: Any) -> str:
    """Describe a verdict on a call in doubt in words."""
    return str(_VERDICTS_GIVEN.get(verdict, plain(verdict)))


def outcome_words(outcome: Any, *, in_doubt: bool = False, is_started: bool = True) -> tuple[str, str]:
    """Describe a call's outcome, as (words, tone of the badge). An unknown outcome stays unchanged."""
    if in_doubt:
        return _("Tool gave an error, in doubt: it may have happened"), "bad"
    if outcome == "error" and not is_started:
        return _("Not executed: refused"), "bad"
    words, tone = _OUTCOMES.get(outcome if isinstance(outcome, str) else "", (plain(outcome), "plain"))
    return str(words), tone


_LABELS = {
    "approved_by": gettext_lazy("Approved by"),
    "expires_at": gettext_lazy("Expires"),
    "from": gettext_lazy("Would have expired"),
    "reason": gettext_lazy("Reason"),
    "risk": gettext_lazy("Risk"),
    "title": gettext_lazy("Decision on"),
    "why": gettext_lazy("Why"),
}
_VERDICTS = {
    "run": gettext_lazy("may run"),
    "ask": gettext_lazy("asks a person"),
    "refuse": gettext_lazy("refused"),
}
_VERBS: dict[str, tuple[Any, str]] = {
    "approve": (gettext_lazy("Approved"), "good"),
    "deny": (gettext_lazy("Denied"), "bad"),
    "answer": (gettext_lazy("Answered instead of run"), "good"),
    "expire": (gettext_lazy("Nobody answered in time"), "bad"),
}
_OUTCOMES: dict[str, tuple[Any, str]] = {
    "ok": (gettext_lazy("Tool finished"), "good"),
    "error": (gettext_lazy("Tool gave an error"), "bad"),
    "denied": (gettext_lazy("Not executed: denied"), "bad"),
    "expired": (gettext_lazy("Not executed: nobody answered"), "bad"),
    "answered": (gettext_lazy("Not executed: answered by a person"), "plain"),
    "cancelled": (gettext_lazy("Not executed: cancelled"), "plain"),
    "unknown": (gettext_lazy("Outcome unknown"), "bad"),
}
ORPHAN_ACTIONS = {
    "held": gettext_lazy("It waits for somebody who may give verdicts."),
    "surfaced": gettext_lazy("The model was told that it is unknown."),
    "retry": gettext_lazy("It is repeated: its tool says that is safe."),
    "reconcile": gettext_lazy("The outside system is asked by the key."),
}
_VERDICTS_GIVEN = {
    "occurred": gettext_lazy("it happened"),
    "not_occurred": gettext_lazy("it did not happen"),
    "unknown": gettext_lazy("unknown"),
}
# Kinds whose first fact describes the step on one line. Other kinds begin with ids, tokens or keys.
_TOLD_BY_FACTS = (
    events.APPROVAL_REQUESTED,
    events.APPROVAL_DECIDED,
    events.APPROVAL_VOIDED,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
    events.RUN_PAUSED,
    events.RUN_RESUMED,
    events.RUN_CANCEL_REQUESTED,
    events.RUN_CANCELLED,
)
_DESCRIBE: dict[str, Callable[[RowCard, Payload], None]] = {
    events.RUN_STARTED: _run_started,
    events.USER: _user,
    events.ASSISTANT: _assistant,
    events.APPROVAL_REQUESTED: _stating(
        gettext_lazy("A person is asked"), "waits", "title", "why", "risk", "expires_at"
    ),
    events.APPROVAL_DECIDED: _approval_decided,
    events.APPROVAL_EXTENDED: _stating(
        gettext_lazy("More time given"), "plain", "from", "expires_at", "reason"
    ),
    events.APPROVAL_VOIDED: _stating(gettext_lazy("An approval no longer counts"), "waits", "why"),
    events.TOOL_STARTED: _stating(gettext_lazy("Tool started"), "plain", "approved_by"),
    events.TOOL_RESULT: _tool_result,
    events.MODEL_FAILED: _model_failed,
    events.LATE_RESULT: _late_result,
    events.ORPHAN_FOUND: _orphan_found,
    events.ORPHAN_RESOLVED: _orphan_resolved,
    events.RUN_RESUMED: _stating(gettext_lazy("Resumed")),
    events.RUN_PAUSE_REQUESTED: _stating(gettext_lazy("Pause requested")),
    events.RUN_PAUSED: _stating(gettext_lazy("Paused"), "waits"),
    events.RUN_CANCEL_REQUESTED: _stating(gettext_lazy("Cancel requested"), "waits"),
    events.RUN_ADOPTED: _stating(gettext_lazy("Another definition adopted")),
    events.RUN_COMPLETED: _run_completed,
    events.RUN_FAILED: _run_failed,
    events.RUN_CANCELLED: _stating(gettext_lazy("Cancelled"), "bad"),
    events.PAYLOAD_ERASED: _stating(gettext_lazy("A value was erased")),
}
