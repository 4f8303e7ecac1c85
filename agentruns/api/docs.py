"""The API object of `agentruns.urls`: its docs page and OpenAPI file find their address in the request."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from django.apps import apps
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from ninja import NinjaAPI, Swagger
from ninja.openapi.schema import OpenAPISchema

from agentruns.api.errors import CONTENT_TYPE

GUIDE = """\
Durable agent runs, and the people who approve what they do.

**Who acts.** Send `Authorization: Bearer ar_…` (a token of `manage.py create_api_token`), or use the session
of a signed-in person; a POST then needs the CSRF cookie's value as `X-CSRFToken`. No body says who acts.

**Start and wait.** `POST /runs` queues a run, a worker drives it. Ask `GET /runs/{run_id}` with
`If-None-Match` until `status` is `completed`, `failed` or `cancelled`, or listen to
`GET /runs/{run_id}/events`. `awaiting-approval`, `orphaned` and `paused` wait for a person.

**Decide.** `GET /approvals?status=pending` lists the calls that wait. Show `title`, `arguments` and `risk`,
then POST to `approve`, `deny` or `answer` with the `digest` that you showed. 409 says who decided, and when.

**Repeat safely.** Give each POST an `Idempotency-Key`, and send it again as often as you like.

**Errors** are `application/problem+json`; go by `type`, which is stable, not by the text. Every path answers
other methods with 405, `Allow` and the type `urn:agentruns:method-not-allowed`.

**Lists** are `{"items": […], "next": …}`: pass `next` as `cursor` (of a journal: as `after`) until it is
null.

**Values.** Ids are strings, times are ISO 8601 in UTC. Members may be added: ignore those you do not know. A
member of a request that is not documented is refused. What a model or a tool wrote, a title too, is not to
be trusted: show it as text, never as HTML.
"""

_root: ContextVar[str] = ContextVar("agentruns_api_root", default="")


class RunsAPI(NinjaAPI):
    """ninja reverses its own namespace, which fails when a host includes us under a namespace of its own."""

    def get_root_path(self, path_params: dict[str, Any]) -> str:
        return _root.get() or super().get_root_path(path_params)

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        """Return the OpenAPI document, in which every problem refers to one schema."""
        document = super().get_openapi_schema(**options)
        schemas = document["components"]["schemas"]
        for operations in document["paths"].values():
            for operation in operations.values():
                answers = sorted(operation["responses"].items())
                operation["responses"] = {status: _referring(answer, schemas) for status, answer in answers}
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        return document


def _referring(answer: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    # What an operation says is one object for all documents: it is copied, never changed.
    problem = answer.get("content", {}).get(CONTENT_TYPE)
    if problem is None:
        return answer
    schemas["Problem"] = problem["schema"]
    referring = {**problem, "schema": {"$ref": "#/components/schemas/Problem"}}
    return {**answer, "content": {**answer["content"], CONTENT_TYPE: referring}}


class Docs(Swagger):
    """Swagger UI that reads the OpenAPI file next to it, and loads nothing from anywhere else."""

    def render_page(self, request: HttpRequest, api: NinjaAPI, **kwargs: Any) -> HttpResponse:
        """Return the page. Its scripts are ninja's: without that app it is a link to the OpenAPI file."""
        if apps.is_installed("ninja"):
            return super().render_page(request, api, **kwargs)
        page = format_html(
            '<!DOCTYPE html><html><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            '<title>{title}</title></head><body><h1>{title}</h1><p><a href="{url}">{link}</a></p><p>{why}</p>'
            "</body></html>",
            title=api.title,
            url=self.get_openapi_url(api, kwargs),
            link=_("The OpenAPI description of this API"),
            why=_("To read it on this page, add “ninja” to INSTALLED_APPS: the page is made of its files."),
        )
        return HttpResponse(page)

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
