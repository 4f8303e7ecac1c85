"""The conversation of a run: the words of people and the agent, and each call on one line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.approvals.around import Surroundings, tools_of
from agentruns.admin.base import ReadOnlyAdmin, status_of
from agentruns.admin.forms import KeyForm, TypedField, area
from agentruns.admin.html import Body, as_text, body, evidence, person, plain, plain_line, visible
from agentruns.admin.markdown import markdown
from agentruns.admin.runs import steps
from agentruns.admin.runs.steps import ODD, TAKEN_OVER, Timing, verdict_words
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError
from agentruns.journal import doubts, events, fold, masking, policy, verify
from agentruns.models import Approval, Message, Run, statuses
from agentruns.models.event import CHILD
from agentruns.services import permissions
from agentruns.services.runs import starting, waiting
from agentruns.tools.card import in_time
from agentruns.utils.bounds import OWN_EVENTS, TEXT_LENGTH

LONGEST = 4_000  # characters of a task, a message or a reply
RESULT = 1_000  # characters of what a tool returned
SHORT = 60  # characters of an argument that stands beside others on a line
LATEST = 2_000  # starts of a session that are compared
WARNINGS = 10  # about calls in other sessions
SAFE = "safe_to_retry"
_NOTED: list[str] = [events.RUN_PAUSED, events.RUN_RESUMED, events.RUN_CANCELLED, events.RUN_FAILED]
_NOTED += [events.RUN_ADOPTED, events.LEFT_OUT, events.BUDGET_RAISED]
NOTES: dict[str, Any] = {kind: steps.FORMS[kind].title for kind in _NOTED}
NOTES[events.MODEL_FAILED] = gettext_lazy("The model failed")


@dataclass
class Line:
    """A call in the conversation: its effect, its state, the decisions on it, its arguments and result."""

    key: str
    asked: int  # seq of the reply
    title: SafeString
    is_named: bool  # the title is the tool's own sentence, and not made of its name
    given: dict[str, Any]
    state: str = ""
    tone: str = "plain"
    took: str = ""
    says: list[str] = field(default_factory=list)
    result: Body | None = None
    file: steps.Payload | None = None  # where all of the result is
    seq: int = 0  # of the result
    files: list[steps.Payload] = field(default_factory=list)
    is_doubted: bool = False  # it is, or was, in doubt
    started: int = 0  # seq of the last start
    limit: int | None = LONGEST
    is_effect: bool = False

    @cached_property
    def texts(self) -> dict[str, str]:
        """Format the arguments as text; leave out blank ones, and arguments that the title contains."""
        texts = {name: as_text(value) for name, value in self.given.items()}
        return {name: text for name, text in texts.items() if text.strip() and text not in self.title}

    @cached_property
    def beside(self) -> dict[str, str]:
        """Choose the arguments that fit beside the title; {} if they are too long or the title names them."""
        short = {key: text for key, text in self.texts.items() if len(text) <= SHORT and "\n" not in text}
        return short if len(", ".join(short.values())) <= 2 * SHORT and not self.is_named else {}

    @property
    def short(self) -> SafeString:
        """Format the arguments that fit beside the title."""
        return format_html_join(", ", "{}", ((visible(text),) for text in self.beside.values()))

    @property
    def bodies(self) -> list[tuple[int, Body]]:
        """List the arguments that do not fit beside the title, and the result, each with its row's seq."""
        below = {key: text for key, text in self.texts.items() if key not in self.beside}
        bodies = [(self.asked, body(key.replace("_", " "), text, self.limit)) for key, text in below.items()]
        return [*bodies, (self.seq, self.result)] if self.result is not None else bodies

    @property
    def is_letter(self) -> bool:
        """Check whether an argument has several lines."""
        return any("\n" in text.strip() for text in self.texts.values())


@dataclass(slots=True)
class Turn:
    """One entry of the conversation: a text of a person or the agent with its calls, or a note."""

    who: SafeString | str
    side: str
    seq: int
    text: Body | None = None
    note: str = ""
    lines: list[Line] = field(default_factory=list)
    file: steps.Payload | None = None  # where all of the text is
    files: list[steps.Payload] = field(default_factory=list)


