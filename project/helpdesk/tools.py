"""The agent's tools, one for each way of recovering an interrupted call.

look_up_order, search_articles,
open_tickets, show_photo,
read_mail                        safe_to_retry: repeating them changes nothing
add_note                         transactional: its writes and its result are one commit
refund, send_voucher,
await_return                     reconcile: ask the provider or the carrier by idempotency key
email_customer                   declares nothing: a person gives the verdict

They raise ToolRefused if nothing happened; any other error of the last four leaves a doubt.
"""

from __future__ import annotations

from datetime import timedelta
from smtplib import SMTPRecipientsRefused
from typing import Any, Literal

from django.core.mail import EmailMessage
from django.urls import reverse

from agentruns import Image, NotOccurred, Occurred, Pending, ToolContext, ToolRefused, tool
from project.helpdesk import ledger
from project.helpdesk.models import Article, Note, Order, Ticket
from project.helpdesk.money import euros

FREE_HAND_CENTS = 10_000  # above this a person decides
RETURN_TIME = timedelta(days=14)  # in which a parcel has to be back


@tool(safe_to_retry=True)
def look_up_order(order_number: str) -> dict[str, Any]:
    """Look up an order: item, price, status, delivery, and what was refunded so far.

    Args:
        order_number: the shop's order number, such as "1001"
    """
    order = find_order(order_number)
    return {
        "order_number": order.number,
        "customer": order.customer.name,
        "item": order.item,
        "total_cents": order.total_cents,
        "refunded_cents": refunded_cents(order),
        "status": order.status,
        "placed_on": order.placed_on.isoformat(),
        "delivered_on": order.delivered_on.isoformat() if order.delivered_on else None,
        "tracking": order.tracking,
    }


@tool(safe_to_retry=True, parallel=True)
def search_articles(query: str) -> list[dict[str, str]]:
    """Search the knowledge base for the shop's rules. Returns at most three articles.

    Args:
        query: one to four words, such as "return period"
    """
    words = query.lower().split()

    def score(article: Article) -> int:
        return sum(3 * (word in article.title.lower()) + (word in article.body.lower()) for word in words)

    found = sorted((article for article in Article.objects.all() if score(article)), key=score, reverse=True)
    return [{"title": article.title, "body": article.body} for article in found[:3]]


@tool(safe_to_retry=True)
def open_tickets() -> list[dict[str, Any]]:
    """List the tickets that are not solved, by number."""
    return [*Ticket.objects.filter(status=Ticket.Status.OPEN).values("number", "subject")]


@tool(safe_to_retry=True)
def show_photo(ticket_number: int) -> Image:
    """Show the photo that the customer sent with a ticket.

    Args:
        ticket_number: the ticket's number
    """
    for path in find_ticket(ticket_number).files("photos"):
        return Image(path=path)
    raise ToolRefused(f"There is no photo with ticket {ticket_number}.")


@tool(safe_to_retry=True, untrusted=True)
def read_mail(ticket_number: int) -> str:
    """Read the mail that the customer forwards with a ticket. Somebody outside wrote it.

    Args:
        ticket_number: the ticket's number
    """
    for path in find_ticket(ticket_number).files("mails"):
        return path.read_text(encoding="utf-8")
    raise ToolRefused(f"No mail was forwarded with ticket {ticket_number}.")


@tool(transactional=True, describe=lambda args: f"Note on ticket {args['ticket_number']}: {args['text']}")
def add_note(ticket_number: int, text: str, solved: bool = False) -> dict[str, Any]:
    """Write an internal note on a ticket; the customer does not see it.

    Args:
        ticket_number: the ticket's number
        text: what a colleague has to know
        solved: true if nothing is left to do on this ticket
    """
    ticket = find_ticket(ticket_number)
    Note.objects.create(ticket=ticket, text=text)
    if solved:
        ticket.status = Ticket.Status.SOLVED
        ticket.save(update_fields=["status"])
    return {"status": "noted", "ticket_number": ticket.number, "ticket_status": ticket.status}


def refund_title(args: dict[str, Any]) -> str:
    """Build the title of a refund, the sentence that an approver reads first."""
    order = find_order(args["order_number"])
    return f"Refund {euros(args['amount_cents'])} to {order.customer} for order {order.number}"


def refund_preview(args: dict[str, Any]) -> dict[str, Any]:
    """Describe for the approver what a refund changes, with links and warnings."""
    order = find_order(args["order_number"])
    before = refunded_cents(order)
    after = before + args["amount_cents"]
    over, page = after - order.total_cents, reverse("admin:helpdesk_order_change", args=[order.pk])
    return {
        "before": {"refunded": euros(before)},
        "after": {"refunded": f"{euros(after)} of {euros(order.total_cents)}"},
        "links": [{"label": f"Order {order.number}", "url": page}],
        "warnings": [f"{euros(over)} more than was paid and not refunded yet"] if over > 0 else [],
    }


def order_as_it_is(args: dict[str, Any], ctx: ToolContext) -> dict[str, str]:
    """Read what an approver of a refund relies on: the order's status, and how much is left to refund."""
    order = find_order(args["order_number"])
    return {"status": order.status, "left to refund": euros(order.total_cents - refunded_cents(order))}


