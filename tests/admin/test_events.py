"""What a run waits for on its page and in the list, and the buttons Deliver and Stop waiting."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from agentruns import (
    Pending,
    Policy,
    deliver_event,
    fork_run,
    run_agent,
    start_run,
    tool,
    wait_for_event,
    wait_until,
)
from agentruns.admin.html import exact, short_id
from agentruns.models import Approval, Event, Message, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at, expire_leases, run_until_blocked
from tests.admin.pages import leads_to, listed, look, read, says, text, unchanged, url, words
from tests.admin.people import OTHERS, browser, user
from tests.admin.world import status
from tests.db.deferrals import ask, desk
from tests.db.families import begin, children, hand_over, work
from tests.redacting import HIDE, KEY
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

OTHERS["clerk"] = ["view_run", "deliver_event", "resolve_orphan"]
DAYS = timedelta(days=3)


def wait(key: str) -> dict[str, Any]:
    """A call that waits for a parcel."""
    return {"name": "wait_for_event", "input": {"name": "parcel", "key": key, "timeout_seconds": 900}}


GONE = "The call does not wait for its event any more."


@tool(awaits="payment", sensitive=["iban"])
def charge(order: str, iban: str = "") -> Pending:
    """Ask the customer to pay."""
    return Pending(f"pi_{order}-{iban}" if iban else f"pi_{order}", DAYS)


def waiting(*calls: Any, session: str = "s1") -> Run:
    """A run that waits for what these calls wait for."""
    asked = calls or (call("charge", order="1"),)
    tools = [charge, wait_for_event, wait_until]
    agent = shop_agent(f"till-{session}", {"tools": [*asked]}, {"text": "Done."}, tools=tools)
    result = run_agent(agent, "charge the customer", session)
    assert result.status == "waiting", result
    return Run.objects.get(pk=result.run_id)


def call_of(run: Run) -> str:
    return Message.objects.filter(run=run, kind="event_awaited").latest("seq").call_id


def press(run: Run, verb: str, role: str = "clerk", **data: Any) -> Any:
    return browser(role).post(url(run, verb, call_of(run)), data, follow=True)


def test_a_page_says_what_its_run_waits_for_since_when_and_until_when() -> None:
    run = waiting()
    awaited = Message.objects.get(run=run, kind="event_awaited")
    until = datetime.fromisoformat(awaited.payload["until"])
    page = look(run, "It waits for something outside, and goes on by itself", role="clerk")
    said = words(page)
    assert f"Waits for payment pi_1 call of charge since {exact(awaited.created_at)}" in said
    assert f"until {exact(until)} (in 2 days)" in said
    assert "waits for payment" in said, "the line of the call"
    assert {url(run, verb, call_of(run)) for verb in ("deliver", "stop_waiting")} <= page.forms.keys()
    assert (
        not {url(run, verb, call_of(run)) for verb in ("deliver", "stop_waiting")}
        & look(run, role="reader").forms.keys()
    )
    called = words(says(browser("clerk").get(url(run, "call", call_of(run)))))
    assert "to wait for payment pi_1." in called
    assert "It waits for the event" in called


def test_events_of_the_same_name_that_nobody_waits_for_are_beside_the_wait() -> None:
    run = waiting()
    for key in ("pi_1/", "<b>pi_1"):
        assert deliver_event("payment", key).status == "early"
    deliver_event("parcel", "pi_1")
    deliver_event("payment", "pi_1//", scope="another")
    page = look(run, role="clerk")
    said = words(page)
    assert "Nobody waits for these events of the same name. Compare the keys: " in said
    assert said.index("<b>pi_1 delivered") < said.index("pi_1/ delivered"), "the newest is the first"
    assert "parcel" not in said and "pi_1//" not in said
    assert "pi_1/" not in words(look(run, role="reader")), "who may not deliver sees none"
    for number in range(9):
        deliver_event("payment", f"n{number}")
    assert [f"n{number} delivered" in words(look(run, role="clerk")) for number in range(9)].count(True) == 5


def test_the_list_and_the_front_page_ask_nobody_for_it() -> None:
    run = waiting()
    line = listed("run", "clerk", status="waiting")
    assert "waits for an event" in line.text
    assert "Waits for payment pi_1, until" in line.text
    assert not [link for link in line.links if "/calls/" in link]
    assert str(run.pk) not in listed("run", "clerk", status="person").html
    front = words(says(browser("clerk").get("/admin/")))
    assert "1 waiting for an event" in front
    assert leads_to(says(browser("superuser").get("/admin/agentruns/run/in-doubt/"))) == []


def test_deliver_takes_json_once_and_names_the_person() -> None:
    run = waiting()
    with unchanged():
        for wrong in ("{", "NaN", "[" * 70 + "]" * 70, "x"):
            page = says(press(run, "deliver", payload=wrong), "Nothing was delivered", status=400)
            kept = page.forms[url(run, "deliver", call_of(run))]["payload"]
            assert "".join(kept.split()) == wrong
    done = press(run, "deliver", payload='{"status": "paid"}')
    says(done, "Delivered. A worker goes on with the run.", "clerk: Event delivered")
    row = Message.objects.get(run=run, kind="event_delivered")
    assert row.payload["actor"]["name"] == "clerk"
    assert LogEntry.objects.get().object_id == str(run.pk)
    with unchanged():
        for verb in ("deliver", "stop_waiting"):
            says(press(run, verb, payload="1"), GONE, status=409)
    assert [result.status for result in run_until_blocked()] == ["completed"]
    assert Message.objects.get(run=run, kind="tool_result").payload["content"] == {"status": "paid"}
    assert "waited" in text(run, "?rows=full") or "Event delivered" in text(run, "?rows=full")


def test_stop_waiting_ends_a_wait_as_its_time_limit_would() -> None:
    run = waiting()
    assert "The outcome of the call is recorded as unknown" in words(look(run))
    says(press(run, "stop_waiting"), "The wait is over. A worker goes on with the run.", "Outcome unknown")
    assert Message.objects.get(run=run, kind="tool_result").payload["outcome"] == "unknown"
    assert deliver_event("payment", "pi_1", {"status": "paid"}).status == "late"
    called = words(says(browser("resolver").get(url(run, "call", call_of(run)))))
    assert "It was delivered after the wait had ended. Read whether it says that it happened:" in called
    assert "so it did happen" not in called, "an event may say that the payment failed"
    assert "the program delivered payment pi_1" in called
    only = waiting(wait("7"), session="s2")
    assert "the model is told that the time is over" in words(look(only))
    press(only, "stop_waiting")
    assert Message.objects.get(run=only, kind="tool_result").payload["content"] == {"timed_out": True}


def test_a_wait_for_a_time_can_be_ended_and_not_delivered() -> None:
    at = datetime.now(UTC) + DAYS
    run = waiting(call("wait_until", at=at.isoformat()))
    page = look(run, "Waits until", role="clerk")
    assert url(run, "stop_waiting", call_of(run)) in page.forms
    assert url(run, "deliver", call_of(run)) not in page.forms
    with unchanged():
        assert press(run, "deliver", payload="1").status_code == 409
    press(run, "stop_waiting")
    assert status(run) == "queued"


def test_several_waits_stand_on_one_page_and_a_paused_run_still_says_them() -> None:
    calls = [wait("a"), wait("b")]
    run = waiting(*calls)
    assert {words(look(run)).count(f"Waits for parcel {key}") for key in "ab"} == {1}
    browser("superuser").post(url(run, "pause"), {"reason": "at night"})
    assert status(run) == "paused"
    says(press(run, "deliver", payload=""), "Delivered.", "Waits for parcel a", "It is paused")
    assert Event.objects.filter(settled_at=None).count() == 1


@pytest.mark.parametrize("role", ["reader", "operator", "anonymous", "customer"])
@pytest.mark.parametrize("verb", ["deliver", "stop_waiting"])
def test_others_may_not_press_them(role: str, verb: str) -> None:
    run = waiting()
    with unchanged():
        response = browser(role).post(url(run, verb, call_of(run)), {"payload": "1"})
        assert response.status_code == 302 if role in ("anonymous", "customer") else 403
        assert browser("clerk").get(url(run, verb, call_of(run))).url == url(run)


def test_the_key_is_masked_where_it_holds_what_is_sensitive() -> None:
    run = waiting(call("charge", order="1", iban="DE02-secret"))
    for page in (look(run, role="clerk"), listed("run", "clerk"), says(browser("clerk").get("/admin/"))):
        assert "DE02-secret" not in page.html
    says(press(run, "deliver", payload="1"), "Delivered.")
    assert "DE02-secret" not in look(run, role="clerk", query="?rows=full").html


class AlonePolicy(Policy):
    """Shows nobody the child runs."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(parent=None)


