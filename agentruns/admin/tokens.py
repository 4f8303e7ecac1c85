"""API tokens in the console: their owners, scopes and last use, and the Revoke button."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy

from agentruns import journal, services
from agentruns.admin import filters, runs
from agentruns.admin.base import LeanChangeList, ReadOnlyAdmin, View
from agentruns.admin.html import EMPTY, ago, badge, plain, remaining, timed, two_lines, visible
from agentruns.conf import settings
from agentruns.models import ApiToken
from agentruns.utils import clock

MINE = "_agentruns_has_tokens"


class TokenList(LeanChangeList):
    """The list of tokens with their owners; one more query fetches the owners."""

    deferred = ("digest",)

    def get_results(self, request: HttpRequest) -> None:
        """Fetch the tokens of the page, and set `person` of each to its owner; None without an owner."""
        super().get_results(request)
        self.result_list = list(self.result_list)
        owners = services.api_tokens.owners(self.result_list)
        for token in self.result_list:
            token.person = owners.get(token.owner_id)


class StateFilter(filters.KnownValues):
    """A filter by state: active, expired or revoked. It does not look at the token's owner."""

    title = gettext_lazy("state")
    parameter_name = "state"
    offered = (
        ("active", gettext_lazy("active")),
        ("expired", gettext_lazy("expired")),
        ("revoked", gettext_lazy("revoked")),
    )

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        lasting, over = Q(revoked_at=None), Q(expires_at__lte=clock.now(settings.DATABASE))
        return queryset.filter({"revoked": ~lasting, "expired": lasting & over}.get(value, lasting & ~over))


def revoke_view(model_admin: TokenAdmin, request: HttpRequest, token: ApiToken) -> HttpResponse:
    """Revoke the token, and redirect to its page with a message that it is, or already was, revoked."""
    if services.api_tokens.revoke(token.pk, request.user):
        done = _("Revoked. No request with it is accepted any more.")
        return model_admin.done(request, token, _("Revoked."), done)
    # a double click, or somebody was faster
    return model_admin.back(request, token, _("It was revoked already."))


class TokenAdmin(ReadOnlyAdmin):
    """The console's pages of API tokens. They show only the beginning of a token: its text is not stored."""

    list_display = ("beginning", "where", "person", "may", "used")
    list_display_links = ("beginning",)
    list_filter = (StateFilter,)
    list_class = TokenList
    ordering = ("-created_at", "-id")
    search_fields = ("prefix__istartswith", "name__icontains")
    search_help_text = gettext_lazy("Beginning of a token, or part of its name")
    page_template = "agentruns/admin/token.html"
    change_list_template = "agentruns/admin/tokens.html"
    views = (View("revoke", "tokens.revoke_view", acts=True),)

    # Who sees which

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Check whether the user may revoke or view the tokens of all users, or owns a token."""
        if services.permissions.may(request.user, "revoke") or super().has_view_permission(request):
            return True
        if not hasattr(request, MINE):  # the admin asks several times on each page
            setattr(request, MINE, self.get_queryset(request).exists())
        return bool(getattr(request, MINE))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Select the tokens that the user may see."""
        return journal.policy.visible_tokens(request.user).select_related("session")

    # The list

    @admin.display(description=gettext_lazy("token, name"), ordering="prefix")
    def beginning(self, token: ApiToken) -> SafeString:
        """Show the token's beginning, by which people recognise it in a program's settings, and its name."""
        beginning = format_html('<span class="ar-id">{}</span>', visible(token))
        return two_lines(beginning, visible(token.name) if token.name else "")

    @admin.display(description=gettext_lazy("state, expires"), ordering="expires_at")
    def where(self, token: Any) -> SafeString:
        """Show the token's state, with the time until it expires or the time since it ended."""
        end = token.revoked_at or token.expires_at
        is_over = end <= clock.now(settings.DATABASE)
        return two_lines(state(token, token.person), timed(end, ago(end)) if is_over else remaining(end))

    @admin.display(description=gettext_lazy("owner"))
    def person(self, token: Any) -> SafeString:
        """Show the owner's username, "-" if the owner is gone; for a session token, show the session."""
        name = token.person.get_username() if token.person is not None else EMPTY
        return visible(token.session if token.session_id else name)

    @admin.display(description=gettext_lazy("scopes"))
    def may(self, token: ApiToken) -> SafeString:
        """Show the scopes of the token; "its session" for a session token."""
        if token.session_id:
            return visible(_("its session"))
        return format_html_join("", '<span class="ar-id">{}</span><br>', ((scope,) for scope in token.scopes))

    @admin.display(description=gettext_lazy("last used, created"), ordering="last_used_at")
    def used(self, token: ApiToken) -> SafeString:
        """Show the time since the last use, or "never used"; below it the time since the creation."""
        made, last = timed(token.created_at, ago(token.created_at)), token.last_used_at
        used = timed(last, ago(last)) if last else _("never used")
        return two_lines(used, format_html("{} {}", _("created"), made))

    # The page

    def page(self, request: HttpRequest, obj: ApiToken, **context: Any) -> HttpResponse:
        """Render the page of one token."""
        owner = services.api_tokens.owners([obj]).get(obj.owner_id)
        known, why_not = dict(ApiToken.Scope.choices), ""
        if obj.revoked_at is not None:
            why_not = _("It was revoked %(when)s.") % {"when": ago(obj.revoked_at)}
        elif not services.api_tokens.may_revoke(request.user, obj):
            why_not = runs.actions.missing("revoke")
        about = {
            "token": obj,
            "owner": visible(owner.get_username() if owner else EMPTY),
            "owner_url": self.other_page(request, get_user_model(), obj.owner_id) if owner else "",
            "badge": state(obj, owner),
            "scopes": [(scope, known.get(scope, "")) for scope in obj.scopes],
            "why_not": why_not,
            "list_url": self.url(request, "changelist"),
        }
        title = _("API token %(token)s") % {"token": plain(obj)}
        return self.render(request, obj, title=title, **{**about, **context})


def state(token: ApiToken, owner: Any) -> SafeString:
    """Build the badge of a token: revoked, expired, without an active owner, or else active.

    Does not check whether the owner has changed the password since, which also ends the token.
    """
    if token.revoked_at is not None:
        return badge("bad", _("revoked"))
    if token.expires_at <= clock.now(settings.DATABASE):
        return badge("plain", _("expired"))
    if token.session_id is None and (owner is None or not owner.is_active):
        return badge("waits", _("owner not active") if owner else _("owner gone"))
    return badge("good", _("active"))
