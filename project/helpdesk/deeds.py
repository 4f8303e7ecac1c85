"""What the agent says and does about a ticket of the past, and what people do with its cards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from agentruns import approve, deny, pause_run
from agentruns.models import Approval
from agentruns.testing import DatabaseClock
from project.helpdesk.agents import helpdesk
from project.helpdesk.models import Order, Ticket
from project.helpdesk.money import euros

Turn = dict[str, Any]
Turns = Callable[[Ticket, Order], list[Turn]]

# The agent's turns


def answers(text: str, query: str) -> Turns:
    """Let the agent look up the rule, mail the customer and write a note."""

    def turns(ticket: Ticket, order: Order) -> list[Turn]:
        return [
            _looks(order, query),
            _mails(ticket, f"Re: {ticket.subject}", text, f"Answered: {ticket.subject}"),
            {"text": f"I answered {ticket.customer.name}'s question: {text}"},
        ]

    return turns


def refunds(cents: int, reason: str, denied: str = "") -> Turns:
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


def gives(cents: int, occasion: Literal["late parcel", "damaged item", "goodwill"]) -> Turns:
    """Let the agent send a voucher, and mail the outcome."""

    def turns(ticket: Ticket, order: Order) -> list[Turn]:
        voucher = {"order_number": order.number, "cents": cents, "occasion": occasion}
        return [
            _looks(order, "delivery"),
            {"text": "A voucher would be fair.", "tools": [{"name": "send_voucher", "input": voucher}]},
            _mails(ticket, f"Re: {ticket.subject}", "I am sorry for the trouble.", f"Voucher: {occasion}"),
            {"text": f"I wrote to {ticket.customer.name} about the voucher."},
        ]

    return turns


def obeys_a_mail(ticket: Ticket, order: Order) -> list[Turn]:
    """Let the agent do what a forwarded mail tells it: refund, without being asked by the customer."""
    pay = {"order_number": order.number, "amount_cents": 9500, "reason": "Claim settled by the carrier."}
    reads = {"name": "read_mail", "input": {"ticket_number": ticket.number}}
    return [
        _looks(order, "delivery"),
        {"text": "I read what the carrier wrote.", "tools": [reads]},
        {"text": "The carrier has settled the claim.", "tools": [{"name": "refund", "input": pay}]},
    ]


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


def accept(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Approve the voucher."""
    approve(card.pk, person, digest=card.digest)


def reject(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Deny the voucher."""
    deny(card.pk, person, "No voucher for this.", digest=card.digest)


def lower(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Approve a voucher of 25 EUR instead."""
    approve(card.pk, person, digest=card.digest, arguments={**card.arguments, "cents": 2500})


def agree_as_it_arrives(card: Approval, clock: DatabaseClock, person: Any) -> None:
    """Approve the refund of a lost parcel, which is delivered before a worker pays."""
    approve(card.pk, person, digest=card.digest, reason="Two weeks are enough.")
    order = Order.objects.filter(number=card.arguments["order_number"])
    order.update(status=Order.Status.DELIVERED, delivered_on=clock.now.date())
