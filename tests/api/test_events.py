"""Events that outside systems deliver, by a token, a session or a signature; what a run says it waits for."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from datetime import timedelta
from typing import Any

import pytest

from agentruns import Pending, Policy, run_agent, session_token, tool
from agentruns.checks.settings import check_event_secrets
from agentruns.contrib.webhook import sign
from agentruns.models import Event, Message, Run
from agentruns.services.api_tokens import create_token
from agentruns.testing import run_until_blocked
from tests.api.http import Api, Program, make_user, refused
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

DAYS = timedelta(days=3)
SECRET, OTHER = (f"whsec_{b64encode(bytes([letter]) * 32).decode()}" for letter in b"ab")
PAID = {"status": "paid", "cents": 500}


@tool(awaits="payment")
def charge(order: str) -> Pending:
    """Ask the customer to pay."""
    return Pending(f"pi_{order}", DAYS)


@pytest.fixture
def waiting(owner: Any) -> Run:
    """A run of the owner's that waits for the payment of order 1."""
    agent = shop_agent("till", {"tools": [call("charge", order="1")]}, {"text": "Paid."}, tools=[charge])
    result = run_agent(agent, "charge", "s1", actor=owner)
    assert result.status == "waiting", result
    return Run.objects.get(pk=result.run_id)


@pytest.fixture
def cashier() -> Program:
    """A program that delivers events, and sees all runs."""
    return Program(create_token(make_user("cashier", "deliver_event", "view_run"), ["events:write"])[1])


class Sender(Api):
    """An outside system that signs what it sends."""

    def __init__(self, secret: str = SECRET, age: int = 0) -> None:
        super().__init__(csrf=True)
        self.secret, self.age, self.sent = secret, age, 0

    def send(self, path: str, body: Any = PAID, **headers: str) -> tuple[int, Any]:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.sent += 1
        moment, name = int(time.time()) - self.age, f"msg_{self.sent}"  # waits: the library reads this clock
        signed = {
            "webhook-id": name,
            "webhook-timestamp": str(moment),
            "webhook-signature": sign(self.secret, name, moment, text),
        }
        return self.post(path, text, **{**signed, **headers})


def test_the_first_delivery_counts_and_the_run_goes_on(waiting: Run, cashier: Program) -> None:
    first, again = (cashier.post("/events/payment/pi_1", body) for body in (PAID, {"status": "failed"}))
    assert first == (200, {"status": "delivered", "run": str(waiting.pk)})
    assert again == (200, {"status": "duplicate", "run": str(waiting.pk)})
    [result] = run_until_blocked()
    assert (result.status, result.output) == ("completed", "Paid.")
    row = Message.objects.get(run=waiting, kind="event_delivered")
    assert row.payload["actor"]["name"] == "cashier"
    assert Message.objects.get(run=waiting, kind="tool_result").payload["content"] == PAID


def test_what_comes_early_is_kept_and_what_comes_late_is_said_to(owner: Any, cashier: Program) -> None:
    assert cashier.post("/events/payment/pi_2", PAID) == (200, {"status": "early", "run": None})
    agent = shop_agent("till", {"tools": [call("charge", order="2")]}, {"text": "Paid."}, tools=[charge])
    early = run_agent(agent, "charge", "early", actor=owner)
    assert [early, *run_until_blocked()][-1].status == "completed"
    agent = shop_agent("late", {"tools": [call("charge", order="3")]}, tools=[charge])
    late = run_agent(agent, "charge", "late", actor=owner)
    Api(owner).post(f"/runs/{late.run_id}/cancel")
    assert cashier.post("/events/payment/pi_3", PAID) == (200, {"status": "late", "run": late.run_id})


