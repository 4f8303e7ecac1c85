"""Reminders and escalations: each a row, once, while nobody decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import Group
from django.core import mail
from django.db import connection

import agentruns
from agentruns import approve, deny, pause_run, resume_run, run_agent, signals, tool
from agentruns.journal.outbox import Notice, resting
from agentruns.journal.policy import Reminders
from agentruns.models import Approval, Message, Notification
from agentruns.services.sweep import sweep
from agentruns.testing.database import frozen_clock
from agentruns.utils.ids import uuid7
from tests.crash.processes import interpret_and_die
from tests.db.helpers import sound, user
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db(transaction=True)

HOUR, SOON = timedelta(hours=1), timedelta(microseconds=1)
MAIL = "agentruns.contrib.mail.MailNotifier"
RECORDER = f"{__name__}.Recorder"
EARLY: dict[str, Any] = {"remind_after": SOON}
BOTH: dict[str, Any] = {"remind_after": SOON, "escalate_after": HOUR, "escalate_to": "managers"}


class Recorder:
    """A notifier that remembers."""

    told: ClassVar[list[Notice]] = []

    def __call__(self, notice: Notice) -> None:
        self.told.append(notice)


class Patient(agentruns.Policy):
    """Reminds of all calls of low risk after a day, and of no others."""

    def reminders(self, tool: Any) -> Reminders:
        return Reminders(timedelta(days=1)) if tool.risk == "low" else Reminders()


class Broken(agentruns.Policy):
    """Says nothing about reminders, by an error."""

    def reminders(self, tool: Any) -> Reminders:
        raise ValueError("no idea")


def asking(name: str, **options: Any) -> None:
    """Declare an agent that makes one call, of a tool with these options."""

    @tool(requires_approval=True, **options)
    def pay(cents: int) -> str:
        """Pay."""
        return "paid"

    shop_agent(name, {"tools": [call("pay", cents=5)]}, tools=[pay])


asking("remind-early", **EARLY)
asking("remind-both", **BOTH)
asking("remind-late", remind_after=HOUR, escalate_after=2 * HOUR, escalate_to="managers")
asking("remind-low", risk="low", **EARLY)


@pytest.fixture(autouse=True)
def _afresh(settings: Any, effects: Effects) -> Iterator[None]:
    settings.AGENTRUNS_NOTIFIERS = [RECORDER]
    Recorder.told.clear(), resting.clear()
    yield
    resting.clear()


def ask(agent: str, key: str = "k") -> Approval:
    """Let a run ask, and return its card."""
    card = run_agent(agent, "do it", key, idempotency_key=key).pending[0]
    Recorder.told.clear()
    return card


def kinds(card: Approval) -> list[str]:
    """List what was told of a card in its journal, which is sound."""
    sound(card.run)
    rows = Message.objects.filter(run_id=card.run_id, kind__in=("approval_reminded", "approval_escalated"))
    return [*rows.order_by("seq").values_list("kind", flat=True)]


def told() -> list[str]:
    return [notice.type for notice in Recorder.told]


def test_people_are_reminded_once(effects: Effects) -> None:
    card, heard = ask("remind-early"), list[Any]()

    def listen(sender: type, approval_id: Any, **about: Any) -> None:
        heard.append(approval_id)

    signals.approval_reminded.connect(listen)
    assert sweep().reminded == 1
    signals.approval_reminded.disconnect(listen)
    assert sweep().reminded == 0
    assert (kinds(card), told(), heard) == (["approval_reminded"], ["approval.reminded"], [card.pk])
    assert Recorder.told[0].status == "pending"
    card.refresh_from_db()
    assert (card.status, card.due_at) == ("pending", None)
    approve(card.pk, None)
    resume_run(str(card.run_id))
    assert sound(card.run).status == "completed"


def test_an_escalation_comes_after_the_reminder() -> None:
    with frozen_clock() as clock:
        card = ask("remind-both")
        clock.forward(minutes=1)
        assert sweep().reminded == 1
        assert kinds(card) == ["approval_reminded"]
        card.refresh_from_db()
        assert card.due_at == card.requested_at + HOUR
        assert sweep().reminded == 0, "it is not time yet"
        clock.move_to(card.due_at)
        assert sweep().reminded == 1
        assert kinds(card) == ["approval_reminded", "approval_escalated"]
    assert told() == ["approval.reminded", "approval.escalated"]
    assert [notice.group for notice in Recorder.told] == ["", "managers"]
    assert Recorder.told[1].payload()["data"]["escalated_to"] == "managers"


def test_what_is_long_overdue_is_only_escalated() -> None:
    with frozen_clock() as clock:
        card = ask("remind-both")
        clock.forward(days=1)
        assert [sweep().reminded, sweep().reminded] == [1, 0]
    assert kinds(card) == ["approval_escalated"]


def test_what_is_decided_is_reminded_of_no_more() -> None:
    card = ask("remind-early")
    deny(card.pk, None, "no")
    assert sweep().reminded == 0
    assert kinds(card) == []


def test_what_is_decided_before_the_delivery_mails_nobody(settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = [MAIL]
    user("ann", "decide_approval", is_staff=True, email="ann@shop.example")
    resting[MAIL] = float("inf")
    card = ask("remind-early")
    sweep()
    mail.outbox.clear()
    deny(card.pk, None, "no")
    Notification.objects.update(sent_at=None, attempts=0, not_before=None)
    sweep()
    assert not mail.outbox
    assert not Notification.objects.filter(sent_at=None).exists()


def test_the_card_of_a_held_run_waits_until_the_run_goes_on() -> None:
    card = ask("remind-early")
    pause_run(card.run_id, reason="wait")
    assert sweep().reminded == 0
    resume_run(str(card.run_id))
    assert sweep().reminded == 1
    assert kinds(card) == ["approval_reminded"]


def test_four_sweeps_at_once_remind_once() -> None:
    cards = [ask("remind-early", f"k{number}") for number in range(5)]
    counts = at_once(*[lambda: sweep().reminded] * 4)
    assert sum(counts) == 5, counts
    assert [kinds(card) for card in cards] == [["approval_reminded"]] * 5
    sweep()
    assert sorted(notice.approval_id for notice in Recorder.told) == sorted(card.pk for card in cards)


def test_a_process_killed_between_the_row_and_the_delivery() -> None:
    card = ask("remind-early")
    code = f"import django; django.setup(); from {__name__} import die_telling; die_telling()"
    interpret_and_die("-c", code)
    assert kinds(card) == ["approval_reminded"]
    Notification.objects.filter(sent_at=None).update(not_before=None)
    assert sweep().reminded == 0
    assert told() == ["approval.reminded"]


def die_telling() -> None:
    """Sweep in this process, which is killed when it tells of the reminder."""
    from django.conf import settings

    def die(self: Recorder, notice: Notice) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    settings.AGENTRUNS_NOTIFIERS, Recorder.__call__ = [RECORDER], die  # type: ignore[method-assign]
    sweep()


def test_an_escalation_goes_to_the_group_too(settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS, settings.AGENTRUNS_REQUESTER_MAY_APPROVE = [MAIL], False
    group, people = Group.objects.create(name="managers"), dict[str, Any]()
    rights = {"ann": "decide_approval", "max": "view_approval", "zoe": "view_run", "req": "view_approval"}
    for name, right in rights.items():
        people[name] = user(name, right, is_staff=True, email=f"{name}@shop.example")
    for name in ("max", "zoe", "req"):
        people[name].groups.add(group)
    with frozen_clock() as clock:
        run_agent("remind-both", "do it", "k", actor=people["req"], idempotency_key="k")
        mail.outbox.clear()
        clock.forward(days=1)
        sweep()
    assert sorted(letter.to[0] for letter in mail.outbox) == ["ann@shop.example", "max@shop.example"]
    assert {letter.subject for letter in mail.outbox} == {
        "[agentruns] Approval needed, nobody has decided: pay"
    }


@pytest.mark.parametrize(
    ("policy", "agent", "due"),
    [
        ("Patient", "remind-low", timedelta(days=1)),
        ("Patient", "remind-early", None),
        ("Broken", "remind-early", None),
    ],
)
def test_the_policy_has_the_last_word(policy: str, agent: str, due: Any, settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.{policy}"
    card = ask(agent)
    assert (card.due_at is None) == (due is None)
    if card.due_at:
        assert abs(card.due_at - card.requested_at - due) < timedelta(minutes=1)


def test_an_idle_sweep_asks_once_for_all_cards() -> None:
    card = ask("remind-late")
    sweep()
    counts = []
    for number in (1, 500):
        copies = [Approval.objects.get(pk=card.pk) for _ in range(number)]
        for place, copy in enumerate(copies):
            copy.pk, copy.call_id = uuid7(), f"{number}-{place}"
        Approval.objects.bulk_create(copies)
        with captured_statements() as statements:
            assert sweep().reminded == 0
        counts.append(len(statements))
    assert counts[0] == counts[1]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("ANALYZE")
    assert "agentruns_due" in Approval.objects.due().explain()