class Talk:
    """The turns of the conversation, built from rows; later rows about a call update its line."""

    def __init__(
        self, run: Run, mask: masking.Mask, times: dict[int, Timing], *, whole: int | None, is_plain: bool
    ) -> None:
        self.run, self.mask, self.times = run, mask, times
        self.whole, self.is_plain = whole, is_plain
        self.turns: list[Turn] = []
        self.lines: dict[str, Line] = {}
        self.described: dict[str, str] = {}
        self.starter = ""  # name of the user who gave the next task
        self.not_run = _("not run") if run.is_ended else _("not run yet")

    def add(self, rows: Sequence[events.Row]) -> None:
        """Add rows; skip rows that cannot be read, such as rows of newer code. The list of steps has them."""
        self.described = described(self.run, rows)
        for row in rows:
            with suppress(*ODD):
                self.add_row(self.mask.row(row))

    def note(self, row: events.Row) -> str:
        """Say what a row of the kinds in NOTES is about, and why."""
        error, why = row.payload.get("error") or {}, row.payload.get("reason") or ""
        if row.kind == events.LEFT_OUT and "seq" in row.payload:
            why = self.decision(row, _("row %(seq)s") % {"seq": row.payload["seq"]})
        elif row.kind == events.BUDGET_RAISED:
            limits = (f"{name} {limit}" for name, limit in row.payload["limits"].items())
            why = self.decision(row, ", ".join(limits))
        why = error.get("text") or why
        return f"{NOTES[row.kind]}: {plain_line(why)}" if why else str(NOTES[row.kind])

    def add_row(self, row: events.Row) -> None:
        """Add a turn, or update the line of the call that a row is about; raises the errors in ODD."""
        payload, line = row.payload, self.lines.get(row.call_id)
        limit = None if row.seq == self.whole else LONGEST
        if row.kind == events.RUN_STARTED:
            self.starter = steps.actor_name(payload)
        elif row.kind == events.USER and payload.get("reason") == events.OUTPUT_INVALID:
            note = _("The answer was not of the required form, and was sent back.")
            self.turns.append(Turn("", "note", row.seq, note=note))
        elif row.kind == events.USER:
            about, starter = payload.get("about"), "" if events.COPIED in payload else self.starter
            who, self.starter = steps.author(payload) or starter or self.run.owner_name, ""
            said = fold.text_of(payload["content"]) + (f"\n{about['detail']}" if about else "")
            turn = Turn(person(who), "person", row.seq, body("", said, limit))
            turn.file, turn.files = steps.file_of(payload), steps.attachments(payload)
            self.turns.append(turn)
        elif row.kind == events.ASSISTANT:
            source = fold.text_of(payload["content"])
            reply = body("", source, limit) if source.strip() else None
            if reply is not None and not self.is_plain:
                reply = markdown("", source, limit, hide=self.mask.json)
            is_same = bool(self.turns) and self.turns[-1].side == "agent"
            turn = Turn("" if is_same else visible(self.run.agent), "agent", row.seq, reply)
            for call in payload["calls"]:
                key, tool = call["id"], call["tool"]
                sentence = self.mask.tool_text(tool, self.described.get(key, ""))
                title = visible(sentence or tool.replace("_", " "))
                line = Line(key, row.seq, title, bool(sentence), call["arguments"], self.not_run, limit=limit)
                self.lines[key] = line
                turn.lines.append(line)
            self.turns.append(turn)
        elif row.kind == events.RUN_RESUMED and str(payload.get("reason")) in TAKEN_OVER:
            why, at_work = str(TAKEN_OVER[payload["reason"]]), 0
            for each in self.lines.values():
                if each.started and not each.seq:
                    each.says.append(why)
                    at_work += 1
            if not at_work:  # no call shows it, so a note does
                self.turns.append(Turn("", "note", row.seq, note=why))
        elif row.kind in NOTES:
            side = "bad" if payload.get("error") else "note"
            self.turns.append(Turn("", side, row.seq, note=self.note(row)))
        elif line is None:
            return
        elif row.kind in (events.APPROVAL_REQUESTED, events.APPROVAL_VOIDED):
            line.title = visible(payload["title"]) if "title" in payload else line.title
            line.is_named, line.started, line.is_effect = True, 0, False  # its start may be rolled back
            line.state, line.tone = _("waits for a decision"), "waits"
        elif row.kind == events.APPROVAL_DECIDED:
            is_edit, line.given = "arguments" in payload, payload.get("arguments", line.given)
            what = _("Edited and approved") if is_edit else steps.verb_words(payload["verb"])[0]
            line.says.append(self.decision(row, what))
            line.state, line.tone = self.not_run, "plain"
        elif row.kind == events.TOOL_STARTED:
            line.state, line.started = _("is at work"), row.seq
            line.is_effect = payload.get("declares") != SAFE
        elif row.kind == events.EVENT_AWAITED:
            what = plain(payload["name"].removeprefix(OWN_EVENTS))
            line.state = _("waits for its run") if payload["name"] == CHILD else _("waits for %s") % what
        elif row.kind == events.EVENT_DELIVERED:
            line.says.append(self.decision(row, steps.delivery_words(payload)))
        elif row.kind == events.ORPHAN_FOUND:
            known = evidence(payload.get("evidence", ""))
            line.says.append(_("In doubt: %(evidence)s") % {"evidence": known})
            line.state, line.tone, line.is_doubted = _("in doubt"), "bad", True
        elif row.kind == events.ORPHAN_RESOLVED:
            line.says.append(self.decision(row, verdict_words(payload["verdict"]), payload.get("evidence")))
        elif row.kind == events.TOOL_RESULT:
            outcome, in_doubt = payload.get("outcome"), payload.get("in_doubt", False)
            words, line.tone = steps.outcome_words(outcome, in_doubt=in_doubt, is_started=bool(row.attempt))
            is_deferred = "deferred" in payload
            line.state = _("deferred") if is_deferred else ("" if outcome == statuses.Outcome.OK else words)
            if payload.get("reconciled"):
                line.says.append(_("The outside system says so, asked by the call's key."))
            timing = self.times.get(row.seq)
            line.took = timing.took if timing is not None and float(timing.bar or 0) else ""
            line.given = payload.get("edited") or line.given
            line.result = body(_("Result"), steps.returned(row), limit and RESULT)
            line.seq, line.file, line.files = row.seq, steps.file_of(payload), steps.attachments(payload)
            line.is_effect = line.is_effect and not doubts.did_nothing(payload) and not is_deferred

    def decision(self, row: events.Row, what: str, why: Any = "") -> str:
        """Format a decision or verdict, such as "maria: it happened. Why"."""
        text = f"{steps.actor(row)}{verify.MARK if self.run.session.imported_at else ''}: {what}"
        why = why or row.payload.get("reason") or ""
        return f"{text}. {plain_line(why)}" if why else text


