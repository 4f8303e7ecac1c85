"""The router that the endpoints are put on, and what every one of them has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from django.http import HttpRequest
from ninja import Router
from ninja.constants import NOT_SET
from ninja.decorators import decorate_view
from ninja.params.models import Path
from ninja.utils import contribute_operation_args

from agentruns.api.auth import BearerAuth, SessionAuth, needed, needing
from agentruns.api.errors import URN, Problem, as_problem, documented, marked
from agentruns.api.examples import illustrated

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class ScopedRouter(Router):
    """Gives every operation the scopes that a token needs for it, and their refusals to its documentation.

    By path and method, so that none can be forgotten; `auth=None` opens an operation to everybody.
    """

    def add_api_operation(
        self,
        path: str,
        methods: list[str],
        view_func: Callable[..., Any],
        *,
        auth: Any = NOT_SET,
        openapi_extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Add an operation."""
        extra = dict(openapi_extra or {})
        if auth is not None:
            extra["responses"] = documented(403, 429)["responses"] | extra.get("responses", {})
        if options.get("include_in_schema", True):
            extra = illustrated(view_func.__name__, methods[0], extra)
            options["operation_id"] = options.get("operation_id") or view_func.__name__
        super().add_api_operation(path, methods, view_func, auth=auth, openapi_extra=extra, **options)
        if auth is not None:
            decorate_view(needing(needed(path, methods)))(view_func)


# One flat router: ninja would not pass a host's own `auth` on to nested ones.
router = ScopedRouter(auth=[BearerAuth(), SessionAuth()], tags=["agent runs"])
router.add_decorator(marked, mode="view")
router.add_decorator(as_problem)


def refuse_other_methods() -> None:
    """Answer every other method of the routes so far with a problem; ninja's own answer is plain text."""
    for path, view in list(router.path_operations.items()):
        allowed = sorted({method for operation in view.operations for method in operation.methods})
        others = [method for method in METHODS if method not in allowed]
        refuse = _refusal(allowed)
        refuse.__name__ = view.operations[0].view_func.__name__  # one name per URL for reverse()
        for name in re.findall(r"{(?:\w+:)?(\w+)}", path):
            contribute_operation_args(refuse, name, str, Path(...))
        router.api_operation(others, path, auth=None, include_in_schema=False)(refuse)


def _refusal(allowed: list[str]) -> Any:
    def refuse(request: HttpRequest, **kwargs: Any) -> NoReturn:
        detail = f"{request.method} is not allowed here; use {' or '.join(allowed)}."
        raise Problem(405, URN + "method-not-allowed", "Method not allowed", detail, allowed=allowed)

    return refuse
