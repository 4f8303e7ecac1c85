"""The page of one call, on which staff give the verdict on a call in doubt."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.approvals.texts import brief, quote
from agentruns.admin.base import CHANNEL, ReadOnlyAdmin, neighbours
from agentruns.admin.forms import RESULT_LENGTH, CancelForm, VerdictForm
from agentruns.admin.html import (
    Body,
    ago,
    arguments,
    as_text,
    bare,
    body,
    cut,
    exact,
    named,
    plain,
    plain_line,
)
from agentruns.admin.runs import actions, chat
from agentruns.admin.runs.list import task_title
from agentruns.admin.runs.steps import (
    OF_A_CALL,
    ORPHAN_ACTIONS,
    TEXT_LIMIT,
    actor,
    actor_name,
    evidence,
    mask_for,
    outcome_words,
    verdict_words,
)
from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.journal import events
from agentruns.journal.copies import original
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, fold
from agentruns.journal.masking import MOST_READ, NOTHING, masks_of
from agentruns.journal.policy import visible_runs
from agentruns.journal.read import definition_bodies, read_rows
from agentruns.models import Approval, Message, Run
from agentruns.services import permissions, waiting
from agentruns.tools.card import MASK
from agentruns.utils import clock
from agentruns.utils.redaction import redact

CALL_LENGTH = 36
EARLIER = 5  # results of the tool of which one is an example
SHORT = 60  # characters of an argument in a title
ENDED = gettext_lazy("Its run has ended. Whether it happened is not known.")
LOOKED_AT = 200  # runs with a call in doubt that are searched for the next one


@dataclass(frozen=True, slots=True)
class CallHistory:
    """A call, the rows about it, and the calls after it in the same reply that have no result yet."""

    run: Run
    call: Call
    rows: list[Row]
    later: list[str]
    described: str = ""  # by its tool
    settled: Row | None = None  # the approval of another call that settled the doubt about this one

    @property
    def seq(self) -> int:
        """The last row about the call, by which a page's state is compared."""
        return self.rows[-1].seq

    @property
    def title(self) -> str:
        """The call in a sentence for people."""
        call = self.call
        said = call.approval.title if call.approval else self.described
        return plain(said) if said else sentence(call.tool, call.arguments)

    @property
    def waits(self) -> bool:
        """Check whether the run waits for a verdict on the call."""
        return self.call.is_open and self.call.orphan == "held"

    @property
    def is_uncleared(self) -> bool:
        """Check whether the result leaves a doubt that nobody has cleared."""
        return self.settled is None and bool(waiting.uncleared_in(self.rows))

    @property
    def in_doubt(self) -> bool:
        """Check whether a verdict can be given."""
        return self.waits or self.is_uncleared

    def all(self, kind: str) -> list[Row]:
        """List the rows of a kind, in order."""
        return [row for row in self.rows if row.kind == kind]

    def last(self, kind: str) -> Row | None:
        """Find the last row of a kind."""
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def returned(self) -> Row | None:
        """The late result of a handler that returned without an error, which shows that the call happened."""
        bad, reports = ("never_entered", "is_error"), reversed(self.all(events.LATE_RESULT))
        return next((one for one in reports if not any(map(one.payload.get, bad))), None)

    @property
    def busy_until(self) -> datetime | None:
        """The time until which the last attempt may still run, by its tool's timeout; None if past."""
        if self.call.timeout is None or self.call.started_at is None:
            return None
        until = self.call.started_at + timedelta(seconds=self.call.timeout)
        return until if until > clock.now(settings.DATABASE) else None


def _shown_by(run: Run, call_id: str) -> Approval | Run:
    """Find the approval that shows a call, else its run."""
    approvals = Approval.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=call_id)
    return approvals.first() or run


def call_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Show a call: its arguments, the known facts about it, and the possible decisions."""
    return call_page(admin, request, history(run, call_id))


def reveal_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Show a call's sensitive arguments to a user who may see them, once, and log it."""
    if request.method != "POST":
        return HttpResponseRedirect(admin.url(request, "call", run.pk, call_id))
    shown = _shown_by(run, call_id)
    if not permissions.may_reveal(request.user, shown):
        raise PermissionDenied
    found = history(run, call_id, revealed=True)
    permissions.reveal(request.user, shown, door=CHANNEL, what=f"call={found.call.id}")
    admin.log_change(request, run, _("Saw the sensitive arguments of call %s.") % found.call.id)
    return call_page(admin, request, found)


