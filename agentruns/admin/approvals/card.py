"""The card of an approval: everything a person needs to decide, and what this person may do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.approvals.decide import form_of, form_options, outcome, outlooks
from agentruns.admin.forms import EditForm
from agentruns.admin.html import (
    EMPTY,
    Body,
    Fact,
    ago,
    approval_badge,
    arguments,
    body,
    dated,
    is_urgent,
    plain,
    pretty,
    risk_badge,
    visible,
)
from agentruns.admin.runs.steps import outcome_words, read_rows, row_card
from agentruns.agents.agent import get_agent
from agentruns.conf import settings
from agentruns.exceptions import UnknownAgentError
from agentruns.journal import events
from agentruns.journal.copies import happened_at
from agentruns.journal.events import Row
from agentruns.journal.fold import text_of
from agentruns.journal.masking import Sensitive, masked, sensitive_in
from agentruns.models import Approval, Message, Run
from agentruns.services import permissions, waiting
from agentruns.tools import Tool
from agentruns.tools.card import MASK, one_line
from agentruns.utils import clock
from agentruns.utils import json as canonical
from agentruns.utils.db import always_rollback
from agentruns.utils.redaction import redact, redacted

LATEST = 200  # decisions and calls that are looked at, however long the history is
SHOWN = 3
LINES = 100  # of a preview
LONGEST = 2_000  # characters of one of its values
DECIDED: dict[str, Any] = {
    "approved": gettext_lazy("approved"),
    "consumed": gettext_lazy("approved"),
    "denied": gettext_lazy("denied"),
    "answered": gettext_lazy("answered"),
    "expired": gettext_lazy("expired"),
}
HISTORY = (
    events.APPROVAL_DECIDED,
    events.APPROVAL_EXTENDED,
    events.TOOL_STARTED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
)
CHANGED = gettext_lazy("What the preview shows has changed since the agent asked. This is how it is now.")
GONE = gettext_lazy("The preview cannot be made any more: it shows how things were when the agent asked.")


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another call of the same reply and where it stands; `pending` if its card waits for a decision."""

    tool: SafeString
    title: SafeString
    state: str
    pending: bool = False


