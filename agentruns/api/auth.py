"""Authentication, scopes and visibility. A token or Django's session decides who acts, never the body."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.apps import apps
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, Resolver404, resolve, reverse
from ninja import security
from ninja.conf import settings as ninja_settings
from ninja.errors import AuthenticationError
from ninja.operation import Operation, PathView
from ninja.throttling import SimpleRateThrottle
from ninja.utils import check_csrf

from agentruns.api.errors import MARK, URN, Problem
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, PermissionDeniedError
from agentruns.journal import deciders, policy
from agentruns.models import ApiToken, Approval, Run, Session, SessionBearer
from agentruns.services import api_tokens, permissions
from agentruns.services.approvals import decisions
from agentruns.services.runs import sessions
from agentruns.utils import redaction
from agentruns.utils.carry import schema_of

HEADER = "Authorization"
SHOWN = 50  # characters of a malformed id
Shown = TypeVar("Shown", Run, Approval)
# The operations that accept a session token; all others refuse it.
VISITORS = {
    "list_runs", "start_run", "get_run", "list_messages", "stream_events", "list_sessions", "get_session",
    "send_message", "list_conversation", "list_approvals", "get_approval", "approve", "deny", "answer",
}  # fmt: skip

logger = redaction.get_logger("agentruns.api.auth")


@dataclass(slots=True)
class Entry:
    """The router's notes on one request, such as the scopes, of which a token needs at least one.

    `headers` are response headers by status. A stream that authenticates its request again uses the same
    notes, so that the throttle counts the stream once.
    """

    scopes: Sequence[str] = ()
    lets_visitors_in: bool = False  # whether the operation accepts a session token
    headers: dict[int, dict[str, str]] = field(default_factory=dict)
    is_counted: bool = False
    operation: Any = None
    before: dict[str, Any] = field(default_factory=dict)  # the request's attributes before authentication


class BearerAuth(security.HttpBearer):
    """Authentication by the token in the Authorization header. With this header, no Django session counts."""

    openapi_description = "A token printed by `manage.py create_api_token`: ar_…"

    def __call__(self, request: HttpRequest) -> Any | None:
        entry_of(request).headers[401] = {"WWW-Authenticate": "Bearer"}
        return self.authenticate(request, "") if HEADER in request.headers else None

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        """Find the token in the header, and make its owner, or its session's visitor, `request.user`.

        Raises Problem: 401 without a valid token, 403 if the token lacks the scopes or the operation refuses
        visitors, 429 above the limit of requests. Ignores `token`.
        """
        bearer = token_of(request)
        if bearer is None:
            _throttle(request)
            raise Problem.named(
                "not-authenticated",
                "The Authorization header is not that of a valid token: mistyped, expired, revoked, or of an "
                "owner who is not active or has a new password. Send 'Bearer ' and what manage.py "
                "create_api_token printed.",
            )
        user: Any = bearer.owner if bearer.session_id is None else SessionBearer(bearer.session_id)
        request.user = user

        async def auser() -> Any:
            return user

        request.auser = auser
        _throttle(request, user)
        entry = entry_of(request)
        if bearer.session_id is not None:
            if not entry.lets_visitors_in:  # nor do a host's own routes with these classes
                raise Problem(
                    403,
                    URN + "scope",
                    "The token is for one session",
                    "A session token reads its session, starts runs in it and confirms its calls, nothing "
                    "else.",
                    scopes=list(entry.scopes),
                )
        elif entry.scopes and set(entry.scopes).isdisjoint(bearer.scopes):
            raise _lacking(bearer, entry.scopes)
        return bearer


class SessionAuth(security.SessionAuth):
    """Authentication by Django's session: 401 if nobody is signed in, 403 for a POST without CSRF token."""

    def __call__(self, request: HttpRequest) -> Any | None:
        try:
            user = self.authenticate(request, None)
        except PermissionDeniedError as error:  # also in an API whose project registers no errors
            raise Problem.of(error) from error
        _throttle(request, user)
        if user is not None and check_csrf(request):
            raise Problem.named("csrf", "Send the CSRF cookie's value in the X-CSRFToken header.")
        if user is not None and not is_let_in(request):
            raise Problem.named(
                "permission-denied",
                "The admin site does not let this session in; it may ask for a second factor. Sign in there "
                "first, or send a token.",
            )
        return user

    def authenticate(self, request: HttpRequest, key: str | None) -> Any | None:
        """Find the signed-in, active user; None if there is none."""
        user = policy.identify(request)
        return user if user.is_authenticated and user.is_active else None


