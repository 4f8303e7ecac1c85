"""Approvals in Slack: a press decides by the same service as the console, and every wrong press nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connections
from django.test import Client
from django.urls import reverse

from agentruns import Policy, RunResult, ToolContext, deny, run_agent, tool
from agentruns.checks.settings import check_notifiers
from agentruns.contrib import slack
from agentruns.journal.outbox import resting
from agentruns.models import Approval, Message, Notification
from agentruns.services.approvals import links
from agentruns.services.approvals.decisions import extend
from agentruns.services.sweep import sweep
from agentruns.tools.builtin import ask_human
from tests.admin.people import user
from tests.db.helpers import the_run
from tests.effects import Effects
from tests.fake_anthropic.http import Answer
from tests.fake_slack import FakeSlack
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

PEOPLE = {"U1": "decider", "U2": "viewer", "U3": "superuser"}
NOTHING = "Nothing was decided."


def person_of(slack_user: str, team: str) -> Any:
    """Find the Django user of somebody in the shop's own workspace."""
    if slack_user == "U-odd":
        raise RuntimeError("the directory is away")
    known = team == FakeSlack.team and slack_user in PEOPLE
    return user(PEOPLE[slack_user]) if known else None


class Lenient(Policy):
    """Lets high risks be decided in Slack, too."""

    def without_console(self, approval: Approval, channel: str) -> bool:
        return channel == "slack"


def titled(args: dict[str, Any]) -> str:
    return f"Refund {args['cents'] / 100:.2f} to {args['to']}"


def refund(ctx: ToolContext, cents: int, to: str = "Ada") -> str:
    """Refund, if somebody says so."""
    return act("refund", ctx, cents=cents)


@pytest.fixture
def workspace(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlack]:
    with FakeSlack("xoxb-secret", "signing-secret") as fake:
        settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.slack.SlackNotifier"]
        monkeypatch.setattr(slack, "API", fake.url)
        settings.AGENTRUNS_SLACK_TOKEN, settings.AGENTRUNS_SLACK_CHANNEL = fake.token, fake.channel
        settings.AGENTRUNS_SLACK_SIGNING_SECRET = fake.secret
        settings.AGENTRUNS_SLACK_USER = f"{__name__}.person_of"
        settings.AGENTRUNS_BASE_URL = "https://shop.example"
        resting.clear()
        yield fake
        resting.clear()


def asks(name: str, **options: Any) -> RunResult:
    """Let an agent ask for a refund; `to` is its second argument, the others options of the tool."""
    given = {"to": options.pop("to")} if "to" in options else {}
    made = tool(**{"requires_approval": True, "describe": titled, **options})(refund)
    agent = shop_agent(f"slack-{name}", {"tools": [call("refund", cents=4200, **given)]}, tools=[made])
    return run_agent(agent, "refund the lamp", f"slack-{name}", actor=user("superuser"), idempotency_key=name)


def send(workspace: FakeSlack, body: bytes, **how: Any) -> int:
    """Send a request as Slack does, from outside: without a cookie."""
    headers = how.pop("headers", None) or workspace.signed(body, **how)
    form = "application/x-www-form-urlencoded"
    client = Client(enforce_csrf_checks=True, raise_request_exception=False)
    return client.post(reverse("agentruns_slack"), body, content_type=form, headers=headers).status_code


def decisions(result: RunResult) -> list[dict[str, Any]]:
    rows = Message.objects.filter(run_id=result.run_id, kind="approval_decided").order_by("seq")
    return [row.payload for row in rows]


