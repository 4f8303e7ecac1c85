"""The past of a run: its state at any row, its forks and repetitions, and its replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django import forms
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin, status_of
from agentruns.admin.forms import KeyForm, TypedField, area
from agentruns.admin.html import EMPTY, Body, as_text, body, plain, pretty, short_id
from agentruns.admin.runs import calls
from agentruns.admin.runs.actions import Situation, missing
from agentruns.admin.runs.list import counts, task_title
from agentruns.admin.runs.page import seq_of
from agentruns.admin.runs.steps import mask_for, outcome_words, row_card
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError, UnknownAgentError
from agentruns.journal import events
from agentruns.journal.deciders import restore
from agentruns.journal.events import Row
from agentruns.journal.fold import ACTIVE, Call, RunState
from agentruns.journal.masking import Mask
from agentruns.journal.read import definition_bodies, rows_until
from agentruns.journal.store import SessionState
from agentruns.models import Message, Run
from agentruns.services import permissions, starting
from agentruns.services.control import agent_again
from agentruns.services.forks import effects, fates
from agentruns.services.history import OWN, ReplayReport, replay_run
from agentruns.utils.bounds import TEXT_LENGTH
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.admin")

LONGEST = 4_000  # characters of one block of the conversation
MESSAGES = 200  # the newest ones
DERIVED = 20  # runs on the page
ASKED = 10  # replies of a model in one request of a browser
REFUSALS = (AgentRunsError, ValueError)  # ValueError: a key that no page of ours sends


class ForkForm(KeyForm):
    """The form to continue from a row, with another text or agent if given."""

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
    """The form that chooses what the recorded run is compared with."""

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
        """Require a model's name if another model is chosen."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("who") == "model" and not cleaned.get("model"):
            self.add_error("model", _("Name the model to ask."))
        return cleaned


@dataclass(slots=True)
class Moment:
    """A row, the state before and after it, and the conversation that the model had or would get."""

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
        before = replace(state.run, usage={**state.run.usage})  # folding goes on in place
        moment = cls(row, before, state, shown, sent)
        state.apply(row)
        if not sent:
            shown.apply(mask.row(row))
        return moment


def lineage(admin: ReadOnlyAdmin, request: HttpRequest, situation: Situation) -> dict[str, Any]:
    """Build the context of a run's origin, of the runs derived from it, and of running it again."""
    run, listed = situation.run, admin.get_queryset(request)
    newest = list(listed.filter(origin_id=run.pk).order_by("-id")[: DERIVED + 1])
    why_not = version = ""
    if run.is_ended and not permissions.may(request.user, "fork", run):
        why_not = missing("fork")
    elif run.is_ended and run.session.imported_at is not None:
        why_not = _("The run was imported: it is a record. Fork it to go on from it.")
    elif run.is_ended:
        try:
            agent = agent_again(run)
        except UnknownAgentError:
            why_not = _("Agent %(agent)s is not known in this process.") % {"agent": plain(run.agent)}
        else:
            why_not = starting.why_not_start(request.user, agent)
            version = agent.version if agent.version != run.version else ""
    return {
        "origin": listed.filter(pk=run.origin_id).first() if run.origin_id else None,
        "derived": newest[:DERIVED],
        "derived_more": len(newest) > DERIVED,
        "again": {"why_not": why_not, "version": version} if run.is_ended else None,
        "again_form": KeyForm(auto_id="again_%s"),
    }


def again_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Queue a new run of the same task, and go to its page."""
    form = KeyForm(request.POST)
    key = form.cleaned_data["key"] if form.is_valid() else ""
    if page := _repeats(admin, request, run):
        return page
    try:
        new = starting.run_again(request.user, run.pk, idempotency_key=key)
    except REFUSALS as error:
        return admin.refused(request, run, error)
    logged = _("Ran again from the console: run %(run)s.") % {"run": new.pk}
    done = _("Started again as run %(run)s. A worker picks it up.") % {"run": short_id(new.pk)}
    return admin.done(request, run, logged, done, new)


def fork_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Queue a run that continues from a row of this run, and go to its page."""
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
    logged = _("Forked at row %(seq)s from the console: run %(run)s.") % {"seq": given["at"], "run": new.pk}
    done = _("Forked at row %(seq)s as run %(run)s. A worker picks it up.")
    return admin.done(request, run, logged, done % {"seq": given["at"], "run": short_id(new.pk)}, new)


