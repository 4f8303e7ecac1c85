"""Authentication, scopes and visibility: a bearer token's owner or the session's user, never the body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.http import HttpRequest
from ninja import security
from ninja.conf import settings as ninja_settings
from ninja.errors import AuthenticationError
from ninja.throttling import AnonRateThrottle, UserRateThrottle
from ninja.utils import check_csrf

from agentruns.api.errors import MARK, URN, Problem
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, NotFoundError, SessionAccessDeniedError
from agentruns.models import ApiToken, Approval, Message, Run, Session
from agentruns.models.querysets import ApprovalQuerySet
from agentruns.services import api_tokens
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.redaction import get_logger

HEADER = "Authorization"
SHOWN = 50  # characters of a malformed id

logger = get_logger("agentruns.api.auth")


@dataclass(slots=True)
class Entry:
    """The router's notes on a request: scopes of which a token needs one, and headers of refusals by status.

    A stream that authenticates again shares them, so that it is counted once.
    """

    scopes: Sequence[str] = ()
    headers: dict[int, dict[str, str]] = field(default_factory=dict)
    is_counted: bool = False


class BearerAuth(security.HttpBearer):
    """A token of `create_api_token`. A request with an Authorization header is never that of a session."""

    openapi_description = "A token printed by `manage.py create_api_token`: ar_…"

    def __call__(self, request: HttpRequest) -> Any | None:
        _entry(request).headers[401] = {"WWW-Authenticate": "Bearer"}
        return self.authenticate(request, "") if HEADER in request.headers else None

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        """Return the token of the header and let its owner act; raise Problem if it is not valid here."""
        found = token_of(request)
        if found is None:
            _throttle(request)
            raise Problem(
                401,
                URN + "not-authenticated",
                "Not authenticated",
                "The Authorization header is not that of a valid token: mistyped, expired, revoked, or of an "
                "owner who is not active. Send 'Bearer ' and what manage.py create_api_token printed.",
            )
        _act_as(request, found.owner)
        _throttle(request, found.owner)
        _require_scope(request, found)
        return found


class SessionAuth(security.SessionAuth):
    """Django's session. Nobody signed in is 401, also without a CSRF token; a session without one is 403."""

    def __call__(self, request: HttpRequest) -> Any | None:
        user = self.authenticate(request, None)
        _throttle(request, user)
        if user is not None and check_csrf(request):
            raise Problem(
                403,
                URN + "csrf",
                "The CSRF token is missing or wrong",
                "Send the CSRF cookie's value in the X-CSRFToken header.",
            )
        return user

    def authenticate(self, request: HttpRequest, key: str | None) -> Any | None:
        """Return the signed-in user, or None."""
        user = request.user
        return user if user.is_authenticated and user.is_active else None


class UserThrottle(UserRateThrottle):
    scope = "agentruns_user"


class AnonymousThrottle(AnonRateThrottle):
    scope = "agentruns_anonymous"

    def get_ident(self, request: HttpRequest) -> str | None:
        # ninja would believe any X-Forwarded-For; it counts only behind proxies that the project declared.
        if ninja_settings.NUM_PROXIES is None:
            return request.META.get("REMOTE_ADDR")
        return super().get_ident(request)


def user_of(request: HttpRequest) -> Any:
    """Return the user who acts.

    A host that mounts the router with another `auth` has to set `request.user`: an actor of None would be
    the program itself, and an anonymous one would own what nobody owns.
    """
    user = request.user
    if not user.is_authenticated or not user.is_active:
        raise AuthenticationError
    return user


def token_of(request: HttpRequest) -> ApiToken | None:
    """Return the valid token of the request's header, also where nobody has to authenticate; else None."""
    scheme, _, text = request.headers.get(HEADER, "").partition(" ")
    return api_tokens.authenticate(text.strip()) if scheme.lower() == "bearer" else None


def channel_of(request: HttpRequest) -> str:
    """Return the channel of a decision: "api", with the prefix of the token if it was made with one."""
    token = getattr(request, "auth", None)
    return f"api:{token.prefix}" if isinstance(token, ApiToken) else "api"


