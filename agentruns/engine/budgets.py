"""Budgets of a run, which its agent declares; they are checked before each request, never during one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from agentruns.agents import prices
from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.providers.names import model_identity

if TYPE_CHECKING:
    from agentruns.journal.fold import RunState


def exceeded(agent: Agent, run: RunState, now: Callable[[], datetime]) -> str:
    """Describe a budget that the run has used up, with its figures; "" if no budget is used up."""
    if run.step >= agent.max_steps:
        return f"max_steps: {run.step} of {agent.max_steps} replies used."
    if agent.token_budget is not None and run.tokens >= agent.token_budget:
        return f"token_budget: {run.tokens} of {agent.token_budget} tokens used."
    spent = Decimal(run.usage.get("cost", "0"))
    if agent.cost_budget is not None and spent >= agent.cost_budget:
        return f"cost_budget: {spent:f} of {agent.cost_budget:f} used."
    if agent.deadline is not None and (elapsed := run.elapsed(now())) >= agent.deadline:
        return f"deadline: {elapsed.total_seconds():.0f} s of {agent.deadline.total_seconds():.0f} s used."
    return ""


def unpriced(agent: Agent) -> str:
    """Explain that a cost budget cannot be kept because a model has no price; "" if it can be kept."""
    models = [] if agent.cost_budget is None else map(model_identity, agent.models)
    model = next((each for each in models if prices.price_of(each) is None), None)
    return f"AGENTRUNS_PRICES has no price for {model}, so cost_budget cannot be kept." if model else ""


def used(usage: dict[str, Any], *models: str) -> dict[str, Any]:
    """Build the row members `usage` and, if the model has a price, `cost`. A later price may differ."""
    if not settings.PRICES:
        return {"usage": usage}
    cost = prices.cost_of(usage, *models)
    return {"usage": usage} if cost is None else {"usage": usage, "cost": prices.amount(cost)}
