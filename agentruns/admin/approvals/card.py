"""The card of an approval: the facts that a person needs to decide, and the decisions this user may make."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin import html
from agentruns.admin.approvals.around import LATEST, SHOWN, Flag, Surroundings, seen_by, tools_of
from agentruns.admin.approvals.verbs import form_of, form_options, outcome
from agentruns.admin.forms import EditForm
from agentruns.admin.runs.steps import OF_A_CALL, actor_name, author, outcome_words, returned, row_card
from agentruns.conf import settings
from agentruns.engine import gate, in_doubt
from agentruns.journal import conversation, deciders, events, fold, masking, read
from agentruns.models import Approval, Message, Run, statuses
from agentruns.services import permissions
from agentruns.services.approvals.decisions import unfit
from agentruns.tools import InvalidArguments, Tool, builtin
from agentruns.tools.card import MASK, in_time
from agentruns.tools.options import REQUESTER
from agentruns.utils import clock, json as canonical
from agentruns.utils.redaction import redact, redacted

BEFORE = 20  # rows that are searched for the request and the results before a call
EDITABLE = 30_000  # characters of arguments in a form
STATUSES = Approval.Status
DECIDED = {each.value: each.label for each in STATUSES if each not in (STATUSES.PENDING, STATUSES.CANCELLED)}
DECIDED["consumed"] = STATUSES.APPROVED.label  # people see no difference
LINES = 100  # of a preview
LONGEST = 2_000  # characters of one value of a preview
QUOTED = 200  # characters of a quote; the rest is folded
LINE = 100  # characters of a quoted argument or result
_PARTS = ("before", "after", "links", "warnings")
HISTORY = (*OF_A_CALL, events.APPROVAL_EXTENDED, events.APPROVAL_REMINDED, events.APPROVAL_ESCALATED)
CHANGED = gettext_lazy("The preview has changed since the agent asked. This is how it is now.")
LATE = gettext_lazy("The preview is not there: making it took too long.")
LATE_AND_OLD = gettext_lazy(
    "The preview cannot be refreshed, which took too long: it shows how things were when the agent asked."
)
GONE = gettext_lazy("The preview cannot be refreshed: it shows how things were when the agent asked.")
_HELD = {
    "paused": gettext_lazy("Its run is paused: what is approved runs only when somebody resumes it."),
    "orphaned": gettext_lazy(
        "A call of its run is in doubt: what is approved runs only when somebody says what became of it."
    ),
}
_STATES: dict[str, Any] = {
    events.TOOL_STARTED: gettext_lazy("is at work"),
    events.ORPHAN_FOUND: gettext_lazy("is in doubt: it may have happened"),
    events.APPROVAL_DECIDED: gettext_lazy("is decided, and has not run yet"),
}


@dataclass(frozen=True, slots=True)
class Quote:
    """A text of a person or a tool. `short` is its beginning; `whole` is "" if `short` is the full text."""

    label: str
    short: SafeString
    whole: SafeString | str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One value of a preview, before and after the call; all texts are ready for a page."""

    label: str
    before: SafeString
    after: SafeString
    differs: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview, ready for a page; `links` are pairs of a text and a URL that is safe to follow.

    `note` has the parts that are neither changes, links nor warnings. `left_out` counts changes beyond LINES.
    """

    changes: list[Change] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    note: SafeString | str = ""
    left_out: int = 0
    warnings: list[SafeString] = field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Check whether the preview is short enough to stand before the quotes of people."""
        size = sum(len(change.before) + len(change.after) for change in self.changes)
        return not self.note and len(self.changes) <= SHOWN and size <= QUOTED


