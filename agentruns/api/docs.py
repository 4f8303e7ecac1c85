"""The OpenAPI document and its page: a guide, and for each operation examples, problem types and headers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from http import HTTPStatus
from typing import Any

from django.apps import apps
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from ninja import NinjaAPI, Swagger
from ninja.openapi.schema import OpenAPISchema

from agentruns.api.errors import CONTENT_TYPE, PROBLEMS, URN

GUIDE = """\
Durable agent runs, and the people who approve what they do.

**Who acts.** Send `Authorization: Bearer ar_…` (a token of `manage.py create_api_token`), or use the session
of a signed-in person; a POST then needs the CSRF cookie's value as `X-CSRFToken`. No body says who acts.

**Start and wait.** `POST /runs` queues a run, a worker drives it. Ask `GET /runs/{run_id}` with
`If-None-Match` until `status` is `completed`, `failed` or `cancelled`, or listen to
`GET /runs/{run_id}/events`. `awaiting-approval`, `orphaned` and `paused` wait for a person.

**Decide.** `GET /approvals?status=pending` lists the calls that wait. Show `title`, `arguments` and `risk`,
then POST to `approve`, `deny` or `answer` with the `digest` that you showed. 409 says who decided, and when.

**Repeat safely.** Give each POST an `Idempotency-Key`, and send it again as often as you like.

**Errors** are `application/problem+json`; go by `type`, which is stable, not by the text. Only an
unknown method is a plain 405 with `Allow`.

**Lists** are `{"items": […], "next": …}`: pass `next` as `cursor` (of a journal: as `after`) until it is
null.

