"""The past of a run: its state at any row, its forks and repetitions, and its replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django import forms
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin, mask_for, status_of
from agentruns.admin.forms import SHORT, KeyForm, LeaveOutForm, TypedField, area
from agentruns.admin.html import EMPTY, Body, as_text, body, plain, pretty, short_id
from agentruns.admin.runs import actions, calls
from agentruns.admin.runs.list import counts, note_waits, task_title
from agentruns.admin.runs.page import seq_of
from agentruns.admin.runs.steps import outcome_words, row_card
from agentruns.conf import settings
from agentruns.engine.children import MAX_FAMILY
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError, UnknownAgentError
from agentruns.journal import batch, deciders, events, fold, masking, read
from agentruns.journal.conversation import KINDS, has_block
from agentruns.models import Message, Run, statuses
from agentruns.services import history, permissions
from agentruns.services.runs import control, forks, starting, write
from agentruns.utils import bounds, redaction

logger = redaction.get_logger("agentruns.admin")

LONGEST = 4_000  # characters of one block of the conversation
MESSAGES = 200  # the newest ones
DERIVED = 20  # runs on the page
ASKED = 10  # replies of a model in one request of a browser
REFUSALS = (AgentRunsError, ValueError)  # ValueError: a key that no page of ours sends


class ForkForm(KeyForm):
    """The form of a fork: the row to continue from and, if given, another message and another agent."""

    at = forms.IntegerField(min_value=1, widget=forms.HiddenInput)
    text = TypedField(
        label=gettext_lazy("Next message to the agent (optional if something is left to do)"),
        required=False,
        max_length=bounds.TEXT_LENGTH,
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
            (history.OWN, gettext_lazy("the replies of its agent's current model")),
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

    row: events.Row
    before: fold.RunState
    state: batch.SessionState
    masked: batch.SessionState  # the same with sensitive arguments masked
    sent: str  # whether the conversation is what was sent: "as sent", "other", "unknown"; "" if none was

    @classmethod
    def at(cls, run: Run, seq: int, mask: masking.Mask) -> Moment:
        """Fold a run's session up to the row `seq`. Raises RunStateError if there is no such row."""
        rows = read.rows_until(settings.DATABASE, run, seq)
        state, masked = (batch.SessionState(run.session_id, run.pk) for _number in range(2))
        for row in rows[:-1]:
            state.apply(row)
            masked.apply(mask.row(row))
        row, sent = rows[-1], ""
        if row.kind == events.ASSISTANT and row.run_id == run.pk:
            sent = {None: "unknown", True: "as sent", False: "other"}[state.was_sent_for(row)]
        before = replace(state.run, usage={**state.run.usage})  # folding goes on in place
        state.apply(row)
        if not sent:
            masked.apply(mask.row(row))
        return cls(row, before, state, masked, sent)

    def facts(self) -> list[tuple[str, Any, Any]]:
        """List the run's facts as (label, value before the row, value after the row).

        The value before is None if it is empty or equal to the value after.
        """
        before, after = self.before, self.state.run
        labels: dict[str, Any] = {**dict(Run.Status.choices), statuses.RunStatus.ACTIVE: _("running")}
        lines = [
            (_("Status"), labels[before.status], labels[after.status]),
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

    def request(self) -> dict[str, Any]:
        """Build the masked request that the model got or would get next.

        The dict has the parts of the definition, and the newest MESSAGES messages.
        """
        state, masked = self.before if self.sent else self.state.run, self.masked
        definition = read.definition_bodies(settings.DATABASE, [state.definition]).get(state.definition, {})
        messages = masked.conversation.settled_messages(self.row.payload.get("read") if self.sent else None)
        instructions, tools = definition.get("instructions", ""), definition.get("tools", {})
        if not isinstance(instructions, str):
            instructions = masked.run.instructions or ""
        if "tools_for" in definition:
            tools = {name: tool for name, tool in tools.items() if name in (masked.run.tools or ())}
        turns = list[tuple[str, list[Body]]]()
        for message in messages[-MESSAGES:]:
            bodies = list[Body]()
            for block in message["content"]:
                if (kind := str(block.get("type"))) == "text":
                    label, text = _("Text"), block.get("text", "")
                elif kind == "tool_use":
                    label = _("Call of %(tool)s") % {"tool": block.get("name")}
                    text = pretty(block.get("input"))
                elif kind == "tool_result":
                    label = _("Result, an error") if block.get("is_error") else _("Result")
                    text = block.get("content", "")
                else:
                    label, text = kind, pretty(block)
                bodies.append(body(label, text, LONGEST))
            turns.append((message["role"], bodies))
        return {
            "model": definition.get("model"),
            "system": body(_("Instructions"), instructions, LONGEST),
            "params": body(_("Parameters"), pretty(definition.get("model_params") or {}), LONGEST),
            "tools": [body(name, pretty(tool), LONGEST) for name, tool in tools.items()],
            "messages": turns,
            "left_out": max(0, len(messages) - MESSAGES),
        }


def lineage(admin: ReadOnlyAdmin, request: HttpRequest, situation: actions.Situation) -> dict[str, Any]:
    """Build the context of a run's origin, parent, derived runs and children, and of running it again."""
    run, listed = situation.run, admin.get_queryset(request)
    derived = list(listed.filter(origin_id=run.pk).order_by("-id")[: DERIVED + 1])
    children = list(listed.filter(parent_id=run.pk).order_by("created_at", "pk")[:MAX_FAMILY])
    parent = listed.filter(pk=run.parent_id).first() if run.parent_id else None
    note_waits([*children, *([parent] if parent is not None else [])])
    why_not = version = ""
    if run.is_ended and not permissions.may(request.user, "fork", run):
        why_not = actions.missing("fork")
    elif run.is_ended and run.session.imported_at is not None:
        why_not = _("The run was imported: it is a record. Fork it to go on from it.")
    elif run.is_ended:
        try:
            agent = control.agent_again(run)
        except UnknownAgentError:
            why_not = _("Agent %(agent)s is not known in this process.") % {"agent": plain(run.agent)}
        else:
            why_not = starting.why_not_start(request.user, agent)
            version = agent.version if agent.version != run.version else ""
    return {
        "origin": listed.filter(pk=run.origin_id).first() if run.origin_id else None,
        "parent": parent,
        "children": children,
        "is_deferred": write.asked_in(run.session) != "",
        "derived": derived[:DERIVED],
        "derived_more": len(derived) > DERIVED,
        "again": {"why_not": why_not, "version": version} if run.is_ended else None,
        "again_form": KeyForm(auto_id="again_%s"),
    }


def again_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Queue a new run of the same task and go to its page; ask first about effects that it may repeat."""
    form = KeyForm(request.POST)
    key = form.cleaned_data["key"] if form.is_valid() else ""
    if page := repeats_page(admin, request, run):
        return page
    try:
        new = starting.run_again(request.user, run.pk, idempotency_key=key)
    except REFUSALS as error:
        return admin.refused(request, run, error)
    done = _("Started again as run %(run)s. A worker picks it up.") % {"run": short_id(new.pk)}
    logged = _("Ran again from the console: run %(run)s.") % {"run": new.pk}
    return admin.done(request, run, logged, done, new)


def fork_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Queue a run that continues from a row of this run; ask first about effects that it may repeat."""
    form = ForkForm(request.user, request.POST, auto_id="fork_%s")
    status, why = 400, _("Correct the form below.")
    if form.is_valid():
        given = form.cleaned_data
        if page := repeats_page(admin, request, run, given["at"]):
            return page
        try:
            new = starting.fork_run(
                request.user,
                run.pk,
                given["at"],
                text=given["text"] or None,
                agent=given["agent"] or None,
                idempotency_key=given["key"],
            )
        except REFUSALS as error:
            status, why = status_of(error), plain(error)
        else:
            names = {"seq": given["at"], "run": short_id(new.pk)}
            logged = _("Forked at row %(seq)s from the console: run %(run)s.") % {**names, "run": new.pk}
            text = _("Forked at row %(seq)s as run %(run)s. A worker picks it up.")
            return admin.done(request, run, logged, text % names, new)
    text = _("Nothing was forked. %(why)s") % {"why": why}
    seq = form.cleaned_data.get("at")
    return at_view(admin, request, run, seq, status=status, refusal=text, fork_form=form)


def repeats_page(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, after: int = 0) -> HttpResponse | None:
    """Render the page on which the user ticks each effect that would happen twice.

    Returns None if there is no such effect, if all are ticked, or if the user may not fork the run.
    """
    done = forks.effects(settings.DATABASE, run, after) if permissions.may(request.user, "fork", run) else []
    ticked, was_asked = request.POST.getlist("knows"), "asked" in request.POST
    if not any(effect.is_final and effect.call_id not in ticked for effect in done):
        return None
    arguments = mask_for(run).arguments
    return admin.render(
        request,
        run,
        title=_("Do this again?"),
        status=400 if was_asked else 200,
        template="repeats",
        refusal=_("Nothing was started: tick each effect, or go back.") if was_asked else "",
        effects=[(each, calls.sentence(each.tool, arguments(each.tool, each.arguments))) for each in done],
        ticked=ticked,
        sent=[(name, text) for name, text in request.POST.items() if name in ForkForm.base_fields],
        is_fork=bool(after),
    )


def leave_out_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, seq: int) -> HttpResponse:
    """Leave a row, or a block of it, out of later requests; a run that its provider refused goes on."""
    form = LeaveOutForm(request.POST)
    if not form.is_valid():
        text = _("Nothing was left out. %(why)s") % {"why": _("Correct the form below.")}
        return at_view(admin, request, run, seq, status=400, refusal=text, leave_data=request.POST)
    after = control.leave_out(run.pk, seq, request.user, **form.cleaned_data)
    done = _("Left out of later requests.")
    if after.status == Run.Status.QUEUED:
        done = _("Left out. A worker goes on with the run.")
    return admin.done(request, run, _("Left out row %(seq)s.") % {"seq": seq}, done, after)


