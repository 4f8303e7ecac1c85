"""What is refused and how: problems, sizes, depths, malformed requests; and what health tells whom."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from datetime import timedelta
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django import urls
from django.core.asgi import get_asgi_application
from django.db import OperationalError, connection
from django.db.models.functions import Now
from django.test import Client
from hypothesis import HealthCheck, given, settings as examples, strategies as st
from ninja import NinjaAPI
from ninja.errors import HttpError

from agentruns import exceptions, start_run
from agentruns.agents.agent import Agent
from agentruns.api import router
from agentruns.api.errors import PROBLEMS, URN, Problem
from agentruns.models import Control, IdempotencyRecord, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.admin.world import World
from tests.api.http import Api, make_user, refused, strict_json
from tests.registry import isolated_registry
from tests.settings import BRIEF
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def test_every_exception_has_a_stable_type_and_one_of_a_host_is_its_nearest_known_class() -> None:
    classes = [kind for _name, kind in inspect.getmembers(exceptions, inspect.isclass)]
    raised = {kind for kind in classes if issubclass(kind, exceptions.AgentRunsError)}
    assert raised - set(PROBLEMS) == {exceptions.DurableRunNotFoundError}  # a NotFoundError like the others
    types = [name for _, name, _ in PROBLEMS.values()]
    assert len(set(types)) == len(types)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in types)

    class OurBusyError(exceptions.SessionBusyError):
        pass

    class SomethingElse(exceptions.AgentRunsError):
        pass

    busy = Problem.of(OurBusyError("busy", "the run"))
    assert (busy.status_code, busy.type, busy.extras) == (409, URN + "session-busy", {"run_id": "the run"})
    assert Problem.of(SomethingElse("?")).status_code == 500
    parts = Problem.of(exceptions.DurableConfigMismatchError("changed", ("model",)))
    assert parts.extras == {"parts": ("model",)}


def test_what_a_host_raises_has_no_type_of_ours_and_a_bug_is_not_hidden(api: Api, monkeypatch: Any) -> None:
    raised: list[Exception] = []

    def broken(*args: Any) -> Any:
        raise raised[-1]

    with monkeypatch.context() as patch:
        patch.setattr("agentruns.api.auth.user_of", broken)  # as a decorator of the host's
        for status, title in ((429, "Too Many Requests"), (499, "Error")):
            raised.append(HttpError(status, "slower"))
            problem = {"type": "about:blank", "title": title, "status": status, "detail": "slower"}
            assert api.get("/runs") == (status, problem)
    raised.append(ZeroDivisionError())
    # A 500 is Django's: it rolls the request's transaction back and tells whoever watches.
    with connection.execute_wrapper(broken), pytest.raises(ZeroDivisionError):
        api.get("/runs")


ALLOWED = {
    "/runs": "GET, POST", "/runs/x": "GET", "/runs/x/messages": "GET", "/runs/x/cancel": "POST",
    "/runs/x/events": "GET", "/approvals": "GET", "/approvals/x/deny": "POST", "/health": "GET",
    "/sessions/a/b": "GET",
}  # fmt: skip


def test_other_methods_are_405(api: Api) -> None:
    for path, named in ALLOWED.items():
        allowed = {*named.split(", ")}
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"} - allowed:
            assert api.request(method, path)[0] == 405
            assert {*api.response["Allow"].split(", ")} == allowed


def test_scripts_come_back_as_text(api: Api, shop: Agent) -> None:
    script = "<script>alert(1)</script>"
    status, problem = api.post("/runs", {"agent": script, "input": "hi"})
    assert (status, script in problem["detail"]) == (422, True)
    assert api.response["X-Content-Type-Options"] == "nosniff"


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


def test_a_length_that_is_said(api: Api, shop: Agent) -> None:
    wrong = {str(MOST + 1): 413, "9" * 5000: 400, "many": 400, "-1": 422, "1e3": 400, "²": 400}
    for length, status in wrong.items():
        body = json.dumps({**START, "input": "hi"})
        response = api.client.post("/api/runs", body, "application/json", CONTENT_LENGTH=length)
        assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert not Run.objects.exists()


@pytest.mark.parametrize("length", [None, b"5"])
def test_a_length_that_is_a_lie(api: Api, shop: Agent, settings: Any, length: bytes | None) -> None:
    """Under ASGI a body comes in pieces, whatever its header says."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    cookies = "; ".join(f"{name}={each.value}" for name, each in api.client.cookies.items())
    token, body = "t" * 32, of_size(1001).encode()
    headers = [(b"host", b"testserver"), (b"content-type", b"application/json")]
    headers += [(b"cookie", f"{cookies}; csrftoken={token}".encode()), (b"x-csrftoken", token.encode())]
    headers += [(b"content-length", length)] if length else []

    async def send() -> int:
        about = {"type": "http", "method": "POST", "path": "/api/runs", "query_string": b""}
        connection = ApplicationCommunicator(get_asgi_application(), {**about, "headers": headers})
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
    urlconf(urls.path("host/", theirs.urls))
    response = api.client.post("/host/agents/runs", of_size(MOST + 1), "application/json")
    assert (response.status_code, list(response.json())) == (413, ["detail"])