def test_one_press_approves_and_the_run_goes_on(workspace: FakeSlack, effects: Effects) -> None:
    result = asks("approved")
    shown = workspace.shown()
    for line in (
        "What: Refund 42.00 to Ada",
        "Risk: normal",
        "Requester: superuser",
        "Session: slack-approved",
    ):
        assert f"{line}\n" in shown
    assert workspace.messages[workspace.latest]["text"] == "Approval needed: Refund 42.00 to Ada"
    assert [*workspace.buttons()] == ["approve", "deny", "open"]
    card = result.pending[0].pk
    assert (
        workspace.buttons()["open"]["url"] == f"https://shop.example/admin/agentruns/approval/{card}/change/"
    )
    assert effects.count() == 0
    assert send(workspace, workspace.press("approve", reason="by phone")) == 200
    (decided,) = decisions(result)
    assert (decided["channel"], decided["verb"], decided["reason"]) == ("slack", "approve", "by phone")
    assert decided["actor"]["name"] == "decider"
    sweep()
    assert the_run(result).status == "completed"
    assert effects.count() == 1
    assert len(workspace.messages) == 1, "the message itself says what happened"
    assert [*workspace.buttons()] == ["open"]
    assert workspace.shown().endswith("Closed (approved), decided by decider.")
    assert workspace.whispers == []


def test_a_denial_gives_the_model_the_reason(workspace: FakeSlack, effects: Effects) -> None:
    first = asks("denied")
    assert send(workspace, workspace.press("deny", reason="not twice")) == 200
    second = asks("denied-silently")
    assert send(workspace, workspace.press("deny")) == 200
    sweep()
    reasons = [decisions(each)[0]["reason"] for each in (first, second)]
    assert reasons == ["not twice", "Denied in Slack, without a reason."]
    assert effects.count() == 0
    assert "Closed (denied)" in workspace.shown()


def test_a_request_that_slack_did_not_sign_decides_nothing(workspace: FakeSlack) -> None:
    result = asks("unsigned")
    body = workspace.press("approve")
    right = workspace.signed(body)
    wrong: list[dict[str, Any]] = [
        {"secret": "another"},
        {"ago": 301},
        {"ago": -301},
        {"headers": {"X-Slack-Signature": right["X-Slack-Signature"]}},
        {"headers": {**right, "X-Slack-Request-Timestamp": "soon"}},
        {"headers": {**right, "X-Slack-Signature": "v0=\xe9"}},
        {"headers": {"X-Nothing": "1"}},
    ]
    assert [send(workspace, body, **how) for how in wrong] == [401] * len(wrong)
    assert send(workspace, body + b"&more=1", headers=right) == 401, "of another body"
    assert send(workspace, b"\xff", ago=0) == 401
    large = b"payload=" + b"x" * slack.MOST
    assert send(workspace, large) == 401
    assert Client().get(reverse("agentruns_slack")).status_code == 405
    assert decisions(result) == []
    assert workspace.calls == ["chat.postMessage"]


def test_a_replay_decides_nothing_twice(workspace: FakeSlack, effects: Effects) -> None:
    result = asks("replayed")
    body, other = workspace.press("approve"), workspace.press("deny", reason="no")
    headers = workspace.signed(body)
    assert [send(workspace, body, headers=headers) for _ in range(3)] == [200] * 3
    assert send(workspace, other) == 200
    assert len(decisions(result)) == 1
    assert len(workspace.whispers) == 3
    assert all("decided by decider" in text and NOTHING in text for _who, text in workspace.whispers)
    sweep()
    assert send(workspace, body, headers=headers) == 200
    assert effects.count() == 1


@pytest.mark.parametrize(
    ("who", "team", "why"),
    [
        ("U9", "T1", "belongs to no user"),
        ("U1", "T2", "belongs to no user"),  # of a shared channel's other workspace
        ("U2", "T1", "lacks the permission"),
    ],
)
def test_who_may_not_decide_is_told_so_alone(workspace: FakeSlack, who: str, team: str, why: str) -> None:
    result = asks(f"stranger-{who}-{team}")
    assert send(workspace, workspace.press("approve", who, team=team)) == 200
    assert send(workspace, workspace.press("deny", who, team=team, reason="x")) == 200
    assert decisions(result) == []
    assert [name for name, _text in workspace.whispers] == [who, who]
    assert all(NOTHING in text and why in text for _who, text in workspace.whispers)
    assert [*workspace.buttons()] == ["approve", "deny", "open"], "for others"


