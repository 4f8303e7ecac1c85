"""The page of one call, the verdicts of staff on a call in doubt, and the list of such calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin import html
from agentruns.admin.approvals.card import brief, quote
from agentruns.admin.base import CHANNEL, ReadOnlyAdmin, following, mask_for, status_of, ways
from agentruns.admin.forms import CancelForm, VerdictForm
from agentruns.admin.runs import actions, chat, steps
from agentruns.admin.runs.events import settling
from agentruns.admin.runs.list import task_title
from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError
from agentruns.journal import copies, events, fold, masking, policy, read
from agentruns.journal.masking import MOST_READ
from agentruns.models import Approval, Message, Run
from agentruns.models.statuses import Orphan, Outcome, Verdict
from agentruns.services import permissions
from agentruns.services.runs import control, waiting, write
from agentruns.tools.card import MASK
from agentruns.utils import bounds, clock, db, redaction

CALL_LENGTH = 36
EARLIER = 5  # latest results of the tool, of which one is shown as an example
SHORT = 60  # characters of an argument in a title
MOVED_ON = gettext_lazy("The call moved on since you looked. This is how it is now.")
LOOKED_AT = 200  # runs with a call in doubt that are searched for the next one
# Rows that are folded; other rows, such as extensions, are skipped.
_FOLDED = (events.APPROVAL_REQUESTED, *steps.OF_A_CALL)
_OPEN = {
    "not_occurred": gettext_lazy("A worker runs it again, with the same key."),
    "retry": gettext_lazy("A worker repeats it: its tool says that is safe."),
    "reconcile": gettext_lazy("A worker asks the outside system what became of it."),
}
_KINDS = {
    str: gettext_lazy("text"),
    dict: gettext_lazy("a JSON object"),
    list: gettext_lazy("a JSON array"),
    int: gettext_lazy("a number"),
    float: gettext_lazy("a number"),
}


@dataclass(frozen=True, slots=True)
class CallHistory:
    """A call, the rows about it, and sentences about the reply's later calls, which wait for its result."""

    run: Run
    call: fold.Call
    rows: list[events.Row]
    later: list[str]
    described: str = ""  # by its tool
    settled: events.Row | None = None  # the approval of another call that settled the doubt about this one

    @property
    def seq(self) -> int:
        """Find the seq of the last row about the call; a page that was shown with another seq is outdated."""
        return self.rows[-1].seq

    @property
    def title(self) -> str:
        """Describe the call in a sentence for people."""
        call = self.call
        title = call.approval.title if call.approval else self.described
        return html.plain(title) if title else sentence(call.tool, call.arguments)

    @property
    def waits(self) -> bool:
        """Check whether the run waits for a verdict on the call."""
        return self.call.is_open and self.call.orphan == Orphan.HELD

    @property
    def is_uncleared(self) -> bool:
        """Check whether the result leaves a doubt that nobody has cleared."""
        return self.settled is None and bool(waiting.uncleared_in(self.rows))

    @property
    def in_doubt(self) -> bool:
        """Check whether a verdict can be given: the run waits for one, or the result leaves a doubt."""
        return self.waits or self.is_uncleared

    def all(self, kind: str) -> list[events.Row]:
        """List the rows of a kind, in order."""
        return [row for row in self.rows if row.kind == kind]

    def last(self, kind: str) -> events.Row | None:
        """Find the last row of a kind; None if there is none."""
        return next(iter(self.all(kind)[::-1]), None)

    @property
    def returned(self) -> events.Row | None:
        """Find the last result without an error that the tool returned late, so that it happened, or None."""
        bad, reports = ("never_entered", "is_error"), reversed(self.all(events.LATE_RESULT))
        # An event has epoch 0. It may say the opposite, such as that the payment failed: a person reads it.
        reports = (row for row in reports if row.payload.get("worker_epoch") != 0)
        return next((row for row in reports if not any(map(row.payload.get, bad))), None)

    @property
    def busy_until(self) -> datetime | None:
        """Compute when the tool's timeout ends the last attempt; None if that is past or unknown."""
        if self.call.timeout is None or self.call.started_at is None:
            return None
        until = self.call.started_at + timedelta(seconds=self.call.timeout)
        return until if until > clock.now(settings.DATABASE) else None