def test_depth(pending: Any, decider: Any) -> None:
    approval, staff = pending(), Api(decider)
    for depth, status in ((61, 422), (62, 422), (63, 422), (500, 422), (100_000, 400)):
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
    unknown = {f"{number}{long[:1000]}": number for number in range(900)}
    assert api.post("/runs", {**START, "input": "hi", **unknown})[0] == 422
    assert len(api.response.content) < 10_000


EXAMPLES = 100 if BRIEF else 300
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
@examples(max_examples=EXAMPLES, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
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


def bearer(user: Any, *scopes: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {create_token(user, scopes)[1]}"}


def asked(client: Any, **headers: str) -> Any:
    response = client.get("/api/health", headers=headers)
    assert response.status_code == 200
    return response.json()


def test_who_is_told_what_of_health(owner: Any) -> None:
    viewer = make_user("viewer", "view_run")
    everything = {
        "status": "ok", "database": connection.vendor, "sweeper": "never", "sweeper_seen_at": None,
        "oldest_queued_at": None, "blocked_runs": 0,
    }  # fmt: skip
    nobody, staff = Api().client, Api(viewer).client
    assert asked(nobody) == asked(Api(owner).client) == {"status": "ok"}
    assert asked(staff) == asked(nobody, **bearer(viewer, "runs:read")) == everything
    for headers in (
        bearer(owner, "runs:read"),
        bearer(viewer, "approvals:decide"),
        {"Authorization": "Bearer nonsense"},
        {"Authorization": "\x7f" * 5000},
    ):
        # With a header that counts for nothing the session does not count either.
        assert asked(nobody, **headers) == asked(staff, **headers) == {"status": "ok"}
    viewer.is_active = False
    viewer.save()
    assert asked(staff) == {"status": "ok"}


def test_the_figures_of_health(shop: Agent) -> None:
    staff = Api(make_user("viewer", "view_run"))
    runs = [start_run(shop, "refund", f"s{number}") for number in range(3)]
    Run.objects.filter(pk=runs[0].pk).update(not_before=Now() + timedelta(hours=1))
    status, body = staff.get("/health")
    assert (status, body["sweeper_seen_at"]) == (200, None)
    oldest = Run.objects.get(pk=runs[1].pk).updated_at
    assert body["oldest_queued_at"] == oldest.isoformat(timespec="microseconds")[:-6] + "Z"
    sweep()
    status, body = staff.get("/health")
    seen = Control.objects.sweepers().get().seen_at
    assert body["sweeper"] == "ok"
    assert body["sweeper_seen_at"] == seen.isoformat(timespec="microseconds")[:-6] + "Z"
    assert body["oldest_queued_at"] is None
    Control.objects.update(seen_at=Now() - timedelta(minutes=11))
    assert staff.get("/health")[1]["sweeper"] == "late"
    with isolated_registry():  # code that knows no agent
        assert staff.get("/health")[1]["blocked_runs"] == 3


def test_health_without_a_database_tells_nothing_else(monkeypatch: Any) -> None:
    def broken() -> Any:
        raise OperationalError("no password supplied for user secret")

    monkeypatch.setattr(connection, "cursor", broken)
    problem = refused(Api().get("/health"), 503, "unavailable")
    assert "secret" not in str(problem)
