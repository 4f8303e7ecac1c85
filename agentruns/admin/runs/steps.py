"""Journal rows as steps: a card of each with the person or program behind it, and the time it took."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import log10
from typing import Any, NamedTuple

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from agentruns.admin import html
from agentruns.content import IMAGES, PLAIN, described
from agentruns.journal import events, fold
from agentruns.journal.payloads import has_blocks, names_in
from agentruns.models.rule import BY_RULE
from agentruns.models.statuses import Outcome

TEXT_LIMIT = 4_000
BRIEF = 90  # characters beside the title of a step
PAYLOAD_LIMIT = 20_000
DIGEST = re.compile("[0-9a-f]{64}")

# The rows that say how a call stands.
OF_A_CALL = (
    events.APPROVAL_DECIDED,
    events.APPROVAL_VOIDED,
    events.TOOL_STARTED,
    events.EVENT_AWAITED,
    events.EVENT_DELIVERED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
)
ODD = (AttributeError, KeyError, TypeError, ValueError)  # raised by rows of newer code
NOTICED = timedelta(seconds=1)  # a shorter gap is not worth a line
# Reasons in a journal why another worker took a run over -> words for people.
TAKEN_OVER = {
    "lease expired": gettext_lazy("Its worker fell silent; another one took the run over."),
    "the last drive failed": gettext_lazy("Its worker failed; another one took the run over."),
}
# Kind of row that ends something -> kind of row that began it.
BEGINS: dict[str, str] = {
    events.TOOL_RESULT: events.TOOL_STARTED,
    events.LATE_RESULT: events.TOOL_STARTED,
    events.APPROVAL_DECIDED: events.APPROVAL_REQUESTED,
    events.ORPHAN_RESOLVED: events.ORPHAN_FOUND,
    events.RUN_RESUMED: events.RUN_PAUSED,
    events.EVENT_AWAITED: events.TOOL_STARTED,
    events.EVENT_DELIVERED: events.EVENT_AWAITED,
}
WAITS: dict[str, Any] = {
    events.APPROVAL_REQUESTED: gettext_lazy("waited %(time)s for an approval"),
    events.ORPHAN_FOUND: gettext_lazy("waited %(time)s for a verdict"),
    events.RUN_PAUSED: gettext_lazy("paused for %(time)s"),
    events.EVENT_AWAITED: gettext_lazy("waited %(time)s for an event"),
}
Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """The wait before a row, and the time of the step that the row ends; `bar` is its logarithm, 0 to 6."""

    waited: str = ""
    took: str = ""
    bar: str = ""


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
    payload: html.Body
    facts: list[tuple[str, SafeString | str]] = field(default_factory=list)  # labels and values
    bodies: list[html.Body] = field(default_factory=list)
    call_url: str = ""
    approval: str = ""
    file: Payload | None = None
    files: list[Payload] = field(default_factory=list)
    timing: Timing | None = None
    limit: int | None = TEXT_LIMIT
    brief: SafeString | str = ""
    person: SafeString | str = ""
    rule: str = ""  # id of the standing rule that decided
    rule_url: str = ""

    def add_fact(self, label: str, value: object) -> None:
        """Add a line with a label, unless the value is empty."""
        if value not in (None, "", [], {}):
            self.facts.append((label, html.visible(value)))

    def add_text(self, label: str, value: object) -> None:
        """Add a text, unless it is empty; the beginning of the first text stands beside the title."""
        if value not in (None, "", [], {}):
            text = html.as_text(value)
            self.bodies.append(html.body(label, text, self.limit))
            line = html.body("", " ".join(text[: 4 * BRIEF].split()), BRIEF)
            self.brief = self.brief or format_html("{}…" if line.left_out else "{}", line.inline)


class Form(NamedTuple):
    """The layout of the cards of one kind of row; without a title, `describe` chooses one by the payload.

    `facts` and `texts` name members of the payload, in their order on the card. `tells` if the first fact
    describes the step on one line. Other kinds begin with ids, tokens or keys.
    """

    title: Any = None
    tone: str = "plain"
    facts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    tells: bool = False


def row_card(row: events.Row, *, whole: bool = False) -> RowCard:
    """Build the card of a row; a row of newer code shows at least its payload.

    Cut long texts unless `whole`; the page must then offer the whole row elsewhere.
    """
    name = actor_name(row.payload)
    result = RowCard(
        seq=str(row.seq),
        title=html.plain(row.kind),
        tone="plain",
        at=html.stamp(row.created_at),
        tool=html.visible(row.tool_name),
        call=row.call_id,
        attempt=row.attempt,
        who=html.visible(name or (_("worker") if row.epoch else _("the program"))),
        payload=html.body(row.kind, html.pretty(row.payload), None if whole else PAYLOAD_LIMIT),
        file=file_of(row.payload),
        files=attachments(row.payload),
        limit=None if whole else TEXT_LIMIT,
        person=html.visible(name),
        approval=row.payload.get("approval", "") if row.kind == events.APPROVAL_REQUESTED else "",
    )
    if form := FORMS.get(row.kind):
        try:
            describe(result, row, form)
        except ODD:
            result.facts, result.bodies, result.brief = [], [], ""
        if form.tells and result.facts and not result.brief:
            result.brief = format_html("{}", result.facts[0][1])
    if events.COPIED in row.payload:
        # A fork copied the row from its origin: nothing happened twice.
        source, result.tone = row.payload[events.COPIED], "copied"
        if not isinstance(source, dict) or "hash" not in source:
            result.title = _("%(title)s, at the fork") % {"title": result.title}
            return result
        result.title = _("Copied: %(title)s") % {"title": result.title}
        names = {"run": str(source["run"])[:13], "seq": source["seq"]}
        result.who = html.visible(_("run %(run)s, row %(seq)s") % names)
        try:
            result.at = html.stamp(events.moment(source.get("at")))
        except (TypeError, ValueError):
            result.at = ""
    return result


def file_of(payload: Payload) -> Payload | None:
    """Find the stored file that has a row's full content; None without such a file."""
    stored = payload.get("stored")
    return stored if isinstance(stored, dict) and names_in(payload) else None


