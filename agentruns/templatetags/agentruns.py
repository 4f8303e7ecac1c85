"""`{% load agentruns %}{% agentruns_dashboard %}`: the console's figures on an admin index of your own."""

from __future__ import annotations

from typing import Any

from django import template
from django.template import Context
from django.utils import timezone

register = template.Library()


@register.inclusion_tag("agentruns/admin/dashboard.html", takes_context=True)
def agentruns_dashboard(context: Context) -> dict[str, Any]:
    """Show what the user may see of the runs and approvals of the admin site that is open; else nothing."""
    # Here, because a project without the admin loads this module too.
    from django.contrib.admin import site as default

    from agentruns.admin.base import zone_of
    from agentruns.admin.dashboard import dashboard

    request = context.get("request")
    if request is None:
        return {}
    view = getattr(request.resolver_match, "func", None)
    with timezone.override(zone_of(request) or timezone.get_current_timezone()):
        return {"dashboard": dashboard(getattr(view, "admin_site", default), request)}
