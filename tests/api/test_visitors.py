"""A customer's browser: a session token lets it read one session, write in it and confirm its own calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import path
from ninja import NinjaAPI

from agentruns import Agent, Policy, cancel_run, question_to, run_agent, session_token, start_run, tool
from agentruns.api.auth import BearerAuth
from agentruns.exceptions import NotFoundError, RunStateError, SessionAccessDeniedError
from agentruns.journal.policy import Quota
from agentruns.journal.verify import problems
from agentruns.models import ApiToken, Approval, Message, Run, Session
from agentruns.models.run import FAILED_DRIVE
from agentruns.services import api_tokens
from agentruns.services.data.retention import erase_session
from agentruns.services.permissions import decidable_by
from agentruns.services.runs.lifecycle import resume_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, frozen_clock
from tests.api.hosting import Broken
from tests.api.http import Api, Program, make_user, refused
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
CANCELLED: list[str] = []


@tool(requires_approval=True, approvers="requester")
def cancel_order(number: str) -> str:
    """Cancel an order."""
    CANCELLED.append(number)
    return f"order {number} is cancelled"


@tool(requires_approval=True)
def refund_order(number: str) -> str:
    """Refund an order."""
    return f"order {number} is refunded"


ASK = question_to("requester", name="ask_customer")


@pytest.fixture(autouse=True)
def nothing_cancelled() -> None:
    CANCELLED.clear()


@pytest.fixture
def chat() -> Agent:
    turns = [{"tools": [call("cancel_order", number="A1")]}, {"text": "It is cancelled."}] * 2
    return agent("chat", [cancel_order, refund_order, ASK], ScriptedModel([*turns]))


def agent(name: str, tools: list[Any], model: Any) -> Agent:
    return Agent(name, instructions="Serve.", tools=tools, model=model)


def asked(agent: Agent, session: str = "chat-17", actor: Any = None) -> Approval:
    """The card of a run that waits for its requester."""
    approval: Approval = run_agent(agent, "cancel A1", session, actor=actor).pending[0]
    return approval


def test_a_visitor_confirms_yes_cancel_it(chat: Agent) -> None:
    browser = Program(session_token("chat-17", HOUR))  # the page is opened before there is a run
    assert asked(chat).approvers == "requester"
    (run,) = browser.get("/sessions/chat-17")[1]["runs"]["items"]
    assert (run["status"], run["owner"]) == ("awaiting-approval", None)
    (card,) = browser.get("/approvals", status="pending")[1]["items"]
    assert (card["tool_name"], card["arguments"]) == ("cancel_order", {"number": "A1"})
    status, decided = browser.post(f"/approvals/{card['id']}/approve", {"digest": card["digest"]})
    assert (status, decided["status"]) == (200, "approved")
    assert (decided["decided_by"], decided["decided_by_name"]) == (None, "the session's visitor")
    assert CANCELLED == []  # it records; a worker executes
    assert resume_run(run["id"]).status == "completed"
    assert CANCELLED == ["A1"]
    kinds = [row["kind"] for row in browser.get(f"/runs/{run['id']}/messages")[1]["items"]]
    assert kinds[-1] == "run_completed"
    session = Session.objects.get()
    row = Message.objects.get(kind="approval_decided").payload
    assert row["actor"] == {"id": f"session:{session.pk}", "name": "the session's visitor"}
    assert row["channel"].startswith("api:ar_")
    # The chat goes on, by the visitor.
    status, run = browser.post("/runs", {"agent": "chat", "input": "and A1 again", "session": "chat-17"})
    assert (status, run["session"], run["owner"]) == (201, "chat-17", None)
    begun = Message.objects.get(run_id=run["id"], kind="run_started").payload
    assert begun["actor"] == {"id": f"session:{session.pk}", "name": "the session's visitor"}
    assert problems(session.pk) == []
    assert resume_run(run["id"]).status == "awaiting-approval"
    (card,) = browser.get("/approvals", status="pending")[1]["items"]
    assert browser.post(f"/approvals/{card['id']}/deny", {"digest": card["digest"], "reason": "no"})[0] == 200
    assert resume_run(run["id"]).status == "completed"
    assert CANCELLED == ["A1"]


def test_other_sessions_are_not_there(chat: Agent) -> None:
    session_token("other", HOUR)
    asked(chat, "other")
    unowned = start_run(chat, "the program's own", "program", actor=make_user("ann"))
    Run.objects.filter(pk=unowned.pk).update(owner=None)
    browser = Program(session_token("mine", HOUR))
    assert browser.get("/runs")[1]["items"] == browser.get("/approvals")[1]["items"] == []
    assert [browser.get(f"/sessions/{key}")[0] for key in ("other", "program", "mine")] == [404, 404, 200]
    for key in ("other", "program", "new"):
        assert browser.post("/runs", {"agent": "chat", "input": "hi", "session": key})[0] == 404
    assert Session.objects.filter(key="new").count() == 0


def test_it_starts_only_what_the_session_is_served_by(chat: Agent, shop: Agent) -> None:
    browser = Program(session_token("chat-17", HOUR))
    assert browser.post("/runs", {"agent": "chat", "input": "hi"})[0] == 403  # the program starts the first
    resume_run(start_run(chat, "hi", "chat-17").pk)
    for name in ("shop", "nobody"):
        assert browser.post("/runs", {"agent": name, "input": "hi"})[0] == 403
    assert browser.post("/runs", {"agent": "chat", "input": "hello"})[0] == 409  # busy, as for everybody
    assert Run.objects.count() == 1


def test_keys_of_two_visitors_never_meet(chat: Agent) -> None:
    quick = agent("quick", [], ScriptedModel([{"text": "hi"}] * 6))
    answers = []
    for key in ("a", "b"):
        browser = Program(session_token(key, HOUR))
        run_agent(quick, "hello", key)
        body = {"agent": "quick", "input": f"I am {key}", "idempotency_key": "1"}
        answers += [browser.post("/runs", body), browser.post("/runs", body)]
    assert [status for status, _run in answers] == [201, 200, 201, 200]
    assert answers[0][1]["id"] == answers[1][1]["id"] != answers[2][1]["id"]


def test_only_what_is_asked_of_the_requester_is_theirs(chat: Agent) -> None:
    model = ScriptedModel([{"tools": [call("refund_order", number="1")]}])
    browser = Program(session_token("chat-17", HOUR))
    card = asked(agent("staff", [refund_order], model))
    assert browser.get("/approvals")[1]["items"] == []
    assert browser.get(f"/approvals/{card.pk}")[0] == 404
    assert browser.post(f"/approvals/{card.pk}/approve", {"digest": card.digest})[0] == 404
    assert Approval.objects.get().status == "pending"


def test_it_is_confirmed_as_it_is(chat: Agent) -> None:
    browser = Program(session_token("chat-17", HOUR))
    card = asked(chat)
    where, digest = f"/approvals/{card.pk}", {"digest": card.digest}
    assert browser.post(f"{where}/approve", {**digest, "arguments": {"number": "B2"}})[0] == 403
    assert browser.post(f"{where}/answer", {**digest, "text": "cancelled, and 500 EUR are due"})[0] == 403
    assert browser.post(f"{where}/approve", {"digest": "0" * 64})[0] == 409
    assert browser.post(f"{where}/approve", {**digest, "idempotency_key": "1"})[0] == 422
    assert Approval.objects.get().status == "pending"
    assert browser.post(f"{where}/approve", digest)[0] == 200
    assert browser.post(f"{where}/approve", digest)[0] == 409


@pytest.mark.parametrize("choices", [[], ["A1", "A2"]], ids=["any-text", "choices"])
def test_a_question_to_the_customer_is_answered_by_them(choices: list[str]) -> None:
    more = {"choices": choices} if choices else {}
    turns = [{"tools": [call("ask_customer", question="Which order?", **more)]}, {"text": "thanks"}]
    browser = Program(session_token("chat-17", HOUR))
    card = asked(agent("asks", [ASK], ScriptedModel(turns)))
    path, digest = f"/approvals/{card.pk}/answer", {"digest": card.digest}
    if choices:
        status, problem = browser.post(path, {**digest, "text": "A3"})
        assert (status, "only one of its choices: 'A1', 'A2'" in problem["detail"]) == (409, True)
    status, decided = browser.post(path, {**digest, "text": "A1"})
    assert (status, decided["status"]) == (200, "answered")
    assert resume_run(card.run_id).status == "completed"


def test_it_ends_with_its_time_when_it_is_revoked_and_with_the_session(chat: Agent) -> None:
    with frozen_clock() as clock:
        text = session_token("chat-17", timedelta(minutes=5))
        browser = Program(text)
        assert browser.get("/runs")[0] == 200
        clock.forward(minutes=6)
        assert browser.get("/runs")[0] == 401
        again = Program(session_token("chat-17", HOUR))
        assert ApiToken.objects.count() == 1  # the one that ended is not kept
        assert again.get("/runs")[0] == 200
        assert api_tokens.revoke(ApiToken.objects.get().pk, make_user("guard", "revoke_api_token"))
        assert again.get("/runs")[0] == 401
        erased = Program(session_token("chat-17", HOUR))
        run = start_run(chat, "hi", "chat-17")
        assert Api(make_user("boss", "cancel_run", "view_run")).post(f"/runs/{run.pk}/cancel")[0] == 200
        erase_session("chat-17")
        assert erased.get("/runs")[0] == 401
    assert not ApiToken.objects.exists()


def test_what_cannot_have_one(owner: Any, chat: Agent) -> None:
    for key, ttl in (("a", timedelta()), ("a", timedelta(days=1, seconds=1)), ("", HOUR), ("x" * 201, HOUR)):
        with pytest.raises(ValueError, match=r"session"):
            session_token(key, ttl)
    assert not Session.objects.exists()
    start_run(chat, "mine", "chat-17", actor=owner)
    with pytest.raises(SessionAccessDeniedError, match="belongs to a user"):
        session_token("chat-17", HOUR)
    session = Session.objects.get()
    assert Program(session_token(session, HOUR)).get("/sessions/chat-17")[0] == 200
    with pytest.raises(ValueError, match="scopes"):
        api_tokens.create_token(owner, ["session"])
    Session.objects.update(imported_at=session.created_at)
    session.refresh_from_db()
    with pytest.raises(RunStateError, match="imported"):
        session_token(session, HOUR)


def test_a_host_s_own_routes_do_not_let_it_in(urlconf: Any, owner: Any) -> None:
    api = NinjaAPI(urls_namespace="own")

    @api.get("/secret", auth=BearerAuth())
    def secret(request: HttpRequest) -> HttpResponse:
        return HttpResponse("secret")

    urlconf(path("own/", api.urls))
    browser = Program(session_token("chat-17", HOUR))
    answer = browser.client.get("/own/secret")
    assert answer.status_code == 403
    assert b"secret" not in answer.content
    token = api_tokens.create_token(owner, ["runs:read"])[1]
    assert Program(token).client.get("/own/secret").content == b"secret"


def test_each_session_is_throttled_by_itself(settings: Any) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "2/m"}
    first, second = (Program(session_token(key, HOUR)) for key in ("a", "b"))
    assert [first.get("/runs")[0] for _ in range(3)] == [200, 200, 429]
    assert second.get("/runs")[0] == 200


# approvers="requester" for users


def test_the_owner_confirms_without_a_permission_nobody_else_does_and_staff_may_deny(
    chat: Agent, owner: Any, settings: Any
) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False  # does not concern what only they can confirm
    card = asked(chat, actor=owner)
    assert list(decidable_by(owner, Approval.objects.pending())) == [card]
    assert Api(owner).post(f"/approvals/{card.pk}/approve", {"digest": card.digest})[0] == 200
    assert resume_run(card.run_id).status == "completed"
    assert CANCELLED == ["A1"]
    card, named = asked(chat, "chat-18", actor=owner), make_user("named", "decide_approval")
    named.groups.add(Group.objects.create(name="requester"))  # a group of that name is not meant
    where, body, staff = f"/approvals/{card.pk}", {"digest": card.digest}, Api(named)
    assert list(decidable_by(named, Approval.objects.pending())) == []
    edit: dict[str, Any] = {"arguments": {"number": "B2"}}
    for verb, more in (("approve", {}), ("approve", edit), ("answer", {"text": "done"})):
        assert staff.post(f"{where}/{verb}", {**body, **more})[0] == 403
    assert Approval.objects.get(pk=card.pk).status == "pending"
    assert staff.post(f"{where}/deny", {**body, "reason": "fraud"})[0] == 200
    assert CANCELLED == ["A1"]


@pytest.mark.parametrize("end", ["revoked", "expired", "cancelled"])
def test_what_a_visitor_confirmed_is_void_when_the_token_is_revoked(chat: Agent, end: str) -> None:
    first, second = (session_token("chat-17", HOUR) for _ in range(2))
    card = asked(chat)
    where, body = f"/approvals/{card.pk}/approve", {"digest": card.digest}
    assert Program(first).post(where, body)[0] == 200
    token = ApiToken.objects.filter(prefix=first[:15])
    if end == "cancelled":
        token.delete()
        assert cancel_run(card.run_id).status == "cancelled"
        return
    if end == "expired":
        token.update(expires_at=Now())
        session_token("chat-17", HOUR)  # the chat's page was loaded again
    else:
        assert api_tokens.revoke(token.get().pk, None)
        row = Program(second).get(f"/runs/{card.run_id}/messages")[1]["items"][-1]
        visitor = f"session:{card.run.session_id}"
        assert (row["kind"], row["payload"]["approval"]) == ("approval_voided", str(card.pk))
        assert Message.objects.get(kind="approval_voided").payload["voided"] == [visitor]
        assert Program(second).post(where, body)[0] == 200
    sweep()
    assert (CANCELLED, problems(card.run.session_id)) == (["A1"], [])


def test_a_token_needs_the_scope_for_own_calls(chat: Agent, decider: Any, pending: Any) -> None:
    card, other = asked(chat, actor=decider), pending(actor=decider)
    where, body = f"/approvals/{card.pk}/approve", {"digest": card.digest}
    for scopes in (["runs:read", "runs:write"], ["approvals:decide"]):
        refused(Program(api_tokens.create_token(decider, scopes)[1]).post(where, body), 403, "scope")
    own = Program(api_tokens.create_token(decider, ["approvals:own"])[1])
    status, problem = own.post(f"/approvals/{other.pk}/approve", {"digest": other.digest})
    assert (status, problem["scopes"]) == (403, ["approvals:decide"])
    assert {one.status for one in Approval.objects.all()} == {"pending"}
    assert own.post(where, body)[0] == 200


def test_refused_at_the_start_without_anybody_who_could(chat: Agent, owner: Any) -> None:
    with pytest.raises(TypeError, match="one person"):
        tool(lambda: None, name="x", requires_approval=True, approvers="requester", approvals=2)
    for begin in (start_run, run_agent):
        with pytest.raises(RunStateError, match=r"cancel_order.*neither an owner nor a session token"):
            begin(chat, "cancel A1", "chat-17")
    assert not Run.objects.exists()
    assert not Session.objects.exists()
    with frozen_clock() as clock:
        session_token("chat-17", timedelta(minutes=1))
        clock.forward(minutes=2)
        with pytest.raises(RunStateError, match="session_token first"):
            start_run(chat, "cancel A1", "chat-17")
        session_token("chat-17", timedelta(minutes=1))
        assert start_run(chat, "cancel A1", "chat-17").owner_id is None
    assert start_run(chat, "cancel A1", "owned", actor=owner).owner == owner


def test_no_query_tells_of_somebody_else_s_token(chat: Agent) -> None:
    text = session_token("chat-17", HOUR)
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM agentruns_apitoken")
        assert text[16:] not in repr(cursor.fetchall())
    with pytest.raises(NotFoundError):
        api_tokens.revoke(text[:15], None)


class Few(Policy):
    """Two runs an hour, and no streams."""

    def visitor_quota(self, session: Session) -> Quota:
        return Quota(runs=2, streams=0) if session.key == "chat" else Quota(runs=0)


def test_visitors_of_a_session_have_a_quota(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Few"
    browsers = [Program(session_token("chat", timedelta(hours=1))) for _number in range(2)]
    run_agent(shop_agent("chat"), "hello", "chat")

    def say(number: int) -> Any:
        answer = browsers[number % 2].post("/runs", {"agent": "chat", "input": f"say {number}"})
        sweep()
        return answer

    assert [say(number)[0] for number in range(3)] == [201, 201, 429]
    run = Run.objects.latest("created_at")
    assert browsers[0].get(f"/runs/{run.pk}/events")[0] == 429
    monkeypatch.setattr(Broken, "question", "visitor_quota")
    settings.AGENTRUNS_POLICY = "tests.api.hosting.Broken"
    assert say(4)[0] == 429
    assert Run.objects.count() == 3


def test_a_visitor_reads_no_context() -> None:
    """What the project said of the task is for its tools."""
    shop_agent("shop", {"text": "hi"}, {"text": "ho"})
    visitor = Program(session_token("s1", HOUR))
    run = start_run("shop", "hello", "s1", context={"note": "RISK-9"})
    sweep()
    paths = ["/runs", f"/runs/{run.pk}", f"/runs/{run.pk}/messages", "/sessions", "/sessions/s1"]
    found = [visitor.get(path) for path in [*paths, "/sessions/s1/messages"]]
    answer = visitor.post("/sessions/s1/messages", {"content": "and?", "idempotency_key": "k"})
    found += [answer, visitor.post("/runs", {"agent": "shop", "input": "and?"})]
    stream = visitor.client.get(f"/api/runs/{run.pk}/events")
    assert {status for status, _body in found} <= {200, 201}
    assert "RISK-9" not in str(found) + b"".join(stream.streaming_content).decode()
    assert answer[1]["context"] == {}
    assert Run.objects.get(pk=answer[1]["id"]).context == {"note": "RISK-9"}
    staff = Api(make_user("staff", "view_run"))
    assert "RISK-9" in str(staff.get(f"/runs/{run.pk}"))
    assert "RISK-9" in str(staff.get(f"/runs/{run.pk}/messages"))


def test_a_visitor_does_not_read_the_error_of_a_failed_drive(chat: Agent) -> None:
    browser = Program(session_token("chat-17", HOUR))
    run = start_run(chat, "cancel A1", "chat-17")
    Run.objects.update(blocked_reason=f"{FAILED_DRIVE}OSError: /srv/secret")
    shown = browser.get(f"/runs/{run.pk}")[1]
    assert (shown["status"], shown["blocked_reason"]) == ("queued", "")
