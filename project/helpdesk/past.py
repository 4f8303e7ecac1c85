"""Two weeks of a small shop before the demo begins, made with the demo's agents and tools on a frozen clock.

With them the console's first page shows a shop at work: runs that completed, that failed, that people
decided, and that still wait.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.test.utils import override_settings
from django.utils import timezone

from agentruns import ModelRequest, approve, deny, pause_run, run_agent
from agentruns.models import Approval, Run
from agentruns.testing import DatabaseClock, frozen_clock, scripted_model
from project.helpdesk.agents import digest, helpdesk
from project.helpdesk.model import TranscriptModel, usage_of
from project.helpdesk.models import Customer, Order, Ticket
from project.helpdesk.money import euros

DAYS = 14
FIRST = 101  # number of the first ticket of the past; its order's number is 1000 higher
MAIL = "django.core.mail.backends.dummy.EmailBackend"  # the mail folder is for the demo's own mails
ASKING, DECIDING = ("lena", "jonas"), ("maria", "tom")  # people of the shop

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A ticket of the past: its time, order and text, the agent's turns, and what a person then does."""

    day: int
    hour: int
    item: str
    cents: int
    subject: str
    body: str
    does: Callable[[Ticket, Order], list[Turn]]
    then: Callable[[Approval, DatabaseClock, Any], object] | None = None


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
        status=Order.Status.DELIVERED,
        placed_on=(at - timedelta(days=9)).date(),
        delivered_on=(at - timedelta(days=4)).date(),
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


# The agent's turns


def answers(text: str, query: str) -> Callable[[Ticket, Order], list[Turn]]:
    """Let the agent look up the rule, mail the customer and write a note."""

    def turns(ticket: Ticket, order: Order) -> list[Turn]:
        return [
            _looks(order, query),
            _mails(ticket, f"Re: {ticket.subject}", text, f"Answered: {ticket.subject}"),
            {"text": f"I answered {ticket.customer.name}'s question: {text}"},
        ]

    return turns


def refunds(cents: int, reason: str, denied: str = "") -> Callable[[Ticket, Order], list[Turn]]:
    """Let the agent refund `cents`, with approval above 100 EUR, and mail the outcome: `denied` if denied."""

    def turns(ticket: Ticket, order: Order) -> list[Turn]:
        pay = {"order_number": order.number, "amount_cents": cents, "reason": reason}
        if denied:
            mails = _mails(ticket, f"Re: {ticket.subject}", denied, f"No refund: {reason}")
            told = f"I told {ticket.customer.name}: {denied}"
        else:
            text = f"I have refunded {euros(cents)} to the card you paid with."
            mails = _mails(ticket, f"{euros(cents)} are on their way back", text, f"{euros(cents)}: {reason}")
            told = f"I refunded **{euros(cents)}** for order {order.number}: {order.item}."
        return [
            _looks(order, "return period"),
            {"text": f"{reason} Our rules allow it.", "tools": [{"name": "refund", "input": pay}]},
            mails,
            {"text": told},
        ]

    return turns


def goes_round(ticket: Ticket, order: Order) -> list[Turn]:
    """Let the agent look up the same order until its steps are used up."""
    return [_looks(order, f"special rule {number}") for number in range(helpdesk.max_steps + 1)]


def declines(ticket: Ticket, order: Order) -> list[Turn]:
    """Let the model refuse the task, which fails the run."""
    blocks = [{"type": "text", "text": "I cannot help with this."}]
    return [_looks(order, "chemicals"), {"content": blocks, "stop_reason": "refusal"}]


def _looks(order: Order, query: str) -> Turn:
    look_up = {"name": "look_up_order", "input": {"order_number": order.number}}
    return {"tools": [look_up, {"name": "search_articles", "input": {"query": query}}]}


def _mails(ticket: Ticket, subject: str, text: str, note: str) -> Turn:
    body = f"Hello {ticket.customer.name.split()[0]},\n\n{text}\n\nKettle & Cup"
    mail = {"ticket_number": ticket.number, "subject": subject, "body": body}
    noted = {"ticket_number": ticket.number, "text": note, "solved": True}
    return {"tools": [{"name": "email_customer", "input": mail}, {"name": "add_note", "input": noted}]}


# The acts of people