def scopes_for(path: str, methods: Sequence[str]) -> list[str]:
    """Return the scopes of which a token needs one for an operation of the router."""
    reads = set(methods) <= {"GET", "HEAD"}
    if path.startswith("/approvals"):
        decide = ApiToken.Scope.APPROVALS_DECIDE.value
        return [ApiToken.Scope.RUNS_READ.value, decide] if reads else [decide]
    return [ApiToken.Scope.RUNS_READ.value if reads else ApiToken.Scope.RUNS_WRITE.value]


def _entry(request: HttpRequest) -> Entry:
    return getattr(request, MARK, None) or Entry()  # a host may use these classes on routes of its own


def _require_scope(request: HttpRequest, token: ApiToken) -> None:
    scopes = _entry(request).scopes
    if not scopes or not set(scopes).isdisjoint(token.scopes):
        return
    raise Problem(
        403,
        URN + "scope",
        "The token lacks a scope",
        f"Token {token.prefix} has {', '.join(token.scopes)}; this takes {' or '.join(scopes)}. Make a token "
        "that has it.",
        scopes=list(scopes),
    )


def _throttle(request: HttpRequest, user: Any = None) -> None:
    """Count the request under AGENTRUNS_API_THROTTLE; raise Problem (429) if it is one too many."""
    entry = _entry(request)
    rate = settings.api_throttle.get("user" if user is not None else "anonymous")
    if rate is None or entry.is_counted:
        return
    entry.is_counted = True
    throttle = UserThrottle(rate) if user is not None else AnonymousThrottle(rate)
    try:
        if throttle.allow_request(request):
            return
    except Exception:  # whatever a cache's client raises: without a cache nobody is kept out
        logger.warning("The cache failed, so a request was not counted.", exc_info=True)
        return
    seconds = math.ceil(throttle.wait() or throttle.duration or 1)
    entry.headers[429] = {"Retry-After": str(seconds)}
    limit = f"At most {throttle.num_requests} requests in {throttle.duration} s."
    detail = f"{limit} Send the next one in {seconds} s."
    raise Problem(429, URN + "throttled", "Too many requests", detail, retry_after=seconds)


def _act_as(request: HttpRequest, user: Any) -> None:
    async def auser() -> Any:
        return user

    request.user = user
    request.auser = auser


# Visibility: "not yours" and "not there" are the same answer. Permissions to act are the services'.


def visible_runs(user: Any) -> QuerySet[Run]:
    """Return the user's own runs; all of them, unowned ones too, with the view permission."""
    return Run.objects.using(settings.DATABASE).for_user(user).select_related("session")


def visible_approvals(user: Any) -> ApprovalQuerySet:
    """Return the approvals of visible runs; all of them for those who decide."""
    return Approval.objects.using(settings.DATABASE).for_user(user)


def find_run(user: Any, run_id: str, *related: str) -> Run:
    """Return a run the user may see, read together with `related`, or raise DurableRunNotFoundError."""
    try:
        return visible_runs(user).select_related("session", *related).get(pk=UUID(run_id))
    except (Run.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no run {run_id[:SHOWN]}.") from None


def run_of_key(user: Any, key: str | None) -> Run | None:
    """Return the user's own run of an idempotency key, if there is one."""
    return visible_runs(user).filter(owner_id=user.pk, idempotency_key=key).first() if key else None


def find_approval(user: Any, approval_id: str) -> Approval:
    """Return an approval the user may see, or raise NotFoundError."""
    try:
        return visible_approvals(user).get(pk=UUID(approval_id))
    except (Approval.DoesNotExist, ValueError):
        raise NotFoundError(f"There is no approval {approval_id[:SHOWN]}.") from None


def find_session(user: Any, key: str) -> Session:
    """Return a session the user may see, or raise SessionAccessDeniedError."""
    # Databases disagree about texts that no key can be, so they are not asked.
    if len(key) <= NAME_LENGTH and key.isprintable():
        sessions = Session.objects.using(settings.DATABASE).filter(key=key)
        if not user.has_perm("agentruns.view_run"):
            sessions = sessions.filter(owner_id=user.pk)
        if session := sessions.first():
            return session
    raise SessionAccessDeniedError(f"There is no session {key[:NAME_LENGTH]!r}.")


def require_call(run: Run, call_id: str) -> None:
    """Raise NotFoundError unless the run has such a call."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=call_id)
    if not call_id.isprintable() or not rows.exclude(call_id="").exists():
        raise NotFoundError(f"Run {run.pk} has no call {call_id[:SHOWN]}.")
