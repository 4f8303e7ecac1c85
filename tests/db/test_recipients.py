"""Who is told: those who may act, each by a mail of their own, until it went through."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from smtplib import SMTPRecipientsRefused
from typing import Any

import django
import pytest
from django.contrib.auth.models import Group, User
from django.core import mail

import agentruns
from agentruns import deny, run_agent, tool
from agentruns.contrib import mail as mails
from agentruns.journal.outbox import deliver_due, notice_of, resting
from agentruns.models import Approval, Notification
from agentruns.services.recipients import recipients
from agentruns.services.sweep import sweep
from tests.crash.processes import interpret_and_die
from tests.db.helpers import user
from tests.db.racing import at_once
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db(transaction=True)

MAIL = "agentruns.contrib.mail.MailNotifier"


class Tenants(agentruns.Policy):
    """The tenant of a user is what precedes the dash; `carl` decides nothing."""

    def scope(self, user: Any) -> str:
        return "" if user is None else str(user.get_username().partition("-")[0])

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(scope=self.scope(user))

    def can_decide(self, user: Any, approval: Any, arguments: Any) -> bool:
        return not user.get_username().endswith("carl")


class Chosen(agentruns.Policy):
    """Names people who may not decide, too."""

    def recipients(self, notice: Any) -> Any:
        return User.objects.filter(username__in=["ann", "tom", "eve"])


@tool(requires_approval=True, approvers="operators")
def restart(host: str) -> str:
    """Restart a machine."""
    return "restarted"


@tool(requires_approval=True, approvers="requester")
def subscribe(plan: str) -> str:
    """Subscribe to a plan."""
    return "subscribed"


ASK = {"tools": [call("restart", host="db1")]}
shop_agent("routes-refund", {"tools": [call("refund", cents=5000)]})
shop_agent("routes-restart", ASK, tools=[restart])
shop_agent("routes-subscribe", {"tools": [call("subscribe", plan="big")]}, tools=[subscribe])


@pytest.fixture(autouse=True)
def letters(settings: Any) -> Iterator[list[Any]]:
    """The mails of a project without a list of addresses."""
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    settings.AGENTRUNS_NOTIFIERS = [MAIL]
    mail.outbox = []
    resting.clear()
    yield mail.outbox
    resting.clear()


def staff(name: str, *permissions: str, **fields: Any) -> User:
    """Make a member of the staff who may decide, with an address."""
    about = {"is_staff": True, "email": f"{name}@shop.example", **fields}
    return user(name, *(permissions or ("decide_approval", "view_run")), **about)


def ask(agent: str, actor: Any = None, key: str = "k") -> Approval:
    """Let a run ask for approval, and return its card."""
    return run_agent(agent, "do it", key, actor=actor, idempotency_key=key).pending[0]


def addresses(letters: list[Any]) -> list[str]:
    """List the addresses of the mails, each of which has one."""
    return sorted(address for letter in letters for (address,) in [letter.recipients()])


def test_those_who_may_decide_get_a_mail_each(letters: list[Any]) -> None:
    staff("ann"), staff("bob")
    staff("root", "view_run", is_superuser=True)
    staff("viewer", "view_run"), staff("gone", is_active=False), staff("mute", email="")
    user("customer", "decide_approval", email="customer@shop.example")
    ask("routes-refund")
    assert addresses(letters) == ["ann@shop.example", "bob@shop.example", "root@shop.example"]
    assert {len(letter.to) for letter in letters} == {1}
    assert not Notification.objects.filter(sent_at=None).exists()
    sweep()
    assert len(letters) == 3


def test_the_group_of_the_tool_and_no_requester(settings: Any, letters: list[Any]) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    group = Group.objects.create(name="operators")
    people = {name: staff(name) for name in ("ann", "bob", "carl")}
    people["ann"].groups.add(group), people["bob"].groups.add(group)
    ask("routes-restart", people["bob"])
    assert addresses(letters) == ["ann@shop.example"]
    letters.clear()
    ask("routes-subscribe", people["carl"], "k2")
    assert addresses(letters) == ["carl@shop.example"], "who confirms it is told"


def test_two_tenants(settings: Any, letters: list[Any]) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Tenants"
    for name in ("acme-ann", "acme-carl", "bolt-bob"):
        staff(name)
    ask("routes-refund", User.objects.get(username="acme-ann"))
    assert addresses(letters) == ["acme-ann@shop.example"]
    letters.clear()
    ask("routes-refund", User.objects.get(username="bolt-bob"), "k2")
    assert addresses(letters) == ["bolt-bob@shop.example"]
    assert Notification.objects.exclude(recipient="").count() == 2, "no row names anybody else"


def test_the_policy_chooses_and_gives_no_rights(settings: Any, letters: list[Any]) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Chosen"
    staff("ann"), staff("bob"), staff("eve", "view_run")
    user("tom", "decide_approval", email="tom@shop.example")
    ask("routes-refund")
    assert addresses(letters) == ["ann@shop.example", "tom@shop.example"]


def test_notices_of_a_run_go_to_those_who_may_act_on_it(letters: list[Any]) -> None:
    staff("ann"), staff("pat", "pause_run", "view_run"), staff("pete", "pause_run")
    card = ask("routes-refund")
    letters.clear()
    agentruns.pause_run(card.run_id, reason="wait")
    assert addresses(letters) == ["pat@shop.example"]


def test_the_number_of_queries_does_not_grow_with_the_people(settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = []
    staff("ann")
    card = ask("routes-refund")
    row = Notification.objects.create(
        event="approval.requested", run_id=card.run_id, approval_id=card.pk, notifier=MAIL,
        created_at=card.requested_at,
    )  # fmt: skip
    notice, counts = notice_of("default", row), []
    for policy in ("agentruns.journal.policy.Policy", f"{__name__}.Scoped"):
        settings.AGENTRUNS_POLICY = policy
        for number in range(2):
            for each in range(10):
                staff(f"more{policy[-3:]}{number}{each}") if number else None
            with captured_statements() as statements:
                people = recipients(notice)
            counts.append((len(people), len(statements)))
    (few, one), (many, two), (fewer, three), (all_of_them, four) = counts
    assert (few, many, fewer, all_of_them) == (1, 11, 11, 21)
    assert one == two <= 8
    assert three == four <= 10


class Scoped(agentruns.Policy):
    """Shows everybody the runs of one scope."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(scope="")


