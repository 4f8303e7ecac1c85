"""The past of a run: its state at any row, forks and running again, and its replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import status_of
from agentruns.admin.forms import TypedField, area
from agentruns.admin.html import (
    EMPTY,
    Body,
    Fact,
    ago,
    body,
    plain,
    pretty,
    run_badge,
    short_id,
    stamp,
    visible,
)
from agentruns.admin.runs import calls
from agentruns.admin.runs.actions import Action, Situation, missing, refused
from agentruns.admin.runs.list import task_title
from agentruns.admin.runs.page import seq_of
from agentruns.admin.runs.steps import mask_for, outcome_words, row_card
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError, UnknownAgentError
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.fold import ACTIVE, Call, RunState
from agentruns.journal.masking import Mask
from agentruns.journal.read import definition_bodies, rows_until
from agentruns.journal.store import SessionState
from agentruns.models import Message, Run
from agentruns.services import permissions, starting
from agentruns.services.control import agent_again
from agentruns.services.forks import Fate, effects, fates
from agentruns.services.history import OWN, ReplayReport, replay_run
from agentruns.utils.bounds import TEXT_LENGTH
from agentruns.utils.ids import uuid7
from agentruns.utils.redaction import get_logger

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin

logger = get_logger("agentruns.admin")

FORK, REPLAY = "agentruns.fork_run", "agentruns.replay_run"
LONGEST = 4_000  # characters of one block of the conversation
MESSAGES = 200  # the newest ones
DERIVED = 20  # runs on the page
ASKED = 10  # replies of a model in one request of a browser
REFUSALS = (AgentRunsError, ValueError)  # ValueError: a key that no page of ours sends


class AgainForm(forms.Form):
    """Run again; the key makes a double click one run."""

    key = forms.CharField(max_length=64, widget=forms.HiddenInput)


class ForkForm(AgainForm):
    """Go on from a row, with another text or agent if one is given."""

    at = forms.IntegerField(min_value=1, widget=forms.HiddenInput)
    text = TypedField(
        label=gettext_lazy("Next message to the agent (optional if something is left to do)"),
        required=False,
        max_length=TEXT_LENGTH,
        widget=area(),
    )
    agent = forms.ChoiceField(label=gettext_lazy("Agent"), required=False)

    def __init__(self, user: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = sorted({agent.name for agent in starting.agents_of(user)})
        same: list[tuple[str, Any]] = [("", _("the same"))]
        self.fields["agent"].choices = same + [(name, plain(name)) for name in names]  # type: ignore[attr-defined]


class ReplayForm(forms.Form):
    """The choice of what the recorded run is compared with."""

    who = forms.ChoiceField(
        label=gettext_lazy("Compare the recorded run with"),
        widget=forms.RadioSelect,
        initial="code",
        choices=[
            ("code", gettext_lazy("the requests that its agent would send now; no model is asked")),
            (OWN, gettext_lazy("the replies of its agent's current model")),
            ("model", gettext_lazy("the replies of another model:")),
        ],
    )
    model = forms.CharField(label=gettext_lazy("Name of the model"), required=False, max_length=100)

    def clean(self) -> dict[str, Any]:
        """Require a name where one is meant."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("who") == "model" and not cleaned.get("model"):
            self.add_error("model", _("Name the model to ask."))
        return cleaned


@dataclass(slots=True)
class Moment:
    """The row, the state before and after it, and the conversation as the model had it or would get it."""

    row: Row
    before: RunState
    state: SessionState
    shown: SessionState  # the same with sensitive arguments masked
    sent: str  # whether the conversation is what was sent: "as sent", "other", "unknown"; "" if none was

    @classmethod
    def at(cls, run: Run, seq: int, mask: Mask) -> Moment:
        """Fold a run's session up to a row; raises RunStateError."""
        rows = rows_until(settings.DATABASE, run, seq)
        state, shown = (SessionState(run.session_id, run.pk) for _number in range(2))
        for row in rows[:-1]:
            state.apply(row)
            shown.apply(mask.row(row))
        row, sent = rows[-1], ""
        if row.kind == events.ASSISTANT and row.run_id == run.pk:
            sent = {None: "unknown", True: "as sent", False: "other"}[state.was_sent_for(row)]
        moment = cls(row, state.run, state, shown, sent)
        moment.before = _frozen(state.run)
        state.apply(row)
        if not sent:
            shown.apply(mask.row(row))
        return moment