@dataclass
class ApprovalCard:
    """One approval, the journal rows around it, and the decisions its user may make; read at first use."""

    approval: Approval
    around: Surroundings
    revealed: bool = False

    @cached_property
    def rows(self) -> list[events.Row]:
        """Find the journal rows about the call."""
        return self.around.rows[self.approval.run_id, self.approval.call_id]

    @cached_property
    def requested(self) -> events.Row | None:
        """Find the journal row that requests the approval; None without such a row."""
        return next((row for row in self.rows if row.kind == events.APPROVAL_REQUESTED), None)

    @cached_property
    def asked_in(self) -> tuple[Run, int]:
        """Find the run that asked for the call, and the row before which it did; a deferred call's parent."""
        run, call_id = self.approval.run, self.approval.call_id
        if (parent := seen_by(self.around.user, run.parent_id)) is not None:
            rows = Message.objects.using(settings.DATABASE).filter(run_id=parent.pk, call_id=call_id)
            for start in rows.filter(kind=events.TOOL_STARTED):
                return parent, start.seq
        return run, self.requested.seq if self.requested else 0

    @cached_property
    def before(self) -> list[events.Row]:
        """Read the latest messages, replies and results before the request; the newest first.

        Reads BEFORE rows. If they have no task or message of a person, reads the latest SHOWN starts and
        messages, too.
        """
        if self.requested is None:
            return []
        run, seq = self.asked_in
        rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq__lt=seq).order_by("-seq")
        kinds = (events.RUN_STARTED, events.USER, events.ASSISTANT, events.TOOL_RESULT)
        before = read.read_rows(rows.filter(kind__in=kinds)[:BEFORE])
        if not any(map(_is_request, before)):  # several, as some may only correct the model
            before += read.read_rows(rows.filter(kind__in=kinds[:2])[:SHOWN])
        return before

    @cached_property
    def mask_before(self) -> masking.Mask:
        """Choose the mask of the rows in `before`."""
        run = self.asked_in[0]
        return self.mask if run.pk == self.approval.run_id else masking.mask_of(run)

    @property
    def reply(self) -> dict[str, Any]:
        """Find the payload of the reply that requested the call; {} if it is not found."""
        return next((row.payload for row in self.before if row.kind == events.ASSISTANT), {})

    @property
    def quotes(self) -> list[Quote]:
        """Quote the last task or message before the call, and the model's text in the reply.

        Before a task that a model wrote comes the first task of its family, if the user may see that run.
        """
        row, quotes = next(filter(_is_request, self.before), None), list[Quote]()
        if row is not None and row.payload.get("giver"):
            starts = Message.objects.using(settings.DATABASE).own().filter(run_id=row.run_id)
            start = starts.get(kind=events.RUN_STARTED).payload
            if first := seen_by(self.around.user, start.get("parent", {}).get("root")):
                name = actor_name(start) or self.approval.run.owner_name or _("the program")
                quotes.append(quote(_("%(name)s asked") % {"name": html.plain(name)}, first.input))
        quotes += [] if row is None else [self.words_of(row)]
        text = self.mask_before.json(fold.text_of(self.reply.get("content", [])))
        return [*quotes, quote(_("Agent (unverified)"), text)] if text.strip() else quotes

    def words_of(self, row: events.Row) -> Quote:
        """Quote the task or message in a row; the label names who gave it to the agent."""
        start = next((row for row in self.before if row.kind == events.RUN_STARTED), None)
        is_task = start is not None and row.seq == start.seq + 1 and events.COPIED not in row.payload
        starter = actor_name(start.payload) if start is not None and is_task else ""
        whose = starter or self.approval.run.owner_name  # perhaps not the author
        name = html.plain(author(row.payload) or whose or _("the program"))
        given = _("Given by %(name)s") % {"name": name}
        if row.payload.get("giver") and whose:
            given = _("%(given)s, for %(name)s") % {"given": given, "name": html.plain(whose)}
        said = self.mask_before.row(row).payload.get("content") or []
        return replace(quote("", fold.text_of(said)), label=given)

    @property
    def evidence(self) -> list[Quote]:
        """Quote the results of the latest SHOWN calls before this call, the oldest first."""
        rows, quotes = [row for row in self.before if row.kind == events.TOOL_RESULT], []
        for row in map(self.mask_before.row, reversed(rows[:SHOWN])):
            label = html.named(row.tool_name, "")[0]
            if row.payload.get("outcome") != statuses.Outcome.OK:
                label = f"{label}: {_state(row)}"
            quotes.append(quote(label, returned(row), LINE))
        return quotes

    @property
    def calls(self) -> dict[str, dict[str, Any]]:
        """Collect all calls of the reply that requested this call, by id."""
        return {str(call.get("id")): call for call in self.reply.get("calls", [])}

    @cached_property
    def siblings(self) -> list[dict[str, Any]]:
        """List the other calls of the same reply with their states; `pending` calls wait for a decision."""
        calls = {key: call for key, call in self.calls.items() if key != self.approval.call_id}
        run_id, alias, states = self.asked_in[0].pk, settings.DATABASE, dict[str, str]()
        about = Message.objects.using(alias).filter(run_id=run_id, call_id__in=list(calls))
        for row in read.read_rows(about.order_by("seq")):
            states[row.call_id] = _state(row) or states.get(row.call_id, "")
        others = Approval.objects.using(alias).filter(run_id=run_id, call_id__in=list(calls))
        cards = {card.call_id: self.mask_before.approval(card) for card in others.defer("arguments", "why")}
        waiting = {key for key, card in cards.items() if card.status == Approval.Status.PENDING}
        states |= dict.fromkeys(waiting, _("waits for a decision"))
        return [
            {
                "tool": html.visible(call.get("tool", "")),
                "title": html.visible(cards[key].title if key in cards else ""),
                "state": states.get(key, _("has not run yet")),
                "pending": key in waiting,
            }
            for key, call in calls.items()
        ]

    @property
    def only_answers(self) -> bool:
        """Check whether the call is a question, which is answered and never executed."""
        return bool(self.requested and self.requested.payload.get("only_answers"))

    @cached_property
    def tool(self) -> Tool | None:
        """Find the call's tool; None if this process does not have the run's definition."""
        return tools_of(self.approval.run).get(self.approval.tool_name)

    @cached_property
    def mask(self) -> masking.Mask:
        """Choose the mask of the session, or one that masks nothing if the card is revealed."""
        return masking.Mask() if self.revealed else self.around.masks[self.approval.run.session_id]

    @cached_property
    def face(self) -> Approval:
        """Mask the approval for this page. The result must never be saved."""
        return self.mask.approval(self.approval)

    @property
    def pending(self) -> bool:
        """Check whether the approval waits for a decision."""
        return self.approval.status == Approval.Status.PENDING

    @property
    def masked_names(self) -> set[str]:
        """Collect the names of the arguments that this page masks, wholly or in part."""
        given, masked = self.approval.arguments, self.face.arguments
        sensitive = set(self.mask.names(self.approval.tool_name)) & set(given)
        return sensitive | {name for name, value in given.items() if masked[name] != value}

    @property
    def properties(self) -> dict[str, Any]:
        """Find the schemas of the tool's arguments by name, in the signature's order; {} without the tool."""
        return self.tool.input_schema.get("properties", {}) if self.tool is not None else {}

    def ordered(self, values: dict[str, Any]) -> dict[str, Any]:
        """Sort arguments in the order of the tool's signature; unknown arguments come last."""
        return {name: values[name] for name in self.properties if name in values} | values

    def bodies(self, values: dict[str, Any]) -> list[html.Body]:
        """Format arguments with the tool's description of each; for a question, only its text."""
        values = self.ordered(values)
        if self.only_answers:
            values = {name: value for name, value in values.items() if name == "question"}
        about = [html.plain(self.properties.get(name, {}).get("description", "")) for name in values]
        pairs = zip(html.arguments(self.mask.arguments(self.approval.tool_name, values)), about, strict=False)
        return [replace(each, kind=f"{each.kind}: {text}" if text else each.kind) for each, text in pairs]

    @cached_property
    def why_not(self) -> str:
        """Explain why this user can neither approve nor deny a pending card; "" if they can.

        Also "" for a card that is not pending.
        """
        approval = self.approval
        if not self.pending:
            return ""
        if approval.expires_at is not None and approval.expires_at <= clock.now(settings.DATABASE):
            return _("It has expired. A worker will record that nobody answered.")
        if approval.run_id in self.around.cancelled():
            return _("Its run is being cancelled.")
        groups = self.around.groups() if approval.approvers else None
        return html.plain(deciders.why_not_decide(self.around.user, approval, groups=groups, verb="deny"))

    def why_not_now(self, verb: str) -> str:
        """Explain why this user cannot approve or deny (`verb`) on a page for several; "" if they can."""
        if not self.pending:
            return outcome(self.approval)
        if verb == statuses.Verb.APPROVE and self.only_answers:
            return _("A question is answered, not approved.")
        return self.why_not or (self.why_not_approve if verb == statuses.Verb.APPROVE else "")

    @property
    def escalated_to(self) -> str:
        """Name the group or permission whose people were told that nobody decides; "" if none were."""
        rows = [row.payload["to"] for row in self.rows if row.kind == events.APPROVAL_ESCALATED]
        return rows[-1] if rows else ""

    @property
    def why_not_approve(self) -> str:
        """Explain why a user who may decide cannot approve; "" if the user can approve."""
        if self.approval.pk in self.around.given():
            return _("You approved it already; it needs another person. You can still change your mind.")
        if not self.only_answers and (why := unfit(self.approval)):
            return html.plain(why)
        if self.approval.approvers != REQUESTER:  # `why_not` has asked already
            return ""
        return html.plain(deciders.why_not_decide(self.around.user, self.approval))

    @property
    def why_not_edit(self) -> str:
        """Explain why the arguments cannot be edited here; "" if they can."""
        if self.tool is None:
            return _("This web server does not have this version of the tool, so it cannot check an edit.")
        if len(canonical.dumps(self.approval.arguments)) > EDITABLE:
            return _("The arguments are too long to edit here. Deny the call, or edit it over the API.")
        return "" if self.approval.arguments or unfit(self.approval) else _("The call takes no arguments.")

    def edit_form(self, data: Any = None) -> EditForm | None:
        """Build the form of an edit; None if the arguments cannot be edited here.

        Arguments that the page masks or redacts have no field.
        """
        if self.why_not_edit or self.tool is None:
            return None
        schema, given, hidden = self.tool.input_schema, self.approval.arguments, self.masked_names
        fits = not unfit(self.approval)
        if not fits:  # the form has what the tool takes now
            offered = {*given, *schema.get("required", ())}
            blanks = {
                name: "" if form.get("type") == "string" else None for name, form in self.properties.items()
            }
            given = {name: given.get(name, blank) for name, blank in blanks.items() if name in offered}
        for name, value in given.items():  # redacted arguments cannot be edited either
            texts = (str(value), json.dumps(value, ensure_ascii=False, default=str))
            if redacted(value) != value or any(redact(text) != text for text in texts):
                hidden.add(name)
        options = form_options("edit", self.approval)
        return EditForm(schema, self.ordered(given), data, hidden=hidden, fits=fits, **options)

    def preview(self, warnings: list[Flag]) -> Any:
        """Choose a pending card's current preview if it has changed, else the stored preview.

        Adds a warning to `warnings` if the preview has changed or could not be made again.
        """
        asked = self.requested.payload if self.requested else {}
        edits = [row.payload for row in self.rows if row.kind == events.APPROVAL_DECIDED]
        stored = [asked, *(payload for payload in edits if "arguments" in payload)][-1].get("preview")
        if self.tool is None or self.tool.preview is None or not self.pending:
            return stored
        now = self.around.previews.get(self.approval.pk)
        if self.approval.pk not in self.around.previews:
            warnings.append(Flag(LATE if stored is None else LATE_AND_OLD))
        elif now is None and stored is not None:
            warnings.append(Flag(GONE))
        elif now is not None and canonical.dumps(now) != canonical.dumps(stored):
            warnings.append(Flag(CHANGED))
            return now
        return stored

    def warned_of(self, edited: dict[str, Any]) -> list[SafeString]:
        """Call the tool's `preview` with `edited` arguments; list its warnings that this card does not show.

        Returns [] without such a preview, because the tool has none, it fails, it takes too long, or an
        argument is invalid.
        """
        tool, made = self.tool, [self.preview([])]
        if tool is None or tool.preview is None:
            return []

        def ask() -> None:
            with suppress(InvalidArguments):  # refused when it is recorded
                made.append(tool.preview_of(tool.effective(edited)))

        in_time(ask)
        previews = [preview(self.mask.tool_text(tool.name, value)) for value in made]
        here, *others = [each.warnings if each is not None else [] for each in previews]
        return [text for texts in others for text in texts if text not in here]