def test_a_dead_address_holds_up_nobody(letters: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    staff("ann"), staff("bob"), staff("carl")
    send = mails.send_mail

    def refuse(subject: str, body: str, sender: None, readers: list[str]) -> int:
        if readers == ["ann@shop.example"]:
            raise SMTPRecipientsRefused({readers[0]: (550, b"no such user")})
        if readers == ["bob@shop.example"]:
            raise SMTPRecipientsRefused({readers[0]: (451, b"try again")})
        return send(subject, body, sender, readers)

    monkeypatch.setattr(mails, "send_mail", refuse)
    ask("routes-refund")
    sweep()
    assert addresses(letters) == ["carl@shop.example"]
    left = Notification.objects.filter(sent_at=None).order_by("recipient").values_list("attempts", flat=True)
    assert list(left) == [10, 1], "one is given up, the other is tried again"


def test_what_is_decided_meanwhile_tells_nobody(letters: list[Any]) -> None:
    staff("ann"), staff("bob")
    resting[MAIL] = float("inf")
    card = ask("routes-refund")
    deny(card.pk, None, "no")
    sweep()
    assert not letters
    assert not Notification.objects.filter(sent_at=None).exists()


def test_four_sweeps_at_once_share_it_out_once(letters: list[Any]) -> None:
    staff("ann"), staff("bob")
    resting[MAIL] = float("inf")
    ask("routes-refund")
    at_once(*[lambda: deliver_due("default")] * 4)
    deliver_due("default")
    assert addresses(letters) == ["ann@shop.example", "bob@shop.example"]


def test_a_process_killed_while_it_mails_tells_the_others_later(letters: list[Any]) -> None:
    staff("ann"), staff("bob")
    code = f"import django; django.setup(); from {__name__} import die_at_the_first; die_at_the_first()"
    interpret_and_die("-c", code)
    rows = Notification.objects.exclude(recipient="")
    assert list(rows.order_by("pk").values_list("attempts", flat=True)) == [1, 0]
    Notification.objects.filter(sent_at=None).update(not_before=None)
    sweep()
    assert addresses(letters) == ["ann@shop.example", "bob@shop.example"]


def die_at_the_first() -> None:
    """Ask in this process, which is killed at its first mail."""
    from django.conf import settings

    settings.AGENTRUNS_NOTIFIERS = [MAIL]
    mails.send_mail = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    ask("routes-refund")