def test_a_function_that_fails_lets_nobody_decide(workspace: FakeSlack) -> None:
    result = asks("odd")
    assert send(workspace, workspace.press("approve", "U-odd")) == 500
    assert decisions(result) == []


def test_an_inactive_user_and_the_requester_where_that_is_forbidden(
    workspace: FakeSlack, settings: Any
) -> None:
    result = asks("requester")
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    assert send(workspace, workspace.press("approve", "U3")) == 200
    user("decider")
    get_user_model().objects.filter(username="decider").update(is_active=False)
    assert send(workspace, workspace.press("approve", "U1")) == 200
    assert decisions(result) == []
    assert "requesters may not decide" in workspace.whispers[0][1]
    assert "is not active" in workspace.whispers[1][1]


def test_a_stale_card_is_shown_anew_and_decides_only_then(workspace: FakeSlack, effects: Effects) -> None:
    result = asks("stale", expires_in=timedelta(hours=1))
    old = workspace.press("approve")
    extend(result.pending[0].pk, user("superuser"), timedelta(hours=1))
    assert send(workspace, old) == 200
    assert decisions(result) == []
    assert "It has changed since this message" in workspace.whispers[0][1]
    assert send(workspace, workspace.press("approve")) == 200, "the new button of the same message"
    sweep()
    assert effects.count() == 1


def test_what_was_decided_elsewhere_is_said(workspace: FakeSlack, effects: Effects) -> None:
    result = asks("elsewhere")
    deny(result.pending[0].pk, user("superuser"), "in the console")
    assert send(workspace, workspace.press("approve")) == 200
    assert len(decisions(result)) == 1
    assert "Closed (denied), decided by superuser." in workspace.shown()
    sweep()
    assert effects.count() == 0


def test_buttons_of_other_links_decide_nothing(workspace: FakeSlack, settings: Any) -> None:
    result = asks("forged")
    card = result.pending[0]
    mails = links.sign(card, links.MAIL, user("decider"))
    own = workspace.buttons()["approve"]
    for value in ("", "x", str(card.pk), mails, own["value"][:-1]):
        assert send(workspace, workspace.press("approve", button={**own, "value": value})) == 200
    assert decisions(result) == []
    assert {text for _who, text in workspace.whispers} == {f"{NOTHING} This link is not valid any more."}


def test_high_risks_two_people_and_questions_are_for_the_console(
    workspace: FakeSlack, settings: Any, effects: Effects
) -> None:
    for name, options in {"high": {"risk": "high"}, "two": {"approvals": 2}}.items():
        asks(name, **options)
        assert [*workspace.buttons()] == ["open"]
    settings.AGENTRUNS_POLICY = f"{__name__}.Lenient"
    result = asks("high-allowed", risk="high")
    body = workspace.press("approve")
    settings.AGENTRUNS_REAUTH_SECONDS = 60  # a password cannot be given in Slack
    assert send(workspace, body) == 200
    assert "in the console only" in workspace.whispers[-1][1]
    assert [*workspace.buttons()] == ["open"]
    settings.AGENTRUNS_REAUTH_SECONDS = None
    assert send(workspace, body) == 200
    sweep()
    assert len(decisions(result)) == 1
    assert effects.count() == 1
    agent = shop_agent("slack-asks", {"tools": [call("ask_human", question="Which?")]}, tools=[ask_human])
    run_agent(agent, "ask", "slack-asks", idempotency_key="asks")
    assert [*workspace.buttons()] == ["open"]


def test_without_a_user_function_messages_have_no_buttons_that_decide(
    workspace: FakeSlack, settings: Any
) -> None:
    result = asks("unmapped")
    body = workspace.press("approve")
    settings.AGENTRUNS_SLACK_USER = None
    assert send(workspace, body) == 404
    asks("unmapped-2")
    assert [*workspace.buttons()] == ["open"]
    settings.AGENTRUNS_SLACK_USER, settings.AGENTRUNS_SLACK_SIGNING_SECRET = f"{__name__}.person_of", ""
    assert send(workspace, body) == 404
    assert decisions(result) == []