def attachments(payload: Payload) -> list[Payload]:
    """List the blocks of a row that name a file, except those hidden from the reader.

    The run's page serves a file by the SHA-256 of its block.
    """
    blocks = payload["content"] if has_blocks(payload) and isinstance(payload["content"], list) else []
    files = [block for block in blocks if DIGEST.fullmatch(str(block.get("sha256")))]
    return [{"media_type": PLAIN, **each, "is_picture": each.get("media_type") in IMAGES} for each in files]


def content_of(payload: Payload) -> Any:
    """Extract a row's content; leave out the files in a list of blocks, which the card lists separately."""
    content = payload.get("content")
    if not has_blocks(payload) or not isinstance(content, list):
        return content
    return described([block for block in content if block.get("type") == "text" or "sha256" not in block])


def returned(row: events.Row) -> str:
    """Format the result of a call as text; "-" if it is empty."""
    content = row.payload.get("content")
    if has_blocks(row.payload) and isinstance(content, list):
        content = fold.text_of(content)
    return html.spoken(content) or html.EMPTY


def actor_name(payload: Payload) -> str:
    """Find the name of a row's actor; "" if the row has no actor, as for the program itself."""
    given = payload.get("actor")
    return str(given.get("name") or "") if isinstance(given, dict) else ""


def author(payload: Payload) -> str:
    """Name the author of a task or message; "" if its row names none."""
    if giver := payload.get("giver"):
        return _("agent %(name)s (unverified)") % {"name": giver}
    return _("the program") if "about" in payload or giver is not None else actor_name(payload)


def actor(row: events.Row) -> str:
    """Name the actor of a row for a page; "the program" if the row has no actor."""
    return html.plain(actor_name(row.payload) or _("the program"))


