"""The JSON API: `router` to mount in a NinjaAPI of yours, or `agentruns.urls`, ready-made.

    api = NinjaAPI()
    api.add_router("/agents", router)
    register_errors(api)  # errors as problem+json; your own routes keep their form

Callers are programs with a bearer token, or users of the Django session, with CSRF. A mount with an `auth`
of its own has to set `request.user`: that user acts, and sees and may do the same as in the admin.
"""

from __future__ import annotations

from functools import cache

from ninja import NinjaAPI

import agentruns
from agentruns.api import agents, approvals, health, runs, sessions, stream  # noqa: F401 - operations
from agentruns.api.auth import SessionAuth
from agentruns.api.docs import GUIDE, Docs, RunsAPI, at_its_address
from agentruns.api.errors import register_errors
from agentruns.api.routing import router

__all__ = ["build_api", "register_errors", "router"]

router._freeze()  # the operations of a project belong on a router of its own


@cache
def build_api() -> NinjaAPI:
    """Build the API that `agentruns.urls` serves: one per process, in the URL namespace "agentruns"."""
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