def test_a_wait_for_a_child_run_names_it_and_leads_to_it(settings: Any) -> None:
    run = begin(hand_over())
    (child,) = children(run)
    page = look(run, "It waits for another run, and goes on by itself when that run has ended")
    short = short_id(child.pk)
    assert f"Waits for run {short} of agent scout queued call of scout since" in words(page)
    assert "waits for its run" in words(page), "the line of the call"
    assert page.links.count(url(child)) == 2, "and among the related runs"
    assert not {url(run, verb, call_of(run)) for verb in ("deliver", "stop_waiting")} & page.forms.keys()
    said = f"Waits for run {short}, which a call of scout started"
    assert said in listed("run", status="waiting").text
    settings.AGENTRUNS_POLICY = f"{__name__}.AlonePolicy"
    page = look(run, said)
    assert url(child) not in page.links


def test_what_a_model_wrote_is_attributed_to_it_and_not_to_the_person(settings: Any) -> None:
    settings.AGENTRUNS_REDACT = HIDE
    task = {"tools": [call("scout", task=f"refund all of <A1> {KEY}")]}
    boss = hand_over(task, to=[{"tools": [call("refund", cents=5000)]}])
    run = start_run(boss, f"a <refund> please {KEY}", "s1", owner=user("customer"))
    work()
    (child,) = children(run)
    card = Approval.objects.get(run=child)
    asked = "customer asked: “a <refund> please [key]”"
    given = "Given by agent boss (unverified), for customer: “refund all of <A1> [key]”"
    shown = words(look(card))
    assert f"{asked} {given}" in shown
    waits = f"Waits for run {short_id(child.pk)}, which a call of scout started"
    assert waits in shown.partition("Started by a call of run")[2]
    assert waits in words(look(child)).partition("Related runs")[2]
    turn = f"/admin/agentruns/approval/turn/{child.pk}/"
    assert f"{asked} {given}" in words(read(browser("superuser").get(turn)))
    assert words(look(child, query="?rows=full")).count("agent boss (unverified)") == 2, "its words and steps"
    told = Message.objects.own().get(run=child, kind="user")
    assert told.payload["giver"] == "boss"
    fork = fork_run(child.pk, told.seq, text="go on")
    work()
    shown = words(look(Approval.objects.get(run=fork)))
    assert ("customer asked" in shown, "agent boss" in shown) == (False, False), "a person's words came last"
    assert "agent boss (unverified)" in words(look(fork))
    settings.AGENTRUNS_POLICY = f"{__name__}.ChildrenPolicy"
    shown = words(look(card))
    assert given in shown
    assert "asked: “a" not in shown