def described(run: Run, rows: Sequence[events.Row]) -> dict[str, str]:
    """Collect the tools' sentences, if made in time, about calls that run without approval, by call id."""
    tools = {name: tool for name, tool in tools_of(run).items() if tool.describe is not None}
    sentences: dict[str, str] = {}

    def describe() -> None:
        for row in rows:
            with suppress(*ODD):
                for call in row.payload["calls"] if row.kind == events.ASSISTANT else ():
                    if call["verdict"] == statuses.GateVerdict.RUN and call["tool"] in tools:
                        sentences[call["id"]] = tools[call["tool"]].title(call["arguments"])

    if tools:
        in_time(describe)
    return {**sentences}


def elsewhere(user: Any, keys: set[str], mask: masking.Mask) -> list[tuple[str, UUID | None]]:
    """List warnings about approved calls that also ran in other sessions, each with the other run's id.

    `keys` are ids of approvals; approvals that the user may not see are left out. Lists at most WARNINGS.
    """
    done = policy.visible_approvals(user).filter(pk__in=keys, status=Approval.Status.CONSUMED)
    cards = list(done.exclude(same_call="").select_related("run").order_by("pk")) if keys else []
    flags_of = Surroundings(user, cards).elsewhere if cards else {}
    flags = [(card, flag) for card in cards for flag in flags_of[card.same_call]][:WARNINGS]
    return [(f"{plain(mask.approval(card).title)}: {flag.text}", flag.run_id) for card, flag in flags]