def describe(card: RowCard, row: events.Row, form: Form) -> None:
    """Describe a row on its card by its kind. Raises the errors in ODD for a payload of newer code."""
    payload = row.payload
    if form.title:
        card.title, card.tone = str(form.title), form.tone
    if row.kind == events.RUN_STARTED:
        agent = format_html("{} {}", html.visible(payload["agent"]), html.visible(payload["version"]))
        card.facts.append((_("Agent"), agent))
    elif row.kind == events.USER and payload.get("reason") == events.OUTPUT_INVALID:
        card.title, card.tone = _("Answer sent back: not of the required form"), "bad"
        card.add_text(_("Told to the model"), fold.text_of(payload["content"]))
    elif row.kind == events.USER:
        is_message = payload.get("reason") == events.MESSAGE
        card.title, card.tone = _("Message") if is_message else _("Task given"), "said"
        card.who = html.visible(author(payload) if is_message or "giver" in payload else "")
        label = _("Input, its beginning") if card.file else _("Input")
        card.add_text(label, content_of(payload) if has_blocks(payload) else fold.text_of(payload["content"]))
    elif row.kind == events.ASSISTANT:
        calls = payload["calls"]
        card.title, card.tone = _("Model replied"), "said"
        if calls:
            title = ngettext("Model asked for %(count)d call", "Model asked for %(count)d calls", len(calls))
            card.title = title % {"count": len(calls)}
        card.add_text(_("It said"), fold.text_of(payload["content"]))
        for call in calls:
            verdict = _VERDICTS.get(call["verdict"], call["verdict"])
            label = _("%(tool)s: %(verdict)s") % {"tool": call["tool"], "verdict": verdict}
            card.add_text(label, html.pretty(call["arguments"]))
        if payload.get("stop_reason") not in ("end_turn", "tool_use"):
            card.add_fact(_("Stopped because"), payload.get("stop_reason"))
    elif row.kind == events.APPROVAL_DECIDED:
        card.title, card.tone = verb_words(payload["verb"])
        if (channel := str(payload.get("channel"))).startswith(BY_RULE):
            payload, card.rule = {**payload, "channel": ""}, channel.removeprefix(BY_RULE)
        if "arguments" in payload:
            card.title = _("Approved with edited arguments")
    elif row.kind == events.TOOL_RESULT:
        in_doubt, is_started = payload.get("in_doubt", False), bool(row.attempt)
        card.title, card.tone = outcome_words(payload["outcome"], in_doubt=in_doubt, is_started=is_started)
        if payload.get("reconciled"):
            card.add_fact(_("Known from"), _("the outside system, asked by idempotency key"))
        card.add_text(_("Arguments a person set"), payload.get("edited"))
        label = _("Told to the model, its beginning") if card.file else _("Told to the model")
        card.add_text(label, content_of(payload))
    elif row.kind == events.EVENT_DELIVERED:
        card.title, card.tone = delivery_words(payload), "waits" if payload.get("late") else "good"
    elif row.kind == events.LATE_RESULT:
        if payload.get("worker_epoch") == 0:
            card.title = _("What was delivered too late")
        if payload.get("never_entered"):
            card.add_fact(_("Report"), _("the tool never started: nothing happened"))
        label = _("The tool returned, its beginning") if card.file else _("The tool returned")
        card.add_text(label, content_of(payload))
    elif row.kind == events.ORPHAN_FOUND:
        if known := payload.get("evidence"):
            card.facts.append((_("Evidence"), html.evidence(known)))
        card.add_fact(_("What becomes of it"), ORPHAN_ACTIONS.get(payload["action"], payload["action"]))
    elif row.kind == events.ORPHAN_RESOLVED:
        card.title = _("Verdict: %(verdict)s") % {"verdict": verdict_words(payload["verdict"])}
    elif row.kind == events.RUN_COMPLETED:
        if payload.get("truncated"):
            card.add_fact(_("Cut off"), _("the reply reached the limit of tokens"))
        if payload.get("earlier"):
            card.add_fact(_("Last reply"), _("it was empty: this is the text of the reply before it"))
    elif row.kind in (events.MODEL_FAILED, events.RUN_FAILED):
        card.add_text(payload["error"]["type"], payload["error"]["text"])
    for name in form.facts:
        value = payload.get(name)
        if name == "reason" and row.kind != events.APPROVAL_DECIDED and isinstance(value, str):
            value = TAKEN_OVER.get(value, value)
        elif name == "retry_in" and value is not None:
            value = f"{value:.1f} s"
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {amount}" for key, amount in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        card.add_fact(str(_LABELS[name]), value)
    for name in form.texts:
        card.add_text(str(_LABELS[name]), payload.get(name))


