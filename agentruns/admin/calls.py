"""The page of one call of a run, on which staff say what became of it when nobody else can."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from agentruns.admin import advice, badges, orphans, verdicts
from agentruns.admin.forms import CancelForm, VerdictForm
from agentruns.admin.journal import TEXT_LIMIT, card
from agentruns.admin.orphans import History
from agentruns.admin.readonly import ReadOnlyAdmin
from agentruns.admin.text import arguments, body, plain, visible
from agentruns.admin.times import dated
from agentruns.admin.verbs import CHANNEL
from agentruns.conf import settings
from agentruns.exceptions import JournalConflictError, PermissionDeniedError, RunStateError
from agentruns.journal import events
from agentruns.journal.masking import sensitive_in
from agentruns.models import Approval, Run
from agentruns.services.control import ORPHAN_VERDICTS, resolve_orphan
from agentruns.services.write import lock_session
from agentruns.tools.card import MASK
from agentruns.utils.db import in_transaction

PERMISSION = "agentruns.resolve_orphan"


class CallPages(ReadOnlyAdmin):
    """The page of a call and the target of its buttons, for the admin of runs."""

    call_template = "agentruns/admin/orphan.html"

    def situation(self, request: HttpRequest, run: Run) -> advice.Situation:
        """Return what is known of the run now, and what this user may do about it."""
        raise NotImplementedError

    def get_urls(self) -> list[URLPattern]:
        """Add the page of one call, and the verdict on it."""
        view = self.admin_site.admin_view
        call = "<str:object_id>/calls/<str:call_id>/"
        return [
            path(call, view(self.call_view), name=self.name("call")),
            path(f"{call}resolve/", view(self.resolve_view), name=self.name("resolve")),
            path(f"{call}reveal/", view(self.reveal_view), name=self.name("reveal")),
            *super().get_urls(),
        ]

    def call_view(self, request: HttpRequest, object_id: str, call_id: str) -> HttpResponse:
        """Show a call: what it was, what is known of it, and what can be decided."""
        run = self.find(request, object_id)
        return self._call_page(request, run, self._history(run, call_id))

    def reveal_view(self, request: HttpRequest, object_id: str, call_id: str) -> HttpResponse:
        """Show the sensitive arguments to who may see them, once, and log it."""
        run = self.find(request, object_id)
        if request.method != "POST":
            return HttpResponseRedirect(self.url(request, "call", run.pk, call_id))
        if not request.user.has_perm("agentruns.reveal_arguments"):
            raise PermissionDenied
        found = self._history(run, call_id, revealed=True)
        self.log_change(request, run, _("Saw the sensitive arguments of call %s.") % found.call.id)
        return self._call_page(request, run, found)

    def resolve_view(self, request: HttpRequest, object_id: str, call_id: str) -> HttpResponse:
        """Record a verdict on what was shown. Whatever is to run is run by a worker."""
        run = self.find(request, object_id)
        found = self._history(run, call_id)
        if request.method != "POST":
            return HttpResponseRedirect(self.url(request, "call", run.pk, call_id))
        if not request.user.has_perm(PERMISSION):
            return self._refuse(request, run, call_id, 403, advice.missing(PERMISSION))
        verdict, seen = request.POST.get("verdict", ""), request.POST.get("seq", "")
        form = verdicts.blank(found, verdict if verdict in ORPHAN_VERDICTS else "", request.POST)
        sound = form.is_valid() and verdicts.is_whole(found, form)
        given = {**form.cleaned_data, "result": verdicts.entered(found, form.cleaned_data.get("result", ""))}
        if seen != str(found.seq):
            return self._too_late(request, run, call_id, given, _moved_on())
        if not sound:
            text = _("Nothing was decided. Correct the form below.")
            return self._call_page(request, run, found, status=400, refusal=text, sent=form)
        try:
            now = in_transaction(settings.DATABASE, lambda: self._resolve(request, found, given))
        except PermissionDeniedError as error:
            return self._refuse(request, run, call_id, 403, plain(error))
        except (RunStateError, JournalConflictError) as error:
            return self._too_late(request, run, call_id, given, plain(error))
        said = verdicts.done(found, now, verdict, given["result"])
        tool = plain(found.call.tool)
        logged = _("Verdict on call %(call)s of %(tool)s: %(verdict)s. %(evidence)s")
        about = {
            "call": found.call.id,
            "tool": tool,
            "verdict": verdict,
            "evidence": plain(given["evidence"]),
        }
        self.log_change(request, now, logged % about)
        self.message_user(request, said, messages.SUCCESS)
        return self.back(request, now)

    def _resolve(self, request: HttpRequest, found: History, given: dict[str, Any]) -> Run:
        run = found.run
        lock_session(settings.DATABASE, run.session_id)
        now = self._history(run, found.call.id)
        if now.seq != found.seq:
            raise RunStateError(_moved_on())
        if now.returned is not None and given["verdict"] == "not_occurred":
            raise RunStateError(_("Its handler returned without an error, so it did happen."))
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
        self, request: HttpRequest, run: Run, call_id: str, given: dict[str, Any], why: str
    ) -> HttpResponse:
        """Say what somebody else decided meanwhile, or that this very click was recorded already."""
        run = self.find(request, str(run.pk))
        found = self._history(run, call_id)
        since = [row for row in found.rows if row.seq > (given.get("seq") or 0)]
        first = next((row for row in since if row.kind == events.ORPHAN_RESOLVED), None)
        if first is not None and given.get("seq") and given.get("verdict"):
            if verdicts.is_same(found, first, request.user, given):  # a double click
                text = _("Your verdict was recorded already. %s")
                self.message_user(request, text % orphans.verdict(first), messages.INFO)
                return self.back(request, run)
            why = orphans.verdict(first)
        elif since and not found.in_doubt:
            why = " ".join(orphans.became(found))
        return self._refuse(request, run, call_id, 409, why, given)

    def _refuse(
        self,
        request: HttpRequest,
        run: Run,
        call_id: str,
        status: int,
        why: str,
        given: dict[str, Any] | None = None,
    ) -> HttpResponse:
        found = self._history(run, call_id)
        text = _("Your verdict was not recorded. %(why)s") % {"why": why}
        sent = None
        if given and given.get("verdict"):
            sent = verdicts.blank(found, given["verdict"], keeps={"evidence": given.get("evidence", "")})
        return self._call_page(request, run, found, status=status, refusal=text, sent=sent)

    def _history(self, run: Run, call_id: str, *, revealed: bool = False) -> History:
        sensitive = {} if revealed else sensitive_in(run)
        found = orphans.history(settings.DATABASE, run, call_id, sensitive)
        if found is None:
            raise Http404(_("Run %(run)s has no call %(call)s.") % {"run": run.pk, "call": plain(call_id)})
        return found

    def _call_page(
        self,
        request: HttpRequest,
        run: Run,
        found: History,
        *,
        status: int = 200,
        sent: VerdictForm | None = None,
        refusal: str = "",
    ) -> HttpResponse:
        situation = self.situation(request, run)
        others = sum(reason.call != found.call.id for reason in situation.reasons)
        why_not = _why_not(request, found)
        approval = found.call.approval.id if found.call.approval is not None else None
        context: dict[str, Any] = {
            "refusal": refusal,
            "tool": visible(found.call.tool),
            "run_id": str(run.pk),
            "run_badge": badges.run(run),
            "run_url": self.url(request, "change", run.pk),
            "card_url": self.other_page(request, Approval, approval) if approval else "",
            "in_doubt": found.in_doubt,
            "is_told": found.is_told,
            "ended": run.is_ended,
            "became": orphans.became(found),
            "arguments": arguments(found.call.arguments),
            "masked": MASK in found.call.arguments.values(),
            "may_reveal": request.user.has_perm("agentruns.reveal_arguments"),
            "reveal_url": self.url(request, "reveal", run.pk, found.call.id),
            "late": [self._late(request, found, row) for row in found.all(events.LATE_RESULT)],
            "facts": orphans.facts(found),
            "findings": orphans.findings(found),
            "rows": [(str(row.seq), self.row_url(request, run, row.seq)) for row in found.rows],
            "why_not": why_not,
            "choices": []
            if why_not or not found.in_doubt
            else verdicts.choices(found, others=others, sent=sent),
            "resolve_url": self.url(request, "resolve", run.pk, found.call.id),
            "cancel": advice.cancel(situation),
            "cancel_url": self.url(request, "cancel", run.pk),
            "cancel_form": CancelForm(auto_id="cancel_%s"),
            "settled": [card(row, whole=True) for row in found.all(*_SETTLING)],
        }
        title = plain(orphans.title(found))
        return self.render(request, run, title=title, status=status, template=self.call_template, **context)

    def row_url(self, request: HttpRequest, run: Run, seq: int) -> str:
        """Return where the page of a run shows one journal row."""
        return f"{self.url(request, 'change', run.pk, after=seq - 1)}#row-{seq}"

    def _late(self, request: HttpRequest, found: History, row: events.Row) -> dict[str, Any]:
        content = row.payload.get("content")
        said = {
            "seq": str(row.seq),
            "when": dated(row.created_at),
            "attempt": str(row.attempt),
            "whole_url": self.url(request, "row", found.run.pk, row.seq),
        }
        if row.payload.get("never_entered"):
            return {**said, "text": _("A worker that had lost the run says that it did not enter the tool.")}
        text = orphans.lateness(found, row)
        returned = body(_("Returned"), verdicts.text_of(content), TEXT_LIMIT, verdicts.kind_of(content))
        return {**said, "text": text, "body": returned, "is_evidence": not row.payload.get("is_error")}


def _why_not(request: HttpRequest, found: History) -> str:
    """Return why there are no buttons for this user on a call in doubt, or ""."""
    if not found.in_doubt:
        return ""
    if not request.user.has_perm(PERMISSION):
        return advice.missing(PERMISSION)
    if found.is_held and found.run.status != Run.Status.ORPHANED:
        return _(
            "The run is %(status)s: other calls of the same reply are at work. Look again in a while."
        ) % {"status": found.run.get_status_display()}
    return ""


def _moved_on() -> str:
    return _("The call moved on since you looked. This is how it is now.")


_SETTLING = (events.ORPHAN_RESOLVED, events.TOOL_RESULT)