@dataclass(slots=True)
class CallContext:
    """The journal around one approval: the reply the call came in, its siblings, its own history."""

    history: list[Row] = field(default_factory=list)
    requested: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    proposed: dict[str, Any] = field(default_factory=dict)
    siblings: list[Sibling] = field(default_factory=list)

    @property
    def preview(self) -> Any:
        """The tool's preview of the arguments that the card has now."""
        edits = [row.payload for row in self.history if row.kind == events.APPROVAL_DECIDED]
        edits = [payload for payload in edits if "arguments" in payload]
        return (edits[-1] if edits else self.requested).get("preview")

    @property
    def only_answers(self) -> bool:
        """True if it is a question: answered, never executed."""
        return bool(self.requested.get("only_answers"))


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning in red, with the run it is about."""

    text: Any
    run_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the comparison, fit for a page."""

    label: str
    before: SafeString
    after: SafeString
    differs: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview fit for a page; `links` are pairs of a text and a URL that is safe to follow."""

    changes: list[Change] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    note: SafeString | str = ""
    left_out: int = 0


@dataclass
class ApprovalCard:
    """One approval, the journal around it, and what this user may do about it; read on first use."""

    approval: Approval
    user: Any
    revealed: bool = False

    @cached_property
    def context(self) -> CallContext:
        """The journal around the call."""
        return context_of(settings.DATABASE, self.approval)

    @cached_property
    def tool(self) -> Tool | None:
        """The tool as this process has it, or None."""
        return _tool(self.approval)

    @cached_property
    def sensitive(self) -> Sensitive:
        """The sensitive arguments of each tool of the run."""
        return sensitive_in(self.approval.run)

    @property
    def pending(self) -> bool:
        """True if it still waits."""
        return self.approval.status == Approval.Status.PENDING

    @property
    def masked_names(self) -> set[str]:
        """The arguments shown as a mask: sensitive, and not revealed."""
        if self.revealed:
            return set()
        return set(self.sensitive.get(self.approval.tool_name, ())) & set(self.approval.arguments)

    @property
    def locked_names(self) -> set[str]:
        """The arguments that cannot be edited, because the page does not show them as they are."""
        given = self.approval.arguments
        return self.masked_names | {name for name, value in given.items() if _is_redacted(value)}

    def shown(self, values: dict[str, Any]) -> list[Body]:
        """Return arguments for the page."""
        hidden = self.masked_names
        return arguments({name: MASK if name in hidden else value for name, value in values.items()})

    @property
    def why_not(self) -> str:
        """The reason why a pending card has no buttons for this user, or ""."""
        approval = self.approval
        if not self.pending:
            return ""
        if approval.expires_at is not None and approval.expires_at <= clock.now(settings.DATABASE):
            return _("Its time is over. The next sweep of a worker records that nobody answered.")
        if waiting.cancel_request(settings.DATABASE, approval.run) is not None:
            return _("Its run is being cancelled.")
        return plain(permissions.why_not_decide(self.user, approval))

    @property
    def why_not_approve(self) -> str:
        """The reason why this user can do everything but approve, or ""."""
        if permissions.already_given(self.user, [self.approval]):
            return _("You approved it already. It takes another person. You can still change your mind.")
        return ""

    @property
    def why_not_edit(self) -> str:
        """The reason why the arguments cannot be edited here, or ""."""
        if self.tool is None:
            return _("This web server does not know the tool as the run does, so it could not check an edit.")
        return "" if self.approval.arguments else _("The call takes no arguments.")

    def edit_form(self, data: Any = None) -> EditForm | None:
        """Return the form of an edit, or None where the arguments cannot be edited here."""
        if self.why_not_edit or self.tool is None:
            return None
        options = form_options("edit", self.approval)
        schema, given = self.tool.input_schema, self.approval.arguments
        return EditForm(schema, given, data, hidden=self.locked_names, **options)


def shown(one: ApprovalCard, approvals: Any) -> dict[str, Any]:
    """Return the context of the card but for its URLs; `approvals` are those that its reader may see."""
    approval, around = one.approval, one.context
    summary, denials = precedents(approvals, approval)
    warnings = flags(settings.DATABASE, approval) if one.pending else []
    now = _preview(one, warnings)
    sensitive = {} if one.revealed else one.sensitive
    question = around.only_answers
    return {
        "why": visible(approval.why),
        "asked_for": visible(approval.run.owner_name or _("the program")),
        "expires": dated(approval.expires_at) if approval.expires_at else "",
        "urgent": is_urgent(approval.requested_at, approval.expires_at),
        "badge": approval_badge(approval),
        "risk": risk_badge(approval),
        "pending": one.pending,
        "outcome": outcome(approval),
        "arguments": one.shown(approval.arguments),
        "changed": _changed(one),
        "preview": preview(now, one.masked_names),
        "flags": warnings,
        "precedents": summary,
        "denials": denials,
        "said": visible(around.said),
        "siblings": around.siblings,
        "question": question,
        "choices": _choices(approval) if question else [],
        "outlooks": outlooks(approval, is_question=question),
        "history": [row_card(masked(row, sensitive), whole=True) for row in around.history],
        "facts": facts(approval),
        "masked": bool(one.masked_names),
        "may_reveal": one.user.has_perm("agentruns.reveal_arguments"),
        "revealed": one.revealed,
    }


def buttons(one: ApprovalCard) -> dict[str, Any]:
    """Return the forms of a pending card, or why there are none."""
    why_not = one.why_not
    if not one.pending or why_not:
        return {"why_not": why_not}
    verbs = ["answer", "deny"] if one.context.only_answers else ["approve", "answer", "deny"]
    if one.approval.expires_at is not None:
        verbs.append("extend")
    return {
        "why_not": "",
        "why_not_approve": one.why_not_approve,
        "why_not_edit": one.why_not_edit,
        **{f"{verb}_form": form_of(verb, one.approval) for verb in verbs},
        **({} if one.context.only_answers else {"edit_form": one.edit_form()}),
    }


def facts(approval: Approval) -> list[Fact]:
    """Return the facts of an approval but for its arguments and its decision."""
    run = approval.run
    needed = _("%(given)d of %(required)d") % {
        "given": approval.approved_count,
        "required": approval.required,
    }
    return [
        Fact(_("Requester"), visible(run.owner_name or EMPTY)),
        Fact(_("Tool"), visible(approval.tool_name)),
        Fact(_("Agent"), _("%(agent)s, version %(version)s") % {"agent": run.agent, "version": run.version}),
        Fact(_("Session"), visible(run.session.key)),
        Fact(_("Asked"), dated(approval.requested_at)),
        Fact(_("Expires"), dated(approval.expires_at) if approval.expires_at else _("never")),
        Fact(_("Who may decide"), visible(approval.approvers or _("whoever may decide approvals"))),
        Fact(_("Approvals given"), needed),
        Fact(_("Digest"), approval.digest[:12], approval.digest),
    ]


def context_of(alias: str, approval: Approval) -> CallContext:
    """Read what surrounds an approval: a constant number of queries."""
    about = Message.objects.using(alias).filter(run_id=approval.run_id)
    rows = read_rows(about.filter(call_id=approval.call_id).order_by("seq"))
    found = CallContext([row for row in rows if row.kind in HISTORY])
    requested = next((row for row in rows if row.kind == events.APPROVAL_REQUESTED), None)
    if requested is None:
        return found
    found.requested = requested.payload
    replies = about.filter(kind=events.ASSISTANT, seq__lt=requested.seq)
    for row in read_rows(replies.order_by("-seq")[:1]):
        found.said = text_of(row.payload.get("content", []))
        calls = {str(call.get("id")): call for call in row.payload.get("calls", [])}
        found.proposed = calls.pop(approval.call_id, {}).get("arguments", {})
        found.siblings = _siblings(alias, approval, calls)
    return found


def _siblings(alias: str, approval: Approval, calls: dict[str, dict[str, Any]]) -> list[Sibling]:
    if not calls:
        return []
    states: dict[str, str] = {}
    about = Message.objects.using(alias).filter(run_id=approval.run_id, call_id__in=list(calls))
    for row in read_rows(about.order_by("seq")):
        states[row.call_id] = _state(row, states.get(row.call_id, ""))
    cards = Approval.objects.using(alias).filter(run_id=approval.run_id, call_id__in=list(calls))
    approvals = {card.call_id: card for card in cards.defer("arguments", "why")}
    return [
        _sibling(call, states.get(call_id, str(_("has not run yet"))), approvals.get(call_id))
        for call_id, call in calls.items()
    ]


def _sibling(call: dict[str, Any], state: str, card: Approval | None) -> Sibling:
    tool = visible(call.get("tool", ""))
    if card is None:
        return Sibling(tool, visible(""), state)
    pending = card.status == Approval.Status.PENDING
    return Sibling(tool, visible(card.title), str(_("waits for a decision")) if pending else state, pending)


def _state(row: Row, before: str) -> str:
    if row.kind == events.TOOL_RESULT:
        return outcome_words(row.payload.get("outcome"), in_doubt=row.payload.get("in_doubt", False))[0]
    return str(_STATES.get(row.kind, before))


def precedents(approvals: Any, approval: Approval) -> tuple[str, list[str]]:
    """Return "12 approved, 1 denied" for the tool, and the reasons of the latest denials."""
    decided = approvals.filter(
        tool_name=approval.tool_name, status__in=DECIDED, run__session__imported_at__isnull=True
    )
    latest = decided.exclude(pk=approval.pk).order_by("-requested_at")
    fields = ("status", "decided_by_name", "reason", "decided_at")
    rows = list(latest.values_list(*fields)[:LATEST])
    counts = Counter(str(DECIDED[status]) for status, *_rest in rows)
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
    return [*found[:SHOWN], *_failed(alias, approval), *_in_doubt(alias, approval)]


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


def _failed(alias: str, approval: Approval) -> list[Flag]:
    """Return the failed calls of the session for which this card asks."""
    text = _("An earlier call of this tool raised an error and may have happened. Approving settles it. %s")
    return [
        Flag(text % one_line(plain(wait.text)), wait.run_id)
        for wait in waiting.uncleared(alias, approval.run)
        if wait.tool == approval.tool_name and wait.gates_tool and wait.text
    ][:SHOWN]


def _in_doubt(alias: str, approval: Approval) -> list[Flag]:
    orphaned = Run.objects.using(alias).filter(status=Run.Status.ORPHANED).order_by("-updated_at")
    found = waiting.waits(alias, orphaned.defer("input", "output", "error")[:LATEST])
    text = _("A call of this tool is in doubt: nobody knows whether it happened.")
    return [
        Flag(text, run_id)
        for run_id, waits in found.items()
        if any(wait.kind == waiting.ORPHAN and wait.tool == approval.tool_name for wait in waits)
    ][:SHOWN]


def preview(shown: Any, hidden: Collection[str] = ()) -> Preview | None:
    """Return a journaled preview for the card, values named as in `hidden` masked; None without one."""
    if not isinstance(shown, dict) or not shown:
        return None
    shown = _masked(shown, hidden) if hidden else shown
    before, after = shown.get("before"), shown.get("after")
    links = [link for link in map(_link, _listed(shown.get("links"))) if link is not None]
    rest = {name: value for name, value in shown.items() if name not in ("before", "after", "links")}
    changes = _changes(before, after)
    names = len({**before, **after}) if isinstance(before, dict) and isinstance(after, dict) else 0
    note = body("", pretty(rest), LONGEST).text if rest else ""
    return Preview(changes, links[:LINES], note, max(0, names - len(changes)))


def _changes(before: Any, after: Any) -> list[Change]:
    if before is None and after is None:
        return []
    if not isinstance(before, dict) or not isinstance(after, dict):
        before, after = {"": before}, {"": after}
    return [
        Change(plain(name), _shown(before, name), _shown(after, name), before.get(name) != after.get(name))
        for name in list({**before, **after})[:LINES]
    ]


def _masked(value: Any, hidden: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {name: MASK if name in hidden else _masked(each, hidden) for name, each in value.items()}
    return [_masked(each, hidden) for each in value] if isinstance(value, list) else value


def _shown(values: dict[str, Any], name: str) -> SafeString:
    value = values.get(name)
    if value is None:
        return visible("")
    shown = body("", value if isinstance(value, str) else pretty(value), LONGEST)
    more = _("and %(count)d characters more") % {"count": shown.left_out}
    return format_html("{} … ({})", shown.text, more) if shown.left_out else shown.text


def _listed(links: Any) -> list[Any]:
    return links if isinstance(links, list) else []


def _link(link: Any) -> tuple[str, str] | None:
    """Return a link's text and URL: one of this site or of the web, never a script."""
    if isinstance(link, dict):
        text, url = link.get("label"), link.get("url")
    elif isinstance(link, list) and len(link) == 2:
        text, url = link
    else:
        text, url = link, link
    if not isinstance(url, str) or not _is_safe(url):
        return None
    return plain(text or url), url


