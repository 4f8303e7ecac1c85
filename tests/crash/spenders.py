"""An agent whose replies cost 1 each, and what a day may cost, for a process that is to be killed."""

from __future__ import annotations

import os
from typing import Any

import agentruns
from agentruns import Agent, ModelReply, ModelRequest
from agentruns.conf import settings
from agentruns.models import Run
from agentruns.testing import Script
from tests.effects import Effects
from tests.shop.agents import call, lookup, misfortune

MODEL = "claude-sonnet-5-5"
PRICES = {MODEL: {"input": 0, "output": 1}}
LIMIT = "SHOP_BUDGET"  # the variable with what a day may cost


class Allows(agentruns.Policy):
    """Gives all runs together one budget."""

    def budget(self, run: Run) -> dict[str, Any]:
        return {"scope": os.environ[LIMIT]}


POLICY = f"{__name__}.{Allows.__name__}"
if LIMIT in os.environ:  # a process of its own
    settings.PRICES, settings.POLICY = PRICES, POLICY


class Billed(Script):
    """Notes each request outside, with places to die before and after it."""

    def propose(self, request: ModelRequest) -> ModelReply:
        misfortune("request:before")
        Effects.from_environment().record(f"{request.run_id}:{request.step}", tool="request")
        misfortune("request:after")
        return super().propose(request)


USED = {"usage": {"output_tokens": 1_000_000}}
spender = Agent(
    "spending-worker",
    instructions="Spend.",
    tools=[lookup],
    model=Billed([{"tools": [call("lookup", number="A1")], **USED}, {"text": "all done", **USED}], MODEL),
    model_params={"max_tokens": 1_000_000},
)