def timings(rows: Iterable[events.Row]) -> dict[int, Timing]:
    """Compute the timing of each row that a run wrote itself, by seq. The first such row has none."""
    by_seq: dict[int, Timing] = {}
    begun: dict[tuple[str, str], datetime] = {}
    before: events.Row | None = None
    for row in rows:
        if events.COPIED in row.payload:  # the history of another run
            continue
        begin = BEGINS.get(row.kind, "")
        since = begun.pop((begin, row.call_id), None)
        if before is not None:
            gap = max(row.created_at - before.created_at, timedelta())
            length: timedelta | None = None
            words, wait, why = "%(time)s", timedelta(), ""
            if row.kind in (events.ASSISTANT, events.MODEL_FAILED):
                planned = before.payload.get("retry_in") if before.kind == events.MODEL_FAILED else None
                seconds = max(planned, 0) if isinstance(planned, int | float) else 0
                wait = timedelta(seconds=min(gap.total_seconds(), seconds))
                why, length = _("waited %(time)s for the next attempt"), gap - wait
                if not before.epoch:
                    words = _("%(time)s, time in the queue included")
            elif begin == events.TOOL_STARTED:
                length = row.created_at - since if since else None
                if awaited := begun.pop((events.EVENT_AWAITED, row.call_id), None):  # nothing was delivered
                    wait, why = row.created_at - awaited, str(WAITS[events.EVENT_AWAITED])
            elif row.kind == events.RUN_RESUMED and since is None:
                wait, why = gap, _("waited %(time)s to be resumed")
                if str(row.payload.get("reason")) in TAKEN_OVER:
                    why = _("no word of its worker for %(time)s")
            elif begin or before.kind in WAITS:
                wait, why = row.created_at - (since or before.created_at), str(WAITS[begin or before.kind])
            elif row.epoch and not before.epoch:
                wait, why = gap, _("waited %(time)s for a worker")
            waited = why % {"time": html.duration(wait)} if wait >= NOTICED else ""
            by_seq[row.seq] = Timing(waited)
            if length is not None:
                length = max(length, timedelta())  # clocks may disagree
                bar = min(log10(max(length / timedelta(milliseconds=1), 1)), 6)
                by_seq[row.seq] = Timing(waited, words % {"time": html.duration(length)}, f"{bar:.1f}")
        begun[row.kind, row.call_id] = row.created_at
        if row.kind in (events.ORPHAN_FOUND, events.APPROVAL_VOIDED):  # its attempt has no result
            begun.pop((events.TOOL_STARTED, row.call_id), None)
        before = row
    return by_seq


def verb_words(verb: Any) -> tuple[str, str]:
    """Describe a decision for a page, as (words, tone of the badge)."""
    words, tone = _VERBS.get(verb, (html.plain(verb), "plain"))
    return str(words), tone


def delivery_words(payload: Payload) -> str:
    """Describe the delivery of an event for a page."""
    return _("Event delivered, too late to count") if payload.get("late") else _("Event delivered")


def verdict_words(verdict: Any) -> str:
    """Describe a verdict on a call in doubt for a page."""
    return str(_VERDICTS_GIVEN.get(verdict, html.plain(verdict)))


def outcome_words(outcome: Any, *, in_doubt: bool = False, is_started: bool = True) -> tuple[str, str]:
    """Describe a call's outcome, as (words, tone of the badge). An unknown outcome stays unchanged."""
    if in_doubt:
        return _("Tool gave an error, in doubt: it may have happened"), "bad"
    if outcome == Outcome.ERROR and not is_started:
        return _("Not executed: refused"), "bad"
    words, tone = _OUTCOMES.get(outcome if isinstance(outcome, str) else "", (html.plain(outcome), "plain"))
    return str(words), tone


