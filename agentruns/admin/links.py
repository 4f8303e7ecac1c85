"""The page of a mail's link: the card of one approval, for one person, who does not sign in.

Its URL: `path("decide/", include("agentruns.admin.links"))`.
"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import path
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.http import require_http_methods

from agentruns.admin import html
from agentruns.admin.approvals import verbs
from agentruns.admin.approvals.card import cards_of, context_of
from agentruns.admin.base import status_of
from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError, NotFoundError
from agentruns.models.statuses import Verb
from agentruns.services.approvals import links
from agentruns.services.approvals.decisions import approve, deny

SECURITY = {
    # Not "no-referrer", with which browsers send no origin that Django's CSRF check accepts. This sends the
    # site's name, and never the path, which holds the link.
    "Referrer-Policy": "strict-origin",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
}


@never_cache
@csrf_protect
@require_http_methods(["GET", "HEAD", "POST"])
def link_view(request: HttpRequest, token: str) -> HttpResponse:
    """Show the card of the approval that a mail's link names; a POST approves or denies it.

    A GET changes nothing, so programs that follow links in mails decide nothing. A link is good for one
    decision. A link that is void, or whose approval the policy leaves to the console, shows no form. Without
    AGENTRUNS_MAIL_LINK_SECONDS there is no such page.
    """
    if settings.MAIL_LINK_SECONDS is None:
        raise Http404
    try:
        approval, user, is_current = links.follow(token, links.MAIL, settings.MAIL_LINK_SECONDS)
    except NotFoundError as error:
        return _page(request, 410, refusal=html.plain(error))
    refusal, status = "", 200
    if not is_current or not links.is_offered(approval, links.MAIL):
        outcome = verbs.outcome(approval) or _("This mail is out of date. Look at the call in the console.")
        return _page(request, 409 if request.method == "POST" else 200, approval=approval, outcome=outcome)
    verb, reason = request.POST.get("verb"), request.POST.get("reason", "").strip()
    if verb in (Verb.APPROVE, Verb.DENY):
        try:
            if verb == Verb.APPROVE:
                approve(approval.pk, user, digest=approval.digest, reason=reason, channel=links.MAIL)
            else:
                deny(approval.pk, user, reason, digest=approval.digest, channel=links.MAIL)
            return HttpResponseRedirect(request.path)
        except AgentRunsError as error:
            refusal, status = _("Nothing was decided. %(why)s") % {"why": html.plain(error)}, status_of(error)
    [card] = cards_of(user, [approval])
    return _page(request, status, **context_of(card), refusal=refusal, user=user)


def _page(request: HttpRequest, status: int, **context: Any) -> HttpResponse:
    response = render(request, "agentruns/admin/link.html", context, status=status)
    for name, value in SECURITY.items():
        response[name] = value
    return response


view: Any = link_view  # marked for Django's and django-stronghold's middlewares that require a login
view.login_required, view.STRONGHOLD_IS_PUBLIC = False, True
urlpatterns = [path("<str:token>/", view, name="agentruns_decide")]