def in_doubt_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """List the calls in doubt on which this user may give a verdict, those that wait longest first."""
    if not admin.has_view_permission(request):
        raise PermissionDenied
    runs, calls = _in_doubt(request, ended=True)
    masks = masks_of(runs.values(), size=MOST_READ)
    for run in runs.values():
        run.mask = masks[run.session_id]  # type: ignore[attr-defined]
    lines = [
        {
            "run": runs[wait.run_id],
            "call": wait.call_id,
            "tool": plain(named(wait.tool, "")[0]),
            "task": task_title(runs[wait.run_id]),
            "evidence": evidence(masks[runs[wait.run_id].session_id].made(wait.tool, wait.text))
            if wait.kind == waiting.ORPHAN
            else ENDED,
        }
        for wait in calls
    ]
    context: dict[str, Any] = {"lines": lines, "list_url": admin.url(request, "changelist")}
    template = "agentruns/admin/in_doubt.html"
    return admin.render(request, None, title=_("Calls in doubt"), template=template, **context)


def _in_doubt(request: HttpRequest, *, ended: bool) -> tuple[dict[UUID, Run], list[waiting.Wait]]:
    """Find the calls in doubt that this user may resolve, not masked, and their runs.

    First calls that runs wait for, the longest first, then those that ended runs left, if `ended`.
    """
    alias, user = settings.DATABASE, request.user
    if not permissions.may(user, "resolve"):
        return {}, []
    some = visible_runs(user).select_related("session").defer("input", "output", "error")
    stopped = list(some.filter(status=Run.Status.ORPHANED).order_by("updated_at", "pk")[:LOOKED_AT])
    left = waiting.ended_in_doubt(alias, visible_runs(user))[:LOOKED_AT] if ended else []
    its = some.filter(pk__in={wait.run_id for wait in left}) if left else ()
    runs = {run.pk: run for run in (*stopped, *its) if permissions.may(user, "resolve", run)}
    places = {key: place for place, key in enumerate(runs)}
    held = waiting.orphans(alias, stopped) if stopped else ()
    found = sorted((wait for wait in held if wait.run_id in runs), key=lambda wait: places[wait.run_id])
    return runs, [*found, *(wait for wait in left if wait.run_id in runs)]


def queue(request: HttpRequest, *, ended: bool = False) -> list[tuple[UUID, str]]:
    """List the runs and calls of the page of calls in doubt, in its order; with `ended` also ended runs."""
    return [(wait.run_id, wait.call_id) for wait in _in_doubt(request, ended=ended)[1]]


def story(found: CallHistory) -> list[str]:
    """Describe in sentences what became of the call, and who decided so."""
    lines, call = [], found.call
    for row in found.rows:
        if row.kind == events.ORPHAN_FOUND:
            text = _("In doubt since %(when)s. %(action)s Evidence: %(evidence)s")
            facts = {"when": _moment(row), "evidence": evidence(row.payload.get("evidence", ""))}
            lines.append(text % {**facts, "action": ORPHAN_ACTIONS.get(row.payload["action"], "")})
        elif row.kind == events.ORPHAN_RESOLVED:
            lines.append(verdict(row))
        elif row.kind == events.TOOL_RESULT:
            lines.append(_outcome(found, row))
    result = found.last(events.TOOL_RESULT)
    if result is None and not found.waits:
        if call.attempt == 0:
            lines.append(_("It has not been started."))
        elif call.is_contradicted:
            lines.append(_("The tool has returned since. A worker will ask a person again."))
        else:
            started = _("Attempt %(attempt)d has started and has no result yet.") % {"attempt": call.attempt}
            lines.append(str(_OPEN.get(call.orphan, started)))
    if result is not None and events.leaves_doubt(result.payload):
        if found.settled is not None:
            text = _("%(name)s, knowing of it, approved the tool's next call on %(when)s.")
            lines.append(text % {"name": actor(found.settled), "when": _moment(found.settled)})
        lines.append(_("Nobody has cleared it.") if found.is_uncleared else _("The doubt is lifted."))
    return lines


def verdict(row: Row) -> str:
    """Describe a verdict: who gave it, when, and on which evidence."""
    payload = row.payload
    said = _("%(name)s: %(verdict)s, %(when)s.") % {
        "name": actor(row),
        "verdict": verdict_words(payload["verdict"]),
        "when": _moment(row),
    }
    known = payload.get("evidence")
    return f"{said} " + _("Evidence: %s") % plain(known) if known else said