def _shown_by(run: Run, call_id: str) -> Approval | Run:
    """Find the approval of a call, by which the call may be revealed; without one, return the run."""
    return Approval.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=call_id).first() or run


def call_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Show a call: its arguments, the known facts about it, and the possible decisions. Raises Http404."""
    return call_page(admin, request, history(run, call_id))


def reveal_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Show a call's sensitive arguments, and log it; raises PermissionDenied and Http404.

    Any method but POST redirects to the call's page.
    """
    if request.method != "POST":
        return HttpResponseRedirect(admin.url(request, "call", run.pk, call_id))
    about = _shown_by(run, call_id)
    if not permissions.may_reveal(request.user, about):
        raise PermissionDenied
    past = history(run, call_id, revealed=True)
    permissions.reveal(request.user, about, door=CHANNEL, what=f"call={call_id}")
    admin.log_change(request, run, _("Saw the sensitive arguments of call %s.") % call_id)
    return call_page(admin, request, past)


def in_doubt_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the calls in doubt on which this user may give a verdict: first those that a run waits for."""
    runs, waits = calls_in_doubt(request, ended=True)
    masks, lines = masking.masks_of(runs.values(), size=MOST_READ), []
    for wait in waits:
        run: Any = runs[wait.run_id]
        run.mask = masks[run.session_id]
        tool = html.plain(html.named(wait.tool, "")[0])
        known = run.mask.tool_text(wait.tool, wait.text)
        lines.append({"run": run, "wait": wait, "tool": tool, "task": task_title(run), "evidence": known})
    return admin.render(request, None, title=_("Calls in doubt"), template="in_doubt", lines=lines)


def calls_in_doubt(request: HttpRequest, *, ended: bool) -> tuple[dict[UUID, Run], list[waiting.Wait]]:
    """Find the runs and the calls in doubt, not masked, on which this user may give a verdict.

    Calls that runs wait for come first, in order of waiting. With `ended`, calls of ended runs follow. Reads
    at most LOOKED_AT runs that wait, and LOOKED_AT calls of ended runs.
    """
    alias, user = settings.DATABASE, request.user
    if not permissions.may(user, "resolve"):
        return {}, []
    some = policy.visible_runs(user).select_related("session").defer("input", "output", "error")
    stopped = list(some.filter(status=Run.Status.ORPHANED).order_by("updated_at", "pk")[:LOOKED_AT])
    left = waiting.ended_in_doubt(alias, policy.visible_runs(user))[:LOOKED_AT] if ended else []
    its = some.filter(pk__in={wait.run_id for wait in left}) if left else ()
    runs = {run.pk: run for run in (*stopped, *its) if permissions.may(user, "resolve", run)}
    places = {key: place for place, key in enumerate(runs)}
    held = waiting.orphans(alias, stopped) if stopped else ()
    waits = sorted((wait for wait in held if wait.run_id in runs), key=lambda wait: places[wait.run_id])
    return runs, [*waits, *(wait for wait in left if wait.run_id in runs)]


def queue(request: HttpRequest, *, ended: bool = False) -> list[tuple[UUID, str]]:
    """List the calls that `calls_in_doubt` finds, as (run id, call id), in the same order."""
    return [(wait.run_id, wait.call_id) for wait in calls_in_doubt(request, ended=ended)[1]]


def story(past: CallHistory) -> list[str]:
    """Describe in sentences what happened to the call, and who gave a verdict or settled the doubt."""
    lines, call, given = [], past.call, past.last(events.ORPHAN_RESOLVED)
    for row in past.rows:
        payload, facts = row.payload, {"name": steps.actor(row), "when": _moment(row)}
        outcome = payload.get("outcome")
        if row.kind == events.ORPHAN_FOUND:
            text = _("In doubt since %(when)s. %(action)s Evidence: %(evidence)s")
            facts["evidence"] = html.evidence(payload.get("evidence", ""))
            facts["action"] = str(steps.ORPHAN_ACTIONS.get(payload["action"], ""))
        elif row.kind == events.ORPHAN_RESOLVED:
            lines.append(verdict_text(row))
            continue
        elif row.kind in (events.EVENT_AWAITED, events.EVENT_DELIVERED):
            text = _("The tool returned on %(when)s, to wait for %(event)s %(key)s.")
            if row.kind == events.EVENT_DELIVERED:
                text = _("%(name)s delivered %(event)s %(key)s on %(when)s.")
            facts |= {"event": html.plain(payload["name"]), "key": html.plain(payload["key"])}
        elif row.kind != events.TOOL_RESULT:
            continue
        elif payload.get("in_doubt"):
            text = _("The tool raised an error on %(when)s, and the model was told.")
        elif outcome == Outcome.UNKNOWN and not steps.actor_name(payload):
            text = _("Its outcome was recorded as unknown on %(when)s.")
        elif outcome == Outcome.UNKNOWN:
            text = _("%(name)s had its outcome told to the model as unknown on %(when)s.")
        elif payload.get("reconciled"):
            text = _("The outside system, asked by the key: it happened, %(when)s.")
        elif given is not None and given.payload["verdict"] == Verdict.OCCURRED and outcome == Outcome.OK:
            facts["name"] = steps.actor(given)
            text = _("The model was told the result that %(name)s entered.")
        else:
            text, facts["outcome"] = _("%(outcome)s, on %(when)s."), steps.outcome_words(outcome)[0]
        lines.append(text % facts)
    if (result := past.last(events.TOOL_RESULT)) is None and not past.waits:
        if call.attempt == 0:
            lines.append(_("It has not been started."))
        elif call.is_pending:
            lines.append(_("It waits for the event: its result is what is delivered."))
        elif call.is_contradicted:
            lines.append(_("The tool has returned since. A worker will ask a person again."))
        else:
            started = _("Attempt %(attempt)d has started and has no result yet.") % {"attempt": call.attempt}
            lines.append(str(_OPEN.get(call.orphan, started)))
    if result is not None and events.leaves_doubt(result.payload):
        if past.settled is not None:
            text = _("%(name)s, knowing of it, approved the tool's next call on %(when)s.")
            lines.append(text % {"name": steps.actor(past.settled), "when": _moment(past.settled)})
        lines.append(_("Nobody has cleared it.") if past.is_uncleared else _("The doubt is lifted."))
    return lines


def verdict_text(row: events.Row) -> str:
    """Describe a verdict: who gave it, when, and on which evidence."""
    words, known = steps.verdict_words(row.payload["verdict"]), row.payload.get("evidence")
    facts = {"name": steps.actor(row), "verdict": words, "when": _moment(row)}
    text = _("%(name)s: %(verdict)s, %(when)s.") % facts
    return f"{text} " + _("Evidence: %s") % html.plain(known) if known else text


def history(run: Run, call_id: str, *, revealed: bool = False) -> CallHistory:
    """Read a call and its rows, masked unless `revealed`; raises Http404 if the run has no such call."""
    about = Message.objects.using(settings.DATABASE).filter(run_id=run.pk)
    mask = masking.Mask() if revealed else mask_for(run)
    is_id = 0 < len(call_id) <= CALL_LENGTH and call_id.isprintable()
    rows = [*map(mask.row, read.read_rows(about.filter(call_id=call_id).order_by("seq")))] if is_id else []
    replies = about.filter(kind=events.ASSISTANT, seq__lt=rows[0].seq if rows else 0).order_by("-seq")[:1]
    for raw in read.read_rows(replies):
        reply = mask.row(raw)
        its = [copies.original(reply), *(copies.original(row) for row in rows if row.kind in _FOLDED)]
        if (call := fold.fold(run.pk, its).calls.get(call_id)) is not None:
            # The reply's later calls, which will not run if the model is told that this call is unknown.
            still_open = set(run.pending_calls)
            later = [
                sentence(after["tool"], after["arguments"])
                for after in reply.payload["calls"][call.ordinal + 1 :]
                if after["id"] in still_open and not after["parallel"]
            ]
            # The approval of a later call that settles the doubt about this one.
            failed, settled = next((row for row in rows if row.payload.get("in_doubt")), None), None
            if failed is not None:
                decided = Message.objects.using(settings.DATABASE).filter(
                    session_id=run.session_id,
                    kind=events.APPROVAL_DECIDED,
                    tool_name=failed.tool_name,
                    seq__gt=failed.seq,
                )
                approvals = map(mask.row, read.read_rows(decided.order_by("seq")))
                settled = next((row for row in approvals if call_id in row.payload.get("settles", ())), None)
            title = mask.tool_text(call.tool, chat.described(run, [raw]).get(call_id, ""))
            return CallHistory(run, call, rows, later, title, settled)
    raise Http404(_("Run %(run)s has no call %(call)s.") % {"run": run.pk, "call": html.plain(call_id)})


def call_page(
    admin: ReadOnlyAdmin, request: HttpRequest, past: CallHistory, sent: Any = None, **context: Any
) -> HttpResponse:
    """Render the page of a call; `sent` is the form of a verdict that was not recorded."""
    run, call = past.run, past.call
    situation, why_not = actions.situation(request, run), ""
    if past.in_doubt and not permissions.may(request.user, "resolve", run):
        why_not = actions.missing("resolve")
    elif past.waits and run.status != Run.Status.ORPHANED:
        text = _("The run is %(status)s: other calls of the same reply are running. Look again in a while.")
        why_not = text % {"status": run.get_status_display()}
    waiting_calls = queue(request) if past.waits else []
    context |= settling(request.user, run, call) if past.waits and call.awaits else {}
    context |= ways(waiting_calls, (run.pk, call.id), LOOKED_AT, lambda key: admin.url(request, "call", *key))
    if past.in_doubt and not why_not:
        reads = [html.body(_("Told to the model, as an error"), in_doubt.UNKNOWN.format(tool=call.tool))]
        if past.later:
            reads.append(html.Body(_("Not run"), format_html("{}", "\n".join(past.later))))
            reads.append(html.body(_("Told to the model of each of these"), in_doubt.AFTER_UNKNOWN))
        context |= {
            "verdict_form": sent or verdict_form(past),
            "paused": run.status == Run.Status.ORPHANED and bool(run.blocked_reason),
            "others_wait": any(wait.call_id != call.id for wait in situation.waits),
            "stored_as": kind_of(past.returned.payload.get("content")) if past.returned else "",
            "model_reads": reads,  # for the verdict `unknown`
        }
    tools = read.definition_bodies(settings.DATABASE, [run.definition_id]).get(run.definition_id, {})
    # What the tool does by its definition: the first thing that says where to look for its traces.
    does = tools.get("tools", {}).get(call.tool, {}).get("description", "")
    label, results = _("Told to the model"), past.all(events.TOOL_RESULT)
    return admin.render(
        request,
        run,
        title=past.title,
        brief=brief(past.title, call.arguments),
        task=task_title(run),
        template="orphan",
        run=run,
        past=past,
        call=call,
        card_url=admin.other_page(request, Approval, call.approval.id) if call.approval else "",
        story=story(past),
        does=quote(_("What the tool does"), does) if does else None,
        started=past.last(events.TOOL_STARTED),
        results=[
            (row, html.body(label, html.as_text(row.payload.get("content")), steps.TEXT_LIMIT))
            for row in results
        ],
        arguments=html.arguments(call.arguments),
        masked=MASK in call.arguments.values(),
        may_reveal=permissions.may_reveal(request.user, _shown_by(run, call.id)),
        late=[(row, *late_report(past, row)) for row in past.all(events.LATE_RESULT)],
        why_not=why_not,
        situation=situation,
        cancel=actions.cancel(situation),
        cancel_form=CancelForm(auto_id="cancel_%s"),
        **context,
    )


def verdict_form(past: CallHistory, verdict: str = "", data: Any = None, *, keeps: Any = None) -> VerdictForm:
    """Build the form of a verdict on a call; `keeps` has typed values that the form shows again."""
    initial = {"seq": str(past.seq), "result": prefilled(past), **(keeps or {})}
    asks = {"is_uncleared": past.is_uncleared, "needs_result": past.waits and past.returned is None}
    form = VerdictForm(data, initial=initial, verdict=verdict, **asks)
    help_text = ""
    if past.returned is None:  # show an earlier result of the tool, or one made up
        help_text = _('For example: done by hand, or {"status": "sent"}')
        rows = Message.objects.using(settings.DATABASE).filter(session_id=past.run.session_id)
        results = rows.filter(kind=events.TOOL_RESULT, tool_name=past.call.tool).order_by("-seq")[:EARLIER]
        oks = (row for row in read.read_rows(results) if row.payload.get("outcome") == Outcome.OK)
        if row := next(oks, None):
            text = html.plain_line(html.as_text(mask_for(past.run).row(row).payload.get("content")))
            help_text = _("An earlier call of it returned: %(result)s") % {"result": text}
    form.fields["result"].help_text = help_text
    form.fields["result"].widget.attrs["rows"] = min(max(initial["result"].count("\n") + 1, 2), 16)
    return form


def prefilled(past: CallHistory) -> str:
    """Format the late result as the form's initial text; "" without a late result or if it is too long."""
    if (late := past.returned) is None:
        return ""
    text = html.bare(html.as_text(late.payload.get("content"))).strip()
    return text if len(text) <= bounds.TEXT_LENGTH else ""


