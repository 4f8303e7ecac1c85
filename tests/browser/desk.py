"""A support desk whose agent asks for what people know: refunds, mails, credits, and answers."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import count
from typing import Any

from agentruns import Agent, ModelReply, ToolContext, ask_human, run_agent, tool
from agentruns.models import Approval, Run
from agentruns.testing import ScriptedModel
from tests.effects import Effects
from tests.shop.agents import call
from tests.waiting import wait_for

_numbers = count(1)


class Writer:
    """A model that writes a text word by word; it waits for the test before each word of `stops`."""

    identity = "writer"

    def __init__(self, text: str, stops: list[int]) -> None:
        self.text, self.stops = text, stops
        self._steps = threading.Semaphore(0)

    def go_on(self) -> None:
        """Let the model write up to its next stop."""
        self._steps.release()

    def propose(self, request: Any) -> ModelReply:
        """Write the text."""
        for number, word in enumerate(self.text.split(" ")):
            if number in self.stops:  # what was written goes out meanwhile
                wait_for(lambda: self._steps.acquire(blocking=False) or request.on_text(""), "the test")
            request.on_text(f"{word} ")
        return ModelReply([{"type": "text", "text": self.text}], "end_turn")


def euros(cents: int) -> str:
    return f"{cents / 100:,.2f} EUR"


def record(ctx: ToolContext, tool_name: str, **facts: object) -> None:
    """Let the effect happen outside."""
    Effects.from_environment().record(ctx.idempotency_key, tool=tool_name, **facts)


@tool(
    requires_approval=True,
    risk="high",
    describe=lambda args: f"Refund {euros(args['cents'])} for order {args['order']}",
    preview=lambda args: {"before": {"refunded": euros(0)}, "after": {"refunded": euros(args["cents"])}},
)
def refund_order(ctx: ToolContext, order: str, cents: int, reason: str) -> str:
    """Pay money back to the card it was paid with.

    Args:
        order: the shop's order number
        cents: how much, in cents
        reason: one sentence for the books
    """
    record(ctx, "refund_order", order=order, cents=cents, reason=reason)
    return f"refunded {euros(cents)}"


@tool(requires_approval=True, describe=lambda args: f"Mail to {args['to']}: {args['subject']}")
def send_mail(ctx: ToolContext, to: str, subject: str, body: str) -> str:
    """Send a mail to a customer. It cannot be taken back."""
    record(ctx, "send_mail", to=to, subject=subject, body=body)
    return "sent"


@tool(requires_approval=True, risk="low", describe=lambda args: f"Close ticket {args['ticket']}")
def close_ticket(ctx: ToolContext, ticket: int) -> str:
    """Close a ticket."""
    record(ctx, "close_ticket", ticket=ticket)
    return "closed"


@tool(
    requires_approval=True,
    approvals=2,
    risk="high",
    describe=lambda args: f"Credit {euros(args['cents'])} to {args['customer']}",
)
def grant_credit(ctx: ToolContext, customer: str, cents: int) -> str:
    """Grant credit to a customer; two people have to agree."""
    record(ctx, "grant_credit", customer=customer, cents=cents)
    return "granted"


@tool(
    requires_approval=True,
    expires_in=timedelta(hours=4),
    describe=lambda args: f"Block the card ending in {args['card']}",
)
def block_card(ctx: ToolContext, card: str) -> str:
    """Block a customer's card."""
    record(ctx, "block_card", card=card)
    return "blocked"


@tool
def book_courier(ctx: ToolContext, order: str, street: str) -> str:
    """Book a courier who collects a parcel. Its worker dies on the way."""
    done = Effects.from_environment().lines()
    record(ctx, "book_courier", order=order)
    if not any(line["tool"] == "book_courier" for line in done):
        raise MemoryError("out of memory")
    return "booked, collected tomorrow between 8 and 12"


@tool(sensitive_results=["iban"])
def look_up_order(ctx: ToolContext, order: str) -> dict[str, str]:
    """Look up what was paid for an order."""
    return {"order": order, "paid": euros(18900), "refunded": euros(0), "iban": "DE02 1203 0000"}


