"""Absences: a delegate is told as well, and gets no rights."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import django
import pytest
from django.contrib.auth.models import Permission, User
from django.core import mail
from django.db.models import QuerySet

import agentruns
from agentruns import run_agent
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal.outbox import resting
from agentruns.models import Approval
from agentruns.services.absences import end_absence, plan_absence, planned
from agentruns.testing.database import frozen_clock
from agentruns.utils import clock
from tests.db.helpers import user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Duty(agentruns.Policy):
    """Tells one person only."""

    def recipients(self, notice: Any) -> Any:
        return User.objects.filter(username="ann")


class Tenants(Duty):
    """The tenant of a user is what precedes the dash."""

    def scope(self, user: Any) -> str:
        return "" if user is None else str(user.get_username().partition("-")[0])

    def visible(self, user: Any, runs: QuerySet[Any]) -> QuerySet[Any]:
        return runs.filter(scope=self.scope(user))


shop_agent("absent-refund", {"tools": [call("refund", cents=5000)]})


@pytest.fixture(autouse=True)
def letters(settings: Any) -> Iterator[list[Any]]:
    """The mails of a project that mails people."""
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    settings.AGENTRUNS_POLICY = f"{__name__}.Duty"
    mail.outbox = []
    resting.clear()
    yield mail.outbox
    resting.clear()


def staff(name: str, *permissions: str) -> User:
    """Make a member of the staff who may decide, with an address."""
    rights = permissions or ("decide_approval", "view_run")
    return user(name, *rights, is_staff=True, email=f"{name}@shop.example")


def ask(agent: str, key: str = "k", actor: Any = None) -> Approval:
    """Let a run ask, and return its card."""
    return run_agent(agent, "do it", key, actor=actor, idempotency_key=key).pending[0]


def told(letters: list[Any]) -> list[str]:
    """Name those who got a mail since the last look."""
    names = sorted(letter.to[0].partition("@")[0] for letter in letters)
    letters.clear()
    return names


def now() -> datetime:
    return clock.now("default")


def test_a_delegate_is_told_as_well_during_the_absence(letters: list[Any]) -> None:
    ann, bob = staff("ann"), staff("bob")
    with frozen_clock() as time:
        absence = plan_absence(ann, bob, now() + HOUR, now() + DAY, ann)
        ask("absent-refund", "before")
        assert told(letters) == ["ann"]
        time.forward(hours=2)
        ask("absent-refund", "during")
        assert told(letters) == ["ann", "bob"]
        assert [line[:3] for line in planned(bob)] == [(ann, bob, absence)]
        assert not planned(bob)[0][3], "who represents ends nothing"
        assert (end_absence(absence.pk, bob), end_absence(absence.pk, ann)) == (False, True)
        assert not end_absence(absence.pk, ann)
        ask("absent-refund", "after")
        assert told(letters) == ["ann"]
        assert planned(ann) == []


def test_a_delegate_without_the_right_and_a_requester_are_not_told(letters: list[Any]) -> None:
    ann, bob, carl = staff("ann"), staff("bob"), staff("carl")
    for delegate in (bob, carl):
        plan_absence(ann, delegate, now() - HOUR, now() + DAY, ann)
    bob.user_permissions.set(Permission.objects.filter(codename="view_approval"))
    ask("absent-refund", "one")
    assert told(letters) == ["ann", "carl"]
    ask("absent-refund", "two", actor=carl)
    assert told(letters) == ["ann"]


def test_who_plans_what() -> None:
    ann, bob, eve = staff("ann"), staff("bob"), staff("eve", "view_run")
    boss = staff("boss", "plan_absence")
    span = (now(), now() + DAY)
    with pytest.raises(PermissionDeniedError, match="plan_absence"):
        plan_absence(ann, bob, *span, bob)
    for delegate in (ann, eve, None):
        with pytest.raises(ValueError, match="delegate"):
            plan_absence(ann, delegate, *span, ann)
    for wrong in (span[::-1], (now() - DAY, now() - HOUR)):
        with pytest.raises(ValueError, match="ends after"):
            plan_absence(ann, bob, *wrong, ann)
    assert plan_absence(ann, bob, *span, boss).created_by_id == str(boss.pk)
    assert plan_absence(bob, ann, *span).created_by_id == "", "by the program"
    assert [len(planned(each)) for each in (boss, ann, bob, eve, None)] == [2, 2, 2, 0, 2]


def test_tenants_do_not_meet(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Tenants"
    ann, bob = staff("acme-ann"), staff("bolt-bob")
    boss = staff("bolt-boss", "plan_absence", "decide_approval")
    span = (now(), now() + DAY)
    with pytest.raises(ValueError, match="delegate"):
        plan_absence(ann, bob, *span, ann)
    with pytest.raises(PermissionDeniedError):
        plan_absence(ann, boss, *span, boss)
    plan_absence(bob, boss, *span, boss)
    assert [len(planned(each)) for each in (ann, bob, boss)] == [0, 1, 1]