def _outcome(found: CallHistory, row: Row) -> str:
    """Describe a result and its source: the handler, the outside system, or a person."""
    outcome, facts = row.payload["outcome"], {"name": actor(row), "when": _moment(row)}
    if row.payload.get("in_doubt"):
        return _("The tool raised an error on %(when)s, and the model was told.") % facts
    if outcome == "unknown":
        if not actor_name(row.payload):
            return _("Its outcome was recorded as unknown on %(when)s.") % facts
        return _("%(name)s had its outcome told to the model as unknown on %(when)s.") % facts
    if row.payload.get("reconciled"):
        return _("The outside system, asked by the key: it happened, %(when)s.") % facts
    given = found.last(events.ORPHAN_RESOLVED)
    if given is not None and given.payload["verdict"] == "occurred" and outcome == "ok":
        return _("The model was told the result that %(name)s entered.") % {**facts, "name": actor(given)}
    return _("%(outcome)s, on %(when)s.") % {**facts, "outcome": outcome_words(outcome)[0]}


def history(run: Run, call_id: str, *, revealed: bool = False) -> CallHistory:
    """Read a call and its rows, masked unless `revealed`; raises Http404 if the run has no such call."""
    about = Message.objects.using(settings.DATABASE).filter(run_id=run.pk)
    mask = NOTHING if revealed else mask_for(run)
    is_id = 0 < len(call_id) <= CALL_LENGTH and call_id.isprintable()
    rows = [*map(mask.row, read_rows(about.filter(call_id=call_id).order_by("seq")))] if is_id else []
    replies = about.filter(kind=events.ASSISTANT, seq__lt=rows[0].seq if rows else 0).order_by("-seq")[:1]
    for raw in read_rows(replies):
        reply = mask.row(raw)
        its = [original(reply), *(original(row) for row in rows if row.kind in _FOLDED)]
        call = fold(run.pk, its).calls.get(call_id)
        if call is not None:
            # The later calls of the reply that are not run if the model reads that this one is unknown.
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
                approvals = map(mask.row, read_rows(decided.order_by("seq")))
                settling = (row for row in approvals if call_id in row.payload.get("settles", ()))
                settled = next(settling, None)
            said = mask.made(call.tool, chat.described(run, [raw]).get(call_id, ""))
            return CallHistory(run, call, rows, later, said, settled)
    raise Http404(_("Run %(run)s has no call %(call)s.") % {"run": run.pk, "call": plain(call_id)})


def call_page(
    admin: ReadOnlyAdmin, request: HttpRequest, found: CallHistory, sent: Any = None, **context: Any
) -> HttpResponse:
    """Render the page of a call; `sent` is the form of a verdict that was not recorded."""
    run, call = found.run, found.call
    situation, why_not = actions.situation(request, run), ""
    if found.in_doubt and not permissions.may(request.user, "resolve", run):
        why_not = actions.missing("resolve")
    elif found.waits and run.status != Run.Status.ORPHANED:
        text = _("The run is %(status)s: other calls of the same reply are running. Look again in a while.")
        why_not = text % {"status": run.get_status_display()}
    before, after, place = neighbours(queue(request) if found.waits else [], (run.pk, call.id), LOOKED_AT)
    if found.in_doubt and not why_not:
        reads = [body(_("Told to the model, as an error"), in_doubt.UNKNOWN.format(tool=call.tool))]
        if found.later:
            reads.append(Body(_("Not run"), format_html("{}", "\n".join(found.later))))
            reads.append(body(_("Told to the model of each of these"), in_doubt.AFTER_UNKNOWN))
        context |= {
            "verdict_form": sent or verdict_form(found),
            "paused": run.status == Run.Status.ORPHANED and bool(run.blocked_reason),
            "others_wait": any(wait.call_id != call.id for wait in situation.waits),
            "stored_as": kind_of(found.returned.payload.get("content")) if found.returned else "",
            "model_reads": reads,  # for the verdict `unknown`
        }
    tools = definition_bodies(settings.DATABASE, [run.definition_id]).get(run.definition_id, {})
    # What the tool does by its definition: the first thing that says where to look for its traces.
    text = tools.get("tools", {}).get(call.tool, {}).get("description", "")
    return admin.render(
        request,
        run,
        title=found.title,
        brief=brief(found.title, call.arguments),
        task=task_title(run),
        template="agentruns/admin/orphan.html",
        run=run,
        found=found,
        call=call,
        place=place,
        previous_url=admin.url(request, "call", *before) if before else "",
        next_url=admin.url(request, "call", *after) if after else "",
        card_url=admin.other_page(request, Approval, call.approval.id) if call.approval else "",
        story=story(found),
        does=quote(_("What the tool does"), text) if text else None,
        started=found.last(events.TOOL_STARTED),
        told=[(row, _content(row, _("Told to the model"))) for row in found.all(events.TOOL_RESULT)],
        arguments=arguments(call.arguments),
        masked=MASK in call.arguments.values(),
        may_reveal=permissions.may_reveal(request.user, _shown_by(run, call.id)),
        late=[(row, *_late(found, row)) for row in found.all(events.LATE_RESULT)],
        why_not=why_not,
        cancel=actions.cancel(situation),
        cancel_form=CancelForm(auto_id="cancel_%s"),
        **context,
    )


