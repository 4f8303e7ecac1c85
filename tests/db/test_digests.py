"""Digests: everybody for whom something waits is told once a day."""

from __future__ import annotations

from typing import Any

import django
import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.core.management import call_command

from agentruns import approve, run_agent, tool
from agentruns.models import Approval
from agentruns.services import digests
from agentruns.testing.database import frozen_clock
from tests.db.helpers import user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool(requires_approval=True, risk="low")
def publish(text: str) -> str:
    """Publish."""
    return "published"


shop_agent("digest-refund", {"tools": [call("refund", cents=5000)]})
shop_agent("digest-post", {"tools": [call("publish", text="hello")]}, tools=[publish])


@pytest.fixture
def letters(settings: Any) -> list[Any]:
    """The mails of a project without notifiers."""
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    mail.outbox = []
    return mail.outbox


def staff(name: str, *permissions: str) -> User:
    """Make a member of the staff who may decide, with an address."""
    rights = permissions or ("decide_approval", "view_run")
    return user(name, *rights, is_staff=True, email=f"{name}@shop.example")


def ask(agent: str, key: str = "k") -> Approval:
    """Let a run ask, and return its card."""
    return run_agent(agent, "do it", key, idempotency_key=key).pending[0]


def told(letters: list[Any]) -> list[str]:
    """Name those who got a mail since the last look."""
    names = sorted(letter.to[0].partition("@")[0] for letter in letters)
    letters.clear()
    return names


def test_a_digest_once_a_day_to_those_for_whom_something_waits(letters: list[Any], settings: Any) -> None:
    settings.AGENTRUNS_BASE_URL = "https://shop.example"
    with frozen_clock() as time:
        ann = staff("ann")
        staff("bob"), staff("mute"), staff("eve", "view_run")
        User.objects.filter(username="mute").update(email="")
        call_command("send_digest")
        assert told(letters) == [], "nothing waits"
        card = ask("digest-refund", "one")
        ask("digest-refund", "two"), ask("digest-post", "three")
        approve(card.pk, ann)
        call_command("send_digest")
        (letter, _other) = letters
        assert letter.subject == "[agentruns] 2 approvals wait for you"
        for line in (
            "Risk high: 1",
            "Risk low: 1",
            "https://shop.example/admin/agentruns/approval/?mine=yes",
        ):
            assert line in letter.body
        assert told(letters) == ["ann", "bob"]
        call_command("send_digest")
        assert told(letters) == []
        time.forward(days=1)
        call_command("send_digest")
        assert told(letters) == ["ann", "bob"]


def test_a_digest_that_failed_is_sent_by_the_next_call(letters: list[Any], monkeypatch: Any) -> None:
    staff("ann"), staff("bob")
    ask("digest-refund")
    send = digests.send_mail

    def fail(subject: str, body: str, sender: None, people: list[str]) -> int:
        if people == ["ann@shop.example"]:
            raise OSError("no line")
        return send(subject, body, sender, people)

    monkeypatch.setattr(digests, "send_mail", fail)
    with pytest.raises(SystemExit):
        call_command("send_digest")
    assert told(letters) == ["bob"]
    monkeypatch.undo()
    assert digests.send_digests() == (1, 0)
    assert told(letters) == ["ann"]
