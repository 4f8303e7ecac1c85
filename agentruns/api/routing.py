"""The router of the endpoints: scopes, documentation, body size, headers and errors of each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException
from ninja import Router
from ninja.decorators import decorate_view
from ninja.operation import Operation, PathView

from agentruns.api.auth import BearerAuth, Entry, SessionAuth, entry_for
from agentruns.api.docs import illustrated
from agentruns.api.errors import MARK, Problem, documented
from agentruns.api.operations import ENDPOINTS, OPEN, LateOperation, declare
from agentruns.api.uploads import TAKING, is_upload, require_small
from agentruns.exceptions import AgentRunsError


class ScopedRouter(Router):
    """Gives every operation its scopes, by path and method so that none is forgotten; documents refusals."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for method, path in ENDPOINTS:
            operation = LateOperation(method, path)
            entry = Entry() if path in OPEN else entry_for(path, [method])
            operation.view_func._ninja_operation = operation  # type: ignore[attr-defined]
            decorate_view(_entering(entry))(operation.view_func)
            self.path_operations.setdefault(path, PathView()).operations.append(operation)

    def add_api_operation(
        self,
        path: str,
        methods: list[str],
        view_func: Callable[..., Any],
        *,
        openapi_extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Declare an operation."""
        extra = dict(openapi_extra or {})
        if path not in OPEN:
            extra["responses"] = documented(403, 429)["responses"] | extra.get("responses", {})
        extra = illustrated(view_func.__name__, methods[0], extra)
        declare(Operation(path, methods, view_func, openapi_extra=extra, **options))


def _entering(made: Entry) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the view decorator of an operation: it checks the body's size, and completes the headers."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        operation: Any = inspect.unwrap(run)

        @wraps(run)
        def enter(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            entry = replace(made, headers={})
            setattr(request, MARK, entry)
            try:
                if is_upload(request) and operation.__self__.operation_id in TAKING:
                    require_small(request)
                else:
                    _read_body(request)
            except (Problem, RawPostDataException) as error:
                response = operation.__self__.api.on_exception(request, error)
            else:
                response = run(request, *args, **kwargs)
            for name, value in entry.headers.get(response.status_code, {}).items():
                response.setdefault(name, value)
            response.setdefault("Cache-Control", "private, no-store")
            return response

        return enter

    return decorate


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
router = ScopedRouter(auth=[BearerAuth(), SessionAuth()], tags=["agent runs"])
router.add_decorator(as_problem)