def leave_form(row: events.Row, data: Any) -> LeaveOutForm:
    """Build the form to leave out a masked row, with a choice for each block that a user or a tool gave."""
    form, content = LeaveOutForm(data, auto_id="leave_%s"), row.payload.get("content")
    names = [("", _("all of it"))]
    for place, block in enumerate(content if isinstance(content, list) and has_block(row, 1) else ()):
        names.append((str(place), plain(block.get("name") or str(block.get("text", place))[:SHORT])))
    form.fields["block"].widget.choices = names
    return form


def replay_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run) -> HttpResponse:
    """Show the form of a replay; a POST replays the run and shows the report. No tool runs.

    A replay that requests a model needs the permission "replay", and is logged.
    """
    form = ReplayForm(request.POST if request.method == "POST" else None)
    status, refusal, report = 200, "", None
    if form.is_valid():
        who = form.cleaned_data["who"]
        model = {"code": None, history.OWN: history.OWN}.get(who, form.cleaned_data["model"])
        try:
            if model is not None and not permissions.may(request.user, "replay", deciders.restore(run)):
                raise PermissionDeniedError(actions.missing("replay"))
            permissions.require_whole(request.user, run)
            report = history.replay_run(run.pk, model=model, limit=ASKED if model else None)
        except AgentRunsError as error:  # also what a provider says
            status, refusal = status_of(error), plain(error)
            if not isinstance(error, PermissionDeniedError):
                refusal = _("The replay stopped. %(why)s") % {"why": refusal}
        except Exception as error:
            if model is None:
                raise
            logger.warning("Replay failed run=%s model=%s", run.pk, model, exc_info=True)
            why = plain(f"{type(error).__name__}: {error}")
            status, refusal = 409, _("The model failed: %(why)s") % {"why": why}
        else:
            if model is not None:
                admin.log_change(request, run, _("Asked %s what it would have done.") % plain(report.model))
    elif form.is_bound:
        status, refusal = 400, _("Correct the form below.")
    may = permissions.may(request.user, "replay", run)
    context: dict[str, Any] = {"why_no_model": "" if may else actions.missing("replay"), "report": report}
    if report is not None:
        record, sides, steps = report.record(), {"then": _("Then"), "now": _("Now")}, []
        for step in record["steps"]:
            texts = []
            for side, label in sides.items():
                if reply := step[side]:
                    lines = [reply["text"]] if reply["text"] else []
                    lines += [f"{call['name']}({pretty(call['input'])})" for call in reply["calls"]]
                    nothing = _("nothing (%(stop)s)") % {"stop": reply["stop_reason"]}
                    texts.append(body(label, "\n".join(lines) or nothing, LONGEST))
            steps.append((step, texts))
        context |= {"record": record, "steps": steps}
        if (difference := record["difference"]) is not None:
            context["sides"] = [
                body(label, _("nothing") if difference[side] is None else as_text(difference[side]), LONGEST)
                for side, label in sides.items()
            ]
    title, page = _("Replay of %(task)s") % {"task": task_title(run)}, {"refusal": refusal, "form": form}
    return admin.render(request, run, title=title, status=status, template="replay", **page, **context)


