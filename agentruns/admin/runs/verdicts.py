"""Verdicts on calls in doubt: their checks, their record, and the texts about them."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.base import CHANNEL, ReadOnlyAdmin, following, status_of
from agentruns.admin.forms import VerdictForm
from agentruns.admin.html import plain
from agentruns.admin.runs import actions, calls
from agentruns.admin.runs.steps import verdict_words
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, PermissionDeniedError, RunStateError
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.masking import carries_mask
from agentruns.models import Message, Run
from agentruns.services import permissions
from agentruns.services.control import resolve_orphan
from agentruns.services.write import lock_session
from agentruns.tools.card import MASK
from agentruns.utils.db import in_transaction

MOVED_ON = gettext_lazy("The call moved on since you looked. This is how it is now.")


def resolve_view(admin: ReadOnlyAdmin, request: HttpRequest, run: Run, call_id: str) -> HttpResponse:
    """Record a verdict on the call that was shown; a worker runs what follows from it."""
    found = calls.history(run, call_id)
    if request.method != "POST":
        return HttpResponseRedirect(admin.url(request, "call", run.pk, call_id))
    if not permissions.may(request.user, "resolve", run):
        return _refused(admin, request, found, {}, PermissionDeniedError(actions.missing("resolve")))
    verdict, seen = request.POST.get("verdict", ""), request.POST.get("seq", "")
    form = calls.verdict_form(found, verdict, request.POST)
    sound = form.is_valid() and is_whole(found, form)
    given = {**form.cleaned_data, "result": entered(found, form.cleaned_data.get("result", ""))}
    if seen != str(found.seq):
        return _refused(admin, request, found, given, RunStateError(str(MOVED_ON)))
    if not sound:
        for name in list(form.errors)[:1]:  # to the field that is to be corrected
            if name in form.fields:
                form.fields[name].widget.attrs["autofocus"] = True
        text = _("Nothing was decided. Correct the form below.")
        return calls.call_page(admin, request, found, form, status=400, refusal=text)
    queue = calls.queue(request, ended=True)  # before it is decided: afterwards it has no place in it

    def resolve() -> Run:
        lock_session(settings.DATABASE, run.session_id)
        now = calls.history(run, call_id)
        if now.seq != found.seq:
            raise RunStateError(str(MOVED_ON))
        if now.returned is not None and verdict == "not_occurred":
            raise RunStateError(_("The tool returned without an error, so it did happen."))
        return resolve_orphan(
            run.pk,
            call_id,
            verdict,
            request.user,
            result=given["result"] if verdict == "occurred" else None,
            evidence=given["evidence"],
            channel=CHANNEL,
        )

    try:
        now = in_transaction(settings.DATABASE, resolve)
    except AgentRunsError as error:
        return _refused(admin, request, found, given, error)
    text = _("Verdict on call %(call)s of %(tool)s: %(verdict)s. %(evidence)s")
    about = {"call": call_id, "tool": plain(found.call.tool), "evidence": plain(given["evidence"])}
    logged = text % {**about, "verdict": verdict}
    back = admin.done(request, now, logged, done(found, now, verdict, given["result"]))
    others = following(queue, (run.pk, call_id))
    return HttpResponseRedirect(admin.url(request, "call", *others[0])) if others else back


def _refused(
    admin: ReadOnlyAdmin,
    request: HttpRequest,
    was: calls.CallHistory,
    given: dict[str, Any],
    error: Exception,
) -> HttpResponse:
    """Explain why nothing was recorded, such as another person's verdict, except after a double click."""
    run, why, seen = admin.find(request, was.run.pk), plain(error), given.get("seq") or 0
    found, sent = calls.history(run, was.call.id), None
    since = [row for row in found.rows if row.seq > seen] if given else []
    first = next((row for row in since if row.kind == events.ORPHAN_RESOLVED), None)
    if given.get("verdict"):
        sent = calls.verdict_form(found, keeps={"evidence": given.get("evidence", "")})
    if first is not None and seen and sent is not None:
        if is_same(found, first, request.user, given):  # a double click
            text = _("Your verdict was recorded already. %s")
            admin.message_user(request, text % calls.verdict(first), messages.INFO)
            return admin.back(request, run)
        why = calls.verdict(first)
    elif since and not found.in_doubt:
        why = " ".join(calls.story(found))
    text = _("Your verdict was not recorded. %(why)s") % {"why": why}
    return calls.call_page(admin, request, found, sent, status=status_of(error), refusal=text)


def entered(found: calls.CallHistory, text: str) -> Any:
    """Find the result that a person means: an unchanged prefilled text means the returned value.

    Text that is a JSON object, array or number is parsed, any other text kept as it is.
    """
    late = found.returned
    if late is not None and text == calls.prefilled(found):
        rows = Message.objects.using(settings.DATABASE).filter(run_id=found.run.pk, seq=late.seq)
        return rows.get().payload.get("content")  # not as the page masks it

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number or isinstance(value, dict | list) else text


def is_whole(found: calls.CallHistory, form: VerdictForm) -> bool:
    """Check that the result holds no mask in place of a returned value; else add an error to the form."""
    late, text = found.returned, form.cleaned_data["result"]
    if late is None or form.cleaned_data["verdict"] != "occurred" or text == calls.prefilled(found):
        return True
    is_masked = MASK in text and MASK in calls.prefilled(found)
    if is_masked or carries_mask(text, "content", {"content": late.payload.get("content")}):
        form.add_error("result", _("Part of it is hidden here. Leave it as it is, or write your own."))
        return False
    return True


def is_same(found: calls.CallHistory, row: Row, user: Any, given: dict[str, Any]) -> bool:
    """Check whether the recorded verdict is the same one that `user` sends again."""
    payload = row.payload
    mine = str((payload.get("actor") or {}).get("id")) == str(user.pk)
    if not mine or (payload["verdict"], payload["evidence"]) != (given["verdict"], given.get("evidence")):
        return False
    if given["verdict"] != "occurred":
        return True
    result = found.last(events.TOOL_RESULT)
    stored = payload.get("result") if "result" in payload else result and result.payload["content"]
    return bool(stored == given["result"])


def done(found: calls.CallHistory, run: Run, verdict: str, result: Any) -> str:
    """Describe the effect of a verdict just recorded; `found` is the call before it."""
    said = _("Recorded: %(verdict)s.") % {"verdict": verdict_words(verdict)}
    if found.is_uncleared:
        still = _("The doubt is lifted.") if verdict != "unknown" else _("The doubt stays.")
        return f"{said} {still}"
    if verdict == "occurred":
        said = _("%(said)s The result is stored as %(kind)s.") % {"said": said, "kind": calls.kind_of(result)}
    if run.status == Run.Status.QUEUED:
        return f"{said} " + _("A worker picks up the run.")
    return said
