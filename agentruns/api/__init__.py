"""The JSON API: a `router` to mount in your own NinjaAPI; `agentruns.urls` has it ready-made.

    api = NinjaAPI()
    api.add_router("/agents", router)
    register_errors(api)  # errors as problem+json; your own routes keep their form

Callers are programs with a bearer token, or signed-in users of the Django session, whose POSTs need a CSRF
token. If you mount the router with your own `auth`, set `request.user`: this user acts, with the same
permissions as in the admin.
"""

from __future__ import annotations

from functools import cache

from ninja import NinjaAPI

import agentruns
from agentruns.api import agents, approvals, events, health, rules, runs, sessions, stream  # noqa: F401 - operations
from agentruns.api.auth import SessionAuth
from agentruns.api.docs import GUIDE, Docs, RunsAPI, at_its_address
from agentruns.api.errors import register_errors
from agentruns.api.routing import router

__all__ = ["build_api", "register_errors", "router"]

router._freeze()  # so that a project adds its operations to its own router


@cache
def build_api() -> NinjaAPI:
    """Build the API that `agentruns.urls` serves in the URL namespace "agentruns", once per process."""
    api = RunsAPI(
        title="agentruns",
        version=agentruns.__version__,
        description=GUIDE,
        urls_namespace="agentruns",
        docs=Docs(),
        docs_decorator=at_its_address,
        auth=SessionAuth(),
    )
    api.add_router("", router)
    register_errors(api)
    return api