def test_a_body_is_any_json_or_nothing_and_bounded(waiting: Run, cashier: Program, settings: Any) -> None:
    for number, body in enumerate(("text", [1], 5, None, True)):
        text = "" if body is None else json.dumps(body)
        assert cashier.post(f"/events/payment/any{number}", text)[1]["status"] == "early"
        assert Event.objects.get(key=f"any{number}").payload == body
    deep: Any = 1
    for _level in range(70):
        deep = [deep]
    refused(cashier.post("/events/payment/deep", deep), 422, "validation")
    refused(cashier.post("/events/payment/nan", "NaN"), 422, "validation")
    refused(cashier.post("/events/payment/none", "{"), 400, "malformed")
    refused(cashier.post(f"/events/payment/{'k' * 201}", PAID), 422, "validation")
    refused(cashier.post("/events/payment/a%00b", PAID), 422, "validation")
    refused(cashier.post("/events/agentruns.time/k", PAID), 422, "validation")
    refused(cashier.post("/events/payment/long", json.dumps("x" * 2**20)), 422, "validation")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    refused(cashier.post("/events/payment/large", "x" * 1001), 413, "too-large")
    assert Event.objects.filter(run=None).count() == 5
    assert cashier.post("/events/payment/a/b%2Fc%3F", PAID)[1]["status"] == "early"
    assert Event.objects.filter(key="a/b/c?").exists()


def test_it_takes_the_scope_of_the_token_and_the_permission(waiting: Run, owner: Any) -> None:
    path = "/events/payment/pi_1"
    clerk = make_user("clerk", "deliver_event")
    refused(Program(create_token(owner, ["events:write"])[1]).post(path, PAID), 403, "permission-denied")
    poor = refused(Program(create_token(clerk, ["runs:write"])[1]).post(path, PAID), 403, "scope")
    assert poor["scopes"] == ["events:write"]
    refused(Program(session_token(waiting.session, timedelta(minutes=5))).post(path, PAID), 403, "scope")
    refused(Api().post(path, PAID), 401, "not-authenticated")
    refused(Program("ar_wrong").post(path, PAID), 401, "not-authenticated")
    refused(Api(clerk, csrf=True).post(path, PAID), 403, "csrf")
    assert not Event.objects.filter(delivered_at__isnull=False).exists()
    # The clerk sees no runs.
    assert Api(clerk).post(path, PAID) == (200, {"status": "delivered", "run": None})


class ByName(Policy):
    """Everybody's scope is their name."""

    def scope(self, user: Any) -> str:
        return "" if user is None else str(user.get_username())


