"""The OpenAPI document and its page: a guide, and examples, problem types and headers of each operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Any

from django.apps import apps
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from ninja import NinjaAPI, Swagger
from ninja.openapi.schema import OpenAPISchema

from agentruns.api.errors import CONTENT_TYPE, TITLES, URN
from agentruns.api.schemas import Problem

JSON = "application/json"
# The objects, requests and problems of the examples, and the facts of each operation that ninja lacks.
EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parent / "examples.json").read_text("utf-8"))
PROBLEM = Problem.model_json_schema()
USUAL = {
    401: ["not-authenticated"],
    404: ["not-found"],
    413: ["too-large"],
    422: ["validation"],
    429: ["throttled"],
    500: ["payload"],
    503: ["unavailable"],
}
READS = {400: ["bad-cursor"], 403: ["scope"]}
WRITES = {400: ["malformed"], 403: ["scope", "csrf", "permission-denied"]}
GUIDE = (Path(__file__).parent / "guide.md").read_text("utf-8")
_root: ContextVar[str] = ContextVar("agentruns_api_root", default="")


class RunsAPI(NinjaAPI):
    """A NinjaAPI whose documentation works in any URL namespace, with a root path by `at_its_address`."""

    def get_root_path(self, path_params: dict[str, Any]) -> str:
        return _root.get() or super().get_root_path(path_params)

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        """Build the OpenAPI document, in which all problems refer to one schema; schemas are sorted."""
        document = super().get_openapi_schema(**options)
        schemas = document["components"]["schemas"]
        for operations in document["paths"].values():
            for operation in operations.values():
                answers = dict(sorted(operation["responses"].items()))
                for status, kept in answers.items():
                    if problem := kept.get("content", {}).get(CONTENT_TYPE):
                        schemas["Problem"] = problem["schema"]
                        # All documents share this answer, so change only a copy.
                        referring = {**problem, "schema": {"$ref": "#/components/schemas/Problem"}}
                        answers[status] = {**kept, "content": {**kept["content"], CONTENT_TYPE: referring}}
                operation["responses"] = answers
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        return document


class Docs(Swagger):
    """The Swagger UI, which reads the OpenAPI file beside it and loads nothing from other hosts."""

    def render_page(self, request: HttpRequest, api: NinjaAPI, **kwargs: Any) -> HttpResponse:
        """Render the page; if the app "ninja" is not installed, only a link to the OpenAPI file."""
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
    """Decorate a view of the documentation: use the folder of the requested path as the API's root path."""

    @wraps(view)
    def located(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        token = _root.set(request.path[: request.path.rindex("/") + 1])
        try:
            return view(request, *args, **kwargs)
        finally:
            _root.reset(token)

    return located


def _made(recipe: Any) -> dict[str, Any]:
    """Build an example answer from a recipe: merge the parts of a list in order.

    Each part is a dict of members, or the name of an example. The recipe `{"page": recipe}` builds a page
    with one item.
    """
    if isinstance(recipe, dict):
        return {"items": [_made(recipe["page"])], "next": None}
    made: dict[str, Any] = {}
    for part in recipe:
        made |= EXAMPLES[part] if isinstance(part, str) else part
    return made


def illustrated(name: str, method: str, *, is_open: bool) -> dict[str, Any]:
    """Build the OpenAPI extras of the operation `name`: its examples, problems and headers.

    An operation that `is_open` gets only the problems in its own entry of EXAMPLES.
    """
    answers = {int(status): answer for status, answer in EXAMPLES["responses"].get(name, {}).items()}
    for status, recipe in EXAMPLES["answers"].get(name, {}).items():
        answers[int(status)] = {"content": {JSON: {"example": _made(recipe)}}}
    if name == "get_session":
        answers[200]["content"][JSON]["example"]["runs"] = _made(EXAMPLES["answers"]["list_runs"]["200"])
    errors = {int(status): types for status, types in EXAMPLES["errors"].get(name, {}).items()}
    usual = {**USUAL, **(READS if method == "GET" else WRITES)}
    always = () if is_open else (401, 403, 429, *((400, 404, 409, 413, 422) if method == "POST" else ()))
    for status in {*always, *errors}:  # ninja itself supports one media type only
        types = errors.get(status) or usual[status]
        examples = {}
        for each in types:
            about = {"type": URN + each, "title": TITLES[each][1], "status": status}
            detail, members = EXAMPLES["sayings"][each], EXAMPLES["members"].get(each, {})
            examples[each] = {"value": {**about, "detail": detail, **members}}
        answers[status] = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(f'`{URN}{each}`' for each in types)}",
            "content": {CONTENT_TYPE: {"schema": PROBLEM, "examples": examples}},
        }
    headers = {401: "WWW-Authenticate", 429: "Retry-After"}
    if name == "get_run":
        headers |= {200: "ETag", 304: "ETag"}
    if "idempotency-key" in errors.get(409, ()):
        headers[200] = "Idempotency-Replayed"
    for status in headers.keys() & answers.keys():
        answers[status] |= {"headers": {headers[status]: EXAMPLES["headers"][headers[status]]}}
    extra = {"responses": answers, "parameters": EXAMPLES["parameters"].get(name, [])}
    if request := EXAMPLES["requests"].get(name):
        content = {JSON: {"example": request}}
        if upload := EXAMPLES["uploads"].get(name):
            content["multipart/form-data"] = {"schema": EXAMPLES["upload"], "example": {"body": upload}}
        extra["requestBody"] = {"content": content}
    return extra
