"""The page of one call, on which staff say what became of it when nobody else knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import CHANNEL
from agentruns.admin.forms import CancelForm, VerdictForm
from agentruns.admin.html import (
    EMPTY,
    Body,
    Fact,
    age,
    ago,
    arguments,
    body,
    dated,
    exact,
    plain,
    two_lines,
    visible,
)
from agentruns.admin.runs import actions, verdicts
from agentruns.admin.runs.steps import TEXT_LIMIT, mask_for, outcome_words
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError
from agentruns.journal import events
from agentruns.journal.copies import original
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, fold
from agentruns.journal.masking import MOST_READ, NOTHING, Mask, masks_of
from agentruns.journal.policy import visible_runs
from agentruns.journal.read import read_rows
from agentruns.models import Approval, Message, Run
from agentruns.services import permissions, waiting
from agentruns.services.control import resolve_orphan
from agentruns.services.write import lock_session
from agentruns.tools.card import MASK, call_text
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import redacted

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin

PERMISSION = "agentruns.resolve_orphan"
CALL_LENGTH = 36
LOOKED_AT = 200  # runs with a call in doubt among which the next one is looked for


@dataclass(frozen=True, slots=True)
class CallHistory:
    """A call, the rows about it, and the calls after it in the same reply that have no result yet."""

    run: Run
    call: Call
    rows: list[Row]
    later: list[str]
    settled: Row | None = None  # the approval of another call that settled the doubt about this one

    @property
    def seq(self) -> int:
        """The last row about the call; a page that showed it showed everything."""
        return self.rows[-1].seq

    @property
    def waits(self) -> bool:
        """True if the run waits for staff to say what became of the call."""
        return self.call.is_open and self.call.orphan == "held"

    @property
    def is_uncleared(self) -> bool:
        """True if its result leaves a doubt, and nobody has cleared it."""
        return self.settled is None and bool(waiting.uncleared_in(self.rows))

    @property
    def in_doubt(self) -> bool:
        """True if a verdict is to be given."""
        return self.waits or self.is_uncleared

    def all(self, *kinds: str) -> list[Row]:
        """Return the rows of some kinds, in order."""
        return [row for row in self.rows if row.kind in kinds]

    def last(self, kind: str) -> Row | None:
        """Return the last row of a kind."""
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def returned(self) -> Row | None:
        """The late report of a handler that returned without an error: evidence that it happened."""
        reports = self.all(events.LATE_RESULT)
        sound = [one for one in reports if not one.payload.get("never_entered") and not _is_error(one)]
        return sound[-1] if sound else None

    @property
    def safe_from(self) -> datetime | None:
        """The moment after which the last attempt cannot be at work any more, by its tool's time limit."""
        if self.call.timeout is None or self.call.started_at is None:
            return None
        return self.call.started_at + timedelta(seconds=self.call.timeout)


def _shown_by(run: Run, call_id: str) -> Approval | Run:
    """Return the approval that shows a call, or its run."""
    approvals = Approval.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=call_id)
    return approvals.first() or run