def _repeats(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, after: int = 0) -> HttpResponse | None:
    """Render the page of effects that would be repeated; None once all of them are ticked."""
    done = effects(settings.DATABASE, run, after) if permissions.may(request.user, "fork", run) else []
    ticked, was_asked = request.POST.getlist("knows"), "asked" in request.POST
    if not any(one.is_final and one.call_id not in ticked for one in done):
        return None
    mask = mask_for(run)
    return admin.render(
        request,
        run,
        title=_("Do this again?"),
        status=400 if was_asked else 200,
        template="agentruns/admin/repeats.html",
        refusal=_("Nothing was started: tick each effect, or go back.") if was_asked else "",
        effects=[(one, calls.sentence(one.tool, mask.arguments(one.tool, one.arguments))) for one in done],
        ticked=ticked,
        sent=[(name, text) for name, text in request.POST.items() if name in ForkForm.base_fields],
        is_fork=bool(after),
    )


def at_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Show the run's state at the row `seq`, by default the last one."""
    return _moment_page(admin, request, run, seq_of(request.GET.get("seq", "")))


def replay_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Show the form; a POST replays the run. Nothing is executed or stored."""
    if request.method != "POST":
        return _replay_page(admin, request, run, ReplayForm())
    form = ReplayForm(request.POST)
    if not form.is_valid():
        return _replay_page(admin, request, run, form, status=400, refusal=_("Correct the form below."))
    who = form.cleaned_data["who"]
    model = {"code": None, OWN: OWN}.get(who, form.cleaned_data["model"])
    try:
        if model is not None and not permissions.may(request.user, "replay", restore(run)):
            raise PermissionDeniedError(missing("replay"))
        permissions.require_whole(request.user, run)
        report = replay_run(run.pk, model=model, limit=ASKED if model else None)
    except AgentRunsError as error:  # also what a provider says
        is_forbidden, why = isinstance(error, PermissionDeniedError), plain(error)
        text = why if is_forbidden else _("The replay stopped. %(why)s") % {"why": why}
        return _replay_page(admin, request, run, form, status=status_of(error), refusal=text)
    except Exception as error:
        if model is None:
            raise
        logger.warning("Replay failed run=%s model=%s", run.pk, model, exc_info=True)
        text = _("The model failed: %(why)s") % {"why": plain(f"{type(error).__name__}: {error}")}
        return _replay_page(admin, request, run, form, status=409, refusal=text)
    if model is not None:
        admin.log_change(request, run, _("Asked %s what it would have done.") % plain(report.model))
    return _replay_page(admin, request, run, form, report)


def _fork_refused(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, form: ForkForm, status: int, why: str
) -> HttpResponse:
    """Show the form again at its row, with the reason why nothing was done."""
    text = _("Nothing was forked. %(why)s") % {"why": why}
    seq = form.cleaned_data.get("at") if hasattr(form, "cleaned_data") else None
    return _moment_page(admin, request, run, seq, status=status, refusal=text, fork_form=form)


def _moment_page(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, seq: int | None, **context: Any
) -> HttpResponse:
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk)
    seqs = rows.order_by("seq").values_list("seq", flat=True)
    first, last, mask = seqs.first(), seqs.last(), mask_for(run)
    try:
        permissions.require_whole(request.user, run, seq or last)
        moment = Moment.at(run, seq or last or 0, mask)
    except PermissionDeniedError as error:
        return admin.refused(request, run, error)
    except RunStateError as error:
        if first is None or "status" in context:
            return admin.refused(request, run, error)
        nearest = min(max(seq or 0, first), last or first)
        return HttpResponseRedirect(admin.url(request, "at", run.pk, seq=nearest))
    row, may = moment.row, partial(permissions.may, request.user)
    replies, past, coming = seqs.filter(kind=events.ASSISTANT), Q(seq__lt=row.seq), Q(seq__gt=row.seq)
    shown: dict[str, Any] = {
        "kept_filters": request.GET.get("_changelist_filters", ""),
        "first": first,
        "last": last,
        "row": row,
        "ways": {
            "earlier": seqs.filter(past).last(),
            "later": seqs.filter(coming).first(),
            "earlier_reply": replies.filter(past).last(),
            "later_reply": replies.filter(coming).first(),
        },
        "card": row_card(mask.row(row)),
        "is_copy": events.COPIED in row.payload,
        "is_other_run": row.run_id != run.pk,
        "facts": facts(moment),
        "calls": [
            (call, body("", pretty(mask.arguments(call.tool, call.arguments)), LONGEST), _stood(call))
            for call in moment.state.run.calls.values()
        ],
        "sent": moment.sent,
        "request_body": _request(moment),
        "why_no_fork": "" if may("fork", run) else missing("fork"),
        "may_erase": not row.is_erased and row.run_id == run.pk and may("erase", run),
        "fates": fates(settings.DATABASE, run, moment.state.run, row.seq),
        "fork_form": ForkForm(request.user, initial={"at": str(row.seq)}, auto_id="fork_%s"),
    }
    title = _("Row %(seq)s of %(task)s") % {"seq": row.seq, "task": task_title(run)}
    template = "agentruns/admin/moment.html"
    return admin.render(request, run, title=title, template=template, **{**shown, **context})


def facts(moment: Moment) -> list[tuple[str, Any, Any]]:
    """List the run's facts after the row, each with its value before the row if that differs."""
    before, after = moment.before, moment.state.run
    lines = [
        (_("Status"), _status(before), _status(after)),
        (_("Model replies"), before.step, after.step),
        (_("Tokens"), counts(before.usage), counts(after.usage)),
        (_("Cost"), before.usage.get("cost"), after.usage.get("cost")),
        (_("Failed attempts since the last reply"), before.failures, after.failures),
        (_("Paused"), before.paused, after.paused),
    ]
    return [
        (label, None if was in (None, "", now) else was, EMPTY if now in (None, "") else now)
        for label, was, now in lines
    ]


