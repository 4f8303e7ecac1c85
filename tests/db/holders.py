"""Tools that pay an order, and what an approver of a payment relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentruns import ToolContext, tool
from tests.db.dying import elsewhere
from tests.shop.agents import act, misfortune
from tests.shop.models import Order

Holds = Callable[[dict[str, Any], Any], Any]


def of_order(arguments: dict[str, Any], ctx: ToolContext) -> Any:
    """Read what the approver of a payment relies on."""
    misfortune("holds:before")
    order = Order.objects.get(number=arguments["number"])
    misfortune("holds:after")
    return {"status": order.note, "total": order.total_cents}


def of_locked_order(arguments: dict[str, Any], ctx: ToolContext) -> Any:
    """Read the same, and keep the row as it is until the end of the transaction."""
    misfortune("holds:before")
    order = Order.objects.select_for_update().get(number=arguments["number"])
    misfortune("holds:after")
    return {"status": order.note, "total": order.total_cents}


def pay(ctx: ToolContext, number: str) -> str:
    """Pay the total of an order, whatever it is by now."""
    order = Order.objects.get(number=number)
    return act("pay", ctx, status=order.note, total=order.total_cents)


def pay_here(ctx: ToolContext, number: str) -> str:
    """Pay the total of an order in this database."""
    order = Order.objects.get(number=number)
    order.refunded_cents += order.total_cents
    order.customer = f"{order.note} {order.total_cents}"
    order.save(update_fields=["refunded_cents", "customer"])
    return "paid"


def paying(holds: Holds | None = of_order, handler: Any = pay, **options: Any) -> Any:
    """Declare the tool that pays."""
    return tool(name="pay", **{"requires_approval": True, "holds": holds, **options})(handler)


def transacting(holds: Holds = of_locked_order, **options: Any) -> Any:
    """Declare the tool that pays in this database."""
    return paying(holds, pay_here, transactional=True, **options)


def change(**fields: Any) -> None:
    """Change the order in another connection, as another request does."""
    elsewhere(lambda: Order.objects.filter(number="A1").update(**fields))