def call_view(admin: RunAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Show a call: what it was, what is known of it, and what can be decided."""
    return _call_page(admin, request, run, _history(run, call_id))


def reveal_view(admin: RunAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Show the sensitive arguments to who may see them, once, and log it."""
    if request.method != "POST":
        return HttpResponseRedirect(admin.url(request, "call", run.pk, call_id))
    shown = _shown_by(run, call_id)
    if not permissions.may_reveal(request.user, shown):
        raise PermissionDenied
    found = _history(run, call_id, revealed=True)
    permissions.reveal(request.user, shown, door=CHANNEL, what=f"call={found.call.id}")
    admin.log_change(request, run, _("Saw the sensitive arguments of call %s.") % found.call.id)
    return _call_page(admin, request, run, found)


def resolve_view(admin: RunAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Record a verdict on what was shown. Whatever is to run is run by a worker."""
    found = _history(run, call_id)
    if request.method != "POST":
        return HttpResponseRedirect(admin.url(request, "call", run.pk, call_id))
    if not permissions.may(request.user, "resolve", run):
        return _refuse(admin, request, run, call_id, 403, actions.missing(PERMISSION))
    verdict, seen = request.POST.get("verdict", ""), request.POST.get("seq", "")
    form = verdicts.blank(found, verdict, request.POST)
    sound = form.is_valid() and verdicts.is_whole(found, form)
    given = {**form.cleaned_data, "result": verdicts.entered(found, form.cleaned_data.get("result", ""))}
    if seen != str(found.seq):
        return _too_late(admin, request, run, call_id, given, _moved_on())
    if not sound:
        for name in list(form.errors)[:1]:  # to the field that is to be corrected
            if name in form.fields:
                form.fields[name].widget.attrs["autofocus"] = True
        text = _("Nothing was decided. Correct the form below.")
        return _call_page(admin, request, run, found, status=400, refusal=text, sent=form)
    queue = _queue(request)  # before it is decided: afterwards it has no place in the queue
    try:
        now = in_transaction(settings.DATABASE, lambda: _resolve(request, found, given))
    except PermissionDeniedError as error:
        return _refuse(admin, request, run, call_id, 403, plain(error))
    except AgentRunsError as error:
        return _too_late(admin, request, run, call_id, given, plain(error))
    said = verdicts.done(found, now, verdict, given["result"])
    tool = plain(found.call.tool)
    logged = _("Verdict on call %(call)s of %(tool)s: %(verdict)s. %(evidence)s")
    about = {"call": found.call.id, "tool": tool, "verdict": verdict, "evidence": plain(given["evidence"])}
    admin.log_change(request, now, logged % about)
    admin.message_user(request, said, messages.SUCCESS)
    place = queue.index((run.pk, call_id)) if (run.pk, call_id) in queue else 0
    others = [key for key in queue[place:] + queue[:place] if key != (run.pk, call_id)]
    if others:
        return HttpResponseRedirect(admin.url(request, "call", *others[0]))
    return admin.back(request, now)


def in_doubt_view(admin: RunAdmin, request: HttpRequest) -> HttpResponse:
    """List the calls in doubt on which this user may give a verdict, those that wait longest first."""
    if not admin.has_view_permission(request):
        raise PermissionDenied
    runs = {run.pk: run for run in _in_doubt(request)}
    masks = masks_of(runs.values(), size=MOST_READ)
    found = waiting.waits(settings.DATABASE, runs.values(), masks)
    lines = [
        {
            "url": admin.url(request, "call", key, wait.call_id),
            "tool": visible(wait.tool),
            "text": body("", wait.text, CALL_LENGTH * 5).text,
            "where": two_lines(runs[key].agent, visible(runs[key].session.key)),
            "requester": visible(runs[key].owner_name or EMPTY),
            "age": age(runs[key].updated_at),
        }
        for key in runs
        for wait in found.get(key, [])
        if wait.kind == waiting.ORPHAN
    ]
    context: dict[str, Any] = {"lines": lines, "list_url": admin.url(request, "changelist")}
    template = "agentruns/admin/in_doubt.html"
    return admin.render(request, None, title=_("Calls in doubt"), status=200, template=template, **context)


def _in_doubt(request: HttpRequest) -> list[Run]:
    """Return the runs with a call in doubt that this user sees and may resolve."""
    user = request.user
    if not permissions.may(user, "resolve"):
        return []
    runs = visible_runs(user).filter(status=Run.Status.ORPHANED).select_related("session")
    listed = runs.defer("input", "output", "error").order_by("updated_at", "pk")[:LOOKED_AT]
    return [run for run in listed if permissions.may(user, "resolve", run)]


def _queue(request: HttpRequest) -> list[tuple[UUID, str]]:
    """Return the runs and calls of that list, in its order."""
    runs = _in_doubt(request)
    places = {run.pk: place for place, run in enumerate(runs)}
    found = [(wait.run_id, wait.call_id) for wait in waiting.orphans(settings.DATABASE, runs)] if runs else []
    return sorted(found, key=lambda key: places[key[0]])


def _beside(queue: list[tuple[UUID, str]], run: Run, call_id: str) -> tuple[Any, Any, str]:
    """Return what stands before and after a call in the list, and its place there."""
    if (run.pk, call_id) not in queue:
        return None, None, ""
    place = queue.index((run.pk, call_id))
    text = _("%(place)d of %(count)s") % {"place": place + 1, "count": len(queue)}
    return queue[place - 1] if place else None, next(iter(queue[place + 1 :]), None), text


def history(alias: str, run: Run, call_id: str, mask: Mask) -> CallHistory | None:
    """Return what is known of a call, what is sensitive masked; None where the run has no such call."""
    if not 0 < len(call_id) <= CALL_LENGTH or not call_id.isprintable():
        return None
    about = Message.objects.using(alias).filter(run_id=run.pk)
    rows = _rows(about.filter(call_id=call_id).order_by("seq"), mask)
    if not rows:
        return None
    replies = about.filter(kind=events.ASSISTANT, seq__lt=rows[0].seq).order_by("-seq")[:1]
    for reply in _rows(replies, mask):
        call = fold(
            run.pk, [original(reply), *(original(row) for row in rows if row.kind in _FOLDED)]
        ).calls.get(call_id)
        if call is not None:
            return CallHistory(run, call, rows, _later(run, reply, call), _settled(run, rows, mask))
    return None


def call_title(found: CallHistory) -> str:
    """Return in one line what the call was; not fit for a page by itself."""
    card = found.call.approval
    return card.title if card is not None else text_of(found.call.tool, found.call.arguments)


def call_facts(found: CallHistory) -> list[Fact]:
    """Return the facts by which an operator finds the call in the outside world."""
    call, started = found.call, found.last(events.TOOL_STARTED)
    key = started.payload.get("key") if started else None
    limit = _("%(seconds)g s") % {"seconds": call.timeout} if call.timeout else _("not limited")
    return [
        Fact(_("Idempotency key"), format_html('<code class="ar-copy">{}</code>', key or EMPTY)),
        Fact(_("Started"), dated(call.started_at)),
        Fact(_("Attempt"), call.attempt or EMPTY),
        Fact(_("Time limit of the tool"), limit),
        Fact(_("The tool declares"), _DECLARES.get(call.declares, plain(call.declares or EMPTY))),
        Fact(_("Approved by"), _approved_by(call)),
        Fact(_("Requester"), visible(found.run.owner_name or EMPTY)),
        Fact(_("Session"), visible(found.run.session.key)),
        Fact(_("Call"), format_html('<code class="ar-copy">{}</code>', call.id)),
    ]


def story(found: CallHistory) -> list[str]:
    """Return in sentences what became of the call and who said so."""
    says: dict[str, Callable[[Row], str]] = {
        events.ORPHAN_FOUND: _doubt,
        events.ORPHAN_RESOLVED: verdict,
        events.TOOL_RESULT: partial(_outcome, found),
    }
    lines = [says[row.kind](row) for row in found.rows if row.kind in says]
    result = found.last(events.TOOL_RESULT)
    if result is None:
        return lines if found.waits else [*lines, _open(found.call)]
    if events.leaves_doubt(result.payload):
        if found.settled is not None:
            text = _("%(name)s, knowing of it, approved the tool's next call on %(when)s.")
            lines.append(text % {"name": _name(found.settled), "when": _moment(found.settled)})
        lines.append(_("Nobody has cleared it.") if found.is_uncleared else _("The doubt is lifted."))
    return lines


def verdict(row: Row) -> str:
    """Return who gave a verdict, which, when, and how they know."""
    payload = row.payload
    said = _("%(name)s: %(verdict)s, %(when)s.") % {
        "name": _name(row),
        "verdict": _VERDICTS.get(payload["verdict"], plain(payload["verdict"])),
        "when": _moment(row),
    }
    evidence = payload.get("evidence")
    return f"{said} " + _("Evidence: %s") % plain(evidence) if evidence else said


def _doubt(row: Row) -> str:
    text = _("In doubt since %(when)s. %(action)s Evidence: %(evidence)s")
    facts = {"when": _moment(row), "evidence": plain(row.payload.get("evidence", ""))}
    return text % {**facts, "action": _ACTIONS.get(row.payload["action"], "")}


def _outcome(found: CallHistory, row: Row) -> str:
    """Return what a result says, and who knew it: a handler, the outside system, or a person."""
    outcome, facts = row.payload["outcome"], {"name": _name(row), "when": _moment(row)}
    if row.payload.get("in_doubt"):
        return _("The tool raised an error on %(when)s, and the model was told.") % facts
    if outcome == "unknown":
        if not (row.payload.get("actor") or {}).get("name"):
            return _("Its outcome was recorded as unknown on %(when)s.") % facts
        return _("%(name)s had its outcome told to the model as unknown on %(when)s.") % facts
    if row.payload.get("reconciled"):
        return _("The outside system, asked by the key: it happened, %(when)s.") % facts
    given = found.last(events.ORPHAN_RESOLVED)
    if given is not None and given.payload["verdict"] == "occurred" and outcome == "ok":
        return _("The model was told the result that %(name)s entered.") % {**facts, "name": _name(given)}
    return _("%(outcome)s, on %(when)s.") % {**facts, "outcome": outcome_words(outcome)[0]}


def _name(row: Row) -> str:
    return plain((row.payload.get("actor") or {}).get("name") or _("the program"))


def lateness(found: CallHistory, late: Row) -> str:
    """Return why a late report was no result, and what it shows."""
    doubts = [row for row in found.all(events.ORPHAN_FOUND) if row.attempt == late.attempt]
    starts = [row for row in found.all(events.TOOL_STARTED) if row.attempt == late.attempt]
    in_one_drive = bool(doubts and starts) and doubts[0].epoch == starts[0].epoch
    if _is_error(late):
        return _("The tool raised an error, too late to count. It may have happened all the same.")
    if in_one_drive:
        return _("The tool returned after its time was over. This is evidence that it happened:")
    return _("The tool returned after its worker had lost the run. This is evidence that it happened:")


def _resolve(request: HttpRequest, found: CallHistory, given: dict[str, Any]) -> Run:
    run = found.run
    lock_session(settings.DATABASE, run.session_id)
    now = _history(run, found.call.id)
    if now.seq != found.seq:
        raise RunStateError(_moved_on())
    if now.returned is not None and given["verdict"] == "not_occurred":
        raise RunStateError(_("The tool returned without an error, so it did happen."))
    return resolve_orphan(
        run.pk,
        found.call.id,
        given["verdict"],
        request.user,
        result=given["result"] if given["verdict"] == "occurred" else None,
        evidence=given["evidence"],
        channel=CHANNEL,
    )


def _too_late(
    admin: RunAdmin, request: HttpRequest, run: Run, call_id: str, given: dict[str, Any], why: str
) -> HttpResponse:
    """Say what somebody else decided meanwhile, or that this very click was recorded already."""
    run = admin.find(request, run.pk)
    found = _history(run, call_id)
    since = [row for row in found.rows if row.seq > (given.get("seq") or 0)]
    first = next((row for row in since if row.kind == events.ORPHAN_RESOLVED), None)
    if first is not None and given.get("seq") and given.get("verdict"):
        if verdicts.is_same(found, first, request.user, given):  # a double click
            text = _("Your verdict was recorded already. %s")
            admin.message_user(request, text % verdict(first), messages.INFO)
            return admin.back(request, run)
        why = verdict(first)
    elif since and not found.in_doubt:
        why = " ".join(story(found))
    return _refuse(admin, request, run, call_id, 409, why, given)


def _refuse(
    admin: RunAdmin,
    request: HttpRequest,
    run: Run,
    call_id: str,
    status: int,
    why: str,
    given: dict[str, Any] | None = None,
) -> HttpResponse:
    found = _history(run, call_id)
    text = _("Your verdict was not recorded. %(why)s") % {"why": why}
    sent = None
    if given and given.get("verdict"):
        sent = verdicts.blank(found, keeps={"evidence": given.get("evidence", "")})
    return _call_page(admin, request, run, found, status=status, refusal=text, sent=sent)


def _history(run: Run, call_id: str, *, revealed: bool = False) -> CallHistory:
    found = history(settings.DATABASE, run, call_id, NOTHING if revealed else mask_for(run))
    if found is None:
        raise Http404(_("Run %(run)s has no call %(call)s.") % {"run": run.pk, "call": plain(call_id)})
    return found


def _call_page(
    admin: RunAdmin,
    request: HttpRequest,
    run: Run,
    found: CallHistory,
    *,
    status: int = 200,
    sent: VerdictForm | None = None,
    refusal: str = "",
) -> HttpResponse:
    situation = actions.situation(request, run)
    others = sum(wait.call_id != found.call.id for wait in situation.waits)
    why_not = _why_not(request, found)
    approval = found.call.approval.id if found.call.approval is not None else None
    may_decide = found.in_doubt and not why_not
    before, after, place = _beside(_queue(request) if found.waits else [], run, found.call.id)
    facts = call_facts(found)
    context: dict[str, Any] = {
        "refusal": refusal,
        "session": visible(run.session.key),
        "place": place,
        "previous_url": admin.url(request, "call", *before) if before else "",
        "next_url": admin.url(request, "call", *after) if after else "",
        "queue_url": admin.url(request, "in_doubt"),
        "tool": visible(found.call.tool),
        "card_url": admin.other_page(request, Approval, approval) if approval else "",
        "in_doubt": found.in_doubt,
        "is_uncleared": found.is_uncleared,
        "ended": run.is_ended,
        "story": story(found),
        "told": [_told(admin, request, run, row) for row in found.all(events.TOOL_RESULT)],
        "arguments": arguments(found.call.arguments),
        "masked": MASK in found.call.arguments.values(),
        "may_reveal": permissions.may_reveal(request.user, _shown_by(run, found.call.id)),
        "reveal_url": admin.url(request, "reveal", run.pk, found.call.id),
        "late": [_late(admin, request, found, row) for row in found.all(events.LATE_RESULT)],
        "keys": facts[:2],
        "facts": facts[2:],
        "rows": [(str(row.seq), _row_url(admin, request, run, row.seq)) for row in found.rows],
        "why_not": why_not,
        "choices": verdicts.choices(found, others=others) if may_decide else [],
        "verdict_form": (sent or verdicts.blank(found)) if may_decide else None,
        "resolve_url": admin.url(request, "resolve", run.pk, found.call.id),
        "cancel": actions.cancel(situation),
        "cancel_url": admin.url(request, "cancel", run.pk),
        "cancel_form": CancelForm(auto_id="cancel_%s"),
    }
    title, template = plain(call_title(found)), "agentruns/admin/orphan.html"
    return admin.render(request, run, title=title, status=status, template=template, **context)


def _row_url(admin: RunAdmin, request: HttpRequest, run: Run, seq: int) -> str:
    """Return where the page of a run shows one journal row."""
    return f"{admin.url(request, 'change', run.pk, after=seq - 1)}#row-{seq}"


def _told(admin: RunAdmin, request: HttpRequest, run: Run, row: Row) -> tuple[Body, str]:
    """Return what the model was told, and where all of it is."""
    text = verdicts.text_of(row.payload.get("content"))
    return body(_("Told to the model"), text, TEXT_LIMIT), admin.url(request, "row", run.pk, row.seq)


def _late(admin: RunAdmin, request: HttpRequest, found: CallHistory, row: events.Row) -> dict[str, Any]:
    content = row.payload.get("content")
    said = {
        "seq": str(row.seq),
        "when": dated(row.created_at),
        "attempt": str(row.attempt),
        "whole_url": admin.url(request, "row", found.run.pk, row.seq),
    }
    if row.payload.get("never_entered"):
        return {**said, "text": _("A worker that had lost the run says that it did not start the tool.")}
    text = lateness(found, row)
    returned = body(_("Returned"), verdicts.text_of(content), TEXT_LIMIT, verdicts.kind_of(content))
    return {**said, "text": text, "body": returned, "is_evidence": not row.payload.get("is_error")}


def _why_not(request: HttpRequest, found: CallHistory) -> str:
    """Return why there are no buttons for this user on a call in doubt, or ""."""
    if not found.in_doubt:
        return ""
    if not permissions.may(request.user, "resolve", found.run):
        return actions.missing(PERMISSION)
    if found.waits and found.run.status != Run.Status.ORPHANED:
        return _(
            "The run is %(status)s: other calls of the same reply are running. Look again in a while."
        ) % {"status": found.run.get_status_display()}
    return ""


def _moved_on() -> str:
    return _("The call moved on since you looked. This is how it is now.")


def _rows(messages: Any, mask: Mask) -> list[Row]:
    return [mask.row(row) for row in read_rows(messages)]


def _later(run: Run, reply: Row, call: Call) -> list[str]:
    """Return the later calls of its reply that are not run if the model reads that this one is unknown."""
    still_open = set(run.pending_calls)
    return [
        text_of(later["tool"], later["arguments"])
        for later in reply.payload["calls"][call.ordinal + 1 :]
        if later["id"] in still_open and not later["parallel"]
    ]


def _settled(run: Run, rows: list[Row], mask: Mask) -> Row | None:
    """Return the approval of a later call that settles the doubt about the call of these rows."""
    failed = next((row for row in rows if row.payload.get("in_doubt")), None)
    if failed is None:
        return None
    decided = Message.objects.using(settings.DATABASE).filter(
        session_id=run.session_id,
        kind=events.APPROVAL_DECIDED,
        tool_name=failed.tool_name,
        seq__gt=failed.seq,
    )
    found = _rows(decided.order_by("seq"), mask)
    return next((row for row in found if failed.call_id in row.payload.get("settles", ())), None)


def text_of(tool: str, arguments: dict[str, Any]) -> str:
    """Return a call with masked arguments in one line; not fit for a page by itself."""
    hidden = [name for name, value in arguments.items() if value == MASK]
    return call_text(tool, redacted(arguments), hidden)


def _approved_by(call: Call) -> SafeString | str:
    if call.approval is None:
        return _("nobody: no approval was needed")
    if not call.approval.names:
        return EMPTY
    return format_html("{}, {}", visible(", ".join(call.approval.names)), dated(call.approval.decided_at))


def _open(call: Call) -> str:
    if call.attempt == 0:
        return _("It has not been started.")
    if call.is_contradicted:
        return _("The tool has returned since. A worker will ask a person again.")
    text = _OPEN.get(call.orphan)
    if text is not None:
        return str(text)
    return _("Attempt %(attempt)d has started and has no result yet.") % {"attempt": call.attempt}


def _is_error(row: Row) -> bool:
    return bool(row.payload.get("is_error"))


def _moment(row: Row) -> str:
    return f"{exact(row.created_at)} ({ago(row.created_at)})"


# Rows of the call that say how it stands; requests for more time and the like are passed over.
_FOLDED = (
    events.APPROVAL_REQUESTED,
    events.APPROVAL_DECIDED,
    events.APPROVAL_VOIDED,
    events.TOOL_STARTED,
    events.TOOL_RESULT,
    events.LATE_RESULT,
    events.ORPHAN_FOUND,
    events.ORPHAN_RESOLVED,
)
_DECLARES = {
    "nothing": gettext_lazy("nothing: it is not repeated by itself, and nothing can be asked about it"),
    "safe_to_retry": gettext_lazy("safe to retry"),
    "reconcile": gettext_lazy("reconcile: the outside system is asked by the key"),
    "transactional": gettext_lazy("transactional"),
}
_OPEN = {
    "not_occurred": gettext_lazy("A worker runs it again, with the same key."),
    "retry": gettext_lazy("A worker repeats it: its tool says that is safe."),
    "reconcile": gettext_lazy("A worker asks the outside system what became of it."),
}
_VERDICTS = {
    "occurred": gettext_lazy("it happened"),
    "not_occurred": gettext_lazy("it did not happen"),
    "unknown": gettext_lazy("unknown"),
}
_ACTIONS = {
    "held": gettext_lazy("A person was asked."),
    "surfaced": gettext_lazy("The model was told that it is unknown."),
    "retry": gettext_lazy("It is repeated: its tool says that is safe."),
    "reconcile": gettext_lazy("The outside system is asked by the key."),
}
