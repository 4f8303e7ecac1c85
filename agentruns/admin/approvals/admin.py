"""Approvals in the console: the queue, and the card on which a person decides about one call."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from agentruns import journal, services
from agentruns.admin import approvals as pages, base, filters, html, rules, runs
from agentruns.models import Approval, Run, fields, statuses
from agentruns.models.approval import HELD

DECIDE, TURN = "approvals.decide.decide_view", "approvals.decide.turn_view"
SELECTED = "approvals.decide.decide_selected"
ONLY = gettext_lazy("Only what was on the page is decided: %(count)d.")
VERBS = ("approve", "edit", "answer", "deny", "extend")


class ApprovalList(base.LeanChangeList):
    """The list of approvals, without the columns that only cards show."""

    deferred = (*filters.HEAVY, "reason")

    def get_results(self, request: HttpRequest) -> None:
        """Fetch the approvals of the page, mask them, and count the other pending requests equal to each."""
        super().get_results(request)
        self.result_list = journal.masking.masked_approvals(self.result_list)
        counts = pages.around.alike(journal.policy.visible_approvals(request.user), self.result_list)
        for approval in self.result_list:
            approval.alike = counts.get(approval.same_call, 1) - 1


def reveal_view(model_admin: ApprovalAdmin, request: HttpRequest, approval: Approval) -> HttpResponse:
    """Show the card with its sensitive arguments, and log it; raises PermissionDenied."""
    if not services.permissions.may_reveal(request.user, approval):
        raise PermissionDenied
    return model_admin.page(request, approval, revealed=True)


def is_queue(request: HttpRequest) -> bool:
    """Check whether the URL asks for the pending approvals, as it does without a status."""
    return request.GET.get("status", Approval.Status.PENDING) == Approval.Status.PENDING


class ApprovalAdmin(base.ReadOnlyAdmin):
    """The console's pages of approvals: calls that wait for people, and decided calls."""

    list_display = ("sentence", "where", "requester", "age")
    list_display_links = ("sentence",)
    list_filter = filters.OF_APPROVALS
    list_class = ApprovalList
    actions = (
        base.selected("approve", gettext_lazy("Approve selected…"), SELECTED, ONLY, ["decide"]),
        base.selected("deny", gettext_lazy("Deny selected…"), SELECTED, ONLY, ["decide"]),
    )
    search_fields = ("run",)
    search_help_text = gettext_lazy(
        "Words of a title, an argument, a task or a session key; a requester; the beginning of an id"
    )
    page_template = "agentruns/admin/approval.html"
    change_list_template = "agentruns/admin/queue.html"
    nothing_chosen = gettext_lazy("Nothing was decided: choose from the list.")
    pages = (
        base.View("news", "base.news_view"),
        base.View("turn", TURN, "turn/<str:run_id>/"),
        base.View("absences", "approvals.absences.absences_view"),
    )
    views = (
        base.View("reveal", "approvals.admin.reveal_view", acts=True),
        base.View("draft_rule", "rules.page.draft_view", "draft-rule/", acts=True),
        *(base.View(verb, DECIDE, options={"verb": verb}, acts=True) for verb in VERBS),
    )

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Check whether the user may see approvals; the permission to decide suffices."""
        return self.has_decide_permission(request) or super().has_view_permission(request, obj)

    def has_decide_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Check whether the user has the permission to decide approvals."""
        return services.permissions.may(request.user, "decide")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Select the approvals that the user may see, with their runs."""
        return journal.policy.visible_approvals(request.user).select_related("run__session")

    def get_ordering(self, request: HttpRequest) -> Any:
        """Choose the order: pending approvals by urgency, any other list by the newest request."""
        return filters.URGENT_FIRST if is_queue(request) else ("-requested_at", "-id")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find approvals by the texts of their cards and by their runs; no approval is found twice."""
        if search_term:
            # Only with arguments short enough for a list.
            given = filters.if_short("arguments", fields.CanonicalField, {})
            light = queryset.defer(*filters.HEAVY).annotate(given=given)
            texts = partial(filters.approval_texts, request.user)
            queryset = filters.searched(request, light, search_term, texts, "run__")
        return queryset, False

    # The list

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the approvals, by default the pending ones."""

        def in_doubt() -> dict[str, Any] | None:
            """Count the runs with a call in doubt, and link to them; None if the user may not see runs."""
            if not base.may_view(self.admin_site, request, Run):
                return None
            orphaned = journal.policy.visible_runs(request.user).filter(status=Run.Status.ORPHANED)
            url = base.page_url(self.admin_site, Run, status=Run.Status.ORPHANED)
            if services.permissions.may(request.user, "resolve"):
                url = base.page_url(self.admin_site, Run, "in_doubt")
            return {"runs": base.counted(orphaned), "url": url}

        waiting = partial(base.counted, self.get_queryset(request).filter(status=statuses.PENDING))
        context: dict[str, Any] = {"in_doubt": in_doubt, "waiting": waiting}
        context["absences_url"] = self.url(request, "absences")
        if is_queue(request):
            context["title"] = _("Calls that wait for a decision")
        if is_queue(request) and request.GET.get(SEARCH_VAR):
            query = request.GET.copy()
            query["status"] = "all"
            context["decided"] = lambda: {
                "count": self.listing(request, query).paginator.counted,
                "url": f"?{query.urlencode()}",
            }
        return super().changelist_view(request, {**context, **(extra_context or {})})

    @admin.display(description=gettext_lazy("what is asked"))
    def sentence(self, approval: Approval) -> SafeString:
        """Show the call in a sentence; below it its tool, its agent, and how many equal requests wait."""
        names = {"tool": html.plain(approval.tool_name), "agent": html.plain(approval.run.agent)}
        second, more = _("%(tool)s, by %(agent)s") % names, approval.alike  # type: ignore[attr-defined]
        if approval.status == Approval.Status.PENDING and more:
            text = ngettext("%(count)d more like it waits", "%(count)d more like it wait", more)
            second = f"{second} · {text % {'count': more}}"
        return html.two_lines(html.visible(approval.title), second)

    @admin.display(description=gettext_lazy("status, risk"), ordering="status")
    def where(self, approval: Approval) -> SafeString:
        """Show the status and the risk; of a pending approval, also that its run is paused or in doubt."""
        is_held = approval.status == Approval.Status.PENDING and approval.run.status in HELD
        held = html.status_badge(approval.run) if is_held else ""
        second = format_html("{} {}", html.risk_badge(approval), held)
        return html.two_lines(html.status_badge(approval), second)

    @admin.display(description=gettext_lazy("requester"), ordering="run__owner_name")
    def requester(self, approval: Approval) -> SafeString:
        """Show the user whom the run was started for."""
        return html.person(approval.run.owner_name)

    @admin.display(description=gettext_lazy("age, expires"), ordering="-requested_at")
    def age(self, approval: Approval) -> SafeString:
        """Show the time since the request, and for a pending approval the time left to decide."""
        left = html.remaining(approval.expires_at) if approval.status == Approval.Status.PENDING else ""
        return html.two_lines(html.age(approval.requested_at), left)

    # The card

    def page(
        self, request: HttpRequest, obj: Approval, *, revealed: bool = False, **context: Any
    ) -> HttpResponse:
        """Render the card of one approval; `revealed` shows its sensitive arguments and logs this.

        Raises PermissionDeniedError if the user may not see the sensitive arguments.
        """
        [card] = pages.card.cards_of(request.user, [obj], revealed=revealed)
        others_wait = any(sibling["pending"] for sibling in card.siblings)
        queue, url = pages.decide.queue(self, request), partial(self.url, request, "change")
        urls = {
            **base.ways(queue, obj.pk, filters.QUEUED, url),
            "urls": {verb: self.url(request, verb, obj.pk) for verb in (*VERBS, "reveal", "draft_rule")},
            "turn_url": self.url(request, "turn", obj.run_id) if others_wait and card.pending else "",
            "list_url": self.url(request, "changelist"),
            "run_url": self.other_page(request, Run, obj.run_id),
            "readers": pages.around.readers(obj.run, card.requested),
            "wants_password": card.pending and services.permissions.needs_password(request, obj.risk),
        }
        if (parent := pages.around.seen_by(request.user, obj.run.parent_id)) is not None:
            runs.list.note_waits([parent])
            urls |= {"parent": parent, "parent_url": self.other_page(request, Run, parent.pk)}
        if revealed:
            services.permissions.reveal(request.user, obj, door=base.CHANNEL)
            self.log_change(request, obj, _("Saw the sensitive arguments."))
        values, about = pages.card.context_of(card), rules.page.of_card(self, request, obj)
        for row in values["history"]:
            row.rule_url = about["rule_urls"].get(row.rule, "")
        flags: list[tuple[Any, str]] = []  # each with the page that it is about
        for flag in values["flags"]:
            run_url = self.other_page(request, Run, flag.run_id) if flag.run_id else ""
            equal_url = base.page_url(self.admin_site, Approval, same=flag.same_call)
            flags.append((flag, equal_url if flag.same_call else run_url))
        context = {**values, **pages.card.buttons(card), **urls, "flags": flags, **about, **context}
        return self.render(request, obj, title=html.plain(card.face.title), **context)

    def log_change(self, request: HttpRequest, obj: Approval, message: Any) -> Any:
        """Mask the message, and log it in the history, which everybody who may see the approval can read."""
        mask = base.mask_for(obj.run)
        return super().log_change(request, mask.approval(obj), mask.json(message))
