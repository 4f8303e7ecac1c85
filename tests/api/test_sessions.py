"""Sessions by the caller's own key, whatever printable text it is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from agentruns import RunContext, cancel_run, fork_run, run_agent, session_token, start_run
from agentruns.agents.agent import Agent
from agentruns.models import Message, Run, Session
from agentruns.utils.clock import utc
from tests.api.http import Api, make_user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = ["ticket-42", "a/b//c/", "/x", "..", "50 % off?#1", "Grüße \U0001f600", '"><script>', "x" * 200]


@pytest.mark.parametrize("key", KEYS)
def test_a_session_is_found_by_its_key(api: Api, shop: Agent, owner: Any, key: str) -> None:
    run = start_run(shop, "refund", key, actor=owner)
    status, body = api.get(f"/sessions/{quote(key, safe='')}")
    assert (status, set(body)) == (
        200,
        {"key", "scope", "title", "owner", "owner_name", "created_at", "runs"},
    )
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


def listed(api: Api, **query: Any) -> list[tuple[str, str]]:
    """Return the keys of the sessions that are listed, with the status of the last run."""
    found: list[tuple[str, str]] = []
    while True:
        status, body = api.get("/sessions", **query)
        assert status == 200
        found += [(one["key"], one["status"]) for one in body["items"]]
        if body["next"] is None:
            return found
        query["cursor"] = body["next"]


def test_my_conversations_are_listed_the_newest_first(
    api: Api, shop: Agent, owner: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("agentruns.api.pagination.PAGE", 2)
    for number in (1, 2, 3):
        start_run(shop, f"task {number}", f"s{number}", actor=owner, scope="north" if number == 2 else None)
    start_run(shop, "theirs", "s4", actor=make_user("other"))
    assert listed(api) == [("s3", "queued"), ("s2", "queued"), ("s1", "queued")]
    assert listed(api, scope="north") == [("s2", "queued")]
    cancel_run(Run.objects.get(session__key="s1").pk)
    assert listed(api) == [("s1", "cancelled"), ("s3", "queued"), ("s2", "queued")]
    again = start_run(shop, "more", "s1", actor=owner)
    assert listed(api)[0] == ("s1", "queued")
    (first, _second) = api.get("/sessions")[1]["items"]
    assert (first["run"], first["agent"], first["title"]) == (str(again.pk), shop.name, "task 1")
    assert (first["owner"], first["updated_at"] > first["created_at"]) == (str(owner.pk), True)
    assert len(listed(Api(make_user("viewer", "view_run")))) == 4
    assert api.get("/sessions", cursor="x")[0] == 400
    assert Api().get("/sessions")[0] == 401


def conversation(api: Api, key: str, **query: Any) -> list[tuple[str, str]]:
    """Return who said what in a session."""
    found: list[tuple[str, str]] = []
    while True:
        status, body = api.get(f"/sessions/{quote(key, safe='')}/messages", **query)
        assert status == 200
        found += [(one["role"], one["text"]) for one in body["items"]]
        if body["next"] is None:
            return found
        query["after"] = body["next"]


def test_a_conversation_is_what_people_read(api: Api, owner: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentruns.api.pagination.PAGE", 2)
    chatty = shop_agent("chatty", {"text": "I look.", "tools": [call("lookup", number="A1")]})
    silent = shop_agent("silent", {"tools": [call("lookup", number="A1")]})
    for key in ("s1", "a/b"):
        run_agent(chatty, "find it", key, actor=owner)
    run_agent(silent, "again", "s1", actor=owner)
    stopped = start_run(chatty, "never mind", "s1", actor=owner)
    cancel_run(stopped.pk, reason="changed my mind")
    said = [
        ("user", "find it"), ("assistant", "I look."), ("assistant", "all done"), ("user", "again"),
        ("assistant", "all done"), ("user", "never mind"), ("program", "changed my mind"),
    ]  # fmt: skip
    assert conversation(api, "s1") == said
    assert conversation(api, "a/b") == said[:3]
    page = api.get("/sessions/s1/messages")[1]
    first = Message.objects.get(run__session__key="s1", seq=2)
    assert page["items"][0] == {
        "seq": 2, "run": str(first.run_id), "kind": "user", "role": "user", "text": "find it",
        "created_at": utc(first.created_at),
    }  # fmt: skip
    fork = fork_run(Run.objects.get(session__key="a/b").pk, 2, text="and this", actor=owner)
    assert conversation(api, fork.session.key) == [said[0], ("user", "and this")]
    copied = api.get(f"/sessions/{quote(fork.session.key, safe='')}/messages")[1]["items"][0]
    origin = Message.objects.get(run__session__key="a/b", seq=2)
    assert copied["created_at"] == utc(origin.created_at)


def test_a_conversation_is_that_of_the_scope_and_of_nobody_else(api: Api, shop: Agent, owner: Any) -> None:
    for scope in ("north", "south"):
        start_run(shop, f"in the {scope}", "s1", actor=owner, scope=scope)
    start_run(shop, "theirs", "s2", actor=make_user("other"))
    status, problem = api.get("/sessions/s1/messages")
    assert (status, problem["scopes"]) == (409, ["north", "south"])
    assert conversation(api, "s1", scope="south") == [("user", "in the south")]
    assert api.get("/sessions/s2/messages")[1]["type"] == "urn:agentruns:session-not-found"
    assert api.get("/sessions/s1/messages", after=-1)[0] == 422


def told(run: RunContext) -> str:
    """Say what no customer is to read."""
    return "Never mention the recall."


def test_a_visitor_reads_the_conversation_but_not_what_the_agent_was_told(owner: Any) -> None:
    agent = shop_agent("told", instructions=told)
    run = run_agent(agent, "hello", "s1", actor=owner)
    run_agent(agent, "another", "s2", actor=owner)
    token = session_token(Session.objects.get(key="s1"), timedelta(hours=1))
    visitor, reader = Api(), Api(owner)
    visitor.client.defaults["HTTP_AUTHORIZATION"] = f"Bearer {token}"
    assert listed(visitor) == [("s1", "completed")]
    assert conversation(visitor, "s1") == [("user", "hello"), ("assistant", "all done")]
    for path in (f"/runs/{run.run_id}/messages", f"/runs/{run.run_id}/events"):
        texts = []
        for each in (visitor, reader):
            answer = each.client.get(f"/api{path}")
            texts.append(answer.getvalue().decode())
            answer.close()
        assert [("recall" in text, "run_started" in text) for text in texts] == [(False, True), (True, True)]
