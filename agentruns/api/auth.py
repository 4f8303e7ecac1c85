"""Authentication, scopes and visibility: a token's owner or session, or Django's user, never the body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db.models import QuerySet
from django.http import HttpRequest
from ninja import security
from ninja.conf import settings as ninja_settings
from ninja.errors import AuthenticationError
from ninja.operation import Operation
from ninja.throttling import SimpleRateThrottle
from ninja.utils import check_csrf

from agentruns import journal, services
from agentruns.api.errors import MARK, URN, Problem
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, NotFoundError
from agentruns.models import ApiToken, Approval, Message, Run, Session, SessionBearer
from agentruns.utils.redaction import get_logger

if TYPE_CHECKING:
    from agentruns.journal.events import Row

HEADER = "Authorization"
SHOWN = 50  # characters of a malformed id
# The operations that a session token is for; everything else is refused.
VISITORS = {
    "list_runs", "start_run", "get_run", "list_messages", "stream_events", "list_sessions", "get_session",
    "send_message", "list_conversation", "list_approvals", "get_approval", "approve", "deny", "answer",
}  # fmt: skip

logger = get_logger("agentruns.api.auth")


@dataclass(slots=True)
class Entry:
    """The router's notes on a request: scopes of which a token needs one, and headers of refusals by status.

    A stream that authenticates again shares them, so that it is counted once.
    """

    scopes: Sequence[str] = ()
    lets_visitors_in: bool = False  # with a session token
    headers: dict[int, dict[str, str]] = field(default_factory=dict)
    is_counted: bool = False
    operation: Any = None
    before: dict[str, Any] = field(default_factory=dict)  # the request's attributes before authentication


class BearerAuth(security.HttpBearer):
    """A token of `create_api_token`. A request with an Authorization header is never that of a session."""

    openapi_description = "A token printed by `manage.py create_api_token`: ar_…"

    def __call__(self, request: HttpRequest) -> Any | None:
        entry_of(request).headers[401] = {"WWW-Authenticate": "Bearer"}
        return self.authenticate(request, "") if HEADER in request.headers else None

    def authenticate(self, request: HttpRequest, token: str) -> ApiToken:
        """Return the token of the header and let its owner act; raise Problem if it is not valid here."""
        found = token_of(request)
        if found is None:
            _throttle(request)
            raise Problem.named(
                "not-authenticated",
                "The Authorization header is not that of a valid token: mistyped, expired, revoked, or of an "
                "owner who is not active or has a new password. Send 'Bearer ' and what manage.py "
                "create_api_token printed.",
            )
        user: Any = found.owner if found.session_id is None else SessionBearer(found.session_id)
        request.user = user

        async def auser() -> Any:
            return user

        request.auser = auser
        _throttle(request, user)
        entry = entry_of(request)
        if found.session_id is not None:
            if not entry.lets_visitors_in:  # nor do routes of a host that use these classes
                raise Problem(
                    403,
                    URN + "scope",
                    "The token is for one session",
                    "A session token reads its session, starts runs in it and confirms its calls, nothing "
                    "else.",
                    scopes=list(entry.scopes),
                )
        elif entry.scopes and set(entry.scopes).isdisjoint(found.scopes):
            raise _lacking(found, entry.scopes)
        return found


class SessionAuth(security.SessionAuth):
    """Django's session. Nobody signed in is 401, also without a CSRF token; a session without one is 403."""

    def __call__(self, request: HttpRequest) -> Any | None:
        user = self.authenticate(request, None)
        _throttle(request, user)
        if user is not None and check_csrf(request):
            raise Problem.named("csrf", "Send the CSRF cookie's value in the X-CSRFToken header.")
        return user

    def authenticate(self, request: HttpRequest, key: str | None) -> Any | None:
        """Return the signed-in user, or None."""
        user = request.user
        return user if user.is_authenticated and user.is_active else None


class Throttle(SimpleRateThrottle):
    """The count of a user's requests, or of those that come from an address without a user."""

    def __init__(self, rate: str, user: Any) -> None:
        super().__init__(rate)
        self.user = user

    def get_cache_key(self, request: HttpRequest) -> str:
        if self.user is not None:
            ident = self.user.actor_id if isinstance(self.user, SessionBearer) else self.user.pk
            return f"throttle_agentruns_user_{ident}"
        # ninja would believe any X-Forwarded-For; it counts only behind proxies that the project declared.
        is_declared = ninja_settings.NUM_PROXIES is not None
        address = self.get_ident(request) if is_declared else request.META.get("REMOTE_ADDR")
        return f"throttle_agentruns_anonymous_{address}"


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
    return services.api_tokens.authenticate(text.strip()) if scheme.lower() == "bearer" else None


def channel_of(request: HttpRequest) -> str:
    """Return the channel of a decision: "api", with the prefix of the token if it was made with one."""
    token = getattr(request, "auth", None)
    return f"api:{token.prefix}" if isinstance(token, ApiToken) else "api"


def require_password(request: HttpRequest, approval: Approval) -> None:
    """Raise Problem (403) where a call of high risk takes a fresh password; a token cannot give one."""
    is_token = isinstance(getattr(request, "auth", None), ApiToken)
    if services.permissions.needs_password(request, approval, has_session=not is_token):
        raise Problem.named(
            "reauthentication-needed",
            "The risk of this call is high. Approve it in the console, which asks for your password, or give "
            "it there first; a token cannot.",
        )


