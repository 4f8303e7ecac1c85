"""The router that the endpoints are put on, and what every one of them has."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from django.http import HttpRequest
from ninja import Router
from ninja.params.models import Path
from ninja.utils import contribute_operation_args

from agentruns.api.auth import SessionAuth
from agentruns.api.errors import URN, Problem, as_problem, marked

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

# One flat router: ninja would not pass a host's own `auth` on to nested ones.
router = Router(auth=SessionAuth(), tags=["agent runs"])
router.add_decorator(marked, mode="view")
router.add_decorator(as_problem)


def refuse_other_methods() -> None:
    """Answer every other method of the routes so far with a problem; ninja's own answer is plain text."""
    for path, view in list(router.path_operations.items()):
        allowed = sorted({method for operation in view.operations for method in operation.methods})
        others = [method for method in METHODS if method not in allowed]
        refuse = _refusal(allowed)
        refuse.__name__ = view.operations[0].view_func.__name__  # one name per URL for reverse()
        for name in re.findall(r"{(\w+)}", path):
            contribute_operation_args(refuse, name, str, Path(...))
        router.api_operation(others, path, auth=None, include_in_schema=False)(refuse)


def _refusal(allowed: list[str]) -> Any:
    def refuse(request: HttpRequest, **kwargs: Any) -> NoReturn:
        detail = f"{request.method} is not allowed here; use {' or '.join(allowed)}."
        raise Problem(405, URN + "method-not-allowed", "Method not allowed", detail, allowed=allowed)

    return refuse
