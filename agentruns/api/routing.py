"""The router of all operations, with the steps before and after each operation's own function."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException
from ninja import Router
from ninja.decorators import decorate_view

from agentruns.api import uploads
from agentruns.api.auth import BearerAuth, SessionAuth, entry_for
from agentruns.api.docs import illustrated
from agentruns.api.errors import MARK, Problem
from agentruns.exceptions import AgentRunsError


class RunsRouter(Router):
    """A router that adds documentation, a size check and response headers to its operations."""

    def add_api_operation(self, path: str, methods: list[str], view_func: Any, **options: Any) -> None:
        """Add an operation with the function's name as its id."""
        name, is_open = view_func.__name__, options["auth"] is None
        options |= {"operation_id": name, "openapi_extra": illustrated(name, methods[0], is_open=is_open)}
        super().add_api_operation(path, methods, decorate_view(watched)(view_func), **options)


def watched(run: Any) -> Callable[..., Any]:
    """Wrap an operation: check the body's size before authentication, and add headers to the response."""
    operation = run.__self__

    @wraps(run)
    def watch(request: HttpRequest, **values: Any) -> Any:
        entry = entry_for(operation)
        setattr(request, MARK, entry)
        try:
            if uploads.is_upload(request) and operation.operation_id in uploads.TAKING:
                uploads.require_small(request)
            else:
                request.body  # noqa: B018 - reads it
        except (Problem, RawPostDataException) as error:
            response = operation.api.on_exception(request, error)
        except RequestDataTooBig:
            most = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
            text = f"The body has more than {most} bytes. Send less, or ask the operator to raise the limit."
            response = operation.api.on_exception(request, Problem.named("too-large", text, max_bytes=most))
        except ValueError:
            text = "Content-Length is not a number of bytes. Send JSON in UTF-8."
            response = operation.api.on_exception(request, Problem.named("malformed", text))
        else:
            entry.before = {**request.__dict__, MARK: None}  # a cycle would keep the body in memory
            response = run(request, **values)
        for name, value in entry.headers.get(response.status_code, {}).items():
            response.setdefault(name, value)
        response.setdefault("Cache-Control", "private, no-store")
        return response

    return watch


def as_problem(view: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a view to raise errors of agentruns as Problem, an HttpError that any NinjaAPI can answer."""

    @wraps(view)
    def translated(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return view(request, *args, **kwargs)
        except AgentRunsError as error:
            raise Problem.of(error) from error

    return translated


# One flat router, because ninja would not pass a host's own `auth` on to nested routers.
router = RunsRouter(auth=[BearerAuth(), SessionAuth()], tags=["agent runs"])
router.add_decorator(as_problem)
