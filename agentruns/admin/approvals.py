"""Approvals in the console: the queue, and the card on which a person decides what was really asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin import badges, decisions, queue
from agentruns.admin.bulk import BulkDecisions
from agentruns.admin.card import buttons, decidable, sections
from agentruns.admin.filters import ApprovalAgentFilter, ApprovalStatusFilter, ToolFilter
from agentruns.admin.paginator import counted
from agentruns.admin.readonly import LeanChangeList, may_view
from agentruns.admin.search import is_uuid, matching
from agentruns.admin.text import plain, two_lines, visible
from agentruns.admin.times import age, remaining
from agentruns.admin.turn import TurnPage
from agentruns.admin.verbs import REFUSALS, VERBS, logged
from agentruns.conf import settings
from agentruns.exceptions import ApprovalStateError, PermissionDeniedError
from agentruns.models import Approval, Run


class ApprovalList(LeanChangeList):
    """Approvals, without what only their cards show."""

    deferred = ("arguments", "why", "reason", "run__input", "run__output", "run__error", "run__usage")


class ApprovalAdmin(TurnPage, BulkDecisions):
    """One call of a tool that waits for people, and what they decided."""

    list_display = ("sentence", "where", "requester", "age")
    list_display_links = ("sentence",)
    list_filter = (queue.MineFilter, ApprovalStatusFilter, ApprovalAgentFilter, ToolFilter)
    list_class = ApprovalList
    actions = ("approve_selected", "deny_selected")
    search_fields = ("run",)
    search_help_text = gettext_lazy("Beginning of a run's id, of a session key or of a requester's name")
    page_template = "agentruns/admin/approval.html"
    change_list_template = "agentruns/admin/queue.html"

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Who decides has to see."""
        return self.has_decide_permission(request) or super().has_view_permission(request, obj)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return approvals with their run."""
        return queue.ranked(super().get_queryset(request).select_related("run__session"))

    def get_ordering(self, request: HttpRequest) -> Any:
        """Return the order: of what waits the most urgent first, of decided ones the newest."""
        pending = request.GET.get("status", "pending") == "pending"
        return queue.URGENT_FIRST if pending else queue.NEWEST_FIRST

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find approvals by their run."""
        return (queryset.filter(matching(search_term, "run__")) if search_term else queryset), False

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons' targets."""
        view = self.admin_site.admin_view
        verbs = [
            path(f"<str:object_id>/{verb}/", view(self._verb_view(verb)), name=self.name(verb))
            for verb in VERBS
        ]
        return [
            path("turn/<str:run_id>/", view(self.turn_view), name=self.name("turn")),
            path("<str:object_id>/reveal/", view(self.reveal_view), name=self.name("reveal")),
            *verbs,
            *super().get_urls(),
        ]

    # The list

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the queue, or what was decided."""
        if not all(map(is_uuid, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            self.message_user(request, _("Nothing was decided: choose from the list."), messages.WARNING)
            return HttpResponseRedirect(request.get_full_path())
        pending = request.GET.get("status", "pending") == "pending"
        title = _("Calls that wait for a decision") if pending else _("Approvals")
        context = {"title": title, "in_doubt": partial(self._in_doubt, request)}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def _in_doubt(self, request: HttpRequest) -> dict[str, Any] | None:
        """Return how many runs a call in doubt holds, and where they are; None for who may not see runs."""
        site, status = self.admin_site, Run.Status.ORPHANED
        if not may_view(site, request, Run):
            return None
        url = reverse("admin:agentruns_run_changelist", current_app=site.name)
        held = Run.objects.using(settings.DATABASE).filter(status=status)
        return {"runs": counted(held), "url": f"{url}?status={status}"}

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

    def page(
        self,
        request: HttpRequest,
        obj: Approval,
        *,
        status: int = 200,
        revealed: bool = False,
        **context: Any,
    ) -> HttpResponse:
        """Return the card."""
        one = decidable(request.user, obj, revealed=revealed)
        before, after = queue.Queue(self, request).neighbours(obj)
        pending = [sibling for sibling in one.asked.siblings if sibling.pending]
        urls = {
            "urls": {verb: self.url(request, verb, obj.pk) for verb in (*VERBS, "reveal")},
            "turn_url": self.url(request, "turn", obj.run_id) if pending and one.pending else "",
            "previous_url": self.url(request, "change", before) if before else "",
            "next_url": self.url(request, "change", after) if after else "",
            "list_url": self.url(request, "changelist"),
            "run_id": str(obj.run_id),
            "run_url": self.other_page(request, Run, obj.run_id),
            "run_badge": badges.run(obj.run),
        }
        if revealed:
            self.log_change(request, obj, _("Saw the sensitive arguments."))
        shown = sections(one, self.get_queryset(request))
        shown["flags"] = [
            (flag, self.other_page(request, Run, flag.run_id) if flag.run_id else "")
            for flag in shown["flags"]
        ]
        title = plain(obj.title)
        context = {**shown, **buttons(one), **urls, **context}
        return self.render(request, obj, title=title, status=status, **context)

    def reveal_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the sensitive arguments to who may see them, once, and log it."""
        approval = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, approval)
        if not request.user.has_perm("agentruns.reveal_arguments"):
            raise PermissionDenied
        return self.page(request, approval, revealed=True)

    # The buttons

    def _verb_view(self, verb: str) -> Callable[..., HttpResponse]:
        def view(request: HttpRequest, object_id: str) -> HttpResponse:
            return self._decide(request, object_id, verb)

        return view

    def _decide(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Record what was decided on what was shown. Records only; a worker executes."""
        approval = self.find(request, object_id)
        if request.method != "POST":
            return self.back(request, approval)
        may_reveal = request.user.has_perm("agentruns.reveal_arguments")
        revealed = verb == "edit" and may_reveal and "revealed" in request.POST
        form = decidable(request.user, approval, revealed=revealed).form(verb, request.POST)
        if form is None:
            return self._refused(request, object_id, 409, ApprovalStateError(_("It cannot be edited here.")))
        if not form.is_valid():
            text = _("Nothing was decided. Correct the form below.")
            return self.page(
                request, approval, status=400, revealed=revealed, refusal=text, **{f"{verb}_form": form}
            )
        cards = queue.Queue(self, request)  # before it is decided: afterwards it has no place in the queue
        try:
            approval = VERBS[verb](approval, request.user, form)
        except PermissionDeniedError as error:
            return self._refused(request, object_id, 403, error)
        except REFUSALS as error:
            again = self.find(request, object_id)
            if decisions.was_mine(settings.DATABASE, again, verb, request.user, form):  # a double click
                self.message_user(request, decisions.outcome(again), messages.INFO)
                return self.back(request, again)
            return self._refused(request, object_id, 409, error, revealed=revealed, **{f"{verb}_form": form})
        self.log_change(request, approval, logged(verb, form))
        self.tell(request, approval, decisions.done(approval, verb))
        if verb == "extend":
            return self.back(request, approval)
        return self.onward(request, approval, cards)

    def _refused(
        self, request: HttpRequest, object_id: str, status: int, error: Exception, **context: Any
    ) -> HttpResponse:
        approval = self.find(request, object_id)
        why = plain(error)
        if status == 409 and approval.status != Approval.Status.PENDING:
            why = decisions.outcome(approval)
        elif status == 409 and approval.digest != request.POST.get("digest"):
            why = _("Its arguments were edited since you looked. This is what it asks now.")
            context = {}
        text = _("Your decision was not recorded. %(why)s") % {"why": why}
        pending = approval.status == Approval.Status.PENDING
        return self.page(request, approval, status=status, refusal=text, **(context if pending else {}))
