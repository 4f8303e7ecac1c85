"""Two weeks of a small shop before the demo begins, made with the demo's agents and tools on a frozen clock.

With them the console's first page shows a shop at work: runs that completed, that failed, that people
decided, and that still wait.
"""

from __future__ import annotations

import io
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.test.utils import override_settings
from django.utils import timezone

from agentruns import ModelRequest, run_agent
from agentruns.models import Run
from agentruns.testing import DatabaseClock, frozen_clock, scripted_model
from project.helpdesk.agents import digest, helpdesk
from project.helpdesk.cases import CASES, Case
from project.helpdesk.deeds import Turn
from project.helpdesk.model import TranscriptModel, usage_of
from project.helpdesk.models import Customer, Order, Ticket

DAYS = 14
FIRST = 101  # number of the first ticket of the past; its order's number is 1000 higher
MAIL = "django.core.mail.backends.dummy.EmailBackend"  # the mail folder is for the demo's own mails
ASKING, DECIDING = ("lena", "jonas"), ("maria", "tom")  # people of the shop


def live_through() -> None:
    """Run the cases of all days, unless runs exist already or the model is a real one, which costs money."""
    if Run.objects.exists() or not isinstance(helpdesk.model, TranscriptModel):
        return
    people = {name: _person(name) for name in (*ASKING, *DECIDING)}
    midnight = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0)
    with frozen_clock() as clock, override_settings(EMAIL_BACKEND=MAIL):
        for day in range(DAYS):
            begins = midnight - timedelta(days=DAYS - day)
            clock.now = begins + timedelta(hours=6)
            run_agent(digest, "What is left open in the shop this morning?", f"morning-{begins:%m-%d}")
            for number, case in enumerate(CASES, FIRST):
                if case.day == day:
                    _work(case, number, begins + timedelta(hours=case.hour, minutes=number * 7 % 60), people)


def _person(name: str) -> Any:
    """Find or create a user of the shop's staff, without a password."""
    user, created = get_user_model().objects.get_or_create(username=name, defaults={"is_staff": True})
    if created:
        user.set_unusable_password()
        user.save()
        may = Permission.objects.filter(
            content_type__app_label="agentruns", codename__in=["decide_approval", "view_run", "view_approval"]
        )
        user.user_permissions.add(*may)
    return user


def _work(case: Case, number: int, at: datetime, people: dict[str, Any]) -> None:
    ticket, order = _written(case, number, at)
    with frozen_clock() as clock, scripted_model(helpdesk, _timed(clock, case.does(ticket, order))):
        clock.now = at
        asking = people[ASKING[number % 2]] if number % 3 else None
        key = ticket.idempotency_key
        result = run_agent(helpdesk, ticket.as_task(), ticket.session_key, actor=asking, idempotency_key=key)
        for card in result.pending if case.then else ():
            clock.forward(minutes=20 + number * 37 % 400)
            case.then(card, clock, people[DECIDING[number % 2]])
            call_command("resume_runs", verbosity=0, stdout=io.StringIO())


def _written(case: Case, number: int, at: datetime) -> tuple[Ticket, Order]:
    """Store the ticket and the order of a case."""
    customers = Customer.objects.order_by("pk")
    customer = customers[number % customers.count()]
    order = Order.objects.create(
        number=str(number + 1000),
        customer=customer,
        item=case.item,
        total_cents=case.cents,
        status=Order.Status.DELIVERED if case.has_come else Order.Status.SHIPPED,
        placed_on=(at - timedelta(days=9)).date(),
        delivered_on=(at - timedelta(days=4)).date() if case.has_come else None,
    )
    body = f"{case.body}\n\nMy order is {order.number}.\n\n{customer.name}"
    return Ticket.objects.create(number=number, customer=customer, subject=case.subject, body=body), order


def _timed(clock: DatabaseClock, turns: list[Turn]) -> list[Any]:
    """Make each turn move the clock as a real model's reply would, and report its tokens."""

    def said(turn: Turn, request: ModelRequest) -> Turn:
        usage = usage_of(request, turn)
        clock.forward(seconds=1.2 + usage["output_tokens"] / 40)
        return {**turn, "usage": usage}

    return [partial(said, turn) for turn in turns]
