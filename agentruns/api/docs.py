"""The API object of `agentruns.urls`: its docs page and OpenAPI file find their address in the request."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from django.http import HttpRequest
from ninja import NinjaAPI, Swagger

_root: ContextVar[str] = ContextVar("agentruns_api_root", default="")


class RunsAPI(NinjaAPI):
    """ninja reverses its own namespace, which fails when a host includes us under a namespace of its own."""

    def get_root_path(self, path_params: dict[str, Any]) -> str:
        return _root.get() or super().get_root_path(path_params)


class Docs(Swagger):
    """Swagger UI that reads the OpenAPI file next to it."""

    def get_openapi_url(self, api: NinjaAPI, path_params: dict[str, Any]) -> str:
        return str(api.openapi_url).lstrip("/")


def at_its_address(view: Callable[..., Any]) -> Callable[..., Any]:
    """Let the view know below which path it was asked for."""

    @wraps(view)
    def located(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        token = _root.set(request.path[: request.path.rindex("/") + 1])
        try:
            return view(request, *args, **kwargs)
        finally:
            _root.reset(token)

    return located