def cards_of(user: Any, approvals: Iterable[Approval], *, revealed: bool = False) -> list[ApprovalCard]:
    """Build the cards of one page for a user."""
    around = Surroundings(user, approvals)
    return [ApprovalCard(approval, around, revealed) for approval in around.cards]


def asked(card: ApprovalCard) -> dict[str, Any]:
    """Build the template context of a card's call: arguments, preview and warnings."""
    approval, run, flags = card.approval, card.face.run, list[Flag]()
    if card.pending and (held := _HELD.get(approval.run.status)):  # an approved call does not run yet
        why = f" “{html.plain_line(run.blocked_reason)}”" if run.blocked_reason else ""
        if run.status == Run.Status.PAUSED:
            actor = card.around.pauses.get(run.pk, {}).get("actor") or {}
            name = html.plain(actor.get("name") or _("the program"))
            why = " " + _("Paused by %(name)s:") % {"name": name} + why
        flags.append(Flag(f"{held}{why}", approval.run_id, "waits"))
    warnings = card.around.flags(approval) if card.pending else []
    changes = preview(card.mask.tool_text(approval.tool_name, card.preview(warnings)))
    for text in changes.warnings if changes is not None else ():
        flags.append(Flag(format_html("{} ({})", text, _("the tool's preview"))))
    is_rule = approval.why == gate.REQUIRES.format(tool=approval.tool_name)
    return {
        "why": "" if is_rule else html.visible(card.face.why),
        "holds": html.visible(html.members(card.face.holds), LONGEST),
        "origin": card.requested.payload.get("origin") if card.requested else None,
        "arguments": card.bodies(approval.arguments),
        "brief": [] if card.only_answers else brief(card.face.title, card.ordered(card.face.arguments)),
        "preview": changes,
        "flags": [*flags, *warnings],
    }