class Signer(NamedTuple):
    """The sender of a signed event, who is no user: known by the name and the scope of its secret."""

    name: str
    scope: str

    @property
    def pk(self) -> str:
        """The sender's key for the limit of requests."""
        return f"events:{self.scope}:{self.name}"


class SignatureAuth(security.APIKeyHeader):
    """Authentication of an event by the headers of Standard Webhooks; with them, nothing else counts."""

    param_name = "webhook-signature"
    openapi_description = "With `webhook-id` and `webhook-timestamp`, as in Standard Webhooks 1.0.0."

    def authenticate(self, request: HttpRequest, key: str | None) -> Signer | None:
        """Verify the signature of the whole body by a secret of the event; None without a signature.

        Raises Problem: 401 for a signature that is wrong or of more than five minutes ago or ahead, and if
        there is no secret for the event's name and scope; 429 above the limit of requests.
        """
        if key is None:
            return None
        match: Any = request.resolver_match
        signer = Signer(match.kwargs["name"], request.GET.get("scope", ""))
        secrets = settings.event_secrets
        for secret in secrets.get(signer) or secrets.get(("*", signer.scope)) or ():
            from standardwebhooks import Webhook, WebhookVerificationError

            with suppress(WebhookVerificationError, ValueError):  # the latter for a header of another form
                Webhook(secret).verify(request.body, dict(request.headers), json_parse=False)
                _throttle(request, signer)
                return signer
        _throttle(request)
        raise Problem.named(
            "not-authenticated",
            "The signature is not that of a secret for this event's name and scope, or webhook-timestamp is "
            "more than five minutes old or ahead. Sign the body as it is sent.",
        )


class OpenPath(PathView):
    """A path whose view is called without a login, because its operations authenticate by themselves."""

    def get_view(self) -> Any:
        """Build the view for Django's URLs; anonymous users pass the middlewares that require a login.

        These middlewares would redirect a request with a token to the login page. The first attribute is that
        of Django's LoginRequiredMiddleware, the second that of django-stronghold.
        """
        view: Any = super().get_view()
        view.login_required, view.STRONGHOLD_IS_PUBLIC = False, True
        return view

    def clone(self) -> PathView:
        """Copy the path for another API that mounts the router."""
        cloned = super().clone()
        cloned.__class__ = OpenPath
        return cloned


class Throttle(SimpleRateThrottle):
    """The limit of requests for one user or visitor, or for one network address if `user` is None."""

    def __init__(self, rate: str, user: Any) -> None:
        super().__init__(rate)
        self.user = user

    def get_cache_key(self, request: HttpRequest) -> str:
        if self.user is not None:
            ident = self.user.actor_id if isinstance(self.user, SessionBearer) else self.user.pk
            return f"throttle_agentruns_user_{schema_of(settings.DATABASE)}_{ident}"  # keys repeat in schemas
        # Unlike ninja, trust X-Forwarded-For only if the project declared its proxies.
        is_declared = ninja_settings.NUM_PROXIES is not None
        address = self.get_ident(request) if is_declared else request.META.get("REMOTE_ADDR")
        return f"throttle_agentruns_anonymous_{address}"