class Starts(NamedTuple):
    """The starts of a run, and its calls that ran more than once in its session with equal arguments."""

    twice: list[dict[str, Any]]
    none_twice: bool  # for sure
    total: int  # starts of the run's own calls
    again: int  # calls of the run that were started more than once
    approvals: set[str]  # ids of the approvals of the run's calls


def repeated(user: Any, run: Run) -> Starts:
    """Find a run's started calls whose tool and arguments another started call of the session repeats.

    Counts the starts of the run, too. Leaves out tools that are safe to repeat, and calls that did nothing.
    Reads the newest LATEST starts in runs that the user may see.
    """
    rows = Message.objects.using(settings.DATABASE).own()
    rows = rows.filter(session_id=run.session_id, kind=events.TOOL_STARTED)
    seen = policy.visible_runs(user)
    if policy.is_narrowed(seen):
        rows = rows.filter(run__in=seen)
    starts_of: dict[tuple[str, str], dict[str, tuple[int, UUID]]] = defaultdict(dict)
    columns = ("tool_name", "call_id", "seq", "run_id", "facts")
    starts = list(rows.order_by("-seq").values_list(*columns)[:LATEST])
    for tool, call, seq, run_id, facts in starts:
        if facts.get("digest") and facts.get("declares") != SAFE:
            starts_of[tool, facts["digest"]].setdefault(call, (seq, run_id))
    several = {key: calls for key, calls in starts_of.items() if len(calls) > 1}
    undone: set[str] = set()  # refused, rolled back, or by a person's verdict: such calls did nothing
    if several:
        again = {call for calls in several.values() for call in calls}
        ends = Message.objects.using(settings.DATABASE).filter(session_id=run.session_id, call_id__in=again)
        ends = ends.filter(kind__in=(events.TOOL_RESULT, events.ORPHAN_RESOLVED))
        undone = {call for call, facts in ends.values_list("call_id", "facts") if doubts.did_nothing(facts)}
    twice = []
    for (tool, _digest), calls in several.items():
        places = sorted(place for call, place in calls.items() if call not in undone)
        if len(places) > 1 and any(run_id == run.pk for _seq, run_id in places):
            twice.append({"tool": plain(tool), "count": len(places), "rows": places})
    is_all = len(starts) < LATEST
    own = [(call, facts.get("approval")) for _tool, call, _seq, run_id, facts in starts if run_id == run.pk]
    times = Counter(call for call, _approval in own)
    if not is_all:
        times = Counter(rows.filter(run_id=run.pk).values_list("call_id", flat=True))
    more = sum(count > 1 for count in times.values())
    none_twice = is_all and not twice and not policy.is_narrowed(seen)
    return Starts(twice, none_twice, times.total(), more, {key for _call, key in own if key})


class ReplyForm(KeyForm):
    """The form of the next message to the agent."""

    text = TypedField(label=gettext_lazy("Reply to this agent"), max_length=TEXT_LENGTH, widget=area(2))


def reply_form(user: Any, run: Run) -> ReplyForm | None:
    """Build the reply form; None if the run is imported, or the user may not message or start the agent."""
    may = not run.session.imported_at and permissions.may(user, "message", run)
    is_startable = may and run.agent in {agent.name for agent in starting.agents_of(user)}
    return ReplyForm(auto_id="reply_%s") if is_startable else None


def reply_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Send a message into the run's session, and go to the run that reads it."""
    form, status = ReplyForm(request.POST, auto_id="reply_%s"), 400
    refusal = _("Nothing was sent. Write what the agent is to be told.")
    if form.is_valid():
        text, key = form.cleaned_data["text"], form.cleaned_data["key"]
        try:
            reader = starting.send_message(request.user, run.session, text, run.agent, key)
        except (AgentRunsError, ValueError) as error:
            status, refusal = status_of(error), _("Nothing was sent. %(why)s") % {"why": plain(error)}
        else:
            if reader.is_new:
                admin.log_change(request, reader, _("Wrote to the agent from the console."))
            sent = _("Sent. The agent reads it next.")
            if reader.status in waiting.FOR_PEOPLE:
                sent = _("Sent. The agent reads it when the run goes on, which waits for a person.")
            admin.message_user(request, sent, messages.SUCCESS)
            return admin.back(request, reader)
    return admin.page(request, run, status=status, refusal=refusal, reply_form=form)