def context_of(card: ApprovalCard) -> dict[str, Any]:
    """Build the template context of a card, except its URLs and forms."""
    approval, question, expires = card.approval, card.only_answers, card.approval.expires_at
    time_to_decide = expires - approval.requested_at if expires else timedelta()
    summary, denials = precedents(card.around.approvals, approval)
    history = [row for row in card.rows if row.kind in HISTORY] if card.requested else []
    proposed = card.calls.get(approval.call_id, {}).get("arguments", {})
    edited = {name: value for name, value in proposed.items() if approval.arguments.get(name) != value}
    context: dict[str, Any] = {}
    unread = card.around.unread().get(approval.run_id) if card.pending else None
    if unread:  # messages since the model's request: the last ones, and the row of the first
        about = Message.objects.using(settings.DATABASE).filter(run_id=approval.run_id)
        last = read.read_rows(about.filter(seq__in=[seq for seq, _at in unread[-SHOWN:]]).order_by("seq"))
        context = {
            "written": unread,
            "written_in": unread[0][0],
            "written_after": unread[0][0] - 1,
            "new_messages": [card.words_of(row) for row in last],
            "earlier": len(unread) - len(last),
        }
    return {
        **asked(card),
        **context,
        "card": card,
        "approval": approval,
        "urgent": expires is not None and expires - clock.now(settings.DATABASE) < time_to_decide / 5,
        "outcome": outcome(approval),
        "changed": card.bodies(edited),  # the arguments as the model proposed them
        "precedents": summary,
        "denials": denials,
        "quotes": card.quotes,
        "choices": list(map(html.plain, builtin.choices_of(card.face.arguments))) if question else [],
        "takes_text": not question or builtin.takes_text(approval.arguments),
        "missing": approval.required - approval.approved_count,
        "model_reads": {  # the texts that are known beforehand
            "edit": conversation.EDITED.format(arguments=_("(the arguments)")),
            "deny": gate.DENIED.format(reason=_("(your reason)")),
            "expire": in_doubt.EXPIRED,
        },
        "history": [row_card(card.mask.row(row), whole=True) for row in history],
        "masked": bool(card.masked_names),
        "may_reveal": permissions.may_reveal(card.around.user, approval),
    }