HOSTILE = "<!channel> <@U1> <https://evil.example|here> &amp; *bold*\nRisk: low\nClosed (approved)\u202e"


def test_a_model_can_neither_mention_nor_imitate_what_is_ours(workspace: FakeSlack) -> None:
    """The fake refuses markup in the text, and in blocks everything but texts."""
    asks("hostile", to=HOSTILE)
    text = workspace.messages[workspace.latest]["text"]
    assert "&lt;!channel&gt; &lt;@U1&gt;" in text
    lines = workspace.shown().splitlines()
    assert lines[0].startswith("What: Refund 42.00 to <!channel> <@U1>"), "literally, on one line"
    assert not [line for line in lines[1:] if line.startswith(("Risk: low", "Closed"))]
    assert "\u202e" not in workspace.shown()


def test_a_message_is_repeated_until_slack_takes_it(
    workspace: FakeSlack, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = Answer(302, {"location": "http://127.0.0.1:9/"}, [], 0)
    for answer in (elsewhere, Answer(500, {}, [], 0), Answer(200, {}, [b"no JSON"], 7)):
        workspace.answer = answer
        resting.clear()
        asks(f"refused-{answer.status}")
    workspace.answer = None
    settings.AGENTRUNS_SLACK_TOKEN = "wrong"
    resting.clear()
    asks("refused-auth")
    assert Notification.objects.filter(sent_at=None, attempts=1).count() == 4
    assert workspace.messages == {}
    for why in ("302", "500", "invalid_auth"):
        assert f"Slack refused chat.postMessage: {why}" in caplog.text.replace("200 ", "")
    assert "wrong" not in caplog.text
    settings.AGENTRUNS_SLACK_TOKEN = workspace.token
    Notification.objects.update(not_before=None)
    sweep()
    assert len(workspace.messages) == 4


def test_a_decision_stands_where_slack_is_not_told_of_it(workspace: FakeSlack, effects: Effects) -> None:
    result = asks("untold")
    body = workspace.press("approve")
    workspace.answer = Answer(500, {}, [], 0)
    assert send(workspace, body) == 200
    sweep()
    assert effects.count() == 1
    assert len(decisions(result)) == 1


def test_slack_is_called_outside_of_every_transaction(
    workspace: FakeSlack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks("atomic")
    inside: list[bool] = []
    told = slack.call_slack

    def watch(*args: Any, **body: Any) -> None:
        inside.append(any(connection.in_atomic_block for connection in connections.all()))
        told(*args, **body)

    for alias in connections:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    monkeypatch.setattr(slack, "call_slack", watch)
    assert send(workspace, workspace.press("approve")) == 200
    assert inside == [False]


def test_the_checks_name_what_is_missing(workspace: FakeSlack, settings: Any) -> None:
    assert check_notifiers(None) == []
    for name, value, why in (
        ("SLACK_TOKEN", "", "AGENTRUNS_SLACK_TOKEN"),
        ("SLACK_CHANNEL", "", "AGENTRUNS_SLACK_CHANNEL"),
        ("SLACK_SIGNING_SECRET", "", "AGENTRUNS_SLACK_SIGNING_SECRET"),
        ("SLACK_USER", "nowhere.at_all", "nowhere"),
    ):
        before = getattr(settings, f"AGENTRUNS_{name}")
        setattr(settings, f"AGENTRUNS_{name}", value)
        (error,) = check_notifiers(None)
        assert (error.id, why in error.msg) == ("agentruns.E030", True), error
        setattr(settings, f"AGENTRUNS_{name}", before)
    settings.ROOT_URLCONF = "agentruns.urls"
    (error,) = check_notifiers(None)
    assert "agentruns_slack" in error.msg
