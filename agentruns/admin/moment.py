"""A run at any row of its journal: what it was then, and the very request that the model was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from agentruns.admin import badges
from agentruns.admin.advice import Action, missing
from agentruns.admin.journal import OUTCOMES, card
from agentruns.admin.lineage import ForkForm, RunLineage
from agentruns.admin.paging import seq_of
from agentruns.admin.text import Body, Fact, body, plain, pretty, visible
from agentruns.admin.times import EMPTY, stamp
from agentruns.conf import settings
from agentruns.exceptions import RunStateError
from agentruns.journal import events
from agentruns.journal.conversation import SessionState
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, RunState
from agentruns.journal.masking import Sensitive, hide, masked, sensitive_in
from agentruns.journal.read import rows_until
from agentruns.models import Definition, Message, Run
from agentruns.services.forks import PERMISSION, fate
from agentruns.utils.ids import uuid7

LONGEST = 4_000  # characters of one block of the conversation
MESSAGES = 200  # the newest ones


@dataclass(slots=True)
class Moment:
    """The row, the state before and after it, and the conversation as the model had it or would get it."""

    row: Row
    before: RunState
    state: SessionState
    shown: SessionState  # the same with sensitive arguments masked
    sent: str  # by whom the conversation is known: "as sent", "other" or "unknown", "" if it was not sent

    @classmethod
    def at(cls, run: Run, seq: int, sensitive: Sensitive) -> Moment:
        """Fold a run's session up to a row; raises RunStateError."""
        rows = rows_until(settings.DATABASE, run, seq)
        state, shown = (SessionState(run.session_id, run.pk) for _number in range(2))
        for row in rows[:-1]:
            state.apply(row)
            shown.apply(masked(row, sensitive))
        row, sent = rows[-1], ""
        if row.kind == events.ASSISTANT and row.run_id == run.pk:
            recorded = row.payload.get("sent")
            sent = "unknown" if recorded is None else "as sent"
            if recorded is not None and recorded != state.fingerprint():
                sent = "other"
        moment = cls(row, state.run, state, shown, sent)
        moment.before = _frozen(state.run)
        state.apply(row)
        if not sent:
            shown.apply(masked(row, sensitive))
        return moment


class RunMoments(RunLineage):
    """The page of a run at a row, for the admin of runs."""

    moment_template = "agentruns/admin/moment.html"

    def get_urls(self) -> list[URLPattern]:
        """Add the page."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/at/", view(self.at_view), name=self.name("at")),
            *super().get_urls(),
        ]

    def sections(self, request: HttpRequest, run: Run) -> dict[str, Any]:
        """Add the way to the page."""
        return {**super().sections(request, run), "moment_url": self.url(request, "at", run.pk)}

    def at_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show what the run was at the row `seq`, by default the last one."""
        run = self.find(request, object_id)
        return self._moment_page(request, run, seq_of(request.GET.get("seq", "")))

    def fork_refused(
        self, request: HttpRequest, run: Run, form: ForkForm, status: int, why: str
    ) -> HttpResponse:
        """Show the form again at its row, with why nothing was done."""
        text = _("Nothing was forked. %(why)s") % {"why": why}
        seq = form.cleaned_data.get("at") if hasattr(form, "cleaned_data") else None
        return self._moment_page(request, run, seq, status=status, refusal=text, sent=form)

    def _moment_page(
        self,
        request: HttpRequest,
        run: Run,
        seq: int | None,
        *,
        status: int = 200,
        refusal: str = "",
        sent: ForkForm | None = None,
    ) -> HttpResponse:
        seqs = Message.objects.using(settings.DATABASE).filter(run_id=run.pk).order_by("seq")
        first, last = (seqs.values_list("seq", flat=True).first(), seqs.values_list("seq", flat=True).last())
        sensitive = sensitive_in(run)
        try:
            moment = Moment.at(run, seq or last or 0, sensitive)
        except RunStateError as error:
            if first is None or status != 200:
                return self._refused(request, str(run.pk), 409, error)
            nearest = min(max(seq or 0, first), last or first)
            return HttpResponseRedirect(self.url(request, "at", run.pk, seq=nearest))
        row, ways = moment.row, self._ways(request, run, moment.row.seq)
        context: dict[str, Any] = {
            "refusal": refusal,
            "run_url": self.url(request, "change", run.pk),
            "run_id": str(run.pk),
            "run_badge": badges.run(run),
            "at_url": self.url(request, "at", run.pk).partition("?")[0],
            "kept_filters": request.GET.get("_changelist_filters", ""),
            "first": first,
            "last": last,
            "seq": row.seq,
            "ways": ways,
            "card": card(masked(row, sensitive)),
            "is_copy": events.COPIED in row.payload,
            "is_other_run": row.run_id != run.pk,
            "facts": facts(moment),
            "calls": [call_line(call, sensitive) for call in moment.state.run.calls.values()],
            "sent": moment.sent,
            "told": _request(moment),
            "fork": self._fork(request, run),
            "fates": [_fate(call) for call in moment.state.run.open_calls()],
            "fork_url": self.url(request, "fork", run.pk),
            "fork_form": sent or ForkForm(initial={"at": str(row.seq), "key": uuid7()}, auto_id="fork_%s"),
        }
        title = _("Row %(seq)s of %(agent)s in %(session)s")
        names = {"seq": row.seq, "agent": plain(run.agent), "session": plain(run.session.key)}
        return self.render(
            request, run, title=title % names, status=status, template=self.moment_template, **context
        )

    def _ways(self, request: HttpRequest, run: Run, seq: int) -> dict[str, str]:
        seqs = Message.objects.using(settings.DATABASE).filter(run_id=run.pk).order_by("seq")
        numbers = seqs.values_list("seq", flat=True)
        replies = seqs.filter(kind=events.ASSISTANT).values_list("seq", flat=True)
        found = {
            "earlier": numbers.filter(seq__lt=seq).last(),
            "later": numbers.filter(seq__gt=seq).first(),
            "earlier_reply": replies.filter(seq__lt=seq).last(),
            "later_reply": replies.filter(seq__gt=seq).first(),
        }
        return {name: self.url(request, "at", run.pk, seq=to) for name, to in found.items() if to is not None}

    def _fork(self, request: HttpRequest, run: Run) -> Action:
        effect = [
            _("A new run, in a session of its own, gets a copy of the journal up to this row and goes on."),
            _("No effect is repeated. What its model asks for from there on is done, as new calls."),
        ]
        if not self.may_fork(request, run):
            return Action(effect, missing(PERMISSION), forbidden=True)
        return Action(effect)