def entry_for(operation: Operation) -> Entry:
    """Build the notes on a request to an operation: the tokens that may use the operation."""
    scope, reads = ApiToken.Scope, operation.methods == ["GET"]
    scopes = [scope.RUNS_READ if reads else scope.RUNS_WRITE]
    if operation.auth_param is None:  # open to everybody
        scopes = []
    elif operation.path.startswith("/approvals"):
        # Which of the two a decision takes depends on the approval.
        deciding = [scope.APPROVALS_DECIDE, scope.APPROVALS_OWN]
        scopes = [scope.RUNS_READ, scope.APPROVALS_DECIDE] if reads else deciding
    is_for_visitors = operation.operation_id in VISITORS
    return Entry([each.value for each in scopes], is_for_visitors, operation=operation)


def entry_of(request: HttpRequest) -> Entry:
    """Return the router's notes on a request."""
    return getattr(request, MARK, None) or Entry()  # a host may use these classes on routes of its own


def require_token_scope(request: HttpRequest, scope: str) -> None:
    """Raise Problem (403) if the request came with a token that lacks a scope; a Django session has all."""
    if not has_token_scope(request, scope):
        raise _lacking(request.auth, [scope])  # type: ignore[attr-defined]


def has_token_scope(request: HttpRequest, scope: str) -> bool:
    """Tell whether the request's token has a scope; a Django session has all."""
    token = getattr(request, "auth", None)
    return not isinstance(token, ApiToken) or scope in token.scopes


def _lacking(token: ApiToken, scopes: Sequence[str]) -> Problem:
    return Problem.named(
        "scope",
        f"Token {token.prefix} has {', '.join(token.scopes)}; this takes {' or '.join(scopes)}. Make a token "
        "that has it.",
        scopes=list(scopes),
    )


def _throttle(request: HttpRequest, user: Any = None) -> None:
    """Count the request under AGENTRUNS_API_THROTTLE; raise Problem (429) if it is one too many."""
    entry = entry_of(request)
    rate = settings.api_throttle.get("user" if user is not None else "anonymous")
    if rate is None or entry.is_counted:
        return
    entry.is_counted = True
    throttle = Throttle(rate, user)
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
    raise Problem.named("throttled", detail, retry_after=seconds)


# Visibility: "not yours" and "not there" are the same answer. Permissions to act are the services'.


def visible_runs(user: Any) -> QuerySet[Run]:
    """Return the runs that a user may see, with their session."""
    return journal.policy.visible_runs(user).select_related("session")


def find_run(user: Any, run_id: str) -> Run:
    """Return a run the user may see, with its session, or raise DurableRunNotFoundError."""
    try:
        return readable(user, visible_runs(user).get(pk=UUID(run_id)))
    except (Run.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no run {run_id[:SHOWN]}.") from None


def shown(user: Any, run: Run, is_new: bool, owner: str | None) -> Run:
    """Return a run for the answer to the request that starts it, or writes to it; DurableRunNotFoundError.

    One found by its key is shown as any other; without what came of it to who may act for another `owner`
    and not see it.
    """
    if not is_new and not visible_runs(user).filter(pk=run.pk).exists():
        if owner in (None, str(user.pk)):
            raise DurableRunNotFoundError(str(services.permissions.KEY_UNSEEN))
        run.output, run.error, run.blocked_reason = None, "", ""
    return readable(user, run)


def readable(user: Any, run: Run) -> Run:
    """Return a run as somebody may have it: a visitor is not shown what the project said of the task."""
    if isinstance(user, SessionBearer):
        run.context = {}
    return run


def find_approval(user: Any, approval_id: str) -> Approval:
    """Return an approval the user may see, or raise NotFoundError."""
    try:
        return journal.policy.visible_approvals(user).select_related("run__session").get(pk=UUID(approval_id))
    except (Approval.DoesNotExist, ValueError):
        raise NotFoundError(f"There is no approval {approval_id[:SHOWN]}.") from None


def find_session(user: Any, key: str, scope: str | None = None) -> Session:
    """Return a session the user may see; raise SessionAccessDeniedError, AmbiguousSessionError."""
    among = Session.objects.using(settings.DATABASE)
    if isinstance(user, SessionBearer):
        among = among.filter(pk=user.session_id)
    else:
        among = among.filter(pk__in=visible_runs(user).filter(session__key=key).values("session_id"))
    return services.sessions.find_session(key, scope, among)


def row_for(user: Any, row: Row) -> Row:
    """Return a row as somebody may have it: a visitor is not shown what the agent was told beforehand."""
    if not isinstance(user, SessionBearer):
        return row
    hidden = {"instructions", "stored"} if "instructions" in row.payload else set()
    hidden |= {"context"} if row.kind == journal.events.RUN_STARTED else set()
    return row._replace(payload={name: each for name, each in row.payload.items() if name not in hidden})


def require_call(run_id: UUID, call_id: str) -> None:
    """Raise NotFoundError unless the run has such a call."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run_id, call_id=call_id)
    if not call_id.isprintable() or not rows.exclude(call_id="").exists():
        raise NotFoundError(f"Run {run_id} has no call {call_id[:SHOWN]}.")
