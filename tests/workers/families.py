"""Agents that hand tasks to two, three or four others side by side, for workers that are killed."""

from __future__ import annotations

from tests.shop.agents import call, charge, lookup, post, refund, shop_agent
from tests.shop.waits import invoice

HEADS = (2, 3, 4)  # child runs
below = [
    shop_agent(name, {"tools": calls}, tools=[lookup, charge, post, refund, invoice])
    for name, calls in {
        "worker-errand": [call("lookup", number="A1"), call("charge", cents=500)],
        "worker-cashier": [call("invoice"), call("post", text="paid")],
        "worker-clerk": [call("refund", cents=5000)],
        "worker-messenger": [call("post", text="one"), call("post", text="two")],
    }.items()
]
for _number in HEADS:
    shop_agent(
        f"head-{_number}",
        {"tools": [call(each.name, task="do it") for each in below[:_number]]},
        {"tools": [call("charge", cents=700)]},
        tools=[charge, *(each.as_tool() for each in below)],
    )