def is_let_in(request: HttpRequest) -> bool:
    """Check whether the admin site with the console lets a staff user's session in; True for other users.

    A project's site may ask more than a password, such as a second factor. The site is that of the console's
    URL; without such a URL, each site with the console has to let the session in.
    """
    if not getattr(request.user, "is_staff", False) or not apps.is_installed("django.contrib.admin"):
        return True
    from django.contrib.admin.sites import all_sites

    sites, mounted = [site for site in all_sites if site.is_registered(Run)], []
    for name in {site.name for site in sites}:
        with suppress(NoReverseMatch, Resolver404, AttributeError):
            page: Any = resolve(reverse(f"{name}:agentruns_run_changelist")).func
            mounted.append(page.model_admin.admin_site)
    try:
        answers = [bool(site.has_permission(request)) for site in mounted or sites]
    except Exception:  # a project's site may raise anything
        logger.warning("An admin site failed in has_permission(); nobody is let in.", exc_info=True)
        return False
    return any(answers) if mounted else all(answers)


def user_of(request: HttpRequest) -> Any:
    """Get the user who acts; raises AuthenticationError if there is no signed-in, active user.

    A host that mounts the router with another `auth` has to set `request.user`. An anonymous user is refused,
    because such a user has no id, and would own the program's runs, which have no owner. Without a
    token of ours, notes on the user who acts in the user's name, as `policy.identify` does and raises.
    """
    is_by_token = isinstance(getattr(request, "auth", None), ApiToken)  # then a cookie says nothing
    user = request.user if is_by_token else policy.identify(request)
    if not user.is_authenticated or not user.is_active:
        raise AuthenticationError
    return user


def token_of(request: HttpRequest) -> ApiToken | None:
    """Find the valid token in a request's header, also for an operation without authentication; or None."""
    scheme, _, text = request.headers.get(HEADER, "").partition(" ")
    return api_tokens.authenticate(text.strip()) if scheme.lower() == "bearer" else None


def channel_of(request: HttpRequest) -> str:
    """Name the channel of a request for the journal: "api", or "api:" and the prefix of its token."""
    token = getattr(request, "auth", None)
    return f"{deciders.API_CHANNEL}{token.prefix}" if isinstance(token, ApiToken) else "api"


def entry_for(operation: Operation) -> Entry:
    """Build the notes on a request to `operation`, with the scopes, of which a token needs at least one."""
    scope, reads = ApiToken.Scope, operation.methods == ["GET"]
    scopes = [scope.RUNS_READ if reads else scope.RUNS_WRITE]
    if operation.auth_param is None:  # open to everybody
        scopes = []
    elif operation.path.startswith("/approvals"):
        # The approval decides which of the two scopes a decision requires.
        deciding = [scope.APPROVALS_DECIDE, scope.APPROVALS_OWN]
        scopes = [scope.RUNS_READ, scope.APPROVALS_DECIDE] if reads else deciding
    elif operation.path.startswith("/rules"):
        scopes = [scope.RUNS_READ if reads else scope.RULES_WRITE]
    elif operation.path.startswith("/events"):
        scopes = [scope.EVENTS_WRITE]
    return Entry([each.value for each in scopes], operation.operation_id in VISITORS, operation=operation)


def entry_of(request: HttpRequest) -> Entry:
    """Get the router's notes on a request; new, empty notes if a host's own route uses these classes."""
    return getattr(request, MARK, None) or Entry()  # a host may use these classes on its own routes


def require_token_scope(request: HttpRequest, scope: str) -> None:
    """Raise Problem (403) if the request's token lacks a scope; a Django session has all scopes."""
    if not has_token_scope(request, scope):
        raise _lacking(request.auth, [scope])  # type: ignore[attr-defined]


def has_token_scope(request: HttpRequest, scope: str) -> bool:
    """Check whether the request's token has a scope; a Django session has all scopes."""
    token = getattr(request, "auth", None)
    return not isinstance(token, ApiToken) or scope in token.scopes


def require_password(request: HttpRequest, risk: str, what: str, verb: str) -> None:
    """Raise Problem (403) if a risk takes a fresh password, which no token can give; `verb` is the button."""
    has_session = not isinstance(getattr(request, "auth", None), ApiToken)
    if permissions.needs_password(request, risk, has_session=has_session):
        raise Problem.named(
            "reauthentication-needed",
            f"The risk of this {what} is high. {verb} it in the console, which asks for your password, or "
            "give it there first; a token cannot.",
        )


