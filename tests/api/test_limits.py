"""Requests that are too large, too deep, or lie about their size."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.urls import path
from ninja import NinjaAPI

from agentruns.agents.agent import Agent
from agentruns.api import router
from agentruns.models import Run
from tests.api.http import Api
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

MOST = 2_621_440  # Django's default
START = {"agent": "shop", "input": ""}


def of_size(size: int) -> str:
    return json.dumps({**START, "input": "x" * (size - len(json.dumps(START)))})


def test_the_size_of_a_body_is_limited_by_djangos_setting(api: Api, shop: Agent, settings: Any) -> None:
    assert api.post("/runs", of_size(MOST))[0] == 201
    status, problem = api.post("/runs", of_size(MOST + 1))
    assert (status, problem["type"], problem["max_bytes"]) == (413, "urn:agentruns:too-large", MOST)
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    assert [api.post("/runs", of_size(size))[0] for size in (100, 101)] == [201, 413]
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = None
    assert api.post("/runs", of_size(3_000_000))[0] == 201
    assert Run.objects.count() == 3


@pytest.mark.parametrize(
    ("length", "status"),
    [(str(MOST + 1), 413), ("9" * 5000, 400), ("many", 400), ("-1", 422), ("1e3", 400), ("²", 400)],
)
def test_a_length_that_is_said(api: Api, shop: Agent, length: str, status: int) -> None:
    response = api.client.post(
        "/api/runs", json.dumps({**START, "input": "hi"}), "application/json", CONTENT_LENGTH=length
    )
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert not Run.objects.exists()


@pytest.mark.parametrize("length", [None, b"5"])
def test_a_length_that_is_a_lie(api: Api, shop: Agent, settings: Any, length: bytes | None) -> None:
    """Under ASGI a body comes in pieces, whatever its header says."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    cookies = "; ".join(f"{name}={each.value}" for name, each in api.client.cookies.items())
    token = "t" * 32
    headers = [
        (b"host", b"testserver"),
        (b"content-type", b"application/json"),
        (b"cookie", f"{cookies}; csrftoken={token}".encode()),
        (b"x-csrftoken", token.encode()),
        *([(b"content-length", length)] if length else []),
    ]
    body = of_size(1001).encode()

    async def send() -> int:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/runs",
            "headers": headers,
            "query_string": b"",
        }
        connection = ApplicationCommunicator(get_asgi_application(), scope)
        await connection.send_input({"type": "http.request", "body": body[:500], "more_body": True})
        await connection.send_input({"type": "http.request", "body": body[500:]})
        status = int((await connection.receive_output(LIMIT))["status"])
        await connection.receive_output(LIMIT)
        await connection.wait(LIMIT)
        return status

    assert asyncio.run(send()) == 413
    assert not Run.objects.exists()


def test_a_host_tells_it_in_its_own_form(api: Api, shop: Agent, urlconf: Any) -> None:
    theirs = NinjaAPI(urls_namespace="theirs", docs_url=None)
    theirs.add_router("/agents", router)
    urlconf(path("host/", theirs.urls))
    response = api.client.post("/host/agents/runs", of_size(MOST + 1), "application/json")
    assert (response.status_code, list(response.json())) == (413, ["detail"])


@pytest.mark.parametrize(("depth", "status"), [(61, 422), (62, 422), (63, 422), (500, 422), (100_000, 400)])
def test_depth(pending: Any, decider: Any, depth: int, status: int) -> None:
    approval, staff = pending(), Api(decider)
    nested = "[" * depth + "]" * depth
    body = f'{{"digest": "{approval.digest}", "arguments": {{"cents": {nested}}}}}'
    answer, problem = staff.post(f"/approvals/{approval.pk}/approve", body)
    # 62 lists in two objects are 64 levels: what is wrong with those is that they are no number of cents.
    name = "invalid-arguments" if depth <= 62 else "validation" if status == 422 else "malformed"
    assert (answer, problem["type"]) == (status, f"urn:agentruns:{name}")
    assert ("64 levels" in problem["detail"]) == (name == "validation")


def test_an_answer_is_never_much_larger_than_the_question(api: Api, shop: Agent) -> None:
    long = "x" * 100_000
    for place in (f"/runs/{long}", f"/approvals/{long}", f"/sessions/{long}", f"/sessions/{'/' * 100_000}"):
        assert api.get(place)[0] == 404
        assert len(api.response.content) < 1000
    for query in ("agent", "session", "cursor", "status"):
        assert api.get("/runs", **{query: long})[0] in (400, 422)
        assert len(api.response.content) < 1000
    assert (
        api.post("/runs", {**START, "input": "hi", **{f"{n}{long[:1000]}": n for n in range(900)}})[0] == 422
    )
    assert len(api.response.content) < 10_000