def kind_of(value: Any) -> str:
    """Name the JSON type of a stored result, such as "a number"."""
    return str(_KINDS.get(type(value), _("JSON")))


def late_report(past: CallHistory, row: events.Row) -> tuple[bool, html.Body | None]:
    """Check whether a late result is of the drive that found the doubt, and format the returned content.

    The content is None if the tool was never started.
    """
    if row.payload.get("never_entered"):
        return False, None
    found, starts = (
        [each.epoch for each in past.all(kind) if each.attempt == row.attempt]
        for kind in (events.ORPHAN_FOUND, events.TOOL_STARTED)
    )
    content = row.payload.get("content")
    label = _("Delivered") if row.payload.get("worker_epoch") == 0 else _("Returned")
    returned = html.body(label, html.as_text(content), steps.TEXT_LIMIT, kind_of(content))
    return bool(found) and found[:1] == starts[:1], returned


def sentence(tool: str, given: dict[str, Any]) -> str:
    """Describe a call by its tool and its short arguments that are not masked."""
    texts = [redaction.redact(html.named(name, value)[1]) for name, value in given.items() if value != MASK]
    beside = [text for text in texts if len(text) <= SHORT and "\n" not in text]
    name = html.plain(html.named(tool, "")[0])
    return html.cut(": ".join(filter(None, (name, ", ".join(map(html.plain, beside))))))


