"""The ready-made URLs in any place, and the router in somebody else's API."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import HttpRequest
from django.urls import include, path, reverse
from ninja.errors import ConfigError

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.api import build_api, router
from agentruns.models import Run
from tests.api.hosting import Bearer, host
from tests.api.http import Api

pytestmark = pytest.mark.django_db(transaction=True)


def paths(api: Api, root: str) -> set[str]:
    response = api.client.get(f"{root}/openapi.json")
    assert response.status_code == 200
    return set(response.json()["paths"])


def test_one_api_per_process() -> None:
    assert build_api() is build_api()
    assert reverse("agentruns:list_runs") == "/api/runs"
    assert reverse("agentruns:approve", args=["x"]) == "/api/approvals/x/approve"


def test_our_router_takes_no_operation_of_somebody_else() -> None:
    with pytest.raises(ConfigError, match="Cannot modify router"):

        @router.get("/theirs")
        def theirs(request: HttpRequest) -> None:
            """Return nothing."""


@pytest.mark.parametrize("installed", [False, True])
def test_docs_and_openapi(api: Api, settings: Any, installed: bool) -> None:
    if installed:
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "ninja"]
    page = api.client.get("/api/docs")
    assert page.status_code == 200
    assert (b'"url": "openapi.json"' if installed else b'href="openapi.json"') in page.content
    assert b'data-api-csrf="true"' in page.content or not installed
    assert b"://" not in page.content
    schema = api.client.get("/api/openapi.json").json()
    assert set(schema["paths"]) == {
        "/api/runs", "/api/runs/{run_id}", "/api/runs/{run_id}/messages", "/api/runs/{run_id}/resume",
        "/api/runs/{run_id}/state", "/api/runs/{run_id}/messages/{seq}/content",
        "/api/runs/{run_id}/files/{sha256}",
        "/api/runs/{run_id}/rows/{seq}/erase",
        "/api/runs/{run_id}/cancel", "/api/runs/{run_id}/fork", "/api/runs/{run_id}/pause",
        "/api/runs/{run_id}/events", "/api/runs/{run_id}/orphans/{call_id}/resolve",
        "/api/approvals", "/api/approvals/{approval_id}",
        "/api/approvals/{approval_id}/approve", "/api/approvals/{approval_id}/deny",
        "/api/approvals/{approval_id}/answer", "/api/agents", "/api/sessions", "/api/sessions/{key}",
        "/api/sessions/{key}/messages", "/api/health",
    }  # fmt: skip
    start = schema["paths"]["/api/runs"]["post"]
    statuses = "200 201 400 401 403 404 409 413 415 422 429 500"
    assert set(start["responses"]) == {*statuses.split()}
    assert set(start["responses"]["409"]["content"]) == {"application/problem+json"}
    assert start["security"] == [{"BearerAuth": []}, {"SessionAuth": []}]
    assert schema["components"]["securitySchemes"]["SessionAuth"]["name"] == settings.SESSION_COOKIE_NAME
    assert "security" not in schema["paths"]["/api/health"]["get"]


def test_under_a_namespace_and_twice(api: Api, urlconf: Any, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    inner = [path("agents/", include("agentruns.urls"))]
    urlconf(
        path("v1/", include((inner, "inner"), namespace="outer")),
        path("v2/<slug:tenant>/", include("agentruns.urls")),
        path("", include("agentruns.urls")),
    )
    assert reverse("outer:agentruns:list_runs") == "/v1/agents/runs"
    for root in ("/v1/agents", "/v2/acme", ""):
        there = Api(owner, root=root)
        assert there.get(f"/runs/{run.pk}")[0] == 200
        assert there.get("/runs/x")[0] == 404
        assert there.get("/sessions/s1")[1]["runs"]["items"][0]["id"] == str(run.pk)
        assert f"{root}/runs" in paths(there, root)
        assert there.client.get(f"{root}/docs").status_code == 200


def test_in_somebody_elses_api(urlconf: Any, shop: Agent, owner: Any) -> None:
    urlconf(path("host/", host().urls))
    ours = Api(owner, root="/host/agents")
    assert ours.get("/runs") == (200, {"items": [], "next": None})
    assert ours.post("/runs", {"agent": "shop", "input": "hi"})[0] == 201
    assert [ours.get("/runs/x")[0], ours.get("/runs", status="x")[0], ours.get("/runs", cursor="x")[0]] == [
        404,
        422,
        400,
    ]
    assert ours.post("/runs", "{")[0] == 400
    assert ours.request("DELETE", "/runs")[0] == 405
    assert Api(root="/host/agents").get("/runs")[0] == 401
    # Their own routes answer as before, but for what only agentruns raises.
    answers = {
        raises: ours.client.get("/host/theirs", {"raises": raises})
        for raises in ("http", "404", "key", "busy")
    }
    assert (answers["http"].status_code, answers["http"].json()) == (400, {"theirs": "bad"})
    assert (answers["404"].status_code, set(answers["404"].json())) == (404, {"detail"})
    assert (answers["key"].status_code, answers["key"].json()) == (418, {"theirs": True})
    assert (answers["busy"].status_code, answers["busy"].json()["run_id"]) == (409, "the run")
    invalid = ours.client.get("/host/theirs", {"raises": "key", "number": "x"})
    assert (invalid.status_code, list(invalid.json())) == (422, ["detail"])


def test_without_register_errors_the_statuses_are_the_same(urlconf: Any, shop: Agent, owner: Any) -> None:
    urlconf(path("host/", host(errors=False).urls))
    client = Api(owner).client
    answers = {
        "/runs/x": 404,
        "/runs?cursor=x": 400,
        "/runs?status=x": 422,
    }
    for url, status in answers.items():
        response = client.get("/host/agents" + url)
        assert (response.status_code, response["Content-Type"]) == (status, "application/json; charset=utf-8")


def test_a_host_may_bring_its_own_auth(urlconf: Any, shop: Agent, owner: Any) -> None:
    urlconf(path("host/", host(auth=Bearer()).urls))
    api = Api(root="/host/agents", csrf=True)
    body = {"agent": "shop", "input": "hi"}
    assert api.post("/runs", body)[0] == 401
    assert api.post("/runs", body, Authorization="Bearer owner")[1]["owner"] == str(owner.pk)
    start_run(shop, "the program's", "s2")
    # An anonymous user owns nothing, and is never taken for the program.
    for method in ("get", "post"):
        send = getattr(api.client, method)
        response = send(
            "/host/agents/runs", body, "application/json", headers={"Authorization": "Bearer rogue"}
        )
        assert response.status_code == 401
    assert Run.objects.count() == 2


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database(pending: Any, owner: Any, decider: Any, settings: Any) -> None:
    """Everything but the users is where AGENTRUNS_DATABASE says."""
    settings.AGENTRUNS_DATABASE = "other"
    approval = pending()
    assert approval._state.db == "other"
    api, staff = Api(owner), Api(decider)
    run = api.get("/runs")[1]["items"][0]
    assert api.post("/runs", {"agent": "shop", "input": "again", "session": "s1"})[1]["run_id"] == run["id"]
    assert len(api.get(f"/runs/{run['id']}/messages")[1]["items"]) == 4
    assert staff.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200
    assert staff.get("/approvals", status="approved")[1]["items"][0]["id"] == str(approval.pk)
    assert api.post(f"/runs/{run['id']}/cancel")[0] == 200
    assert api.post(f"/runs/{run['id']}/cancel")[1]["ended_by_name"] == "owner"
    assert not Run.objects.using("default").exists()
