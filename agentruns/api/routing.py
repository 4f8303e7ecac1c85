"""The router, whose operations are known by name until one is first asked for: its module is imported then.

Every command of a project loads its URLs, and ninja's models take longer to make than all the rest of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, wraps
from importlib import import_module
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException
from ninja import Router
from ninja.constants import NOT_SET
from ninja.errors import ConfigError
from ninja.operation import Operation, PathView

from agentruns.api import uploads
from agentruns.api.auth import BearerAuth, Entry, SessionAuth, entry_for
from agentruns.api.docs import illustrated
from agentruns.api.errors import MARK, Problem
from agentruns.exceptions import AgentRunsError

ENDPOINTS = {
    ("GET", "/agents"): "agents.list_agents",
    ("GET", "/approvals"): "approvals.list_approvals",
    ("GET", "/approvals/{approval_id}"): "approvals.get_approval",
    ("POST", "/approvals/{approval_id}/approve"): "approvals.approve",
    ("POST", "/approvals/{approval_id}/deny"): "approvals.deny",
    ("POST", "/approvals/{approval_id}/answer"): "approvals.answer",
    ("POST", "/runs/{run_id}/fork"): "runs.fork_run",
    ("GET", "/health"): "health.health",
    ("POST", "/runs"): "runs.start_run",
    ("GET", "/runs"): "runs.list_runs",
    ("GET", "/runs/{run_id}"): "runs.get_run",
    ("GET", "/runs/{run_id}/messages"): "runs.list_messages",
    ("GET", "/runs/{run_id}/messages/{seq}/content"): "runs.get_content",
    ("GET", "/runs/{run_id}/files/{sha256}"): "runs.get_file",
    ("GET", "/runs/{run_id}/state"): "runs.get_state",
    ("POST", "/runs/{run_id}/resume"): "runs.resume_run",
    ("POST", "/runs/{run_id}/cancel"): "runs.cancel_run",
    ("POST", "/runs/{run_id}/pause"): "runs.pause_run",
    ("POST", "/runs/{run_id}/orphans/{call_id}/resolve"): "runs.resolve_orphan",
    ("POST", "/runs/{run_id}/rows/{seq}/erase"): "runs.erase_row",
    ("POST", "/sessions/{path:key}/messages"): "sessions.send_message",
    ("GET", "/sessions"): "sessions.list_sessions",
    ("GET", "/sessions/{path:key}/messages"): "sessions.list_conversation",
    ("GET", "/sessions/{path:key}"): "sessions.get_session",
    ("GET", "/runs/{run_id}/events"): "stream.stream_events",
}
OPEN = {"/health"}  # to everybody

# What the declaration of an operation says, and its URL does not need.
DECLARED = ("signature", "models", "response_models", "description", "exclude_unset", "openapi_extra")

_declared: dict[tuple[str, str], Operation] = {}


class LateOperation(Operation):
    """An operation of ENDPOINTS; its declaration, by `@router.get` and the like, is read when needed."""

    def __init__(self, method: str, path: str) -> None:
        def late(request: Any, **values: Any) -> Any:
            return self.declaration.view_func(request, **values)

        self.module, _, late.__name__ = ENDPOINTS[method, path].partition(".")
        super().__init__("", [method], late, auth=None if path in OPEN else NOT_SET)
        self.path, self.operation_id = path, late.__name__
        self.entry = Entry() if path in OPEN else entry_for(late.__name__, method, path)
        for name in DECLARED:
            delattr(self, name)

    @cached_property
    def declaration(self) -> Operation:
        # Imported each time: another thread that has begun may not have come to its end.
        import_module(f"agentruns.api.{self.module}")
        return _declared[self.methods[0], self.path]

    def _run_checks(self, request: Any) -> Any:
        """Run them, and only then read an upload."""
        refusal = super()._run_checks(request)
        if refusal is None and self.operation_id in uploads.TAKING and uploads.is_upload(request):
            try:
                uploads.unpack(request)
            except Exception as error:
                return self.api.on_exception(request, error)
        return refusal

    def __getattr__(self, name: str) -> Any:
        if name not in DECLARED:
            raise AttributeError(name)
        return getattr(self.declaration, name)

    def run(self, request: Any, **values: Any) -> Any:
        """Check the body's size, answer, and complete the headers."""
        entry = replace(self.entry, headers={}, operation=self)
        setattr(request, MARK, entry)
        try:
            if uploads.is_upload(request) and self.operation_id in uploads.TAKING:
                uploads.require_small(request)
            else:
                _read_body(request)
        except (Problem, RawPostDataException) as error:
            response: Any = self.api.on_exception(request, error)
        else:
            entry.before = {**request.__dict__, MARK: None}  # without itself: a circle would keep the body
            response = super().run(request, **values)
        for name, value in entry.headers.get(response.status_code, {}).items():
            response.setdefault(name, value)
        response.setdefault("Cache-Control", "private, no-store")
        return response

    def clone(self) -> LateOperation:
        """Return a copy for one mount of the router."""
        return copy.copy(self)


def _read_body(request: HttpRequest) -> None:
    """Raise Problem for a body above DATA_UPLOAD_MAX_MEMORY_SIZE, before anything else is done."""
    try:
        request.body  # noqa: B018 - reads it
    except RequestDataTooBig:
        most = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        detail = f"The body has more than {most} bytes. Send less, or ask the operator to raise the limit."
        raise Problem.named("too-large", detail, max_bytes=most) from None
    except ValueError:
        detail = "Content-Length is not a number of bytes. Send JSON in UTF-8."
        raise Problem.named("malformed", detail) from None


class LateRouter(Router):
    """Has all operations from the start; their declarations follow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for method, path in ENDPOINTS:
            view = self.path_operations.setdefault(path, PathView())
            view.operations.append(LateOperation(method, path))

    def add_api_operation(self, path: str, methods: list[str], view_func: Any, **options: Any) -> None:
        """Keep the declaration of an operation of ENDPOINTS; raise ConfigError for any other."""
        if (methods[0], path) not in ENDPOINTS:
            text = f"{methods[0]} {path} is not in ENDPOINTS. A router of yours takes your own operations."
            raise ConfigError(text)
        options["openapi_extra"] = illustrated(view_func.__name__, methods[0], is_open=path in OPEN)
        _declared[methods[0], path] = Operation(path, methods, view_func, **options)


def as_problem(view: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what a service raises into a Problem, which any NinjaAPI answers with the right status."""

    @wraps(view)
    def translated(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return view(request, *args, **kwargs)
        except AgentRunsError as error:
            raise Problem.of(error) from error

    return translated


# One flat router, because ninja would not pass a host's own `auth` on to nested ones.
router = LateRouter(auth=[BearerAuth(), SessionAuth()], tags=["agent runs"])
router.add_decorator(as_problem)