def _stood(call: Call) -> str:
    """Name the state of a call of the last reply."""
    if call.outcome:
        return outcome_words(call.outcome, in_doubt=call.in_doubt)[0]
    if call.is_waiting:
        return _("in doubt, waits for a person") if call.orphan == "held" else _("waits for a person")
    return _("at work, or in doubt") if call.is_started else _("not started")


def _request(moment: Moment) -> dict[str, Any]:
    """Build the request as the model had it: the definition's parts, and the conversation."""
    state = moment.before if moment.sent else moment.state.run
    definition = definition_bodies(settings.DATABASE, [state.definition]).get(state.definition, {})
    messages = moment.shown.conversation.settled_messages(
        moment.row.payload.get("read") if moment.sent else None
    )
    instructions, tools = definition.get("instructions", ""), definition.get("tools", {})
    if not isinstance(instructions, str):
        instructions = moment.shown.run.instructions or ""
    if "tools_for" in definition:
        tools = {name: tool for name, tool in tools.items() if name in (moment.shown.run.tools or ())}
    return {
        "model": definition.get("model"),
        "system": body(_("Instructions"), instructions, LONGEST),
        "params": body(_("Parameters"), pretty(definition.get("model_params") or {}), LONGEST),
        "tools": [body(name, pretty(tool), LONGEST) for name, tool in tools.items()],
        "messages": [(one["role"], [*map(_block, one["content"])]) for one in messages[-MESSAGES:]],
        "left_out": max(0, len(messages) - MESSAGES),
    }


def _block(block: dict[str, Any]) -> Body:
    kind = str(block.get("type"))
    if kind == "text":
        label, text = _("Text"), block.get("text", "")
    elif kind == "tool_use":
        label, text = _("Call of %(tool)s") % {"tool": block.get("name")}, pretty(block.get("input"))
    elif kind == "tool_result":
        label = _("Result, an error") if block.get("is_error") else _("Result")
        text = block.get("content", "")
    else:
        label, text = kind, pretty(block)
    return body(label, text, LONGEST)


def _status(state: RunState) -> str:
    return _("running") if state.status == ACTIVE else str(Run.Status(state.status).label)


def _replay_page(
    admin: ReadOnlyAdmin,
    request: HttpRequest,
    run: Run,
    form: ReplayForm,
    report: ReplayReport | None = None,
    **context: Any,
) -> HttpResponse:
    may = permissions.may(request.user, "replay", run)
    context |= {"why_no_model": "" if may else missing("replay"), "report": report}
    if report is not None:
        record, sides = report.record(), {"then": _("Then"), "now": _("Now")}
        steps = []
        for step in record["steps"]:
            texts = []
            for side, label in sides.items():
                if said := step[side]:
                    lines = [said["text"]] if said["text"] else []
                    lines += [f"{call['name']}({pretty(call['input'])})" for call in said["calls"]]
                    nothing = _("nothing (%(stop)s)") % {"stop": said["stop_reason"]}
                    texts.append(body(label, "\n".join(lines) or nothing, LONGEST))
            steps.append((step, texts))
        context |= {"record": record, "steps": steps}
        if (found := record["difference"]) is not None:
            context["sides"] = [
                body(label, _("nothing") if found[side] is None else as_text(found[side]), LONGEST)
                for side, label in sides.items()
            ]
    title, template = _("Replay of %(task)s") % {"task": task_title(run)}, "agentruns/admin/replay.html"
    return admin.render(request, run, title=title, template=template, form=form, **context)