def agree(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Approve the refund."""
    approve(card.pk, person, digest=card.digest, reason="The parcel is back.")


def refuse(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Deny the refund."""
    deny(card.pk, person, "Sent back used; offer a repair.", digest=card.digest)


def put_off(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Pause the run until the maker has answered."""
    pause_run(card.run_id, None, reason="Waiting for word from the maker.")


SENT = "Your parcel left us on Monday and takes three to five working days."
REPAIR = "The warranty covers it for two years: please send it in, we pay for the parcel."
PARTS = "The seal is in the shop as a spare part, and it fits your machine."
BACK = "Send it back within 30 days, unused; the label is in your account."

CASES = [
    Case(
        0,
        8,
        "Milk jug",
        2900,
        "Where is my parcel?",
        "It should have come on Friday.",
        answers(SENT, "delivery"),
    ),
    Case(
        0, 11, "Filter papers", 900, "Wrong size", "These do not fit.", refunds(900, "Wrong size delivered.")
    ),
    Case(1, 9, "Drip kettle", 7900, "Does it rust?", "There is a spot inside.", answers(REPAIR, "warranty")),
    Case(
        1,
        13,
        "Espresso machine",
        64900,
        "It leaks",
        "Since the first day.",
        refunds(64900, "Leaks since day one."),
        agree,
    ),
    Case(
        2,
        10,
        "Hand grinder",
        8900,
        "How do I send it back?",
        "It is a gift they have.",
        answers(BACK, "return period"),
    ),
    Case(2, 15, "Cleaning powder", 1400, "What is in it?", "Can I mix it with bleach?", declines),
    Case(
        3, 9, "Stoneware cup", 2490, "Broken", "The cup came in two pieces.", refunds(2490, "Arrived broken.")
    ),
    Case(
        4,
        8,
        "Electric grinder",
        18900,
        "Too loud",
        "It wakes the house up.",
        refunds(18900, "Too loud.", denied=REPAIR),
        refuse,
    ),
    Case(4, 16, "Moka pot", 4450, "A new seal?", "Mine is worn out.", answers(PARTS, "spare parts")),
    Case(5, 12, "Scales", 5900, "A special case", "I want what my friend got.", goes_round),
    Case(
        6,
        10,
        "Travel press",
        3500,
        "Where is my parcel?",
        "Tracking says nothing.",
        answers(SENT, "delivery"),
    ),
    Case(
        7, 9, "Drip kettle", 7900, "The handle is loose", "After two weeks.", refunds(7900, "Handle loose.")
    ),
    Case(
        7,
        14,
        "Espresso machine",
        34900,
        "Not as described",
        "It has one boiler, not two.",
        refunds(34900, "Not as described."),
        agree,
    ),
    Case(8, 8, "Descaler", 1900, "Is it safe?", "And together with chlorine?", declines),
    Case(
        8,
        11,
        "Cups, six of them",
        7200,
        "One is missing",
        "There are only five.",
        refunds(1200, "One of six is missing."),
    ),
    Case(9, 9, "Hand grinder", 8900, "Where is my parcel?", "I leave on Sunday.", answers(SENT, "delivery")),
    Case(
        9, 17, "Knock box", 3900, "It smells", "Of rubber, after a week.", refunds(3900, "Smells of rubber.")
    ),
    Case(
        10,
        10,
        "Electric grinder",
        24900,
        "Stopped working",
        "After three days.",
        refunds(24900, "Broke after three days."),
        agree,
    ),
    Case(11, 9, "Scales", 5900, "As my friend", "He got a better price.", goes_round),
    Case(
        11, 13, "Milk jug", 2900, "A dent", "The jug has a dent.", refunds(1000, "A dent: part of the price.")
    ),
    Case(
        12,
        8,
        "Moka pot",
        4450,
        "Does it work on induction?",
        "My stove is new.",
        answers(PARTS, "spare parts"),
    ),
    Case(
        12,
        10,
        "Roaster",
        49900,
        "The drum is stuck",
        "It turned twice.",
        refunds(49900, "The drum is stuck."),
        put_off,
    ),
    Case(
        13,
        9,
        "Espresso machine",
        64900,
        "Water in the plug",
        "I had to cut the power.",
        refunds(64900, "Water reached the plug."),
    ),
    Case(
        13,
        15,
        "Drip kettle",
        7900,
        "Thank you",
        "The new one is lovely.",
        answers("We are glad to hear it.", "delivery"),
    ),
    Case(
        13,
        16,
        "Electric grinder",
        18900,
        "Sent back last week",
        "When do I get my money?",
        refunds(18900, "The parcel is back."),
    ),
]
