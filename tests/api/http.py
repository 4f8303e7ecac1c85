"""A client that holds every answer to what the API promises of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.http import HttpResponse
from django.test import Client

ROOT = "/api"


class Api:
    def __init__(self, user: Any = None, *, csrf: bool = False, root: str = ROOT) -> None:
        self.client = Client(enforce_csrf_checks=csrf)
        self.root = root
        self.response = HttpResponse()
        if user is not None:
            self.client.force_login(user)

    def get(self, path: str, **query: Any) -> tuple[int, Any]:
        return self._answer(self.client.get(self.root + path, query or None))

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        text = body if isinstance(body, str | bytes) else json.dumps(body) if body is not None else ""
        return self._answer(
            self.client.post(self.root + path, text, content_type="application/json", headers=headers)
        )

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return self.get(path) if method == "GET" else self.post(path, body, **headers)

    def pages(self, path: str, by: str = "cursor", **query: Any) -> Iterator[list[Any]]:
        """Follow `next` to the end, and yield the items of each page."""
        while True:
            status, body = self.get(path, **query)
            assert status == 200, body
            page = body.get("runs", body)  # a session has pages of runs
            yield page["items"]
            if page["next"] is None:
                return
            query[by] = page["next"]

    def every(self, path: str, by: str = "cursor", **query: Any) -> list[Any]:
        """List the items of all pages."""
        return [item for page in self.pages(path, by, **query) for item in page]

    def request(self, method: str, path: str) -> tuple[int, Any]:
        return self._answer(self.client.generic(method, self.root + path))

    def _answer(self, response: Any) -> tuple[int, Any]:
        self.response = response
        if response.status_code == 405:  # Django's own
            assert response["Allow"]
            return 405, None
        body = strict_json(response.content) if response.content else None
        if response.status_code >= 400:
            assert response["Content-Type"] == "application/problem+json", response.content
            assert body is None or body["status"] == response.status_code
            assert body is None or {"type", "title", "detail"} <= set(body)
        return response.status_code, body


def strict_json(content: bytes) -> Any:
    """Parse what a strict parser of another language would take: no NaN, no lone surrogates."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(content, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def refused(answer: tuple[int, Any], status: int, kind: str) -> dict[str, Any]:
    """Check the status and the type of a problem; return the problem."""
    assert (answer[0], answer[1]["type"]) == (status, f"urn:agentruns:{kind}"), answer
    problem: dict[str, Any] = answer[1]
    return problem


def make_user(name: str, *permissions: str, **fields: Any) -> Any:
    """Make a user with permissions of agentruns, by codename."""
    user = get_user_model().objects.create_user(name, **fields)
    found = Permission.objects.filter(content_type__app_label="agentruns", codename__in=permissions)
    assert len(found) == len(permissions)
    user.user_permissions.set(found)
    return user


class Program(Api):
    """The API as a program with a token uses it: no cookie, and CSRF is enforced."""

    def __init__(self, text: str, root: str = "/api") -> None:
        super().__init__(csrf=True, root=root)
        self.client.defaults["HTTP_AUTHORIZATION"] = f"Bearer {text}"


def endpoints(run: Any, approval: Any) -> list[tuple[str, str, dict[str, Any] | None]]:
    """List a request to each endpoint: method, path and body."""
    return [
        ("GET", "/runs", None),
        ("POST", "/runs", {"agent": "shop", "input": "hi"}),
        ("GET", f"/runs/{run}", None),
        ("GET", f"/runs/{run}/messages", None),
        ("POST", f"/runs/{run}/resume", {}),
        ("POST", f"/runs/{run}/cancel", {}),
        ("GET", "/approvals", None),
        ("GET", f"/approvals/{approval}", None),
        ("POST", f"/approvals/{approval}/approve", {"digest": "x"}),
        ("POST", f"/approvals/{approval}/deny", {"digest": "x", "reason": "no"}),
    ]
