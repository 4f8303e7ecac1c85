"""The console in the Django admin. A site of your own: `agentruns.admin.register(site)`."""

from __future__ import annotations

from django.contrib import admin

from agentruns.admin.approvals import ApprovalAdmin
from agentruns.admin.runs import RunAdmin
from agentruns.conf import settings
from agentruns.models import Approval, Run

__all__ = ["ApprovalAdmin", "RunAdmin", "register"]


def register(site: admin.AdminSite) -> None:
    """Put the console on an admin site."""
    site.register(Run, RunAdmin)
    site.register(Approval, ApprovalAdmin)


if settings.ADMIN:
    register(admin.site)
