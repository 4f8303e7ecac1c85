"""The page of absences: who is away, and who gets the notices meanwhile."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from agentruns.admin.base import ReadOnlyAdmin
from agentruns.admin.forms import MomentField
from agentruns.admin.html import plain
from agentruns.exceptions import AgentRunsError
from agentruns.services import absences, permissions


def absences_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the absences that the user may plan; a POST plans one, or ends the one whose id is `end`."""
    user, post, page = request.user, request.POST, dict[str, Any]()
    if request.method == "POST":
        try:
            if "end" in post:
                absences.end_absence(post["end"], user)
            else:
                begins_at, ends_at = map(MomentField().clean, map(post.get, ("begins_at", "ends_at")))
                person, delegate = map(user_named, map(post.get, ("person", "delegate")))
                person = person if post.get("person") else user
                absences.plan_absence(person, delegate, begins_at, ends_at, user)
            admin.message_user(request, _("Done."), messages.SUCCESS)
            return HttpResponseRedirect(admin.url(request, "absences"))
        except (AgentRunsError, ValueError, ValidationError) as error:
            why = plain(" ".join(getattr(error, "messages", [str(error)])))
            page = {"given": post, "status": 400, "refusal": _("Nothing was changed. %(why)s") % {"why": why}}
    page |= {"lines": absences.planned(user), "for_others": permissions.may(user, "plan_absence")}
    return admin.render(request, None, title=_("Absences"), template="absences", **page)


def user_named(name: str | None) -> Any:
    """Find the user of a name; None if there is none. PostgreSQL could not look for a NUL."""
    users: Any = get_user_model()
    name = (name or "").replace("\0", "\ufffd")
    return users._default_manager.filter(**{users.USERNAME_FIELD: name}).first()
