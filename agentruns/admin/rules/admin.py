"""Standing rules in the console: their list. The pages are imported at their first use."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy

from agentruns import journal, services
from agentruns.admin import base, html, rules as pages
from agentruns.models import ApprovalRule

VERBS = ("stop", "try", "activate", "retire")


class RuleAdmin(base.ReadOnlyAdmin):
    """The console's pages of standing rules."""

    list_display = ("sentence", "where", "about", "decided_at")
    list_display_links = ("sentence",)
    list_filter = ("status", ("tool", admin.AllValuesFieldListFilter))
    ordering = ("name", "scope", "-version")
    page_template = "agentruns/admin/rule.html"
    change_list_template = "agentruns/admin/rules.html"
    pages = (base.View("add", "rules.page.form_view"),)
    views = (
        *(base.View(verb, "rules.page.press_view", options={"verb": verb}, acts=True) for verb in VERBS),
        base.View("backtest", "rules.page.backtest_view", acts=True, in_transaction=False),
    )

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Check whether the user may see rules; a permission to write or to activate them suffices."""
        may = partial(services.permissions.may, request.user)
        return super().has_view_permission(request, obj) or may("write_rule") or may("activate_rule")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Check whether the user may write rules, by the form of this module."""
        return services.permissions.may(request.user, "write_rule")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Select the rules that the user may see."""
        return services.rules.list_rules(request.user)

    @admin.display(description=gettext_lazy("rule"), ordering="name")
    def sentence(self, rule: ApprovalRule) -> SafeString:
        """Show the rule's name and version, and its sentence."""
        sentence = journal.rules.sentence(rule, partial(html.plain_line, limit=html.ONE_LINE))
        return html.two_lines(html.visible(rule), html.cut(sentence, 2 * html.LINE))

    @admin.display(description=gettext_lazy("status"), ordering="status")
    def where(self, rule: ApprovalRule) -> SafeString:
        """Show the status, with its expiry while the rule is live, or else with the reason."""
        second = html.remaining(rule.expires_at) if rule.status in rule.LIVE else html.plain_line(rule.why)
        return html.two_lines(html.status_badge(rule), second)

    @admin.display(description=gettext_lazy("tool, agent"), ordering="tool")
    def about(self, rule: ApprovalRule) -> SafeString:
        """Show the tool that the rule answers; below it the agent and the scope."""
        names = map(html.plain, filter(None, (rule.agent, rule.scope)))
        return html.two_lines(html.visible(rule.tool), " · ".join(names))

    def page(self, request: HttpRequest, obj: ApprovalRule, **context: Any) -> HttpResponse:
        """Render the page of one rule."""
        return pages.page.page(self, request, obj, **context)