def ask_provider(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
    """Ask the payment provider whether a refund in doubt happened."""
    line = ledger.find(ctx.idempotency_key, "refund")
    return Occurred(receipt(line)) if line else NotOccurred()


@tool(
    reconcile=ask_provider,
    requires_approval=lambda args, ctx: args["amount_cents"] > FREE_HAND_CENTS,
    holds=order_as_it_is,
    outward=True,
    describe=refund_title,
    preview=refund_preview,
    risk="high",
)
def refund(ctx: ToolContext, order_number: str, amount_cents: int, reason: str) -> dict[str, Any]:
    """Pay money back for an order, to the card it was paid with. Above 100 EUR a person approves first.

    Args:
        order_number: the shop's order number
        amount_cents: how much, in cents; at most what was paid and not refunded yet
        reason: one sentence for the books
    """
    order = find_order(order_number)
    left = order.total_cents - refunded_cents(order)
    if not 0 < amount_cents <= left:
        raise ToolRefused(
            f"Not refunded: {amount_cents} cents; {left} cents of order {order.number} are left."
        )
    line = ledger.record(
        "refund",
        ctx.idempotency_key,
        session=ctx.session_key or "",
        order=order.number,
        amount_cents=amount_cents,
        reason=reason,
    )
    return receipt(line)


def voucher_title(args: dict[str, Any]) -> str:
    """Build the title of a voucher: amount, recipient, order and occasion."""
    order = find_order(args["order_number"])
    return f"Voucher of {euros(args['cents'])} to {order.customer}: {args['occasion']}, order {order.number}"


def ask_for_voucher(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
    """Ask the mail provider whether a voucher in doubt was sent."""
    line = ledger.find(ctx.idempotency_key, "voucher")
    return Occurred(sent_voucher(line)) if line else NotOccurred()


@tool(reconcile=ask_for_voucher, requires_approval=True, outward=True, describe=voucher_title, risk="low")
def send_voucher(
    ctx: ToolContext,
    order_number: str,
    cents: int,
    occasion: Literal["late parcel", "damaged item", "goodwill"],
) -> dict[str, Any]:
    """Send the customer of an order a voucher for the next one. A person approves it.

    Args:
        order_number: the shop's order number
        cents: what the voucher is worth, in cents
        occasion: what the customer gets it for
    """
    line = ledger.record(
        "voucher",
        ctx.idempotency_key,
        session=ctx.session_key or "",
        order=find_order(order_number).number,
        amount_cents=cents,
        occasion=occasion,
    )
    return sent_voucher(line)


def ask_carrier(ctx: ToolContext, args: dict[str, Any]) -> Pending | NotOccurred:
    """Ask the carrier whether a return in doubt was announced: then its parcel is still to come."""
    line = ledger.find(ctx.idempotency_key, "label")
    return Pending(line["label"], RETURN_TIME) if line else NotOccurred()


@tool(
    awaits="parcel",
    reconcile=ask_carrier,
    describe=lambda args: f"Return of order {args['order_number']}, for ticket {args['ticket_number']}",
)
def await_return(ctx: ToolContext, ticket_number: int, order_number: str) -> Pending:
    """Send the customer a label for a return, and wait until the parcel is back; the result says what came.

    Args:
        ticket_number: the ticket whose sender gets the label
        order_number: the order that comes back
    """
    customer, order = find_ticket(ticket_number).customer, find_order(order_number)
    line = ledger.record(
        "label",
        ctx.idempotency_key,
        session=ctx.session_key or "",
        order=order.number,
        to=customer.email,
        label=f"lb_{ctx.idempotency_key[:12]}",
    )
    return Pending(line["label"], RETURN_TIME)


def mail_title(args: dict[str, Any]) -> str:
    """Build the title of a mail: recipient and subject."""
    customer = find_ticket(args["ticket_number"]).customer
    return f"Mail to {customer} <{customer.email}>: {args['subject']}"


@tool(
    refuses=SMTPRecipientsRefused,  # there is one recipient, so nobody got the mail
    outward=True,
    describe=mail_title,
)
def email_customer(ctx: ToolContext, ticket_number: int, subject: str, body: str) -> dict[str, str]:
    """Send an e-mail to the customer who wrote the ticket. It cannot be taken back.

    Args:
        ticket_number: the ticket that is answered; its sender gets the mail
        subject: the subject line
        body: the whole text, with greeting and closing
    """
    customer = find_ticket(ticket_number).customer
    mail = EmailMessage(
        subject, body, to=[customer.email], headers={"X-Idempotency-Key": ctx.idempotency_key}
    )
    mail.send()
    ledger.record(
        "email", ctx.idempotency_key, session=ctx.session_key or "", to=customer.email, subject=subject
    )
    return {"status": "sent", "to": customer.email}


def find_order(number: str) -> Order:
    """Find an order; raises ToolRefused, whose text tells the model to ask the customer."""
    order = Order.objects.select_related("customer").filter(number=number).first()
    if order is None:
        raise ToolRefused(f"There is no order {number!r}; ask the customer for the number.")
    return order


def find_ticket(number: int) -> Ticket:
    """Find a ticket with its customer; raises ToolRefused."""
    ticket = Ticket.objects.select_related("customer").filter(number=number).first()
    if ticket is None:
        raise ToolRefused(f"There is no ticket {number}.")
    return ticket


def refunded_cents(order: Order) -> int:
    """Sum the cents that the payment provider has paid back for an order."""
    paid = (line for line in ledger.lines() if line["kind"] == "refund" and line["order"] == order.number)
    return sum(line["amount_cents"] for line in paid)


def receipt(line: dict[str, Any]) -> dict[str, Any]:
    """Build the payment provider's answer about a refund from its line in the ledger."""
    return {
        "status": "refunded",
        "refund_id": f"re_{line['key'][:12]}",
        "order_number": line["order"],
        "amount_cents": line["amount_cents"],
    }


def sent_voucher(line: dict[str, Any]) -> dict[str, Any]:
    """Build the result of a voucher from its line in the ledger."""
    return {"status": "sent", "code": f"KC-{line['key'][:8]}", "amount_cents": line["amount_cents"]}