def _is_safe(url: str) -> bool:
    if plain(url) != url or any(character in url for character in "\\\n\t ") or url.startswith("//"):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") if parts.scheme or parts.netloc else url.startswith("/")


def _preview(one: ApprovalCard, warnings: list[Flag]) -> Any:
    """Return the preview to show: of a pending card the one made now, and a warning if it differs."""
    shown = one.context.preview
    if one.tool is None or one.tool.preview is None or not one.pending:
        return shown
    with always_rollback():
        now = one.tool.preview_of(one.approval.arguments)
    if now is None and shown is not None:
        warnings.append(Flag(GONE))
    elif now is not None and canonical.dumps(now) != canonical.dumps(shown):
        warnings.append(Flag(CHANGED))
        return now
    return shown


def _is_redacted(value: Any) -> bool:
    texts = (str(value), json.dumps(value, ensure_ascii=False, default=str))
    return redacted(value) != value or any(redact(text) != text for text in texts)


def _changed(one: ApprovalCard) -> list[Body]:
    """Return the arguments as the model proposed them, where a person set others."""
    given, proposed = one.approval.arguments, one.context.proposed
    return one.shown({name: value for name, value in proposed.items() if given.get(name) != value})


def _choices(approval: Approval) -> list[str]:
    choices = approval.arguments.get("choices")
    return [plain(choice) for choice in choices] if isinstance(choices, list) else []


def _tool(approval: Approval) -> Tool | None:
    try:
        agent = get_agent(approval.run.agent, approval.run.version)
    except UnknownAgentError:
        return None
    same = agent.definition_hash == approval.run.definition_id  # else it is another tool of that name
    return agent.tools.get(approval.tool_name) if same else None


_STATES = {
    events.TOOL_STARTED: gettext_lazy("is at work"),
    events.ORPHAN_FOUND: gettext_lazy("is in doubt: it may have happened"),
    events.APPROVAL_DECIDED: gettext_lazy("is decided, and has not run yet"),
}