_LABELS = {
    "approved_by": gettext_lazy("Approved by"),
    "at": gettext_lazy("Came at"),
    "arguments": gettext_lazy("Edited arguments"),
    "attempt": gettext_lazy("Attempt"),
    "channel": gettext_lazy("Via"),
    "cost": gettext_lazy("Cost"),
    "evidence": gettext_lazy("Evidence"),
    "expires_at": gettext_lazy("Expires"),
    "fallback": gettext_lazy("Asked instead"),
    "from": gettext_lazy("Would have expired"),
    "idempotency_key": gettext_lazy("Idempotency key"),
    "key": gettext_lazy("Key"),
    "instructions": gettext_lazy("Instructions of this run"),
    "misfit": gettext_lazy("Not as annotated"),
    "model": gettext_lazy("Model"),
    "name": gettext_lazy("Event"),
    "output": gettext_lazy("Output"),
    "raised": gettext_lazy("The tool raised"),
    "reason": gettext_lazy("Reason"),
    "request_id": gettext_lazy("Request"),
    "result": gettext_lazy("Result"),
    "retry_in": gettext_lazy("Next attempt in"),
    "risk": gettext_lazy("Risk"),
    "seq": gettext_lazy("Row"),
    "block": gettext_lazy("Block"),
    "session": gettext_lazy("Session"),
    "settles": gettext_lazy("Settles the doubt about"),
    "status": gettext_lazy("HTTP status"),
    "text": gettext_lazy("Answer"),
    "title": gettext_lazy("Decision on"),
    "tools": gettext_lazy("Tools of this run"),
    "until": gettext_lazy("Until"),
    "usage": gettext_lazy("Tokens"),
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
FORMS = {
    events.RUN_STARTED: Form(
        gettext_lazy("Run started"), facts=("session", "idempotency_key", "tools"), texts=("instructions",)
    ),
    events.USER: Form(),
    events.ASSISTANT: Form(facts=("model", "usage", "cost")),
    events.APPROVAL_REQUESTED: Form(
        gettext_lazy("A person is asked"), "waits", ("title", "why", "risk", "expires_at"), tells=True
    ),
    events.APPROVAL_DECIDED: Form(
        facts=("reason", "settles", "channel"), texts=("arguments", "text"), tells=True
    ),
    events.APPROVAL_EXTENDED: Form(gettext_lazy("More time given"), facts=("from", "expires_at", "reason")),
    events.APPROVAL_VOIDED: Form(gettext_lazy("An approval no longer counts"), "waits", ("why",), tells=True),
    events.APPROVAL_REMINDED: Form(gettext_lazy("People are reminded"), "waits"),
    events.APPROVAL_ESCALATED: Form(gettext_lazy("Escalated"), "waits", ("to",), tells=True),
    events.TOOL_STARTED: Form(gettext_lazy("Tool started"), facts=("approved_by",)),
    events.EVENT_AWAITED: Form(
        gettext_lazy("Waits for an event"), "waits", ("name", "key", "until"), tells=True
    ),
    events.EVENT_DELIVERED: Form(facts=("name", "key", "at"), tells=True),
    events.TOOL_RESULT: Form(facts=("misfit",)),
    events.MODEL_FAILED: Form(
        gettext_lazy("Model call failed"),
        "bad",
        ("attempt", "status", "request_id", "retry_in", "fallback", "cost"),
    ),
    events.LATE_RESULT: Form(gettext_lazy("Late report of a worker that had lost the run"), "waits"),
    events.ORPHAN_FOUND: Form(gettext_lazy("Call in doubt"), "bad", texts=("raised",), tells=True),
    events.ORPHAN_RESOLVED: Form(facts=("evidence", "channel"), texts=("result",), tells=True),
    events.RUN_RESUMED: Form(gettext_lazy("Resumed"), facts=("reason",), tells=True),
    events.RUN_PAUSE_REQUESTED: Form(gettext_lazy("Pause requested"), facts=("reason",)),
    events.RUN_PAUSED: Form(gettext_lazy("Paused"), "waits", ("reason",), tells=True),
    events.RUN_CANCEL_REQUESTED: Form(gettext_lazy("Cancel requested"), "waits", ("reason",), tells=True),
    events.RUN_ADOPTED: Form(gettext_lazy("Another definition adopted"), facts=("reason",)),
    events.RUN_COMPLETED: Form(gettext_lazy("Completed"), "good", texts=("output",)),
    events.RUN_FAILED: Form(gettext_lazy("Failed"), "bad"),
    events.RUN_CANCELLED: Form(gettext_lazy("Cancelled"), "bad", ("reason",), tells=True),
    events.PAYLOAD_ERASED: Form(gettext_lazy("A value was erased"), facts=("reason",)),
    events.LEFT_OUT: Form(gettext_lazy("Left out of later requests"), "waits", ("seq", "block", "reason")),
    events.BUDGET_LOW: Form(gettext_lazy("Budget nearly used up"), "waits", ("budget", "used", "limit")),
    events.BUDGET_RAISED: Form(gettext_lazy("Budget raised"), facts=("limits", "reason")),
}
