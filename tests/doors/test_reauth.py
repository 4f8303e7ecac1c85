"""A call of high risk is approved by who has just given their password, through every door for people."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from agentruns import Policy, approve, run_agent, tool
from agentruns.models import Approval, Message
from agentruns.services.api_tokens import create_token
from agentruns.services.permissions import CONFIRMED_AT
from agentruns.utils import clock
from tests.admin.pages import read, url
from tests.api.http import Api, make_user
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