def facts(moment: Moment) -> list[Fact]:
    """Return what the run was after the row, and what it was before where that was something else."""
    before, after = moment.before, moment.state.run
    lines = [
        (_("Status"), before.status, after.status),
        (_("Model replies"), before.step, after.step),
        (_("Tokens"), _tokens(before), _tokens(after)),
        (_("Cost"), before.usage.get("cost"), after.usage.get("cost")),
        (_("Failed attempts since the last reply"), before.failures, after.failures),
        (_("Paused"), before.paused, after.paused),
        (_("Definition"), before.definition[:12], after.definition[:12]),
    ]
    found = [Fact(_("Written"), stamp(moment.row.created_at))]
    for label, was, now in lines:
        if was in (None, "", now):
            found.append(Fact(label, visible(EMPTY if now in (None, "") else now)))
        else:
            found.append(Fact(label, visible(_("%(now)s (was %(was)s)") % {"now": now or EMPTY, "was": was})))
    return found


def call_line(call: Call, sensitive: Sensitive) -> dict[str, Any]:
    """Return a call of the last reply as it stood then."""
    outcome = str(OUTCOMES.get(call.outcome, (call.outcome, ""))[0]) if call.outcome else ""
    where = outcome or (_("at work, or in doubt") if call.is_started else _("not started"))
    if not outcome and call.is_waiting:
        where = _("in doubt, waits for a person") if call.orphan == "held" else _("waits for a person")
    return {
        "tool": visible(call.tool),
        "arguments": body("", pretty(hide(call.arguments, sensitive.get(call.tool, ()))), LONGEST),
        "where": visible(where),
        "attempt": call.attempt,
        "card": visible(call.approval.status) if call.approval else "",
        "by": visible(", ".join(call.approval.names)) if call.approval else "",
    }


def _fate(call: Call) -> str:
    tool = plain(call.tool)
    if fate(call) == "unknown":
        return _("%(tool)s had started: its outcome is told to the model as unknown.") % {"tool": tool}
    return _("%(tool)s had not started: it is not executed in the fork.") % {"tool": tool}


def _request(moment: Moment) -> dict[str, Any]:
    """Return the request as the model had it: the definition's parts, and the conversation."""
    state = moment.before if moment.sent else moment.state.run
    found = Definition.objects.using(settings.DATABASE).filter(pk=state.definition)
    definition: dict[str, Any] = found.values_list("body", flat=True).first() or {}
    messages = moment.shown.settled_messages()
    return {
        "model": visible(definition.get("model") or EMPTY),
        "system": body(_("Instructions"), definition.get("instructions", ""), LONGEST),
        "params": pretty(definition.get("model_params") or {}),
        "tools": [
            (visible(name), body(plain(name), pretty(tool), LONGEST))
            for name, tool in definition.get("tools", {}).items()
        ],
        "messages": [_message(message) for message in messages[-MESSAGES:]],
        "left_out": max(0, len(messages) - MESSAGES),
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    roles = {"user": _("to the model"), "assistant": _("the model")}
    return {
        "role": roles.get(message["role"], message["role"]),
        "tone": "said" if message["role"] == "assistant" else "plain",
        "blocks": [_block(block) for block in message["content"]],
    }


def _block(block: dict[str, Any]) -> Body:
    kind = str(block.get("type"))
    if kind == "text":
        return body(_("Text"), block.get("text", ""), LONGEST)
    if kind == "tool_use":
        label = _("Call of %(tool)s") % {"tool": plain(block.get("name"))}
        return body(label, pretty(block.get("input")), LONGEST)
    if kind == "tool_result":
        label = _("Result, an error") if block.get("is_error") else _("Result")
        return body(label, block.get("content", ""), LONGEST)
    return body(kind, pretty(block), LONGEST)


def _tokens(state: RunState) -> str:
    return ", ".join(f"{plain(name)} {amount}" for name, amount in state.usage.items() if name != "cost")


def _frozen(state: RunState) -> RunState:
    """Return what the page says of a state, as it is now: folding goes on in place."""
    kept = ("status", "step", "usage", "failures", "paused", "definition")
    return RunState(state.run_id, **{name: getattr(state, name) for name in kept})
