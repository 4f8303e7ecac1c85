"""Sessions by the caller's own key: who may write where, what is answered, and what is read of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from agentruns import (
    Agent,
    Policy,
    RunContext,
    cancel_run,
    deny,
    fork_run,
    run_again,
    run_agent,
    session_token,
    start_run,
)
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run, Session
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.utils.clock import utc
from tests.admin.people import browser
from tests.api.http import Api, Program, make_user, refused
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

GATED = {"tools": [call("refund", cents=5000)]}


@pytest.fixture
def chat() -> Agent:
    turns = [GATED, {"text": "Refunded."}, {"text": "You are welcome."}]
    return Agent("chat", instructions="Serve.", tools=TOOLS, model=ScriptedModel(turns), starters="anyone")


def says_hi(name: str) -> Agent:
    return Agent(name, instructions="Serve.", model=ScriptedModel([{"text": "hi"}] * 3), starters="anyone")


def said(run: Run) -> list[str]:
    rows = Message.objects.filter(session=run.session_id, kind="user").order_by("seq")
    return [row.payload["content"][0]["text"] for row in rows]


def test_a_customer_writes_again_while_the_card_is_open(chat: Agent) -> None:
    ann = make_user("ann")
    run_agent(chat, "refund it", "a/b", actor=ann)
    api, decider = Api(ann), make_user("decider", "decide_approval", is_staff=True)
    status, run = api.post("/sessions/a%2Fb/messages", {"content": "please hurry", "idempotency_key": "k"})
    assert (status, run["status"]) == (201, "awaiting-approval")
    hurry = {"content": "please hurry"}
    assert api.post("/sessions/a/b/messages", hurry, Idempotency_Key="k")[0] == 200
    assert api.post("/sessions/a/b/messages", {"content": "other", "idempotency_key": "k"})[0] == 409
    (card,) = Api(decider).get("/approvals")[1]["items"]
    row = Message.objects.get(facts__contains='"reason":"message"')
    assert [*map(len, (card["unread"], said(Run.objects.get())))] == [1, 2]
    assert card["unread"] == Api(decider).get(f"/approvals/{card['id']}")[1]["unread"]
    assert row.facts["actor"] == {"id": str(ann.pk), "name": "ann"}
    page = browser(decider).get(f"/admin/agentruns/approval/{card['id']}/change/")
    assert "Messages since it was asked: 1, the last" in page.content.decode()
    linked = browser("viewer").get(f"/admin/agentruns/approval/{card['id']}/change/").content.decode()
    assert f'{run["id"]}/change/?after={row.seq - 1}#row-{row.seq}">' in linked
    denied = Api(decider).post(f"/approvals/{card['id']}/deny", {"reason": "no", "digest": card["digest"]})
    assert denied[1]["unread"] == []
    sweep()
    assert Run.objects.get().status == "completed"
    status, second = api.post("/sessions/a/b/messages", {"content": "thank you"})
    assert (status, second["status"], second["id"] != run["id"]) == (201, "queued", True)
    assert problems(row.session_id) == []


def test_others_learn_nothing_and_write_only_with_permission(chat: Agent) -> None:
    run_agent(chat, "refund it", "s1", actor=make_user("ann"))
    body = {"content": "hello"}
    for path in ("/sessions/s1/messages", "/sessions/none/messages"):
        refused(Api(make_user(f"eve{len(path)}", "start_run")).post(path, body), 404, "session-not-found")
    assert Api(make_user("viewer", "view_run")).post("/sessions/s1/messages", body)[0] == 403
    clerk = Api(make_user("clerk", "view_run", "start_run"))
    assert clerk.post("/sessions/s1/messages", body)[0] == 201
    card = Approval.objects.get()
    deny(card.pk, None, "no")
    sweep()
    status, problem = clerk.post("/sessions/s1/messages", body)
    assert (status, "agentruns.act_for" in problem["detail"]) == (403, True)
    boss = make_user("root", is_superuser=True)
    token = Program(create_token(boss, ["runs:write", "runs:read"])[1])
    assert token.post("/sessions/s1/messages", body)[0] == 403  # it would act for ann, without the scope
    agent = Api(make_user("agent", "view_run", "start_run", "act_for"))
    status, run = agent.post("/sessions/s1/messages", body)
    assert (status, run["owner_name"]) == (201, "ann")
    assert Api().post("/sessions/s1/messages", body)[0] == 401


def test_what_is_no_message_is_422_and_a_busy_session_names_its_run(chat: Agent) -> None:
    says_hi("other")
    ann, path = make_user("ann"), "/sessions/s1/messages"
    result = run_agent(chat, "refund it", "s1", actor=ann)
    wrong: list[dict[str, Any]] = [{}, {"content": ""}, {"content": 1}, {"content": "x", "agent": "none"}]
    assert [Api(ann).post(path, body)[0] for body in wrong] == [422] * 4
    status, problem = Api(ann).post(path, {"content": "x", "agent": "other"})
    assert (status, problem["type"], problem["run_id"]) == (409, "urn:agentruns:session-busy", result.run_id)


def test_a_visitor_writes_in_their_own_session_only(chat: Agent) -> None:
    visitor = Program(session_token("s1", timedelta(hours=1)))
    assert visitor.post("/sessions/s1/messages", {"content": "hello"})[0] == 403  # before the first run
    run_agent(chat, "refund it", "s1")
    run_agent(chat, "refund it", "s2")
    assert visitor.post("/sessions/s1/messages", {"content": "hello", "idempotency_key": "k"})[0] == 201
    assert visitor.post("/sessions/s1/messages", {"content": "hello", "idempotency_key": "k"})[0] == 200
    assert visitor.post("/sessions/s2/messages", {"content": "hello"})[0] == 404
    assert visitor.post("/sessions/s1/messages", {"content": "hello", "agent": "other"})[0] == 403
    row = Message.objects.get(facts__contains='"reason":"message"')
    assert row.payload["actor"]["name"] == "the session's visitor"
    assert visitor.get(f"/runs/{row.run_id}/messages")[1]["items"][-1]["payload"]["reason"] == "message"


@pytest.mark.parametrize("asks", ["message", "task"])
def test_whose_words_the_next_run_reads_is_its_requester(settings: Any, asks: str) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    turns = [GATED, {"tools": [call("refund", cents=999_900)]}]
    Agent("chat", instructions="Serve.", tools=TOOLS, model=ScriptedModel(turns), starters="anyone")
    ann, bob = make_user("ann"), make_user("bob", "view_run", "start_run", "decide_approval", "act_for")
    if asks == "message":
        first = run_agent("chat", "refund 50", "s1", actor=ann).run_id
        assert Api(bob).post("/sessions/s1/messages", {"content": "No: 9999, to bob."})[0] == 201
    else:
        body = {"agent": "chat", "input": "9999, to bob.", "session": "s1", "owner": str(ann.pk)}
        first = Api(bob).post("/runs", body)[1]["id"]
    Api(ann).post(f"/runs/{first}/cancel", {})
    Api(ann).post("/sessions/s1/messages", {"content": "go on"})
    sweep()
    card = Approval.objects.get(status="pending")
    assert card.run.requesters == f" {ann.pk} {bob.pk} "
    assert Api(bob).post(f"/approvals/{card.pk}/approve", {"digest": card.digest})[0] == 403
    assert problems(card.run.session_id) == []


def test_whose_words_were_answered_is_no_requester_of_the_next_run(chat: Agent) -> None:
    ann, bob = make_user("ann"), make_user("bob", "view_run", "start_run", "decide_approval")
    run_agent(chat, "refund it", "s1", actor=ann)
    Api(bob).post("/sessions/s1/messages", {"content": "please"})
    deny(Approval.objects.get().pk, bob, "no")
    sweep()
    Api(ann).post("/sessions/s1/messages", {"content": "thanks"})
    assert Run.objects.latest("created_at").requesters == f" {ann.pk} "


class OwnInTeam(Policy):
    """Everybody may start runs of their own in the scope "team", and none for another owner."""

    def can(self, user: Any, action: str, obj: Any) -> bool:
        if action == "act_for":
            owner, scope = obj
            return owner is None and scope == "team"
        return super().can(user, action, obj)


def test_who_may_start_own_runs_in_a_scope_does_not_write_as_the_program_there(
    chat: Agent, settings: Any
) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.OwnInTeam"
    other = says_hi("other")
    bob = Api(make_user("bob", "view_run", "start_run"))
    run_agent(other, "nightly", "order-1", scope="team")
    assert bob.post("/sessions/order-1/messages", {"content": "x", "scope": "team"})[0] == 403
    assert bob.post("/runs", {"agent": "chat", "input": "x", "scope": "team"})[0] == 201
    settings.AGENTRUNS_POLICY = "agentruns.Policy"
    clerk = Api(make_user("clerk", "view_run", "start_run", "act_for"))
    status, run = clerk.post("/sessions/order-1/messages", {"content": "x", "scope": "team"})
    assert (status, run["owner"]) == (201, None)


@pytest.mark.parametrize("how", ["inactive", "deleted"])
def test_nothing_is_started_for_a_user_who_is_not_active(how: str) -> None:
    says_hi("chat")
    gone, staff = make_user("gone"), make_user("bob", is_superuser=True, is_staff=True)
    first = run_agent("chat", "mine", "s1", actor=gone).run_id
    users, key = type(gone).objects.filter(pk=gone.pk), str(gone.pk)
    users.update(is_active=False) if how == "inactive" else users.delete()
    body = {"agent": "chat", "input": "x", "session": "s1", "owner": key}
    assert Api(staff).post("/runs", body)[0] == 403
    assert Api(staff).post("/sessions/s1/messages", {"content": "x"})[0] == 403
    assert browser(staff).post(f"/admin/agentruns/run/{first}/again/", {"key": "k"}).status_code == 403
    assert Run.objects.count() == 1
    assert run_again(first), "the program may"


def test_who_may_not_start_an_agent_any_more_writes_in_no_run_of_it() -> None:
    Agent("desk", instructions="Serve.", tools=TOOLS, model=ScriptedModel([GATED]))
    ann = make_user("ann", "start_run")
    run_agent("desk", "refund it", "s1", actor=ann)
    assert Api(ann).post("/sessions/s1/messages", {"content": "please"})[0] == 201
    ann.user_permissions.clear()
    status, problem = Api(type(ann).objects.get(pk=ann.pk)).post("/sessions/s1/messages", {"content": "more"})
    assert (status, "agentruns.start_run" in problem["detail"]) == (403, True)
    assert len(said(Run.objects.get())) == 2


KEYS = ["ticket-42", "a/b//c/", "/x", "..", "50 % off?#1", "Grüße \U0001f600", '"><script>', "x" * 200]


def test_a_session_is_found_by_its_key(api: Api, shop: Agent, owner: Any) -> None:
    told = {"key", "scope", "title", "owner", "owner_name", "created_at", "runs"}
    for key in KEYS:
        run = start_run(shop, "refund", key, actor=owner)
        status, body = api.get(f"/sessions/{quote(key, safe='')}")
        assert (status, {*body}) == (200, told)
        assert (body["key"], body["owner"], body["owner_name"]) == (key, str(owner.pk), "owner")
        assert body["runs"] == {"items": [api.get(f"/runs/{run.pk}")[1]], "next": None}


def test_its_runs_come_in_pages(api: Api, shop: Agent, owner: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentruns.api.routing.PAGE", 1)
    for number in range(3):
        run = start_run(shop, f"task {number}", "s1", actor=owner)
        assert api.post(f"/runs/{run.pk}/cancel")[0] == 200
    start_run(shop, "elsewhere", "s2", actor=owner)
    assert [run["input"] for run in api.every("/sessions/s1")] == ["task 2", "task 1", "task 0"]
    assert api.get("/sessions/s1", cursor="x")[0] == 400


def listed(api: Api, **query: Any) -> list[tuple[str, str]]:
    """List the keys of the sessions, with the status of the last run."""
    return [(one["key"], one["status"]) for one in api.every("/sessions", **query)]


def conversation(api: Api, key: str, **query: Any) -> list[tuple[str, str]]:
    """List who said what in a session."""
    path = f"/sessions/{quote(key, safe='')}/messages"
    return [(one["role"], one["text"]) for one in api.every(path, "after", **query)]


def test_not_yours_is_not_there(api: Api, shop: Agent) -> None:
    start_run(shop, "theirs", "s1", actor=make_user("other"))
    start_run(shop, "the program's", "s2")
    for key in ("s1", "s2", "s3", "x" * 201, "%00", "%F0%9F"):
        refused(api.get(f"/sessions/{key}"), 404, "session-not-found")
    assert api.get("/sessions/s1")[1]["detail"] == "There is no session 's1'."
    viewer = Api(make_user("viewer", "view_run"))
    assert [viewer.get(f"/sessions/{key}")[0] for key in ("s1", "s2", "s3")] == [200, 200, 404]
    assert Api().get("/sessions/s1")[0] == 401
    assert Run.objects.count() == 2


def test_my_conversations_are_listed_the_newest_first(
    api: Api, shop: Agent, owner: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("agentruns.api.routing.PAGE", 2)
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


def test_a_conversation_is_what_people_read(api: Api, owner: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentruns.api.routing.PAGE", 2)
    chatty = shop_agent("chatty", {"text": "I look.", "tools": [call("lookup", number="A1")]})
    silent = shop_agent("silent", {"tools": [call("lookup", number="A1")]})
    for key in ("s1", "a/b"):
        run_agent(chatty, "find it", key, actor=owner)
    run_agent(silent, "again", "s1", actor=owner)
    stopped = start_run(chatty, "never mind", "s1", actor=owner)
    cancel_run(stopped.pk, reason="changed my mind")
    said = [
        ("user", "find it"), ("assistant", "I look."), ("assistant", "all done"), ("user", "again"),
        ("assistant", "all done"), ("user", "never mind"), ("program", "The run was cancelled."),
    ]  # fmt: skip
    assert conversation(api, "s1") == said
    staff = conversation(Api(make_user("staff", "view_run")), "s1")
    assert staff == [*said[:-1], ("program", "changed my mind")]
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


def test_a_visitor_reads_the_conversation_but_not_what_the_agent_was_told(api: Api, owner: Any) -> None:
    agent = shop_agent("told", instructions=told)
    run = run_agent(agent, "hello", "s1", actor=owner)
    run_agent(agent, "another", "s2", actor=owner)
    visitor = Program(session_token(Session.objects.get(key="s1"), timedelta(hours=1)))
    assert listed(visitor) == [("s1", "completed")]
    assert conversation(visitor, "s1") == [("user", "hello"), ("assistant", "all done")]
    for path in (f"/runs/{run.run_id}/messages", f"/runs/{run.run_id}/events"):
        for reader, is_told in ((visitor, False), (api, False), (Api(make_user(path, "view_run")), True)):
            answer: Any = reader.client.get(f"/api{path}")
            text = answer.getvalue().decode()
            assert ("recall" in text, "run_started" in text) == (is_told, True)
            answer.close()
