"""Deciding several approvals at once: first a page that lists exactly these, then each by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import badges, decisions
from agentruns.admin.card import Decidable, decidable
from agentruns.admin.deciding import DecidingAdmin
from agentruns.admin.forms import BulkApproveForm, BulkDenyForm
from agentruns.admin.text import Body, plain, visible
from agentruns.admin.verbs import REFUSALS, decide
from agentruns.exceptions import PermissionDeniedError
from agentruns.models import Approval

MOST = 100  # what one page can show and one person can look at
FORMS: dict[str, type[Form]] = {"approve": BulkApproveForm, "deny": BulkDenyForm}
TITLES = {
    "approve": gettext_lazy("Approve these calls?"),
    "deny": gettext_lazy("Deny these calls?"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One approval of the selection: as it will be decided, or as it was."""

    key: str
    digest: str
    title: SafeString
    url: str
    risk: SafeString
    requester: SafeString
    arguments: list[Body]
    why_not: str = ""
    done: str = ""


class BulkDecisions(DecidingAdmin):
    """Two actions of the list of approvals."""

    @admin.action(permissions=["decide"], description=gettext_lazy("Approve selected…"))
    def approve_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, then approve what was listed."""
        return self._bulk(request, "approve")

    @admin.action(permissions=["decide"], description=gettext_lazy("Deny selected…"))
    def deny_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask, then deny what was listed."""
        return self._bulk(request, "deny")

    def _bulk(self, request: HttpRequest, verb: str) -> HttpResponse | None:
        """Decide on the ids that were on the page, whatever else "select all" may mean."""
        approvals = self._chosen(request)
        if len(approvals) > MOST:
            text = _("Choose at most %(most)d: nobody looks at more on one page.") % {"most": MOST}
            self.message_user(request, text, messages.WARNING)
            return None
        if request.POST.get("select_across") == "1" and "confirmed" not in request.POST:
            text = _("Only what was on the page is decided: %(count)d.") % {"count": len(approvals)}
            self.message_user(request, text, messages.WARNING)
        if "confirmed" not in request.POST:
            return self._confirm(request, verb, approvals, FORMS[verb]())
        form = FORMS[verb](request.POST)
        if not form.is_valid():
            return self._confirm(request, verb, approvals, form, status=400)
        reason = form.cleaned_data["reason"]
        # Sessions in one order for everybody: two bulk decisions in transactions of their own then never
        # wait for each other.
        in_order = sorted(approvals, key=lambda approval: approval.run.session_id)
        done = {one.pk: self._decided(request, verb, one, reason) for one in in_order}
        lines = [done[approval.pk] for approval in approvals]
        return self._show(request, verb, lines, outcome=True)

    def _chosen(self, request: HttpRequest) -> list[Approval]:
        keys = [UUID(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)]
        found = self.get_queryset(request).in_bulk(keys[: MOST + 1])
        return [found[key] for key in dict.fromkeys(keys) if key in found]

    def _confirm(
        self, request: HttpRequest, verb: str, approvals: list[Approval], form: Form, *, status: int = 200
    ) -> HttpResponse:
        ones = [decidable(request.user, approval) for approval in approvals]
        lines = [self._line(request, one, why_not=_why_not(one, verb)) for one in ones]
        return self._show(request, verb, lines, status=status, form=form)

    def _decided(self, request: HttpRequest, verb: str, approval: Approval, reason: str) -> Line:
        """Decide one; what refuses it is told beside it and stops no other."""
        digest, one = request.POST.get(f"digest-{approval.pk}"), decidable(request.user, approval)
        if digest is None:  # was skipped when the person looked
            return self._line(request, one, why_not=_why_not(one, verb) or _("It was not on the page."))
        try:
            approval = decide(approval, request.user, verb, digest, reason)
        except (PermissionDeniedError, *REFUSALS) as error:
            again = self.find(request, str(approval.pk))
            return self._line(request, one, why_not=decisions.outcome(again) or plain(error))
        self.log_change(
            request,
            approval,
            _("Approved in bulk.") if verb == "approve" else _("Denied: %s") % plain(reason),
        )
        return self._line(request, one, done=decisions.done(approval, verb))

    def _line(self, request: HttpRequest, one: Decidable, *, why_not: str = "", done: str = "") -> Line:
        approval = one.approval
        return Line(
            key=str(approval.pk),
            digest=approval.digest,
            title=visible(approval.title),
            url=self.url(request, "change", approval.pk),
            risk=badges.risk(approval),
            requester=visible(approval.run.owner_name or _("the program")),
            arguments=one.shown(approval.arguments),
            why_not=why_not,
            done=done,
        )

    def _show(
        self,
        request: HttpRequest,
        verb: str,
        lines: list[Line],
        *,
        status: int = 200,
        outcome: bool = False,
        form: Form | None = None,
    ) -> HttpResponse:
        context = {
            "verb": verb,
            "lines": lines,
            "form": form,
            "outcome": outcome,
            "count": sum(not line.why_not for line in lines),
            "action_url": request.get_full_path(),
            "list_url": request.get_full_path(),
        }
        title = str(_("What became of each") if outcome else TITLES[verb])
        return self.render(
            request, None, title=title, status=status, template="agentruns/admin/bulk.html", **context
        )


def _why_not(one: Decidable, verb: str) -> str:
    """Return why one of the selection is left out, or ""."""
    if not one.pending:
        return decisions.outcome(one.approval)
    if verb == "approve" and one.asked.only_answers:
        return _("A question is answered, not approved.")
    return one.why_not or (one.why_not_approve if verb == "approve" else "")