def test_an_event_is_in_its_senders_scope(waiting: Run, settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.ByName"
    clerk, boss = make_user("clerk", "deliver_event"), make_user("boss", "deliver_event", "act_for")
    mine = Program(create_token(clerk, ["events:write", "runs:act_for"])[1])
    assert mine.post("/events/payment/pi_1", PAID)[1]["status"] == "early"
    assert Event.objects.get(delivered_at__isnull=False).scope == "clerk"
    refused(mine.post("/events/payment/pi_1?scope=", PAID), 403, "permission-denied")
    text = create_token(boss, ["events:write"])[1]
    refused(Program(text).post("/events/payment/pi_1?scope=", PAID), 403, "scope")
    assert Api(boss).post("/events/payment/pi_1?scope=", PAID)[1]["status"] == "delivered"


def test_a_signature_is_enough(waiting: Run, settings: Any) -> None:
    settings.AGENTRUNS_EVENT_SECRETS = {"payment": f"{OTHER} {SECRET}"}
    sender = Sender()
    assert sender.send("/events/payment/pi_1") == (200, {"status": "delivered", "run": None})
    assert sender.send("/events/payment/pi_1") == (200, {"status": "duplicate", "run": None})
    row = Message.objects.get(run=waiting, kind="event_delivered")
    assert row.payload["actor"] == {"id": "", "name": "the sender of payment"}


@pytest.mark.parametrize(
    ("secrets", "sender", "path", "headers"),
    [
        ({"payment": SECRET}, Sender(OTHER), "payment/k", {}),
        ({"payment": SECRET}, Sender(age=400), "payment/k", {}),
        ({"payment": SECRET}, Sender(age=-400), "payment/k", {}),
        ({"payment": SECRET}, Sender(), "parcel/k", {}),
        ({"payment": SECRET}, Sender(), "payment/k?scope=north", {}),
        ({"payment": {"north": SECRET}}, Sender(), "payment/k", {}),
        ({"payment": OTHER, "*": SECRET}, Sender(), "payment/k", {}),
        ({}, Sender(), "payment/k", {}),
        *(
            ({"payment": SECRET}, Sender(), "payment/k", {"webhook-signature": text})
            for text in ("v1", "nonsense", "v1,é", "v1,%%", "v2,AAAA", "v1,AAAA", "", " ")
        ),
        ({"payment": SECRET}, Sender(), "payment/k", {"webhook-timestamp": "nan"}),
        ({"payment": SECRET}, Sender(), "payment/k", {"webhook-id": "another"}),
    ],
)
def test_another_signature_is_refused(
    secrets: Any, sender: Sender, path: str, headers: dict[str, str], settings: Any
) -> None:
    settings.AGENTRUNS_EVENT_SECRETS = secrets
    clerk = make_user("clerk", "deliver_event")
    bearer = {"Authorization": f"Bearer {create_token(clerk, ['events:write'])[1]}"}
    told = [refused(sender.send(f"/events/{path}", PAID, **headers, **more), 401, "not-authenticated")
            for more in ({}, bearer)]  # fmt: skip
    assert told[0] == told[1]
    assert "more than five minutes old or ahead" in told[0]["detail"]
    assert "AGENTRUNS" not in str(told[0]), "the sender is nobody yet"
    assert not Event.objects.exists()


def test_a_changed_or_unreadable_body_is_refused(settings: Any) -> None:
    settings.AGENTRUNS_EVENT_SECRETS = {"*": {"": SECRET, "north": OTHER}}
    sender = Sender()
    refused(sender.send("/events/payment/k", b'"\xff"'), 401, "not-authenticated")
    moment = int(time.time())  # waits: the library reads this clock
    signed = sign(SECRET, "m", moment, b"{}")
    headers = {"webhook-id": "m", "webhook-timestamp": str(moment), "webhook-signature": signed}
    refused(sender.post("/events/payment/k", "[]", **headers), 401, "not-authenticated")
    assert sender.send("/events/payment/k")[1]["status"] == "early"
    assert Sender(OTHER).send("/events/parcel/k?scope=north")[1]["status"] == "early"
    assert {*Event.objects.values_list("scope", "name")} == {("", "payment"), ("north", "parcel")}


@pytest.mark.parametrize(
    "secrets",
    ["text", {"payment": "hidden"}, {"payment": "whsec_hidden"}, {"payment": "whsec_" + "AAAA"},
     {"payment": {"north": f"{SECRET} hidden"}}, {"payment": ""}],
)  # fmt: skip
def test_a_secret_that_is_none_is_found_and_not_printed(secrets: Any, settings: Any) -> None:
    settings.AGENTRUNS_EVENT_SECRETS = secrets
    [error] = check_event_secrets(None)
    assert error.id == "agentruns.E027"
    assert not [word for word in ("hidden", "AAAA", SECRET) if word in f"{error.msg} {error.hint}"]
    settings.AGENTRUNS_EVENT_SECRETS = {"payment": f"{SECRET} {OTHER}", "*": {"north": SECRET}}
    assert check_event_secrets(None) == []


def test_senders_are_counted_each_for_itself(settings: Any) -> None:
    settings.AGENTRUNS_EVENT_SECRETS = {"a": SECRET, "b": SECRET}
    settings.AGENTRUNS_API_THROTTLE = {"user": "2/h", "anonymous": "1/h"}
    sender, thief = Sender(), Sender(OTHER)
    assert [sender.send(f"/events/{name}/k")[0] for name in "aabba"] == [200, 200, 200, 200, 429]
    assert [thief.send("/events/a/k")[0] for _ in range(2)] == [401, 429]


def test_a_run_says_for_which_events_it_waits(waiting: Run, owner: Any) -> None:
    run = Api(make_user("viewer", "view_run")).get(f"/runs/{waiting.pk}")[1]
    [wait] = run["waits_for"]
    since, until = wait.pop("since"), wait.pop("until")
    call_id = Message.objects.get(run=waiting, kind="event_awaited").call_id
    assert run["status"] == "waiting"
    assert wait == {"call_id": call_id, "tool": "charge", "name": "payment", "key": "pi_1"}
    assert waiting.created_at.isoformat() < since.replace("Z", "+00:00") < until
    api = Api(owner)
    assert [each["key"] for each in api.get(f"/runs/{waiting.pk}")[1]["waits_for"]] == [""]
    assert [len(each["waits_for"]) for each in api.every("/runs", status="waiting")] == [1]
    state = api.get(f"/runs/{waiting.pk}/state")[1]
    assert (state["status"], state["calls"][0]["outcome"]) == ("waiting", None)
    api.post(f"/runs/{waiting.pk}/cancel")
    assert api.get(f"/runs/{waiting.pk}")[1]["waits_for"] == []
