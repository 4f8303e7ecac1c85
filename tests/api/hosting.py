"""The API of somebody else, which mounts the router; and a policy of theirs that fails."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError
from ninja.security import HttpBearer

from agentruns import Policy
from agentruns.api import register_errors, router
from agentruns.exceptions import SessionBusyError


class Bearer(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> Any:
        from django.contrib.auth import get_user_model

        if token == "rogue":
            return "somebody"  # forgets to set request.user
        request.user = get_user_model().objects.get(username=token)
        return token


def host(*, auth: Any = None, errors: bool = True) -> NinjaAPI:
    """Somebody else's API, with errors of its own form."""
    api = NinjaAPI(urls_namespace="host", docs_url=None)

    @api.exception_handler(KeyError)
    def key_error(request: HttpRequest, error: Any) -> HttpResponse:
        return api.create_response(request, {"theirs": True}, status=418)

    @api.exception_handler(HttpError)
    def http_error(request: HttpRequest, error: Any) -> HttpResponse:
        return api.create_response(request, {"theirs": str(error)}, status=error.status_code)

    @api.get("/theirs")
    def theirs(request: HttpRequest, raises: str, number: int = 0) -> None:
        raise {
            "http": HttpError(400, "bad"),
            "404": Http404("gone"),
            "key": KeyError("x"),
            "busy": SessionBusyError("busy", "the run"),
        }[raises]

    api.add_router("/agents", router, **({"auth": auth} if auth else {}))
    if errors:
        register_errors(api)
    return api


class Broken(Policy):
    """A policy that fails at one question."""

    question = ""

    def __getattribute__(self, name: str) -> Any:
        if name == Broken.question:
            raise RuntimeError("card 4000 0000")
        return super().__getattribute__(name)
