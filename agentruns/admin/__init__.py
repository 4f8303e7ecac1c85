"""The console in the Django admin. For a site of your own, call `agentruns.admin.register(site)`."""

from __future__ import annotations

from django.contrib import admin

from agentruns.admin.approvals.admin import ApprovalAdmin
from agentruns.admin.rules.admin import RuleAdmin
from agentruns.admin.runs.admin import RunAdmin
from agentruns.admin.tokens import TokenAdmin
from agentruns.conf import settings
from agentruns.models import ApiToken, Approval, ApprovalRule, Run

__all__ = ["ApprovalAdmin", "RuleAdmin", "RunAdmin", "TokenAdmin", "register"]


def register(site: admin.AdminSite) -> None:
    """Register the console on an admin site; show its figures on the index unless the site has a template."""
    site.register(Run, RunAdmin)
    site.register(Approval, ApprovalAdmin)
    site.register(ApprovalRule, RuleAdmin)
    site.register(ApiToken, TokenAdmin)
    if site.index_template is None:
        site.index_template = "agentruns/admin/index.html"


if settings.ADMIN:
    register(admin.site)
