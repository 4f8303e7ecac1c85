"""Sessions by the caller's own key, whatever printable text it is."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.models import Run
from tests.api.http import Api, make_user

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = ["ticket-42", "a/b//c/", "/x", "..", "50 % off?#1", "Grüße \U0001f600", '"><script>', "x" * 200]


@pytest.mark.parametrize("key", KEYS)
def test_a_session_is_found_by_its_key(api: Api, shop: Agent, owner: Any, key: str) -> None:
    run = start_run(shop, "refund", key, actor=owner)
    status, body = api.get(f"/sessions/{quote(key, safe='')}")
    assert (status, set(body)) == (200, {"key", "owner", "owner_name", "created_at", "runs"})
    assert (body["key"], body["owner"], body["owner_name"]) == (key, str(owner.pk), "owner")
    assert body["runs"] == {"items": [api.get(f"/runs/{run.pk}")[1]], "next": None}


def test_its_runs_come_in_pages(api: Api, shop: Agent, owner: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentruns.api.pagination.PAGE", 1)
    for number in range(3):
        run = start_run(shop, f"task {number}", "s1", actor=owner)
        assert api.post(f"/runs/{run.pk}/cancel")[0] == 200
    start_run(shop, "elsewhere", "s2", actor=owner)
    seen, query = [], {}
    while True:
        runs = api.get("/sessions/s1", **query)[1]["runs"]
        seen += [run["input"] for run in runs["items"]]
        if runs["next"] is None:
            break
        query = {"cursor": runs["next"]}
    assert seen == ["task 2", "task 1", "task 0"]
    assert api.get("/sessions/s1", cursor="x")[0] == 400


def test_not_yours_is_not_there(api: Api, shop: Agent) -> None:
    start_run(shop, "theirs", "s1", actor=make_user("other"))
    start_run(shop, "the program's", "s2")
    for key in ("s1", "s2", "s3", "x" * 201, "%00", "%F0%9F"):
        status, problem = api.get(f"/sessions/{key}")
        assert (status, problem["type"]) == (404, "urn:agentruns:session-not-found"), key
    assert api.get("/sessions/s1")[1]["detail"] == "There is no session 's1'."
    viewer = Api(make_user("viewer", "view_run"))
    assert [viewer.get(f"/sessions/{key}")[0] for key in ("s1", "s2", "s3")] == [200, 200, 404]
    assert Api().get("/sessions/s1")[0] == 401
    assert Run.objects.count() == 2


def test_other_methods_are_405(api: Api) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"):
        status, _ = api.request(method, "/sessions/a/b")
        assert (status, api.response["Allow"]) == (405, "GET")
