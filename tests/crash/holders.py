"""Agents whose approvals hold, for a process that is to be killed, and for the one that goes on."""

from __future__ import annotations

from tests.db.holders import paying, transacting
from tests.shop.agents import call, shop_agent

PAY = {"tools": [call("pay", number="A1")]}

outside = shop_agent("holding-outside", PAY, tools=[paying()])
inside = shop_agent("holding-inside", PAY, tools=[transacting()])