**Values.** Ids are strings, times are ISO 8601 in UTC. Members may be added: ignore those you do not know. A
member of a request that is not documented is refused. Text by a model or a tool, titles too, is not to be
trusted: show it as text, never as HTML.
"""

_root: ContextVar[str] = ContextVar("agentruns_api_root", default="")


class RunsAPI(NinjaAPI):
    """A NinjaAPI that may be included under any namespace; ninja itself can only reverse its own."""

    def get_root_path(self, path_params: dict[str, Any]) -> str:
        return _root.get() or super().get_root_path(path_params)

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        """Return the OpenAPI document, in which every problem refers to one schema."""
        document = super().get_openapi_schema(**options)
        schemas = document["components"]["schemas"]
        for operations in document["paths"].values():
            for operation in operations.values():
                answers = sorted(operation["responses"].items())
                operation["responses"] = {status: _referring(answer, schemas) for status, answer in answers}
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        return document


def _referring(answer: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    # An operation's answer is one object shared by all documents: copy it, never change it.
    problem = answer.get("content", {}).get(CONTENT_TYPE)
    if problem is None:
        return answer
    schemas["Problem"] = problem["schema"]
    referring = {**problem, "schema": {"$ref": "#/components/schemas/Problem"}}
    return {**answer, "content": {**answer["content"], CONTENT_TYPE: referring}}


class Docs(Swagger):
    """Swagger UI that reads the OpenAPI file next to it and loads nothing from other hosts."""

    def render_page(self, request: HttpRequest, api: NinjaAPI, **kwargs: Any) -> HttpResponse:
        """Return the page, or a link to the OpenAPI file without the app "ninja", which has the scripts."""
        if apps.is_installed("ninja"):
            return super().render_page(request, api, **kwargs)
        page = format_html(
            '<!DOCTYPE html><html><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            '<title>{title}</title></head><body><h1>{title}</h1><p><a href="{url}">{link}</a></p><p>{why}</p>'
            "</body></html>",
            title=api.title,
            url=self.get_openapi_url(api, kwargs),
            link=_("The OpenAPI description of this API"),
            why=_("To read it on this page, add “ninja” to INSTALLED_APPS: the page is made of its files."),
        )
        return HttpResponse(page)

    def get_openapi_url(self, api: NinjaAPI, path_params: dict[str, Any]) -> str:
        return str(api.openapi_url).lstrip("/")


def at_its_address(view: Callable[..., Any]) -> Callable[..., Any]:
    """Let a view of the documentation know the path that it was requested at."""

    @wraps(view)
    def located(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        token = _root.set(request.path[: request.path.rindex("/") + 1])
        try:
            return view(request, *args, **kwargs)
        finally:
            _root.reset(token)

    return located


JSON = "application/json"
RUN_ID = "01a20189-67e9-70a1-9b0c-1b07670a3b0b"
APPROVAL_ID = "01a20189-6f02-7c40-8d5e-2f1c9a40b7d3"
CALL_ID = "01a20189-6efe-7b11-a2c4-90d1f0e3a866"
FORK_ID = "01a2018a-14d0-7e52-9f3b-7e4a2c9d1100"
DIGEST = "5f0c7c1b9ad0e86b8f0d4e7d2a5c6b1f3e9a8d7c6b5a49382716f5e4d3c2b1a0"
DEFINITION = "8a1f4be2c07d95b36e2a91c8d4f07b653e1d2c9b8a7f60514e3d2c1b0a9f8e7d"
HASH = "c27e19d4b80f6a35e1d2c3b4a5968778695a4b3c2d1e0f9f8e7d6c5b4a392817"
ETAG = 'W/"6dfe1fba9c2d47e08b31c5a4f7209d6e"'
STARTED, ASKED, DECIDED = (f"2026-11-03T14:05:{second}.120000Z" for second in ("00", "02", "31"))
ANN, MARIA = {"owner": "7", "owner_name": "ann"}, {"decided_by": "3", "decided_by_name": "maria"}
ARGUMENTS = {"order": "1004", "cents": 34900}

RUN: dict[str, Any] = {
    "id": RUN_ID,
    "session": "ticket-4",
    **ANN,
    "agent": "support",
    "version": "1",
    "definition": DEFINITION,
    "idempotency_key": "ticket-4",
    "status": "queued",
    "input": "Please refund order 1004.",
    "origin": None,
    "origin_seq": None,
    "step": 0,
    "usage": {},
    "output": None,
    "error": "",
    "lease_expires_at": None,
    "not_before": None,
    "attempts": 0,
    "blocked_reason": "",
    "imported_at": None,
    "created_at": STARTED,
    "updated_at": STARTED,
}
USED = {"step": 1, "usage": {"input_tokens": 812, "output_tokens": 64}, "updated_at": ASKED}
WAITING = {**RUN, **USED, "status": "awaiting-approval"}
FORK = {
    **RUN,
    "id": FORK_ID,
    "session": "ticket-4 (fork 1)",
    "idempotency_key": "",
    "input": "And send the invoice.",
    "origin": RUN_ID,
    "origin_seq": 7,
}
ROW = {
    "session": "ticket-4",
    "run": RUN_ID,
    "seq": 2,
    "kind": "user",
    "call_id": "",
    "tool_name": "",
    "attempt": 0,
    "epoch": 0,
    "payload": {"v": 1, "content": [{"type": "text", "text": "Please refund order 1004."}]},
    "prev_hash": DEFINITION,
    "hash": HASH,
    "created_at": STARTED,
}
APPROVAL = {
    "id": APPROVAL_ID,
    "run": RUN_ID,
    "call_id": CALL_ID,
    "tool_name": "refund",
    "arguments": ARGUMENTS,
    "digest": DIGEST,
    "title": "Refund 349.00 EUR for order 1004",
    "why": "The tool always asks.",
    "risk": "high",
    "status": "pending",
    "approvers": "",
    "required": 1,
    "approved_count": 0,
    "requested_at": ASKED,
    "expires_at": None,
    "decided_at": None,
    "decided_by": None,
    "decided_by_name": "",
    "reason": "",
}
DECISION = {**APPROVAL, **MARIA, "decided_at": DECIDED, "reason": "Goodwill."}
STATE = {
    "run": RUN_ID,
    "seq": 4,
    "agent": "support",
    "version": "1",
    "status": "awaiting-approval",
    "step": 1,
    "usage": USED["usage"],
    "output": None,
    "error": "",
    "definition": DEFINITION,
    "paused": False,
    "pause_requested": False,
    "cancel_requested": False,
    "model_failures": 0,
    "calls": [
        {
            "id": CALL_ID,
            "tool": "refund",
            "arguments": ARGUMENTS,
            "digest": DIGEST,
            "idempotency_key": f"{RUN_ID}:{CALL_ID}",
            "attempt": 0,
            "started_at": None,
            "outcome": None,
            "in_doubt": False,
            "approval": {"id": APPROVAL_ID, "status": "pending", "approved_by": []},
        }
    ],
}
_INTEGER, _TEXT = {"type": "integer"}, {"type": "string"}
_SCHEMA = {
    "type": "object",
    "properties": {"order": _TEXT, "cents": _INTEGER},
    "required": ["order", "cents"],
    "additionalProperties": False,
}
TOOL = {
    "name": "refund",
    "description": "Refund an order.",
    "input_schema": _SCHEMA,
    "requires_approval": True,
}

REQUESTS: dict[str, dict[str, Any]] = {
    "start_run": {"agent": "support", "input": RUN["input"], "session": "ticket-4"},
    "fork_run": {"at": 7, "text": FORK["input"]},
    "resume_run": {"idempotency_key": "resume-ticket-4"},
    "cancel_run": {"reason": "The customer called."},
    "pause_run": {"reason": "The shop is being moved."},
    "resolve_orphan": {
        "verdict": "occurred",
        "result": "349.00 EUR refunded",
        "evidence": "It is on the bank's statement of today.",
    },
    "approve": {"digest": DIGEST, "reason": "Goodwill."},
    "deny": {"digest": DIGEST, "reason": "The order was never paid."},
    "answer": {"digest": DIGEST, "text": "It was refunded by hand already."},
}

ANSWERS: dict[str, dict[int, Any]] = {
    "start_run": {201: RUN, 200: WAITING},
    "list_runs": {200: {"items": [WAITING], "next": None}},
    "get_run": {200: WAITING},
    "list_messages": {200: {"items": [ROW], "next": None}},
    "get_state": {200: STATE},
    "resume_run": {200: {**WAITING, "status": "queued"}},
    "cancel_run": {200: {**WAITING, "status": "cancelled"}},
    "pause_run": {200: {**WAITING, "status": "paused"}},
    "resolve_orphan": {200: {**WAITING, "status": "queued"}},
    "fork_run": {201: FORK, 200: FORK},
    "list_approvals": {200: {"items": [APPROVAL], "next": None}},
    "get_approval": {200: APPROVAL},
    "approve": {200: {**DECISION, "status": "approved", "approved_count": 1}},
    "deny": {200: {**DECISION, "status": "denied", "reason": "The order was never paid."}},
    "answer": {200: {**DECISION, "status": "answered", "reason": ""}},
    "list_agents": {
        200: {"items": [{"name": "support", "version": "1", "tools": [TOOL]}], "next": None},
    },
    "get_session": {
        200: {"key": "ticket-4", **ANN, "created_at": STARTED, "runs": {"items": [WAITING], "next": None}},
    },
    "health": {
        200: {
            "status": "ok",
            "database": "postgresql",
            "sweeper_seen_at": DECIDED,
            "oldest_queued_at": None,
        }
    },
}

# Problems by type: the title where no exception has one, the detail, members of its own.
SAYINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "malformed": ("The request cannot be read", "Cannot parse request body. Send JSON in UTF-8.", {}),
    "bad-cursor": ("Bad cursor", "Pass `next` of the page before, unchanged, as `cursor`.", {}),
    "not-authenticated": ("Not authenticated", "Sign in, or send a bearer token.", {}),
    "csrf": (
        "The CSRF token is missing or wrong",
        "Send the CSRF cookie's value in the X-CSRFToken header.",
        {},
    ),
    "scope": (
        "The token lacks a scope",
        "Token ar_k3v9x2m4q8wz has runs:read; this takes runs:write. Make a token that has it.",
        {"scopes": ["runs:write"]},
    ),
    "permission-denied": ("", "The user ann may not do this: a permission is missing.", {}),
    "not-found": ("", f"There is no run {FORK_ID}.", {}),
    "session-not-found": ("", "There is no session 'ticket-5'.", {}),
    "session-busy": (
        "",
        "The session is busy with another run; wait until that has ended.",
        {"run_id": RUN_ID},
    ),
    "run-state": (
        "",
        f"Run {RUN_ID} has ended (completed); it cannot be changed any more.",
        {"run_id": RUN_ID, "run_status": "completed", "ended_by": None, "ended_at": DECIDED},
    ),
    "approval-state": (
        "",
        f"Approval {APPROVAL_ID} was approved by maria already; there is nothing left to decide.",
        {
            "approval_id": APPROVAL_ID,
            "approval_status": "approved",
            "digest": DIGEST,
            "run_id": RUN_ID,
            **MARIA,
            "decided_at": DECIDED,
        },
    ),
    "journal-conflict": ("", f"Run {RUN_ID} changed meanwhile; try again.", {}),
    "config-mismatch": ("", f"Run {RUN_ID} cannot go on here: its agent was changed.", {"parts": ["tools"]}),
    "idempotency-key": (
        "The idempotency key belongs to another request",
        "Idempotency key 'k-1' was given with another method, path or body. Use a new key for a new request, "
        "or repeat the first one unchanged.",
        {"answered_at": DECIDED},
    ),
    "too-large": (
        "The request is too large",
        "The body has more than 2621440 bytes. Send less, or ask the operator to raise the limit.",
        {"max_bytes": 2621440},
    ),
    "validation": (
        "The request is not valid",
        "body.agent: Field required",
        {"errors": [{"loc": ["body", "agent"], "msg": "Field required", "type": "missing"}]},
    ),
    "unknown-agent": ("", "There is no agent 'suport'. Known are: support.", {}),
    "not-durable": ("", "Nothing can be made durable without a session.", {}),
    "invalid-arguments": ("", "The edited arguments do not fit refund: cents: Field required", {}),
    "throttled": (
        "Too many requests",
        "At most 100 requests in 60 s. Send the next one in 12 s.",
        {"retry_after": 12},
    ),
    "payload": ("", f"Run {RUN_ID}, seq 5: the file of its content is missing.", {}),
    "unavailable": ("Unavailable", "The database cannot be reached.", {}),
}

ONCE = ("resume_run", "cancel_run", "pause_run", "resolve_orphan", "approve", "deny", "answer")
PERMITTED = (*ONCE, "fork_run", "get_content")
EVERYWHERE = {
    400: ["malformed"],
    401: ["not-authenticated"],
    404: ["not-found"],
    413: ["too-large"],
    422: ["validation"],
    429: ["throttled"],
    500: ["payload"],
    503: ["unavailable"],
}
CHANGED = ["run-state", "journal-conflict", "idempotency-key"]
DECIDING = {409: ["approval-state", "journal-conflict", "idempotency-key"]}
TYPES: dict[str, dict[int, list[str]]] = {
    "start_run": {
        404: ["session-not-found"],
        409: ["session-busy", "run-state", "journal-conflict"],
        422: ["validation", "unknown-agent", "not-durable"],
    },
    "fork_run": {
        409: ["run-state", "session-busy", "journal-conflict"],
        422: ["validation", "unknown-agent"],
    },
    "resume_run": {409: ["run-state", "session-busy", "config-mismatch", *CHANGED[1:]]},
    "cancel_run": {409: CHANGED},
    "pause_run": {409: CHANGED},
    "resolve_orphan": {409: CHANGED},
    "get_state": {409: ["run-state"]},
    "get_session": {404: ["session-not-found"]},
    "approve": {**DECIDING, 422: ["validation", "invalid-arguments"]},
    "deny": DECIDING,
    "answer": DECIDING,
}


def _header(description: str, example: str) -> dict[str, Any]:
    return {"description": description, "schema": _TEXT, "example": example}


TAG = {"ETag": _header("value for If-None-Match", ETAG)}
AGAIN = {"Idempotency-Replayed": _header("true: this is the answer to the first request", "true")}
HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": _header("how to authenticate", "Bearer")},
    429: {"Retry-After": _header("in how many seconds to send the next one", "12")},
}
HEADERS_OF: dict[str, dict[int, dict[str, Any]]] = {
    "get_run": {200: TAG, 304: TAG},
    **{name: {200: AGAIN} for name in ONCE},
}

PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "get_run": [
        {
            "in": "header",
            "name": "If-None-Match",
            "description": "the ETag of the version you have: 304 while nothing has changed",
            "schema": _TEXT,
            "required": False,
            "example": ETAG,
        }
    ]
}


def illustrated(name: str, method: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI extras of the endpoint `name`, with its examples, problem types and headers."""
    answers = dict(extra.get("responses", {}))
    for status, answer in ANSWERS.get(name, {}).items():
        answers[status] = {**answers.get(status, {}), "content": {JSON: {"example": answer}}}
    for status, answer in answers.items():
        if CONTENT_TYPE in answer.get("content", {}):
            answers[status] = _problem(answer, status, _types(name, method, status))
    for status, headers in {**HEADERS, **HEADERS_OF.get(name, {})}.items():
        if status in answers:
            answers[status] = {**answers[status], "headers": headers}
    extra = {**extra, "responses": answers}
    if name in PARAMETERS:
        extra["parameters"] = [*extra.get("parameters", []), *PARAMETERS[name]]
    if name in REQUESTS:
        extra["requestBody"] = {"content": {JSON: {"example": REQUESTS[name]}}}
    return extra


def _types(name: str, method: str, status: int) -> list[str]:
    if status == HTTPStatus.FORBIDDEN:
        of_session = [] if method == "GET" else ["csrf"]
        return ["scope", *of_session, *["permission-denied"] * (name in PERMITTED)]
    if status == HTTPStatus.BAD_REQUEST and method == "GET":
        return ["bad-cursor"]
    return TYPES.get(name, {}).get(status) or EVERYWHERE[status]


def _problem(answer: dict[str, Any], status: int, types: list[str]) -> dict[str, Any]:
    examples = {each: {"value": _example(each, status)} for each in types}
    content = {**answer["content"][CONTENT_TYPE], "examples": examples}
    named = ", ".join(f"`{URN}{each}`" for each in types)
    return {"description": f"{answer['description']}: {named}", "content": {CONTENT_TYPE: content}}


def _example(name: str, status: int) -> dict[str, Any]:
    title, detail, members = SAYINGS[name]
    known = {each: title for _status, each, title in PROBLEMS.values()}
    about = {"type": URN + name, "title": title or known[name], "status": status, "detail": detail}
    return {**about, **members}