def buttons(card: ApprovalCard) -> dict[str, Any]:
    """Build the forms of a pending card, or the reason why there are none."""
    if not card.pending or card.why_not:
        return {"why_not": card.why_not}
    question, may_change = card.only_answers, card.approval.approvers != REQUESTER
    forms = {
        "why_not": "",
        "why_not_approve": card.why_not_approve,
        "may_change": may_change,
        "decide_form": form_of("approve", card.approval),
    }
    if question or may_change:
        forms["answer_form"] = form_of("answer", card.approval)
    if may_change and not question:
        forms |= {"edit_form": card.edit_form(), "why_not_edit": card.why_not_edit}
    if may_change and card.approval.expires_at is not None:
        forms["extend_form"] = form_of("extend", card.approval)
    return forms


def _is_request(row: events.Row) -> bool:
    return row.kind == events.USER and row.payload.get("reason") != events.OUTPUT_INVALID


def _state(row: events.Row) -> str:
    """Name the state of a call after this row; "" if the row changes no state."""
    if row.kind == events.TOOL_RESULT:
        return outcome_words(row.payload.get("outcome"), in_doubt=row.payload.get("in_doubt", False))[0]
    return str(_STATES.get(row.kind, ""))


def precedents(approvals: Any, approval: Approval) -> tuple[str, list[Approval]]:
    """Summarise other decisions about the tool as "12 approved, 1 denied", and find the latest denials.

    Counts at most the LATEST newest decisions. Leaves out imported sessions.
    """
    decided = approvals.filter(tool_name=approval.tool_name, status__in=DECIDED).exclude(pk=approval.pk)
    latest = decided.filter(run__session__imported_at__isnull=True).order_by("-requested_at")
    rows = list(latest.values_list("pk", "status")[:LATEST])
    counts = Counter(str(DECIDED[status]) for _key, status in rows)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    if len(rows) == LATEST:
        summary = _("of the last %(count)d: %(summary)s") % {"count": LATEST, "summary": summary}
    denied = [key for key, status in rows if status == STATUSES.DENIED][:SHOWN]
    denials = latest.filter(pk__in=denied).select_related("run") if denied else ()
    return summary, masking.masked_approvals(denials)


