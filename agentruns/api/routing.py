"""The router of the endpoints: it documents each of them, and turns the errors of services into problems."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest
from ninja import Router
from ninja.operation import Operation, PathView

from agentruns.api.auth import BearerAuth, SessionAuth
from agentruns.api.docs import illustrated
from agentruns.api.errors import Problem
from agentruns.api.operations import ENDPOINTS, OPEN, LateOperation, declare
from agentruns.exceptions import AgentRunsError


class LateRouter(Router):
    """Has all operations from the start; their declarations follow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for method, path in ENDPOINTS:
            view = self.path_operations.setdefault(path, PathView())
            view.operations.append(LateOperation(method, path))

    def add_api_operation(
        self, path: str, methods: list[str], view_func: Callable[..., Any], **options: Any
    ) -> None:
        """Declare an operation."""
        extra = illustrated(view_func.__name__, methods[0], is_open=path in OPEN)
        declare(Operation(path, methods, view_func, **{**options, "openapi_extra": extra}))


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