class ChildrenPolicy(Policy):
    """Shows nobody the runs that hand tasks over."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.exclude(parent=None)


def test_nobody_is_said_to_have_given_the_task_of_a_deferred_call(settings: Any) -> None:
    run, child = ask(desk(), "my lamp is broken", owner=user("customer"), actor=user("customer"))
    card = Approval.objects.get()
    assert "Given by customer: “my lamp is broken”" in words(look(card))
    settings.AGENTRUNS_POLICY = f"{__name__}.ChildrenPolicy"
    task = f"give_back(cents=5000) (a deferred call of run {run.pk})"
    assert f"Given by the program: “{task}”" in words(look(card))
    assert f"the program {task}" in words(look(child)), "its conversation"


def test_the_page_of_a_call_in_doubt_names_the_event_that_settles_it(settings: Any) -> None:
    shop_agent("till", {"tools": [call("charge", order="1")]}, {"text": "Done."}, tools=[charge])
    run = start_run("till", "charge", "s1")
    with crashing_at("after_tool"):
        sweep()
    deliver_event("payment", "pi_1", {"paid": 1})
    deliver_event("other", "pi_2")
    expire_leases()
    sweep()
    start = Message.objects.own().get(run=run, kind="tool_started")
    where = url(run, "call", start.call_id)
    page = says(browser("clerk").get(where))
    door = f"/api/events/payment/{start.payload['key']}"
    assert "The tool awaits payment. An event of this name with the idempotency key" in words(page)
    assert f"A sender delivers it here: POST {door}" in words(page)
    assert "Nobody waits for these events of the same name. Compare the keys: pi_1 delivered" in words(page)
    assert "pi_2" not in page.text
    assert "pi_1" not in says(browser("resolver").get(where)).text
    token = create_token(user("clerk"), ["events:write"])[1]
    sent = Client().post(door, {}, "application/json", HTTP_AUTHORIZATION=f"Bearer {token}")
    assert sent.json()["status"] == "delivered"
    sweep()
    assert status(run) == "completed"
    assert "The tool awaits" not in says(browser("clerk").get(where)).text