def lineage(admin: RunAdmin, request: HttpRequest, situation: Situation) -> dict[str, Any]:
    """Return the origin of a run, the runs derived from it, and the ways to run, fork or replay it."""
    run = situation.run
    derived = admin.get_queryset(request).filter(origin_id=run.pk)
    newest = list(derived.order_by("-id")[: DERIVED + 1])
    return {
        "origin": _origin(admin, request, run),
        "derived": [_line(admin, request, one) for one in newest[:DERIVED]],
        "derived_more": len(newest) > DERIVED,
        "again": _again(request, run) if run.is_ended else None,
        "again_url": admin.url(request, "again", run.pk),
        "again_form": AgainForm(initial={"key": str(uuid7())}, auto_id="again_%s"),
        "moment_url": admin.url(request, "at", run.pk),
        "replay_url": admin.url(request, "replay", run.pk),
    }


def again_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Queue a new run of the same task, and go to its page."""
    form = AgainForm(request.POST)
    key = form.cleaned_data["key"] if form.is_valid() else ""
    if page := _repeats(admin, request, run):
        return page
    try:
        new = starting.run_again(request.user, run.pk, idempotency_key=key)
    except REFUSALS as error:
        return refused(admin, request, run, error)
    admin.log_change(request, run, _("Ran again from the console: run %(run)s.") % {"run": new.pk})
    done = _("Started again as run %(run)s. A worker picks it up.") % {"run": short_id(new.pk)}
    admin.message_user(request, done, messages.SUCCESS)
    return admin.back(request, new)


def fork_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Queue a run that goes on from a row of this one, and go to its page."""
    form = ForkForm(request.user, request.POST, auto_id="fork_%s")
    if not form.is_valid():
        return _fork_refused(admin, request, run, form, 400, _("Correct the form below."))
    given = form.cleaned_data
    if page := _repeats(admin, request, run, given["at"]):
        return page
    try:
        new, _is_new = starting.fork_run(
            request.user,
            run.pk,
            given["at"],
            text=given["text"] or None,
            agent=given["agent"] or None,
            idempotency_key=given["key"],
        )
    except REFUSALS as error:
        return _fork_refused(admin, request, run, form, status_of(error), plain(error))
    logged = _("Forked at row %(seq)s from the console: run %(run)s.")
    admin.log_change(request, run, logged % {"seq": given["at"], "run": new.pk})
    done = _("Forked at row %(seq)s as run %(run)s. A worker picks it up.")
    admin.message_user(request, done % {"seq": given["at"], "run": short_id(new.pk)}, messages.SUCCESS)
    return admin.back(request, new)


def _repeats(admin: RunAdmin, request: HttpRequest, run: Run, after: int = 0) -> HttpResponse | None:
    """Return the page of what was done already and may be done again, until each of it was ticked."""
    done = effects(settings.DATABASE, run, after) if _may_fork(request, run) else []
    ticked, was_asked = request.POST.getlist("knows"), "asked" in request.POST
    if not any(one.is_final and one.call_id not in ticked for one in done):
        return None
    mask = mask_for(run)
    lines = [(one, visible(calls.text_of(one.tool, mask.arguments(one.tool, one.arguments)))) for one in done]
    sent = [(name, text) for name, text in request.POST.items() if name in ForkForm.base_fields]
    context: dict[str, Any] = {
        "refusal": _("Nothing was started: tick each effect, or go back.") if was_asked else "",
        "effects": [(one, text, ago(one.at), one.call_id in ticked) for one, text in lines],
        "sent": sent,
        "action_url": request.get_full_path(),
        "is_fork": bool(after),
    }
    title, template = _("Do this again?"), "agentruns/admin/repeats.html"
    return admin.render(
        request, run, title=title, status=400 if was_asked else 200, template=template, **context
    )


