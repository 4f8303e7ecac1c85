"""Template tags and filters. `{% load agentruns %}{% agentruns_dashboard %}` shows figures on your own index.

The filters are for the console's own pages. Each calls the function of its name in `agentruns.admin.html`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django import template
from django.template import Context
from django.utils import timezone

register = template.Library()


@register.inclusion_tag("agentruns/admin/dashboard.html", takes_context=True)
def agentruns_dashboard(context: Context) -> dict[str, Any]:
    """Show figures of the runs and approvals that the user may see, with links into the current admin site.

    Outside an admin site the links lead to the default site. Shows nothing if the context has no `request`.
    """
    # Imported here, because a project without the admin loads this module too.
    from django.contrib.admin import site as default

    from agentruns.admin.base import zone_of
    from agentruns.admin.dashboard import dashboard

    request = context.get("request")
    if request is None:
        return {}
    view = getattr(request.resolver_match, "func", None)
    with timezone.override(zone_of(request)):
        return {"dashboard": dashboard(getattr(view, "admin_site", default), request)}


@register.simple_tag(takes_context=True)
def console_url(context: Context, action: str, *args: Any, **query: Any) -> str:
    """Build the URL of a page or action of the ModelAdmin that renders this page, by `ReadOnlyAdmin.url`."""
    url: str = context["url_of"](action, *args, **query)
    return url


def of_the_console(name: str, value: Any) -> Any:
    """Format a value by the function `name` of `agentruns.admin.html`: the filter of that name."""
    from agentruns.admin import html  # here for the same reason as above

    return getattr(html, name)(value)


TEXTS = ("visible", "plain", "plain_line", "person", "short_id", "evidence", "status_badge", "risk_badge")
for filter_name in (*TEXTS, "exact", "ago", "age", "stamp", "dated", "remaining"):
    register.filter(filter_name, partial(of_the_console, filter_name))
