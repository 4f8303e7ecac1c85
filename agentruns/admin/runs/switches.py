"""The page of the kill switch: agents and tools, each on or off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agentruns.admin.html import dated, origin_text, plain, visible
from agentruns.agents.agent import registered
from agentruns.services import permissions, switches
from agentruns.utils.bounds import REASON_LENGTH

if TYPE_CHECKING:
    from agentruns.admin.runs.admin import RunAdmin

KINDS = {"agent": gettext_lazy("Agent"), "tool": gettext_lazy("Tool")}


class SwitchForm(forms.Form):
    """One switch, and where it is to stand."""

    kind = forms.ChoiceField(choices=list(KINDS.items()))
    name = forms.CharField(max_length=100, strip=False)
    state = forms.ChoiceField(choices=[("off", "off"), ("on", "on")])
    reason = forms.CharField(max_length=REASON_LENGTH, required=False)


def switches_view(admin: RunAdmin, request: HttpRequest) -> HttpResponse:
    """Show the agents and tools that this process knows, and all that are off; a POST moves one switch."""
    if not permissions.may(request.user, "switch"):
        raise PermissionDenied
    if request.method != "POST":
        return _page(admin, request)
    form = SwitchForm(request.POST)
    if not form.is_valid():
        return _page(admin, request, 400, _("Nothing was switched: choose from the list."))
    kind, name, state = (form.cleaned_data[each] for each in ("kind", "name", "state"))
    try:
        if state == "off":
            changed = switches.switch_off(kind, name, request.user, reason=form.cleaned_data["reason"])
        else:
            changed = switches.switch_on(kind, name, request.user)
    except ValueError as error:
        return _page(admin, request, 400, str(error))
    said = _("%(name)s is %(state)s now.") if changed else _("%(name)s was %(state)s already.")
    text = said % {"name": plain(name), "state": _("off") if state == "off" else _("on")}
    admin.message_user(request, text, messages.SUCCESS if changed else messages.INFO)
    return HttpResponseRedirect(admin.url(request, "switches"))


def _page(admin: RunAdmin, request: HttpRequest, status: int = 200, refusal: str = "") -> HttpResponse:
    off = {one.name: one for one in switches.switched_off()}
    known: dict[tuple[str, str], Any] = {}
    for agent in registered():
        known["agent", agent.name] = ""
        known |= {("tool", tool.name): origin_text(tool.origin) for tool in agent.tools.values()}
    for name in off:
        _off, kind, named = name.split(":", 2)
        known.setdefault((kind, named), "")
    lines = [
        {
            "kind": kind,
            "label": KINDS[kind],
            "name": name,
            "shown": visible(name),
            "origin": origin,
            "off": (one := off.get(f"off:{kind}:{name}")),
            "reason": visible(one.reason) if one else "",
            "actor": visible(one.actor or _("the program")) if one else "",
            "since": dated(one.seen_at) if one else "",
        }
        for (kind, name), origin in sorted(known.items())
    ]
    template = "agentruns/admin/switches.html"
    shown: dict[str, Any] = {"lines": lines, "refusal": refusal}
    return admin.render(request, None, title=_("Switches"), status=status, template=template, **shown)