def _moment(row: events.Row) -> str:
    return f"{html.exact(row.created_at)} ({html.ago(row.created_at)})"


def resolve_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Record a verdict on the call, and redirect to the next call in doubt or else to the run's page.

    Refuses a verdict if the call has changed since the page showed it, and shows the call's page with the
    reason. A worker then continues the run, unless it has ended or other calls wait. A GET redirects to the
    call's page.
    """
    past = history(run, call_id)
    if request.method != "POST":
        return HttpResponseRedirect(admin.url(request, "call", run.pk, call_id))
    if not permissions.may(request.user, "resolve", run):
        return _refused(admin, request, past, {}, PermissionDeniedError(actions.missing("resolve")))
    verdict, seen = request.POST.get("verdict", ""), request.POST.get("seq", "")
    form = verdict_form(past, verdict, request.POST)
    if form.is_valid() and verdict == Verdict.OCCURRED and past.returned is not None:
        # A result that was changed may hold a mask in place of a part of the returned value.
        text, prefill = form.cleaned_data["result"], prefilled(past)
        returned = {"content": past.returned.payload.get("content")}
        is_masked = MASK in text and MASK in prefill
        if text != prefill and (is_masked or masking.carries_mask(text, "content", returned)):
            form.add_error("result", _("Part of it is hidden here. Leave it as it is, or write your own."))
    given = {**form.cleaned_data, "result": entered(past, form.cleaned_data.get("result", ""))}
    if seen != str(past.seq):
        return _refused(admin, request, past, given, RunStateError(str(MOVED_ON)))
    if not form.is_valid():
        for name in list(form.errors)[:1]:  # to the field that is to be corrected
            form.fields[name].widget.attrs["autofocus"] = True
        text = _("Nothing was decided. Correct the form below.")
        return call_page(admin, request, past, form, status=400, refusal=text)
    waiting_calls = queue(request, ended=True)  # before it is decided: afterwards it has no place in it

    def resolve() -> Run:
        write.lock_session(settings.DATABASE, run.session_id)
        now = history(run, call_id)
        if now.seq != past.seq:
            raise RunStateError(str(MOVED_ON))
        if now.returned is not None and verdict == Verdict.NOT_OCCURRED:
            raise RunStateError(_("The tool returned without an error, so it did happen."))
        return control.resolve_orphan(
            run.pk,
            call_id,
            verdict,
            request.user,
            result=given["result"] if verdict == Verdict.OCCURRED else None,
            evidence=given["evidence"],
            channel=CHANNEL,
        )

    try:
        now = db.in_transaction(settings.DATABASE, resolve)
    except AgentRunsError as error:
        return _refused(admin, request, past, given, error)
    text = _("Verdict on call %(call)s of %(tool)s: %(verdict)s. %(evidence)s")
    about = {"call": call_id, "tool": html.plain(past.call.tool), "evidence": html.plain(given["evidence"])}
    logged = text % {**about, "verdict": verdict}
    back = admin.done(request, now, logged, done(past, now, verdict, given["result"]))
    others = following(waiting_calls, (run.pk, call_id))
    return HttpResponseRedirect(admin.url(request, "call", *others[0])) if others else back


def _refused(
    admin: ReadOnlyAdmin, request: HttpRequest, was: CallHistory, given: dict[str, Any], error: Exception
) -> HttpResponse:
    """Show the call's page with the reason why no verdict was recorded, such as another person's verdict.

    After a double click, say that the verdict was recorded already, and redirect to the run's page.
    """
    run, why, seen = admin.find(request, was.run.pk), html.plain(error), given.get("seq") or 0
    past, sent = history(run, was.call.id), None
    since = [row for row in past.rows if row.seq > seen] if given else []
    first = next((row for row in since if row.kind == events.ORPHAN_RESOLVED), None)
    if given.get("verdict"):
        sent = verdict_form(past, keeps={"evidence": given.get("evidence", "")})
    if first is not None and seen and sent is not None:
        if is_same(past, first, request.user, given):  # a double click
            text = _("Your verdict was recorded already. %s")
            return admin.back(request, run, text % verdict_text(first))
        why = verdict_text(first)
    elif since and not past.in_doubt:
        why = " ".join(story(past))
    text = _("Your verdict was not recorded. %(why)s") % {"why": why}
    return call_page(admin, request, past, sent, status=status_of(error), refusal=text)


def entered(past: CallHistory, text: str) -> Any:
    """Convert the typed result to a value; an unchanged prefilled text means the returned value itself.

    A text that is a JSON object, array or number is parsed; any other text stays a text.
    """
    if (late := past.returned) is not None and text == prefilled(past):
        rows = Message.objects.using(settings.DATABASE).filter(run_id=past.run.pk, seq=late.seq)
        return rows.get().payload.get("content")  # not as the page masks it

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number or isinstance(value, dict | list) else text


def is_same(past: CallHistory, row: events.Row, user: Any, given: dict[str, Any]) -> bool:
    """Check whether `user` sends again the verdict that is recorded in `row`."""
    payload = row.payload
    mine = str((payload.get("actor") or {}).get("id")) == str(user.pk)
    if not mine or (payload["verdict"], payload["evidence"]) != (given["verdict"], given.get("evidence")):
        return False
    if given["verdict"] != Verdict.OCCURRED:
        return True
    result = past.last(events.TOOL_RESULT)
    stored = payload.get("result") if "result" in payload else result and result.payload["content"]
    return bool(stored == given["result"])


def done(past: CallHistory, run: Run, verdict: str, result: Any) -> str:
    """Describe the effect of a verdict just recorded; `past` is the call before the verdict."""
    text = _("Recorded: %(verdict)s.") % {"verdict": steps.verdict_words(verdict)}
    if past.is_uncleared:
        still = _("The doubt is lifted.") if verdict != Verdict.UNKNOWN else _("The doubt stays.")
        return f"{text} {still}"
    if verdict == Verdict.OCCURRED:
        text = _("%(said)s The result is stored as %(kind)s.") % {"said": text, "kind": kind_of(result)}
    return f"{text} " + _("A worker picks up the run.") if run.status == Run.Status.QUEUED else text