def at_view(
    admin: ReadOnlyAdmin, request: HttpRequest, run: Run, seq: int | None = None, **context: Any
) -> HttpResponse:
    """Show the run's state at the row in the URL, or at the last row if the URL names none.

    With `context`, shows the state at `seq` instead, and puts `context` over the values of the page. If there
    is no such row, redirects to the nearest one. Shows the run's page with a refusal if the user may not see
    all runs of the session up to the row. Does so, too, instead of a redirect, if the run has no rows, or if
    `context` has a "status".
    """
    if not context:
        seq = seq_of(request.GET.get("seq", ""))
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
    call_lines = []
    for call in moment.state.run.calls.values():
        given = body("", pretty(mask.arguments(call.tool, call.arguments)), LONGEST)
        call_lines.append((call, given, outcome_words(call.outcome, in_doubt=call.in_doubt)[0]))
    row, may = moment.row, partial(permissions.may, request.user)
    is_part, leave_data = row.kind in KINDS and not run.session.imported_at, context.get("leave_data")
    replies, past, coming = seqs.filter(kind=events.ASSISTANT), Q(seq__lt=row.seq), Q(seq__gt=row.seq)
    page: dict[str, Any] = {
        "template": "moment",
        "title": _("Row %(seq)s of %(task)s") % {"seq": row.seq, "task": task_title(run)},
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
        "facts": moment.facts(),
        "calls": call_lines,
        "sent": moment.sent,
        "request_body": moment.request(),
        "why_no_fork": "" if may("fork", run) else actions.missing("fork"),
        "leave_form": leave_form(mask.row(row), leave_data) if is_part and may("resume", run) else None,
        "leave_open": leave_data is not None or "leave" in request.GET,
        "may_erase": not row.is_erased and row.run_id == run.pk and may("erase", run),
        "fates": forks.fates(settings.DATABASE, run, moment.state.run, row.seq),
        "fork_form": ForkForm(request.user, initial={"at": str(row.seq)}, auto_id="fork_%s"),
    }
    return admin.render(request, run, **{**page, **context})
