"""Malformed requests: never a 500, always problem+json."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agentruns.api import router
from agentruns.models import IdempotencyRecord
from tests.admin.people import user
from tests.admin.world import World
from tests.api.http import Api, strict_json

pytestmark = pytest.mark.django_db(transaction=True)

texts = st.text(max_size=20) | st.sampled_from(
    ["\x00", "\ud800", "\u202e", "NaN", "-1", "9" * 30, "' OR 1=1 --"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
MEMBERS = (
    "agent", "input", "session", "at", "text", "reason", "digest", "arguments", "verdict", "result",
    "evidence", "idempotency_key", "actor",
)  # fmt: skip
objects = st.dictionaries(st.sampled_from(MEMBERS) | texts, values | st.just("not_occurred"), max_size=5)
bodies = st.one_of(
    st.binary(max_size=40),
    objects.map(lambda value: json.dumps(value).encode()),
    values.map(lambda value: json.dumps(value).encode("utf-16")),
    st.integers(1, 3000).map(lambda depth: b'{"arguments":' + b"[" * depth + b"]" * depth + b"}"),
    st.integers(1, 3000).map(lambda depth: b'{"a":' * depth),
)
# What a server lets through to an application: Latin-1 without control characters.
header = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_categories=["Cc"]), max_size=30)
HEADERS = (
    "IDEMPOTENCY_KEY", "IF_NONE_MATCH", "IF_MATCH", "AUTHORIZATION", "ACCEPT", "X_CSRFTOKEN", "COOKIE",
    "RANGE", "LAST_EVENT_ID",
)  # fmt: skip
headers = st.dictionaries(
    st.sampled_from([f"HTTP_{name}" for name in HEADERS]) | st.just("CONTENT_LENGTH"), header
)
kinds = st.sampled_from(["application/json", "text/plain", "", "multipart/form-data; boundary=x", "\xff/;="])
queries = st.dictionaries(
    st.sampled_from(["status", "agent", "session", "cursor", "after", "at", "x"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    max_size=3,
)


def paths() -> list[tuple[str, str]]:
    """Return each operation: its method, and its path with places for ids."""
    return [
        (operation.methods[0], path.replace("path:", ""))
        for path, view in router.path_operations.items()
        for operation in view.operations
        if operation.include_in_schema and not path.endswith("/events")
    ]


def possible(headers: dict[str, str], body: bytes) -> dict[str, str]:
    """Return the headers without a length beyond the body: Django's client asserts that nobody sends one."""
    try:
        is_beyond = int(headers.get("CONTENT_LENGTH", "0")) > len(body)
    except ValueError:
        return headers
    return {name: each for name, each in headers.items() if not is_beyond or name != "CONTENT_LENGTH"}


@given(data=st.data(), signed_in=st.sampled_from([True, True, True, False]))
@hypothesis_settings(
    max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
)
def check(clients: dict[bool, Client], ids: dict[str, str], data: Any, signed_in: bool) -> None:
    method, path = data.draw(st.sampled_from(paths()))
    for name, real in ids.items():
        path = path.replace(f"{{{name}}}", data.draw(st.sampled_from([real, real, "x", "%00", "%FF", "é"])))
    body = data.draw(bodies) if method == "POST" else b""
    response = clients[signed_in].generic(
        method,
        f"/api{path}",
        body,
        content_type=data.draw(kinds),
        query_params=data.draw(queries) if method == "GET" else None,
        **possible(data.draw(headers), body),
    )
    if response.status_code >= 400:
        assert response.status_code < 500, response.content
        assert response["Content-Type"] == "application/problem+json"
        assert strict_json(response.content)["status"] == response.status_code
    assert signed_in or path == "/health" or response.status_code >= 400


def test_never_a_500(world: World) -> None:
    approval, run = world.waiting(), world.orphaned()
    ids = {
        "run_id": str(run.pk),
        "approval_id": str(approval.pk),
        "call_id": run.messages.get(kind="orphan_found").call_id,
        "seq": "2",
        "key": run.session.key,
    }
    check({True: Api(user("superuser")).client, False: Client()}, ids)
    assert IdempotencyRecord.objects.filter(status=0).count() == 0
