"""Who is asking: the owner of a bearer token, or the user of the Django session. Never from the body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest
from ninja import security
from ninja.errors import AuthenticationError
from ninja.utils import check_csrf

from agentruns.api import throttling
from agentruns.api.errors import URN, Problem
from agentruns.models import ApiToken
from agentruns.services import api_tokens

HEADER = "Authorization"
SCOPES = "_agentruns_scopes"
TOKEN = "_agentruns_token"  # noqa: S105 - the name of an attribute
ANSWER = "_agentruns_answer"
COUNTED = "_agentruns_counted"


class BearerAuth(security.HttpBearer):
    """A token of `create_api_token`. With an Authorization header nothing else counts, no session either."""

    openapi_description = "What `manage.py create_api_token` printed: ar_…"

    def __call__(self, request: HttpRequest) -> Any | None:
        _announce(request, HTTPStatus.UNAUTHORIZED, "WWW-Authenticate", "Bearer")
        return self.authenticate(request, "") if HEADER in request.headers else None

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        """Return the token of the header and let its owner act; raise Problem if it does not count here."""
        found = token_of(request)
        if found is None:
            _count(request)
            raise Problem(
                401,
                URN + "not-authenticated",
                "Not authenticated",
                "The Authorization header is not that of a valid token: mistyped, expired, revoked, or of an "
                "owner who is not active. Send 'Bearer ' and what manage.py create_api_token printed.",
            )
        _count(request, found.owner)
        _require_scope(request, found)
        _act_as(request, found.owner)
        return found


class SessionAuth(security.SessionAuth):
    """Django's session. Nobody signed in is 401, also without a CSRF token; a session without one is 403."""

    def __call__(self, request: HttpRequest) -> Any | None:
        user = self.authenticate(request, None)
        _count(request, user)
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
    if not hasattr(request, TOKEN):
        scheme, _, text = request.headers.get(HEADER, "").partition(" ")
        found = api_tokens.authenticate(text.strip()) if scheme.lower() == "bearer" else None
        setattr(request, TOKEN, found)
    token: ApiToken | None = getattr(request, TOKEN)
    return token


def channel_of(request: HttpRequest) -> str:
    """Return what the journal keeps of where a decision came from: "api", with a token's prefix if by one."""
    token = getattr(request, "auth", None)
    return f"api:{token.prefix}" if isinstance(token, ApiToken) else "api"


def needed(path: str, methods: Sequence[str]) -> list[str]:
    """Return the scopes of which a token needs one for an operation of the router."""
    reads = set(methods) <= {"GET", "HEAD"}
    if path.startswith("/approvals"):
        decide = ApiToken.Scope.APPROVALS_DECIDE.value
        return [ApiToken.Scope.RUNS_READ.value, decide] if reads else [decide]
    return [ApiToken.Scope.RUNS_READ.value if reads else ApiToken.Scope.RUNS_WRITE.value]


def needing(scopes: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a view decorator that says which scopes count, and gives refusals the headers they need."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def answering(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            setattr(request, SCOPES, scopes)
            setattr(request, COUNTED, [])  # shared with the copies by which a stream asks who it is again
            response = run(request, *args, **kwargs)
            for name, value in getattr(request, ANSWER, {}).get(response.status_code, {}).items():
                response.headers.setdefault(name, value)
            return response

        return answering

    return decorate


def _require_scope(request: HttpRequest, token: ApiToken) -> None:
    scopes: Sequence[str] = getattr(request, SCOPES, ())
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


def _count(request: HttpRequest, user: Any = None) -> None:
    counted: list[bool] = getattr(request, COUNTED, [])
    if counted:
        return
    counted.append(True)
    try:
        if user is None:
            throttling.count_anonymous(request)
        else:
            throttling.count_user(user)
    except throttling.Throttled as error:
        _announce(request, HTTPStatus.TOO_MANY_REQUESTS, "Retry-After", str(error.retry_after))
        raise


def _announce(request: HttpRequest, status: int, name: str, value: str) -> None:
    """Give the answer a header if it has this status; ninja's exceptions carry none."""
    answers: dict[int, dict[str, str]] = getattr(request, ANSWER, {})
    setattr(request, ANSWER, {**answers, int(status): {name: value}})


def _act_as(request: HttpRequest, user: Any) -> None:
    async def auser() -> Any:
        return user

    request.user = user
    request.auser = auser