def at_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Show what the run was at the row `seq`, by default the last one."""
    return _moment_page(admin, request, run, seq_of(request.GET.get("seq", "")))


def replay_view(admin: RunAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Show the form; a POST goes through the run again. Nothing is executed or stored."""
    if request.method != "POST":
        return _replay_page(admin, request, run, ReplayForm())
    form = ReplayForm(request.POST)
    if not form.is_valid():
        return _replay_page(admin, request, run, form, status=400, refusal=_("Correct the form below."))
    who = form.cleaned_data["who"]
    model = {"code": None, OWN: OWN}.get(who, form.cleaned_data["model"])
    if model is not None and not permissions.may(request.user, "replay", run):
        return _replay_page(admin, request, run, form, status=403, refusal=missing(REPLAY))
    try:
        permissions.require_whole(request.user, run)
        report = replay_run(run.pk, model=model, limit=ASKED if model else None)
    except PermissionDeniedError as error:
        return _replay_page(admin, request, run, form, status=403, refusal=plain(error))
    except AgentRunsError as error:  # also what a provider says
        text = _("The replay stopped. %(why)s") % {"why": plain(error)}
        return _replay_page(admin, request, run, form, status=409, refusal=text)
    except Exception as error:
        if model is None:
            raise
        logger.warning("Replay failed run=%s model=%s", run.pk, model, exc_info=True)
        text = _("The model failed: %(why)s") % {"why": plain(f"{type(error).__name__}: {error}")}
        return _replay_page(admin, request, run, form, status=409, refusal=text)
    if model is not None:
        admin.log_change(request, run, _("Asked %s what it would have done.") % plain(report.model))
    return _replay_page(admin, request, run, form, report=report)


def _fork_refused(
    admin: RunAdmin, request: HttpRequest, run: Run, form: ForkForm, status: int, why: str
) -> HttpResponse:
    """Show the form again at its row, with why nothing was done."""
    text = _("Nothing was forked. %(why)s") % {"why": why}
    seq = form.cleaned_data.get("at") if hasattr(form, "cleaned_data") else None
    return _moment_page(admin, request, run, seq, status=status, refusal=text, sent=form)


