"""The page of the kill switch: agents and tools, each on or off."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from agentruns.admin.base import ReadOnlyAdmin
from agentruns.admin.html import plain
from agentruns.agents.agent import registered
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal.policy import Switch
from agentruns.services import permissions, switches


def switches_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the agents and tools known here or switched off; a POST switches one. Raises PermissionDenied."""
    if not permissions.may(request.user, "switch"):
        raise PermissionDenied
    status, refusal = 200, ""
    if request.method == "POST":
        post = request.POST
        kind, name, state, reason = (post.get(each, "") for each in ("kind", "name", "state", "reason"))
        try:
            changed = switches.switch(kind, name, state, request.user, reason=reason)
        except (ValueError, PermissionDeniedError) as error:
            status, refusal = 400 if isinstance(error, ValueError) else 403, str(error)
        else:
            text = _("%(name)s was %(state)s already.")
            if changed:
                text = _("%(name)s is %(state)s. Every process knows it within five seconds.")
            names = {"name": plain(name), "state": _("off") if state == "off" else _("on")}
            admin.message_user(request, text % names, messages.SUCCESS if changed else messages.INFO)
            return HttpResponseRedirect(admin.url(request, "switches"))
    off = switches.switched_off(request.user)
    origins: dict[tuple[str, str], Any] = dict.fromkeys(off)
    for agent in registered():
        origins["agent", agent.name] = None
        origins |= {("tool", tool.name): tool.origin for tool in agent.tools.values()}
    lines = [
        {"kind": kind, "name": name, "origin": origin, "off": off.get((kind, name))}
        for (kind, name), origin in sorted(origins.items(), key=lambda item: (item[0] not in off, item[0]))
        if (kind, name) in off or permissions.may(request.user, "switch", Switch(kind, name))
    ]
    page: dict[str, Any] = {"title": _("Switches"), "template": "switches", "status": status}
    return admin.render(request, None, **page, lines=lines, refusal=refusal)
