"""A call of high risk is approved by who has just given their password, through every door for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_login_failed
from django.db.models import F
from django.test import Client

from agentruns import Policy, approve, draft_rule, run_agent, tool
from agentruns.models import Approval, Message, StartCount
from agentruns.services.api_tokens import create_token
from agentruns.services.permissions import CONFIRMED_AT
from agentruns.utils import clock
from tests.admin.pages import read, url
from tests.api.http import Api, make_user
from tests.db.racing import together
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/agentruns/approval/"
PASSWORD = "correct horse"


class WithKey(Policy):
    """Knows people by a key of their own."""

    def has_second_factor(self, request: Any) -> bool:
        return bool(request.headers.get("X-Key") == "1")


@tool(requires_approval=True, risk="high")
def pay(cents: int) -> str:
    """Pay."""
    return "paid"


@tool(requires_approval=True)
def note(text: str) -> str:
    """Note."""
    return "noted"


@pytest.fixture
def ann(settings: Any) -> Any:
    settings.AGENTRUNS_REAUTH_SECONDS = 300
    return make_user("ann", "decide_approval", "view_approval", is_staff=True, password=PASSWORD)


def cards(*calls: Any, session: str = "s1") -> list[Approval]:
    agent = shop_agent(f"payer-{session}", {"tools": list(calls)}, tools=[pay, note])
    return list(run_agent(agent, "pay", session).pending)


def decided() -> int:
    return Message.objects.filter(kind="approval_decided").count()


def age(client: Client, seconds: float) -> None:
    """Let the password have been given so long ago."""
    session = client.session
    session[CONFIRMED_AT] = (clock.now("default") - timedelta(seconds=seconds)).timestamp()
    session.save()


def test_the_card_asks_and_keeps_what_was_typed(ann: Any) -> None:
    make_user("bob", password="another one")
    client, two = Api(ann).client, cards(call("pay", cents=5), call("pay", cents=6))
    for decisions, (verb, card) in enumerate(zip(("approve", "edit"), two, strict=True)):
        age(client, 301)
        assert "Your password" in read(client.get(url(card))).text
        given = {"digest": card.digest, "reason": "a long story", "argument-cents": "4"}
        for password in ("", "wrong", "another one"):
            answer = client.post(url(card, verb), {**given, "password": password})
            page = read(answer)
            assert (answer.status_code, decided()) == (403, decisions)
            assert "Nothing was decided" in page.text
            form = page.forms[url(card, verb)]
            assert (form["reason"].strip(), form["password"]) == ("a long story", "")
        assert client.post(url(card, verb), {**given, "password": PASSWORD}).status_code == 302
        assert decided() == decisions + 1
    assert PASSWORD not in str([row.payload for row in Message.objects.all()])


def test_it_is_asked_again_but_not_for_other_risks_or_without_the_setting(ann: Any, settings: Any) -> None:
    first, second, third, fourth, by_service = cards(*(call("pay", cents=cents) for cents in range(1, 6)))
    client = Api(ann).client
    assert approve(by_service.pk, ann).status == "approved", "as from a shell"
    client.post(url(first, "approve"), {"digest": first.digest, "password": PASSWORD})
    assert client.post(url(second, "approve"), {"digest": second.digest}).status_code == 302
    age(client, 301)
    assert client.post(url(third, "approve"), {"digest": third.digest}).status_code == 403
    assert client.post(url(third, "deny"), {"digest": third.digest, "reason": "no"}).status_code == 302
    assert decided() == 4
    (plain,) = cards(call("note", text="x"), session="s2")
    assert "Your password" not in read(client.get(url(plain))).text
    assert client.post(url(plain, "approve"), {"digest": plain.digest}).status_code == 302
    settings.AGENTRUNS_REAUTH_SECONDS = None
    assert client.post(url(fourth, "approve"), {"digest": fourth.digest}).status_code == 302


def test_several_at_once_ask_likewise(ann: Any) -> None:
    client = Api(ann).client
    for decisions, where in ((0, "list"), (2, "turn")):
        age(client, 301)
        both = cards(call("pay", cents=5), call("note", text="x"), session=where)
        given: dict[str, Any] = {f"digest-{one.pk}": one.digest for one in both}
        given |= {"_selected_action": [str(one.pk) for one in both], "reason": "my note"}
        to, how = LIST, {"action": "approve_selected", "confirmed": "1"}
        if where == "turn":
            to, how = f"{LIST}turn/{both[0].run_id}/", {"verb": "approve"}
        answer = client.post(to, {**given, **how})
        assert (answer.status_code, decided()) == (403, decisions)
        page = read(answer)
        assert "give your password" in page.text
        assert "my note" in str(page.forms)
        answer = client.post(to, {**given, **how, "password": PASSWORD})
        assert (answer.status_code in (200, 302), decided()) == (True, decisions + 2)


@pytest.fixture
def failed() -> Iterator[list[dict[str, Any]]]:
    """What Django's signal of a failed login told, for example to django-axes."""
    told: list[dict[str, Any]] = []

    def hear(sender: Any, credentials: Any, request: Any = None, **more: Any) -> None:
        told.append({"name": credentials["username"], "user": request.user.get_username()})

    user_login_failed.connect(hear)
    yield told
    user_login_failed.disconnect(hear)


def give(client: Client, card: Approval, password: str, verb: str = "approve") -> tuple[int, str]:
    answer: Any = client.post(url(card, verb), {"digest": card.digest, "reason": "x", "password": password})
    return answer.status_code, read(answer).text


