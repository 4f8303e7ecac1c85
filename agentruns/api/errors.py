"""Errors as application/problem+json (RFC 9457), with one table from exceptions to problems."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from http.client import responses
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, RawPostDataException
from django.http.multipartparser import MultiPartParserError
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from agentruns import exceptions as core
from agentruns.conf import settings
from agentruns.content import AS_BLOCKS, AS_TEXT
from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.services.permissions import reads_all
from agentruns.tools import InvalidArguments
from agentruns.utils import json as canonical, redaction
from agentruns.utils.clock import utc

CONTENT_TYPE = "application/problem+json"
URN = "urn:agentruns:"
MARK = "_agentruns_entry"  # the attribute with the router's notes, which marks requests to this router

# The nearest base class of an exception decides. A hidden object has the same type as a missing object.
PROBLEMS: dict[type[Exception], tuple[int, str, str]] = {
    core.NotFoundError: (404, "not-found", "Not found"),
    core.SessionAccessDeniedError: (404, "session-not-found", "No such session"),
    core.PermissionDeniedError: (403, "permission-denied", "Not allowed"),
    core.AmbiguousSessionError: (409, "ambiguous-session", "Several scopes have a session of that key"),
    core.QuotaExceededError: (429, "quota-exceeded", "Too many runs"),
    core.UnknownAgentError: (422, "unknown-agent", "Unknown agent"),
    core.ContentTooLargeError: (413, "content-too-large", "A file is too large"),
    core.ContentTypeError: (415, "content-type", "A file is of a type that is not taken"),
    core.ContentError: (422, "content", "A block of the input is none"),
    InvalidArguments: (422, "invalid-arguments", "The arguments do not fit the tool"),
    core.ApprovalStateError: (409, "approval-state", "The approval is not what was decided on"),
    core.RuleStateError: (409, "rule-state", "The rule's state does not allow this"),
    core.RunStateError: (409, "run-state", "The run's state does not allow this"),
    core.SessionBusyError: (409, "session-busy", "The session is busy"),
    core.SwitchedOffError: (409, "switched-off", "The agent is switched off"),
    core.DurableConfigMismatchError: (409, "config-mismatch", "The agent's definition has changed"),
    core.JournalRewoundError: (409, "journal-rewound", "The database lost rows of the run"),
    core.LeaseLostError: (409, "lease-lost", "Another process took the run over"),
    core.JournalLockedError: (409, "journal-locked", "Another transaction keeps the session locked"),
    core.ToolRefused: (422, "tool-refused", "The tool refused"),
    core.JournalConflictError: (409, "journal-conflict", "The run changed meanwhile; try again"),
    core.BudgetExceededError: (409, "budget-exceeded", "A budget of the run is used up"),
    core.ToolDurabilityError: (409, "tool-durability", "The outcome of a call is not known"),
    core.NotDurableError: (422, "not-durable", "Nothing can be made durable here"),
    core.MemoryStoreNotDurableError: (422, "memory-store-not-durable", "The store forgets everything"),
    core.JournalUnreadableError: (500, "journal-unreadable", "The journal is damaged"),
    core.RenderingError: (500, "rendering", "A function of the agent failed"),
    core.PayloadError: (500, "payload", "What the journal points at is missing or was altered"),
    core.AgentRunsError: (500, "error", "The request failed"),
}
# Status and title of each type: those of exceptions, and those of the API itself.
TITLES: dict[str, tuple[int, str]] = {
    **{name: (status, title) for status, name, title in PROBLEMS.values()},
    "malformed": (400, "The request cannot be read"),
    "bad-cursor": (400, "Bad cursor"),
    "not-authenticated": (401, "Not authenticated"),
    "csrf": (403, "The CSRF token is missing or wrong"),
    "reauthentication-needed": (403, "A fresh password is needed"),
    "scope": (403, "The token lacks a scope"),
    "idempotency-key": (409, "The idempotency key belongs to another request"),
    "too-large": (413, "The request is too large"),
    "validation": (422, "The request is not valid"),
    "throttled": (429, "Too many requests"),
    "streams": (429, "Too many event streams"),
    "unavailable": (503, "Unavailable"),
}

UNREADABLE = (SuspiciousOperation, MultiPartParserError, RawPostDataException)  # of a request's body

# Limits that keep an answer from being much larger than its request.
MOST_ERRORS = 20
LONGEST_NAME = 100

# The attributes of exceptions that become members of the body.
FACTS = ("run_id", "lease_expires_at", "parts", "scopes", "retry_after")


class Problem(HttpError):
    """An error with a status and a stable type; `extras` become members of the body, `detail` is redacted."""

    def __init__(self, status: int, type: str, title: str, detail: str, **extras: Any) -> None:
        super().__init__(status, redaction.redact(detail))
        self.type = type
        self.title = title
        self.extras = extras

    @classmethod
    def named(cls, name: str, detail: str, **extras: Any) -> Problem:
        """Build a problem of the type `name` in TITLES; `extras` become members of the body."""
        status, title = TITLES[name]
        return cls(status, URN + name, title, detail, **extras)

    @classmethod
    def of(cls, error: Exception, **extras: Any) -> Problem:
        """Build the problem of an exception of agentruns.

        `extras` become members of the body, and so do the attributes in FACTS that are not empty. An
        ApprovalStateError that InvalidArguments caused becomes the problem of InvalidArguments.
        """
        cause = error.__cause__ if isinstance(error, core.ApprovalStateError) else None
        of = cause if isinstance(cause, InvalidArguments) else error  # edited arguments that do not fit: 422
        name = next(PROBLEMS[kind][1] for kind in type(of).__mro__ if kind in PROBLEMS)
        known = {fact: getattr(error, fact, None) for fact in FACTS}
        facts = {fact: value for fact, value in known.items() if value}
        return cls.named(name, str(error), **{**facts, **extras})

    def response(self) -> HttpResponse:
        """Build the response; an extra `retry_after` also becomes the header Retry-After."""
        body = {"type": self.type, "title": self.title, "status": self.status_code, "detail": self.message}
        extras = {key: utc(each) if isinstance(each, datetime) else each for key, each in self.extras.items()}
        seconds = self.extras.get("retry_after")
        return JsonResponse(
            canonical.legal({**extras, **body}),
            status=self.status_code,
            content_type=CONTENT_TYPE,
            headers={"Retry-After": str(seconds)} if seconds else None,
        )


def register_errors(api: NinjaAPI) -> None:
    """Register exception handlers, so that `api` answers the errors of our router's routes as problem+json.

    Call this once, after the API's own handlers are registered: on the API's other routes these still answer
    all errors but those of agentruns, which are answered as problem+json on every route. Without this call
    our errors have the same statuses, but bodies in the API's own form.
    """

    def register(kind: type[Exception]) -> None:
        handlers = api._exception_handlers  # ninja has no public way to get a registered handler
        theirs: Any = handlers.get(kind, handlers[Exception])

        def handle(request: HttpRequest, error: Any) -> Any:
            is_ours = isinstance(error, Problem) or getattr(request, MARK, False)
            if not is_ours and kind is not core.AgentRunsError:
                return theirs(request, error)
            # A host's view may raise a class.
            return problem_of(error() if isinstance(error, type) else error).response()

        api.add_exception_handler(kind, handle)

    for kind in (core.AgentRunsError, HttpError, ValidationError, Http404, *UNREADABLE):
        register(kind)


def problem_of(error: Exception) -> Problem:
    """Build the problem of an exception of agentruns, of ninja, or of a request that cannot be read."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, core.AgentRunsError):
        return Problem.of(error)
    if isinstance(error, Http404):
        return Problem.named("not-found", str(error) or "Not found.")
    if isinstance(error, AuthenticationError):
        return Problem.named("not-authenticated", "Sign in, or send a bearer token.")
    if isinstance(error, HttpError) and error.status_code != HTTPStatus.BAD_REQUEST:
        title = responses.get(error.status_code, "Error")  # a host's own status may have no name
        return Problem(error.status_code, "about:blank", title, error.message)
    if not isinstance(error, ValidationError):
        return Problem.named("malformed", f"{error}. Send JSON in UTF-8.")
    errors = []
    for each in error.errors[:MOST_ERRORS]:
        place = [*each["loc"]]
        if place[0] == "body":
            del place[1:2]  # our parameter's name means nothing to clients
        parts = (part for part in place if part not in (AS_TEXT, AS_BLOCKS))
        loc = [part[:LONGEST_NAME] if isinstance(part, str) else part for part in parts]
        errors.append({"loc": loc, "msg": each["msg"], "type": each["type"]})
    detail = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors[:3])
    return Problem.named("validation", detail, errors=redaction.redacted(errors))


