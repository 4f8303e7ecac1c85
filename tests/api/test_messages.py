"""Messages over HTTP: who may write where, what is answered, and what the open card says of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agentruns import Agent, Policy, run_again, run_agent, session_token
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.people import browser
from tests.api.http import Api, Program, make_user
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

GATED = {"tools": [call("refund", cents=5000)]}


@pytest.fixture
def chat() -> Agent:
    turns = [GATED, {"text": "Refunded."}, {"text": "You are welcome."}]
    return Agent("chat", instructions="Serve.", tools=TOOLS, model=ScriptedModel(turns), starters="anyone")


def said(run: Run) -> list[str]:
    rows = Message.objects.filter(session=run.session_id, kind="user").order_by("seq")
    return [row.payload["content"][0]["text"] for row in rows]


def test_a_customer_writes_again_while_the_card_is_open(chat: Agent) -> None:
    ann = make_user("ann")
    run_agent(chat, "refund it", "a/b", actor=ann)
    api, decider = Api(ann), make_user("decider", "decide_approval", is_staff=True)
    status, run = api.post("/sessions/a%2Fb/messages", {"content": "please hurry", "idempotency_key": "k"})
    assert (status, run["status"]) == (201, "awaiting-approval")
    assert (
        api.post("/sessions/a/b/messages", {"content": "please hurry"}, **{"Idempotency-Key": "k"})[0] == 200
    )
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
    assert (
        Api(decider).post(f"/approvals/{card['id']}/deny", {"reason": "no", "digest": card["digest"]})[1][
            "unread"
        ]
        == []
    )
    sweep()
    assert Run.objects.get().status == "completed"
    status, second = api.post("/sessions/a/b/messages", {"content": "thank you"})
    assert (status, second["status"], second["id"] != run["id"]) == (201, "queued", True)
    assert problems(row.session_id) == []


def test_others_learn_nothing_and_write_only_with_permission(chat: Agent) -> None:
    run_agent(chat, "refund it", "s1", actor=make_user("ann"))
    body = {"content": "hello"}
    for path in ("/sessions/s1/messages", "/sessions/none/messages"):
        status, problem = Api(make_user(f"eve{len(path)}", "start_run")).post(path, body)
        assert (status, problem["type"]) == (404, "urn:agentruns:session-not-found")
    assert Api(make_user("viewer", "view_run")).post("/sessions/s1/messages", body)[0] == 403
    clerk = Api(make_user("clerk", "view_run", "start_run"))
    assert clerk.post("/sessions/s1/messages", body)[0] == 201
    card = Approval.objects.get()
    assert Api(make_user("boss", "decide_approval")).post(
        f"/approvals/{card.pk}/deny", {"reason": "no", "digest": card.digest}
    )[0] == 200  # fmt: skip
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


@pytest.mark.parametrize("body", [{}, {"content": ""}, {"content": 1}, {"content": "x", "agent": "none"}])
def test_what_is_no_message_is_422(chat: Agent, body: Any) -> None:
    ann = make_user("ann")
    run_agent(chat, "refund it", "s1", actor=ann)
    assert Api(ann).post("/sessions/s1/messages", body)[0] == 422


def test_a_busy_session_names_its_run(chat: Agent) -> None:
    Agent("other", instructions="Serve.", model=ScriptedModel([{"text": "hi"}]), starters="anyone")
    ann = make_user("ann")
    result = run_agent(chat, "refund it", "s1", actor=ann)
    status, problem = Api(ann).post("/sessions/s1/messages", {"content": "x", "agent": "other"})
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
    card = Approval.objects.get()
    Api(bob).post(f"/approvals/{card.pk}/deny", {"reason": "no", "digest": card.digest})
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
    other = Agent(
        "other", instructions="Serve.", model=ScriptedModel([{"text": "hi"}] * 2), starters="anyone"
    )
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
    Agent("chat", instructions="Serve.", model=ScriptedModel([{"text": "hi"}] * 3), starters="anyone")
    gone, staff = make_user("gone"), make_user("bob", is_superuser=True, is_staff=True)
    first = run_agent("chat", "mine", "s1", actor=gone).run_id
    users = type(gone).objects.filter(pk=gone.pk)
    key = str(gone.pk)
    if how == "inactive":
        users.update(is_active=False)
    else:
        users.delete()
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