def _content(row: Row, label: str, kind: str = "") -> Body:
    return body(label, as_text(row.payload.get("content")), TEXT_LIMIT, kind)


def verdict_form(
    found: CallHistory, verdict: str = "", data: Any = None, *, keeps: Any = None
) -> VerdictForm:
    """Build the form of a verdict on a call; `keeps` has the values typed before."""
    initial = {"seq": str(found.seq), "result": prefilled(found), **(keeps or {})}
    form = VerdictForm(
        data,
        initial=initial,
        verdict=verdict,
        is_uncleared=found.is_uncleared,
        needs_result=found.waits and found.returned is None,
    )
    help_text = ""
    if found.returned is None:  # the last result of the tool in the session, or one made up
        help_text = _('For example: done by hand, or {"status": "sent"}')
        rows = Message.objects.using(settings.DATABASE).filter(session_id=found.run.session_id)
        results = rows.filter(kind=events.TOOL_RESULT, tool_name=found.call.tool).order_by("-seq")[:EARLIER]
        oks = (row for row in read_rows(results) if row.payload.get("outcome") == "ok")
        if row := next(oks, None):
            text = plain_line(as_text(mask_for(found.run).row(row).payload.get("content")))
            help_text = _("An earlier call of it returned: %(result)s") % {"result": text}
    form.fields["result"].help_text = help_text
    lines = initial["result"].count("\n") + 1
    form.fields["result"].widget.attrs["rows"] = min(max(lines, 2), 16)
    return form


def prefilled(found: CallHistory) -> str:
    """Build a form's text from the handler's late result; "" without one or if it is too long."""
    late = found.returned
    if late is None:
        return ""
    text = bare(as_text(late.payload.get("content"))).strip()
    return text if len(text) <= RESULT_LENGTH else ""


def kind_of(value: Any) -> str:
    """Name the form in which a result is stored."""
    if isinstance(value, str):
        return _("text")
    return str(_JSON_KINDS.get(type(value), _("JSON")))


def _late(found: CallHistory, row: Row) -> tuple[str, Body | None]:
    """Explain a late result, and build the body of what the tool returned, if it did."""
    if row.payload.get("never_entered"):
        return _("A worker that had lost the run says that it did not start the tool."), None
    doubts = [one for one in found.all(events.ORPHAN_FOUND) if one.attempt == row.attempt]
    starts = [one for one in found.all(events.TOOL_STARTED) if one.attempt == row.attempt]
    text = _("The tool returned after its worker had lost the run. This is evidence that it happened:")
    if row.payload.get("is_error"):
        text = _("The tool raised an error, too late to count. It may have happened all the same.")
    elif doubts and starts and doubts[0].epoch == starts[0].epoch:  # in one drive
        text = _("The tool returned after its time was over. This is evidence that it happened:")
    return text, _content(row, _("Returned"), kind_of(row.payload.get("content")))


def sentence(tool: str, arguments: dict[str, Any]) -> str:
    """Describe a call by its tool and its short arguments that are not masked."""
    texts = [redact(named(name, value)[1]) for name, value in arguments.items() if value != MASK]
    beside = [text for text in texts if len(text) <= SHORT and "\n" not in text]
    return cut(": ".join(filter(None, (plain(named(tool, "")[0]), ", ".join(map(plain, beside))))))


def _moment(row: Row) -> str:
    return f"{exact(row.created_at)} ({ago(row.created_at)})"


# Other rows, such as extensions, are skipped.
_FOLDED = (events.APPROVAL_REQUESTED, *OF_A_CALL)
_OPEN = {
    "not_occurred": gettext_lazy("A worker runs it again, with the same key."),
    "retry": gettext_lazy("A worker repeats it: its tool says that is safe."),
    "reconcile": gettext_lazy("A worker asks the outside system what became of it."),
}
_JSON_KINDS = {
    dict: gettext_lazy("a JSON object"),
    list: gettext_lazy("a JSON array"),
    int: gettext_lazy("a number"),
    float: gettext_lazy("a number"),
}