def excess(args: dict[str, Any]) -> list[str]:
    """Warn of a refund of more than the 189.00 EUR that the order cost."""
    more = args["cents"] - 18900
    return [f"{euros(more)} more than was paid ({euros(18900)})"] if more > 0 else []


@tool(
    requires_approval=True,
    risk="high",
    sensitive=["iban"],
    expires_in=timedelta(hours=11),
    describe=lambda args: f"Refund {euros(args['cents'])}, order {args['order']}",
    preview=lambda args: {"warnings": excess(args)},
)
def pay_back(ctx: ToolContext, order: str, iban: str, cents: int) -> str:
    """Pay money back to an account.

    Args:
        order: the shop's order number
        cents: how much, in cents
    """
    record(ctx, "pay_back", order=order, cents=cents)
    return f"paid back {euros(cents)}"


TOOLS = [
    *(refund_order, send_mail, close_ticket, grant_credit, block_card, book_courier),
    *(ask_human, look_up_order, pay_back),
]
WHY = "Broke after 41 days; goodwill, as he buys often."
REFUND = call("refund_order", order="1004", cents=34900, reason=WHY)
MAIL = call(
    "send_mail",
    to="david.lindqvist@example.com",
    subject="Your espresso machine is on its way back",
    body="Hello David,\n\na courier collects the machine tomorrow. The repair is free.\n\nKettle & Cup",
)
TICKET = call("close_ticket", ticket=4)
CREDIT = call("grant_credit", customer="Marta Nowak", cents=15000)
CARD = call("block_card", card="4242")
COURIER = call("book_courier", order="1004", street="Kungsgatan 8, Uppsala")
QUESTION = call(
    "ask_human",
    question="David would rather have a new machine than a repair. Do we send one?",
    choices=["Yes, a new one", "No, repair it"],
)


class Desk:
    """Lets the desk's agent ask; each call of these is a session of its own."""

    def __init__(self, name: str = "helpdesk") -> None:
        self.name = name

    def ask(
        self,
        *calls: dict[str, object],
        task: str = "Ticket 4: David Lindqvist's espresso machine leaks. What can we do for him?",
        said: str = "The machine broke in daily use after six weeks. I would be generous here.",
        session: str = "",
        actor: Any = None,
    ) -> list[Approval]:
        """Let the agent ask; return the cards of that reply, in its order."""
        result = self._say(list(calls), task, said, session, actor)
        assert result.status == "awaiting-approval", result
        return result.pending

    def one(self, what: dict[str, object] = REFUND, **options: Any) -> Approval:
        (approval,) = self.ask(what, **options)
        return approval

    def kettle(self, session: str = "", actor: Any = None) -> Approval:
        """Let the agent look at an order and then ask for its refund; return the card."""
        asks = call("pay_back", order="4107", iban="DE02 1203 0000", cents=19290)
        turns = [
            {"tools": [call("look_up_order", order="4107")]},
            {"text": "Photo shows it; return period open.", "tools": [asks]},
            {"text": "He has his money."},
        ]
        (approval,) = self._run(turns, "Please refund the broken kettle.", session, actor).pending
        return approval

    def in_doubt(self, session: str = "") -> tuple[Run, str]:
        """Run into a call whose outcome nobody knows; return the run, and the call's id."""
        task = "Ticket 4: have David Lindqvist's espresso machine collected."
        result = self._say([COURIER], task, "I book a courier for him.", session, None)
        assert result.status == "orphaned", result
        run = Run.objects.get(pk=result.run_id)
        return run, run.messages.get(kind="tool_started").call_id

    def _say(self, calls: list[Any], task: str, said: str, session: str, actor: Any) -> Any:
        return self._run(
            [{"text": said, "tools": calls}, {"text": "David has his answer."}], task, session, actor
        )

    def _run(self, turns: list[Any], task: str, session: str, actor: Any) -> Any:
        number, instructions = next(_numbers), "You answer the shop's customers."
        model = ScriptedModel(turns)
        agent = Agent(self.name, version=str(number), instructions=instructions, tools=TOOLS, model=model)
        return run_agent(agent, task, session or f"{self.name}-{number}", actor=actor)