def run_facts(user: Any, run: Run, call_id: str = "") -> dict[str, Any]:
    """Describe a run for a 409: its id and status, and who ended it or, if it is paused, who paused it.

    With `call_id`, adds that id, and who resolved the call. Each person is named with the time, but to `user`
    only if the user may read all of the run or is this person.
    """
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk).own().order_by("-seq")
    facts: dict[str, Any] = {"run_id": str(run.pk), "run_status": run.status}
    facts |= _who_and_when(user, run, "ended", rows.filter(kind__in=events.CLOSING).first())
    if run.status == Run.Status.PAUSED:
        facts |= _who_and_when(user, run, "paused", rows.filter(kind=events.RUN_PAUSED).first())
    if call_id:
        verdicts = rows.filter(kind=events.ORPHAN_RESOLVED, call_id=call_id)
        facts |= {"call_id": call_id, **_who_and_when(user, run, "resolved", verdicts.first())}
    return facts


def approval_facts(user: Any, approval: Approval) -> dict[str, Any]:
    """Describe an approval for a 409: ids, status, digest, and who decided it last, and when.

    For a cancelled approval, names who ended the run instead. Names a person to `user` as `run_facts` does.
    """
    rows = Message.objects.using(settings.DATABASE).filter(run_id=approval.run_id).order_by("-seq")
    decided = rows.filter(kind=events.APPROVAL_DECIDED, call_id=approval.call_id)
    is_over = approval.status == Approval.Status.CANCELLED
    last = (rows.filter(kind__in=events.CLOSING) if is_over else decided).first()
    return {
        "approval_id": str(approval.pk),
        "approval_status": approval.status,
        "digest": approval.digest,
        "run_id": str(approval.run_id),
        **_who_and_when(user, approval, "decided", last),
    }


def _who_and_when(user: Any, about: Run | Approval, done: str, row: Message | None) -> dict[str, Any]:
    if row is None:
        return {}
    actor = row.payload.get("actor") or {}
    if actor.get("id") != getattr(user, "actor_id", str(user.pk)) and not reads_all(user, about):
        actor = {}
    return {
        f"{done}_by": actor.get("id") or None,
        f"{done}_by_name": redaction.redact(actor.get("name", "")),
        f"{done}_at": row.created_at,
    }