def _moment_page(
    admin: RunAdmin,
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
    mask = mask_for(run)
    try:
        permissions.require_whole(request.user, run, seq or last)
        moment = Moment.at(run, seq or last or 0, mask)
    except PermissionDeniedError as error:
        return refused(admin, request, run, error)
    except RunStateError as error:
        if first is None or status != 200:
            return refused(admin, request, run, error)
        nearest = min(max(seq or 0, first), last or first)
        return HttpResponseRedirect(admin.url(request, "at", run.pk, seq=nearest))
    row, ways = moment.row, _ways(admin, request, run, moment.row.seq)
    context: dict[str, Any] = {
        "refusal": refusal,
        "at_url": admin.url(request, "at", run.pk).partition("?")[0],
        "kept_filters": request.GET.get("_changelist_filters", ""),
        "first": first,
        "last": last,
        "seq": row.seq,
        "ways": ways,
        "card": row_card(mask.row(row)),
        "is_copy": events.COPIED in row.payload,
        "is_other_run": row.run_id != run.pk,
        "facts": facts(moment),
        "calls": [call_line(call, mask) for call in moment.state.run.calls.values()],
        "sent": moment.sent,
        "request_body": _request(moment),
        "fork": _fork(request, run),
        "erase_url": _erase_url(admin, request, run, row),
        "fates": [_fate(one) for one in fates(settings.DATABASE, run, moment.state.run, row.seq)],
        "fork_url": admin.url(request, "fork", run.pk),
        "fork_form": sent
        or ForkForm(request.user, initial={"at": str(row.seq), "key": uuid7()}, auto_id="fork_%s"),
    }
    title = _("Row %(seq)s of %(task)s") % {"seq": row.seq, "task": task_title(run)}
    return admin.render(
        request, run, title=title, status=status, template="agentruns/admin/moment.html", **context
    )


def _erase_url(admin: RunAdmin, request: HttpRequest, run: Run, row: Row) -> str:
    if row.is_erased or row.run_id != run.pk or not permissions.may(request.user, "erase", run):
        return ""
    return admin.url(request, "erase", run.pk, row.seq)


def _ways(admin: RunAdmin, request: HttpRequest, run: Run, seq: int) -> dict[str, str]:
    seqs = Message.objects.using(settings.DATABASE).filter(run_id=run.pk).order_by("seq")
    numbers = seqs.values_list("seq", flat=True)
    replies = seqs.filter(kind=events.ASSISTANT).values_list("seq", flat=True)
    found = {
        "earlier": numbers.filter(seq__lt=seq).last(),
        "later": numbers.filter(seq__gt=seq).first(),
        "earlier_reply": replies.filter(seq__lt=seq).last(),
        "later_reply": replies.filter(seq__gt=seq).first(),
    }
    return {name: admin.url(request, "at", run.pk, seq=to) for name, to in found.items() if to is not None}


def _fork(request: HttpRequest, run: Run) -> Action:
    effect = [
        _("A new run, in a session of its own, gets a copy of the journal up to this row and goes on."),
        _("No effect is repeated. Whatever its model asks for from there on is done, as new calls."),
    ]
    if not _may_fork(request, run):
        return Action(effect, missing(FORK), forbidden=True)
    return Action(effect)


def facts(moment: Moment) -> list[Fact]:
    """Return what the run was after the row, and what it was before where that was something else."""
    before, after = moment.before, moment.state.run
    lines = [
        (_("Status"), _status(before), _status(after)),
        (_("Model replies"), before.step, after.step),
        (_("Tokens"), _tokens(before), _tokens(after)),
        (_("Cost"), before.usage.get("cost"), after.usage.get("cost")),
        (_("Failed attempts since the last reply"), before.failures, after.failures),
        (_("Paused"), before.paused, after.paused),
    ]
    found = [Fact(_("Written"), stamp(moment.row.created_at))]
    for label, was, now in lines:
        if was in (None, "", now):
            found.append(Fact(label, visible(EMPTY if now in (None, "") else now)))
        else:
            found.append(Fact(label, visible(_("%(now)s (was %(was)s)") % {"now": now or EMPTY, "was": was})))
    return found


def call_line(call: Call, mask: Mask) -> dict[str, Any]:
    """Return a call of the last reply as it stood then."""
    outcome = outcome_words(call.outcome, in_doubt=call.in_doubt)[0] if call.outcome else ""
    where = outcome or (_("at work, or in doubt") if call.is_started else _("not started"))
    if not outcome and call.is_waiting:
        where = _("in doubt, waits for a person") if call.orphan == "held" else _("waits for a person")
    return {
        "tool": visible(call.tool),
        "arguments": body("", pretty(mask.arguments(call.tool, call.arguments)), LONGEST),
        "where": visible(where),
        "attempt": call.attempt,
        "card": visible(call.approval.status) if call.approval else "",
        "by": visible(", ".join(call.approval.names)) if call.approval else "",
    }


def _fate(fate: Fate) -> str:
    tool = plain(fate.call.tool)
    if fate.result is not None:
        seq = fate.result.seq
        text = _("%(tool)s has run since: the fork gets its result of row %(seq)s.")
        return text % {"tool": tool, "seq": seq}
    if fate.outcome == "unknown":
        return _("%(tool)s had started: its outcome is told to the model as unknown.") % {"tool": tool}
    return _("%(tool)s had not started: it is not executed in the fork.") % {"tool": tool}


def _request(moment: Moment) -> dict[str, Any]:
    """Return the request as the model had it: the definition's parts, and the conversation."""
    state = moment.before if moment.sent else moment.state.run
    definition = definition_bodies(settings.DATABASE, [state.definition]).get(state.definition, {})
    messages = moment.shown.settled_messages(moment.row.payload.get("read") if moment.sent else None)
    instructions, tools = definition.get("instructions", ""), definition.get("tools", {})
    if not isinstance(instructions, str):
        instructions = moment.shown.run.instructions or ""
    if "tools_for" in definition:
        tools = {name: tool for name, tool in tools.items() if name in (moment.shown.run.tools or ())}
    return {
        "model": visible(definition.get("model") or EMPTY),
        "system": body(_("Instructions"), instructions, LONGEST),
        "params": pretty(definition.get("model_params") or {}),
        "tools": [(visible(name), body(plain(name), pretty(tool), LONGEST)) for name, tool in tools.items()],
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


def _status(state: RunState) -> str:
    return _("running") if state.status == ACTIVE else str(Run.Status(state.status).label)


def _tokens(state: RunState) -> str:
    return ", ".join(f"{plain(name)} {amount}" for name, amount in state.usage.items() if name != "cost")


def _frozen(state: RunState) -> RunState:
    """Return what the page says of a state, as it is now: folding goes on in place."""
    kept = ("status", "step", "usage", "failures", "paused", "definition")
    return RunState(state.run_id, **{name: getattr(state, name) for name in kept})


def _again(request: HttpRequest, run: Run) -> Action:
    effect = [
        _("A new run of the same task is queued in the same session, linked to this one."),
        _("Its model sees what was done before. Whatever it asks for again is done again."),
    ]
    if not _may_fork(request, run):
        return Action(effect, missing(FORK), forbidden=True)
    if run.session.imported_at is not None:
        return Action(effect, _("The run was imported: it is a record. Fork it to go on from it."))
    try:
        agent = agent_again(run)
    except UnknownAgentError:
        name = plain(run.agent)
        return Action(effect, _("Agent %(agent)s is not known in this process.") % {"agent": name})
    if why := starting.why_not_start(request.user, agent):
        return Action(effect, why, forbidden=True)
    if agent.version != run.version:
        text = _("Version %(old)s is not registered any more; it runs under version %(new)s.")
        effect.append(text % {"old": plain(run.version), "new": plain(agent.version)})
    return Action(effect)


def _origin(admin: RunAdmin, request: HttpRequest, run: Run) -> dict[str, Any] | None:
    if run.origin_id is None:
        return None
    origin = admin.get_queryset(request).filter(pk=run.origin_id).first()
    found: dict[str, Any] = {"run": str(run.origin_id), "seq": run.origin_seq}
    if origin is not None:
        found |= _line(admin, request, origin)
        if run.origin_seq is not None:
            found["at_url"] = admin.url(request, "at", origin.pk, seq=run.origin_seq)
    return found


def _line(admin: RunAdmin, request: HttpRequest, run: Run) -> dict[str, Any]:
    return {
        "run": str(run.pk),
        "short": short_id(run.pk),
        "badge": run_badge(run),
        "session": visible(run.session.key),
        "age": ago(run.created_at),
        "at": run.origin_seq,
        "url": admin.url(request, "change", run.pk),
    }


def _may_fork(request: HttpRequest, run: Run) -> bool:
    return permissions.may(request.user, "fork", run)


def _replay_page(
    admin: RunAdmin,
    request: HttpRequest,
    run: Run,
    form: ReplayForm,
    *,
    status: int = 200,
    refusal: str = "",
    report: ReplayReport | None = None,
) -> HttpResponse:
    may = permissions.may(request.user, "replay", run)
    context = {
        "refusal": refusal,
        "form": form,
        "why_no_model": "" if may else missing(REPLAY),
        "replay_url": admin.url(request, "replay", run.pk),
        "report": _report(admin, request, run, report) if report else None,
    }
    title = _("Replay of %(task)s") % {"task": task_title(run)}
    return admin.render(
        request, run, title=title, status=status, template="agentruns/admin/replay.html", **context
    )


def _report(admin: RunAdmin, request: HttpRequest, run: Run, report: ReplayReport) -> dict[str, Any]:
    record = report.record()
    found = record["difference"]
    return {
        "is_equal": report.is_equal,
        "model": visible(report.model) if report.model else "",
        "notes": [visible(note) for note in record["notes"]],
        "steps": [
            {
                "seq": str(step["seq"]),
                "url": admin.url(request, "at", run.pk, seq=step["seq"]),
                "number": step["step"] + 1,
                "sides": [
                    (label, body(label, _decision(said), LONGEST))
                    for label, said in ((_("Then"), step["then"]), (_("Now"), step["now"]))
                    if said is not None
                ],
            }
            for step in record["steps"]
        ],
        "difference": None
        if found is None
        else {
            "seq": str(found["seq"]),
            "url": admin.url(request, "at", run.pk, seq=found["seq"]),
            "path": visible(found["path"]),
            "then": body(_("Then"), _text(found["then"]), LONGEST),
            "now": body(_("Now"), _text(found["now"]), LONGEST),
        },
    }


def _decision(said: dict[str, Any]) -> str:
    lines = [said["text"]] if said["text"] else []
    lines += [f"{call['name']}({pretty(call['input'])})" for call in said["calls"]]
    return "\n".join(lines) or _("nothing (%(stop)s)") % {"stop": said["stop_reason"]}


def _text(value: Any) -> str:
    if value is None:
        return _("nothing")
    return value if isinstance(value, str) else pretty(value)
