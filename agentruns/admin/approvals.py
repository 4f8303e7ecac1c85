"""Approvals in the console: the queue, and the card on which a person decides what was really asked."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns import people
from agentruns.admin import badges, decisions, facts, waiting
from agentruns.admin.filters import ApprovalAgentFilter, ApprovalStatusFilter, ToolFilter
from agentruns.admin.forms import ApproveForm, DenyForm
from agentruns.admin.readonly import READING, LeanChangeList, ReadOnlyAdmin
from agentruns.admin.search import matching
from agentruns.admin.text import arguments, plain, two_lines, visible
from agentruns.admin.times import age, dated, remaining
from agentruns.approvals import approve, deny
from agentruns.conf import settings
from agentruns.exceptions import (
    ApprovalStateError,
    JournalConflictError,
    PermissionDeniedError,
    RunStateError,
)
from agentruns.models import Approval, Run

REFUSALS = (ApprovalStateError, RunStateError, JournalConflictError)


class ApprovalList(LeanChangeList):
    """Approvals, without what only their cards show."""

    deferred = ("arguments", "why", "reason", "run__input", "run__output", "run__error", "run__usage")


class ApprovalAdmin(ReadOnlyAdmin):
    """One call of a tool that waits for people, and what they decided."""

    list_display = ("sentence", "where", "requester", "age")
    list_display_links = ("sentence",)
    list_filter = (ApprovalStatusFilter, ApprovalAgentFilter, ToolFilter)
    list_class = ApprovalList
    search_fields = ("run",)
    search_help_text = gettext_lazy("Beginning of a run's id, of a session key or of a requester's name")
    page_template = "agentruns/admin/approval.html"

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Who decides has to see."""
        may_decide = request.user.has_perm("agentruns.decide_approval")
        return may_decide or super().has_view_permission(request, obj)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return approvals with their run."""
        return super().get_queryset(request).select_related("run__session")

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the order: who waits longest first; of decided ones the newest first."""
        pending = request.GET.get("status", "pending") == "pending"
        return ("requested_at", "id") if pending else ("-requested_at", "-id")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find approvals by their run."""
        return (queryset.filter(matching(search_term, "run__")) if search_term else queryset), False

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons' targets."""
        view = self.admin_site.admin_view
        return [
            path("<str:object_id>/approve/", view(self.approve_view), name=self.name("approve")),
            path("<str:object_id>/deny/", view(self.deny_view), name=self.name("deny")),
            *super().get_urls(),
        ]

    # The list

    @admin.display(description=gettext_lazy("what is asked"))
    def sentence(self, approval: Approval) -> SafeString:
        """What the call does, in one sentence; below it what is called, and by whom."""
        names = {"tool": plain(approval.tool_name), "agent": approval.run.agent}
        return two_lines(visible(approval.title), _("%(tool)s, by %(agent)s") % names)

    @admin.display(description=gettext_lazy("status, risk"), ordering="status")
    def where(self, approval: Approval) -> SafeString:
        """The status and the risk, in words."""
        return two_lines(badges.approval(approval), badges.risk(approval))

    @admin.display(description=gettext_lazy("requester"), ordering="run__owner_name")
    def requester(self, approval: Approval) -> SafeString:
        """Who the run was started for."""
        return visible(approval.run.owner_name or "-")

    @admin.display(description=gettext_lazy("age, expires"), ordering="-requested_at")
    def age(self, approval: Approval) -> SafeString:
        """How long it has been asked, and how long it can still be decided."""
        is_pending = approval.status == Approval.Status.PENDING
        return two_lines(age(approval.requested_at), remaining(approval.expires_at) if is_pending else "")

    # The card

    def page(self, request: HttpRequest, obj: Approval, *, status: int = 200, **context: Any) -> HttpResponse:
        """Return the card."""
        sections = {
            "why": visible(obj.why),
            "asked_for": visible(obj.run.owner_name or _("the program")),
            "expires": dated(obj.expires_at) if obj.expires_at else "",
            "badge": badges.approval(obj),
            "risk": badges.risk(obj),
            "pending": obj.status == Approval.Status.PENDING,
            "outcome": decisions.outcome(obj),
            "arguments": arguments(obj.arguments),
            "facts": facts.of_approval(obj),
            "decisions": decisions.made(settings.DATABASE, obj),
            "why_not": self.why_not(request, obj),
            "approve_url": self.url(request, "approve", obj.pk),
            "deny_url": self.url(request, "deny", obj.pk),
            "approve_form": ApproveForm(initial={"digest": obj.digest}, auto_id="approve_%s"),
            "deny_form": DenyForm(initial={"digest": obj.digest}, auto_id="deny_%s"),
            "run_id": str(obj.run_id),
            "run_url": self.other_page(request, Run, obj.run_id),
            "run_badge": badges.run(obj.run),
        }
        title = plain(obj.title)
        return self.render(request, obj, title=title, status=status, **{**sections, **context})

    def why_not(self, request: HttpRequest, approval: Approval) -> str:
        """Return why there are no buttons for this user on a pending card, or ""."""
        if approval.status != Approval.Status.PENDING:
            return ""
        if approval.expires_at is not None and approval.expires_at <= timezone.now():
            return _("Its time is over. The next sweep of a worker records that nobody answered.")
        if waiting.cancel_request(settings.DATABASE, approval.run) is not None:
            return _("Its run is being cancelled.")
        if decisions.already_given(settings.DATABASE, approval, request.user):
            return _("You approved it already. It takes another person.")
        return plain(people.why_not_decide(request.user, approval))

    # The buttons

    def approve_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Approve what was shown. Records only; a worker executes."""
        form = ApproveForm(request.POST, auto_id="approve_%s")
        return self._decide(request, object_id, "approve", form)

    def deny_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Deny what was shown, with a reason."""
        form = DenyForm(request.POST, auto_id="deny_%s")
        return self._decide(request, object_id, "deny", form)

    def _decide(self, request: HttpRequest, object_id: str, verb: str, form: Form) -> HttpResponse:
        approval = self.find(request, object_id)
        if request.method in READING:
            return self.back(request, approval)
        if not form.is_valid():
            text = _("Nothing was decided. Correct the form below.")
            return self.page(request, approval, status=400, refusal=text, **{f"{verb}_form": form})
        digest, reason = form.cleaned_data["digest"], form.cleaned_data["reason"]
        try:
            if verb == "approve":
                approval = approve(approval.pk, request.user, digest=digest, reason=reason)
            else:
                approval = deny(approval.pk, request.user, reason, digest=digest)
        except PermissionDeniedError as error:
            return self._refused(request, object_id, 403, error)
        except REFUSALS as error:
            again = self.find(request, object_id)
            if decisions.was_mine(again, verb, request.user, digest):  # a double click
                self.message_user(request, decisions.outcome(again), messages.INFO)
                return self.back(request, again)
            return self._refused(request, object_id, 409, error)
        self.log_change(request, approval, _("Approved.") if verb == "approve" else _("Denied: %s") % reason)
        self.message_user(request, decisions.done(approval, verb), messages.SUCCESS)
        return self.back(request, approval)

    def _refused(self, request: HttpRequest, object_id: str, status: int, error: Exception) -> HttpResponse:
        approval = self.find(request, object_id)
        why = plain(error)
        if status == 409 and approval.status != Approval.Status.PENDING:
            why = decisions.outcome(approval)
        elif status == 409 and approval.digest != request.POST.get("digest"):
            why = _("Its arguments were edited since you looked. This is what it asks now.")
        text = _("Your decision was not recorded. %(why)s") % {"why": why}
        return self.page(request, approval, status=status, refusal=text)
