"""Runs that wait while their agent changes: an approved call runs as approved, or people are asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Annotated, Any
from uuid import uuid4

import pytest
from pydantic import BaseModel, Field

from agentruns import ToolContext, adopt_definition, approve, deny, run_agent, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.models import Approval
from agentruns.services.sweep import sweep
from tests.db.helpers import outcomes, payloads, sound, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


class Order(BaseModel):
    number: str


class LaterOrder(Order):
    gift: bool = False


def pay(ctx: ToolContext, cents: int, order: Order) -> str:
    return act("pay", ctx, cents=cents)


def with_note(ctx: ToolContext, cents: int, order: Order, note: str = "by hand") -> str:
    return act("pay", ctx, cents=cents, note=note)


def with_two(
    ctx: ToolContext, cents: int, order: Order, limit: int | None = None, tags: tuple[str, ...] = ("new",)
) -> str:
    return act("pay", ctx, cents=cents, tags=tags)


def with_made(
    ctx: ToolContext, cents: int, order: Order, ref: str = Field(default_factory=lambda: str(uuid4()))
) -> str:
    return act("pay", ctx, cents=cents, ref=ref)


def with_required(ctx: ToolContext, cents: int, order: Order, note: str) -> str:
    return act("pay", ctx, cents=cents, note=note)


def with_nested(ctx: ToolContext, cents: int, order: LaterOrder) -> str:
    return act("pay", ctx, cents=cents)


def narrowed(ctx: ToolContext, cents: Annotated[int, Field(le=1000)], order: Order) -> str:
    return act("pay", ctx, cents=cents)


def read_otherwise(ctx: ToolContext, cents: float, order: Order) -> str:
    return act("pay", ctx, cents=cents)


def renamed(ctx: ToolContext, amount: int, order: Order) -> str:
    return act("pay", ctx, cents=amount)


def without(ctx: ToolContext, cents: int) -> str:
    return act("pay", ctx, cents=cents)


def tool_of(fn: Callable[..., str], **options: Any) -> Any:
    return tool(name="pay", **{"requires_approval": True, **options})(fn)


OTHER = tool(name="other")(without)
PAY = {"tools": [call("pay", cents=5000, order={"number": "A1"})]}
AS_APPROVED: dict[str, Any] = {
    "an optional parameter": tool_of(with_note),
    "two of them": tool_of(with_two),
    "nobody is asked any more": tool_of(pay, requires_approval=False),
    "two people are asked": tool_of(pay, approvals=2),
    "others are asked": tool_of(pay, approvers="finance", risk="high"),
    "it expires": tool_of(pay, expires_in=timedelta(hours=1), describe=lambda args: "A payment"),
    "it is asked about": tool_of(with_note, timeout=60, safe_to_retry=True),
}
# Each with what the card says, and what the person has to put in place of the arguments.
ASKED_AGAIN: dict[str, tuple[Any, str, dict[str, Any] | None]] = {
    "a default that is made anew": (tool_of(with_made), "ref", {"ref": "r1"}),
    "a required parameter": (tool_of(with_required), "note: Field required", {"note": "mine"}),
    "an optional part of a value": (tool_of(with_nested), "order.gift", {}),
    "a narrower type": (tool_of(narrowed), "cents: Input should be less", {"cents": 900}),
    "another type": (tool_of(read_otherwise), "cents: the tool now reads another value", {}),
    "a new name": (tool_of(renamed), "amount: Field required", {"cents": None, "amount": 5000}),
    "a parameter less": (tool_of(without), "order: Extra inputs", {"order": None}),
    "no such tool": (OTHER, "there is no tool 'pay' any more", None),
}


@pytest.fixture
def waiting() -> Iterator[Callable[..., Approval]]:
    """Start a run that waits for a payment's approval, and deploy another tool in place of its own."""

    def wait(**options: Any) -> Approval:
        agent = shop_agent("payer", PAY, tools=[tool_of(pay, **options)])
        return run_agent(agent, "pay it", "s1", idempotency_key="k").pending[0]

    with isolated_registry():
        yield wait


def deploy(card: Approval, its: Any, first: str) -> None:
    """Register the payer with the tool `its`; adopt and approve, `first` before the other."""
    shop_agent("payer", PAY, tools=[its])
    steps: list[Callable[[], Any]] = [
        lambda: adopt_definition(card.run_id),
        lambda: approve(card.pk, None, digest=card.digest),
    ]
    for step in steps if first == "adopt" else reversed(steps):
        step()


@pytest.mark.parametrize("first", ["adopt", "approve"])
@pytest.mark.parametrize("change", AS_APPROVED)
def test_an_approved_call_runs_as_approved_by_a_tool_that_takes_more(
    change: str, first: str, waiting: Callable[..., Approval], effects: Effects
) -> None:
    card = waiting()
    deploy(card, AS_APPROVED[change], first)
    assert sweep().completed == 1
    run, (line,) = sound(card.run), effects.lines()
    card.refresh_from_db()
    assert (outcomes(run), card.status, line["cents"]) == (["ok"], "consumed", 5000)
    assert line.get("note", "by hand") == "by hand"
    assert payloads(run, "tool_started")[0]["digest"] == card.digest


@pytest.mark.parametrize("change", ASKED_AGAIN)
def test_an_approved_call_that_fits_no_more_is_asked_about_again(
    change: str, waiting: Callable[..., Approval], effects: Effects
) -> None:
    """The card says what has changed; approving it as it is is refused, edited it runs."""
    card, (its, says, edit) = waiting(), ASKED_AGAIN[change]
    deploy(card, its, "approve")
    assert (sweep().waiting, effects.count()) == (1, 0)
    card.refresh_from_db()
    assert (card.status, sound(card.run).status) == ("pending", "awaiting-approval")
    assert card.why.startswith("pay has changed since this was approved: ") and says in card.why
    with pytest.raises(ApprovalStateError, match="pay cannot run this call as it is"):
        approve(card.pk, None, digest=card.digest)
    if edit is None:
        deny(card.pk, None, "the tool is gone", digest=card.digest)
    else:
        given = {name: each for name, each in {**card.arguments, **edit}.items() if each is not None}
        approve(card.pk, None, digest=card.digest, arguments=given)
    assert sweep().completed == 1
    assert outcomes(sound(card.run)) == (["denied"] if edit is None else ["ok"])
    assert effects.count() == (edit is not None)


def test_people_who_are_asked_again_have_as_long_as_the_first_time(
    waiting: Callable[..., Approval], effects: Effects
) -> None:
    """A deploy on the day after must not let the call expire before anybody has seen that it came back."""
    card = waiting(expires_in=timedelta(hours=1), approvals=2)
    before = card.expires_at
    for name in ("ann", "ben"):
        approve(card.pk, user(name, "decide_approval"), digest=card.digest)
    shop_agent("payer", PAY, tools=[tool_of(narrowed)])
    adopt_definition(card.run_id)
    assert sweep().waiting == 1
    card.refresh_from_db()
    (row,) = payloads(sound(card.run), "approval_voided")
    assert (card.status, card.approved_count, len(row["voided"])) == ("pending", 0, 2)
    assert row["why"].count("has changed") == 1, "once, whoever approved"
    assert before is not None and card.expires_at is not None
    assert (card.expires_at > before, effects.count()) == (True, 0)