def _lacking(token: ApiToken, scopes: Sequence[str]) -> Problem:
    return Problem.named(
        "scope",
        f"Token {token.prefix} has {', '.join(token.scopes)}; this takes {' or '.join(scopes)}. Make a token "
        "that has it.",
        scopes=list(scopes),
    )


def _throttle(request: HttpRequest, user: Any = None) -> None:
    """Count a request once against AGENTRUNS_API_THROTTLE; Problem (429) above it, if the cache works."""
    entry = entry_of(request)
    rate = settings.api_throttle.get("user" if user is not None else "anonymous")
    if rate is None or entry.is_counted:
        return
    entry.is_counted = True
    throttle = Throttle(rate, user)
    try:
        if throttle.allow_request(request):
            return
    except Exception:  # any error of a cache's client; without a cache there is no limit
        logger.warning("The cache failed, so a request was not counted.", exc_info=True)
        return
    seconds = math.ceil(throttle.wait() or throttle.duration or 1)
    entry.headers[429] = {"Retry-After": str(seconds)}
    limit = f"At most {throttle.num_requests} requests in {throttle.duration} s."
    raise Problem.named("throttled", f"{limit} Send the next one in {seconds} s.", retry_after=seconds)


# Visibility: the answer is the same for an object that the user may not see and for a missing object.
# The services check the permissions to act.


def visible_runs(user: Any) -> QuerySet[Run]:
    """Select the runs that a user may see, with their sessions."""
    return policy.visible_runs(user).select_related("session")


def find_run(user: Any, run_id: str) -> Run:
    """Find a run that the user may see, as `readable`; raises DurableRunNotFoundError."""
    try:
        return readable(user, visible_runs(user).get(pk=UUID(run_id)))
    except (Run.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no run {run_id[:SHOWN]}.") from None


def shown(user: Any, run: Run, owner: str | None) -> Run:
    """Prepare a run, as `readable` does, for the answer to the request that started it or wrote to it.

    Raises DurableRunNotFoundError if the run existed before and the user may not see it. If the user acts for
    another `owner`, such a run is returned instead, without its output, error and `blocked_reason`.
    """
    if not run.is_new and not visible_runs(user).filter(pk=run.pk).exists():
        if owner in (None, str(user.pk)):
            raise DurableRunNotFoundError(str(permissions.KEY_UNSEEN))
        run.output, run.error, run.blocked_reason = None, "", ""
    return readable(user, run)


def readable(user: Any, shown: Shown) -> Shown:
    """Note on a run or an approval whether the user may read all of it, and return it.

    The answers show a visitor neither the run's context nor its owner.
    """
    shown.shows_all = permissions.reads_all(user, shown)
    if isinstance(user, SessionBearer) and isinstance(shown, Run):
        shown.context = {}
        hide_owners(user, [shown])
    return shown


def hide_owners(user: Any, owned: Iterable[Run | Session]) -> None:
    """Remove the owners from runs or sessions, which are not saved again, if the user is a visitor."""
    for each in owned if isinstance(user, SessionBearer) else ():
        each.owner_id, each.owner_name = None, ""


def find_approval(user: Any, approval_id: str) -> Approval:
    """Find an approval that the user may see, with its run and session; raises NotFoundError."""
    return decisions.find_approval(approval_id, policy.visible_approvals(user))


def find_session(user: Any, key: str, scope: str | None = None) -> Session:
    """Find a session that the user may see; raises SessionAccessDeniedError or AmbiguousSessionError."""
    its: Any = [user.session_id] if isinstance(user, SessionBearer) else None
    its = its or visible_runs(user).filter(session__key=key).values("session_id")
    return sessions.find_session(key, scope, Session.objects.using(settings.DATABASE).filter(pk__in=its))