def quote(label: str, text: object, limit: int = QUOTED) -> Quote:
    """Redact a text and build its quote, on one line of at most `limit` characters."""
    whole = redact(str(text)).strip()  # before line ends go: redaction may need them
    short = html.body(label, " ".join(whole.split()), limit)
    return Quote(short.label, short.inline, html.body("", whole).text if short.left_out else "")


def brief(sentence: str, given: dict[str, Any]) -> list[Quote]:
    """Quote each argument that is masked or that the sentence does not contain, on one line."""
    quotes = []
    for name, value in given.items():
        label, words = html.named(name, value)
        texts = (html.as_text(value), words)
        forms = {form for text in texts for form in (text, text.replace(",", "")) if text}
        is_named = any(re.search(rf"(?<!\w){re.escape(form)}(?!\w)", sentence) for form in forms)
        if value == MASK or not is_named:
            quotes.append(quote(label, words, LINE))
    return quotes


def unit_in(sentence: str, amount: str) -> str:
    """Find the currency beside an amount in a sentence, such as "EUR" or "€"; "" without one."""
    forms = "|".join({re.escape(amount), re.escape(amount.replace(",", ""))})
    unit = r"([A-Z]{3}\b|[€$£¥])"
    match = re.search(rf"(?<![\w.,])(?:{forms})\s?{unit}|{unit}\s?(?:{forms})(?![\w.,]*\d)", sentence)
    return (match[1] or match[2]) if match else ""


def preview(stored: Any) -> Preview | None:
    """Prepare a stored preview for a page; None if `stored` is empty or no dict."""
    if not isinstance(stored, dict) or not stored:
        return None
    before, after = stored.get("before"), stored.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        before, after = ({}, {}) if before is None and after is None else ({"": before}, {"": after})
    changes, names = list[Change](), list({**before, **after})
    for name in names[:LINES]:
        sides, cells = (before.get(name), after.get(name)), []
        labels = {html.named(name, value)[0] for value in sides if value is not None}
        is_one = len(labels) == 1  # with two labels only one side is an amount of cents
        for value in sides:
            text = "" if value is None else html.named(name, value)[1] if is_one else html.spoken(value)
            cells.append(html.visible(text, LONGEST))
        label = html.plain(labels.pop() if is_one else name)
        changes.append(Change(label, cells[0], cells[1], sides[0] != sides[1]))
    given, warned = stored.get("links"), stored.get("warnings")
    links = [link for link in map(_link, given if isinstance(given, list) else ()) if link is not None]
    warnings = [text for text in (warned if isinstance(warned, list) else [warned]) if text not in (None, "")]
    texts = [quote("", html.as_text(text), LONGEST).short for text in warnings[:LINES]]
    rest = {name: value for name, value in stored.items() if name not in _PARTS}
    note = html.body("", html.pretty(rest), LONGEST).text if rest else ""
    return Preview(changes, links[:LINES], note, len(names) - len(changes), texts)


def _link(link: Any) -> tuple[str, str] | None:
    """Read a link's text and URL; None unless the URL is an http or https URL or a path of this site."""
    if isinstance(link, dict):
        text, url = link.get("label"), link.get("url")
    elif isinstance(link, list) and len(link) == 2:
        text, url = link
    else:
        text, url = "", link
    if not isinstance(url, str) or html.bare(url) != url or url.startswith("//"):
        return None
    try:
        scheme, site = urlsplit(url)[:2]
    except ValueError:
        return None
    is_safe = scheme in ("http", "https") if scheme or site else url.startswith("/")
    if not is_safe or any(character in url for character in "\\\n\t "):
        return None
    if not text:
        text = _("Open %(site)s") % {"site": site} if site else _("Open the page about it")
    return html.plain(text), url