def test_wrong_passwords_are_counted_told_and_logged_until_none_is_checked(
    ann: Any, failed: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    make_user("bob", "decide_approval", "view_approval", is_staff=True, password=PASSWORD)
    first, second, third = cards(*(call("pay", cents=cents) for cents in (1, 2, 3)))
    (plain,) = cards(call("note", text="x"), session="s2")
    clients = [Api(ann).client, Api(ann).client]  # of two browsers
    for number in range(5):
        status, text = give(clients[number % 2], first, "wrong")
        assert (status, "That is not your password" in text, len(failed)) == (403, True, number + 1)
    assert failed == [{"name": "ann", "user": "ann"}] * 5
    for password in (PASSWORD, "wrong"):
        status, text = give(clients[0], first, password)
        assert (status, "No password is taken for 15 min" in text) == (403, True)
    both = {f"digest-{first.pk}": first.digest, "_selected_action": [str(first.pk)], "password": PASSWORD}
    in_bulk = clients[1].post(LIST, {**both, "action": "approve_selected", "confirmed": "1"})
    assert (in_bulk.status_code, decided(), len(failed)) == (403, 0, 5)
    records = [each.getMessage() for each in caplog.records if each.name == "agentruns.passwords"]
    assert (len(records), f"user={ann.pk} address=127.0.0.1" in records[0]) == (8, True)
    assert PASSWORD not in caplog.text
    # Everything else goes on, for ann and for others.
    assert (give(clients[0], plain, "")[0], give(clients[0], second, "", "deny")[0]) == (302, 302)
    assert give(Api(User.objects.get(username="bob")).client, third, PASSWORD)[0] == 302
    StartCount.objects.filter(user_id=f"password:{ann.pk}").update(since=F("since") - timedelta(minutes=15))
    assert give(clients[0], first, PASSWORD)[0] == 302
    assert not StartCount.objects.exists(), "the count begins anew"


def test_of_many_tries_at_once_no_more_are_checked(ann: Any, failed: list[dict[str, Any]]) -> None:
    (card,) = cards(call("pay", cents=5))
    clients = [Api(ann).client for _number in range(8)]
    answers = together(lambda number: give(clients[number], card, "wrong"))
    assert ([status for status, _text in answers], len(failed), decided()) == ([403] * 8, 5, 0)


def test_the_api_says_what_is_missing(ann: Any, settings: Any) -> None:
    card, other = cards(call("pay", cents=5), call("pay", cents=6))
    path, body = f"/approvals/{card.pk}/approve", {"digest": card.digest}
    api = Api(ann)
    status, problem = api.post(path, body)
    assert (status, problem["type"]) == (403, "urn:agentruns:reauthentication-needed")
    _token, text = create_token(ann, ["approvals:decide"])
    age(api.client, 10)  # of the cookie's session, which does not count beside a token
    assert api.post(path, body, Authorization=f"Bearer {text}")[0] == 403
    assert decided() == 0
    settings.AGENTRUNS_POLICY = f"{__name__}.WithKey"
    assert api.post(path, body, Authorization=f"Bearer {text}", X_Key="1")[0] == 200
    settings.AGENTRUNS_POLICY = "agentruns.Policy"
    assert api.post(f"/approvals/{other.pk}/approve", {"digest": other.digest})[0] == 200
    assert decided() == 2


@tool(requires_approval=True, risk="high", rules=True)
def send(cents: int) -> str:
    """Send."""
    return "sent"


def test_activating_a_rule_for_a_high_risk_asks_likewise(settings: Any) -> None:
    settings.AGENTRUNS_REAUTH_SECONDS = 300
    rights = ("view_approvalrule", "activate_rule", "view_run")
    bea = make_user("bea", *rights, is_staff=True, password=PASSWORD)
    shop_agent("sender", tools=[send])
    fits = [{"path": "arguments.cents", "op": "<=", "value": 5}]
    rule = draft_rule(None, name="small", agent="sender", tool="send", conditions=fits)
    api, (_token, text) = Api(bea), create_token(bea, ["rules:write"])
    for more in ({}, {"Authorization": f"Bearer {text}"}):
        status, problem = api.post(f"/rules/{rule.pk}/activate", {}, **more)
        assert (status, problem["type"]) == (403, "urn:agentruns:reauthentication-needed")
    page = f"/admin/agentruns/approvalrule/{rule.pk}/"
    assert 'name="password"' in api.client.get(f"{page}change/").content.decode()
    sent = {"seen": str(rule.changes.get().pk)}
    for password in ("", "wrong"):
        answer = api.client.post(f"{page}activate/", {**sent, "password": password})
        told = answer.content.decode()
        assert (answer.status_code, "Nothing was changed." in told, "assword" in told) == (403, True, True)
        assert "Nothing was decided." not in told
        assert "Used of its caps" not in told, "it has none"
    rule.refresh_from_db()
    assert rule.status == "draft"
    api.client.post(f"{page}activate/", {**sent, "password": PASSWORD})
    rule.refresh_from_db()
    assert rule.status == "active"
    assert 'name="password"' not in api.client.get(f"{page}change/").content.decode()
    rule = draft_rule(None, name="small", agent="sender", tool="send", conditions=fits)
    assert api.post(f"/rules/{rule.pk}/activate", {}, Authorization=f"Bearer {text}")[0] == 403
    assert api.post(f"/rules/{rule.pk}/activate", {})[0] == 200, "its password was given just now"
