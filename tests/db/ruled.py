"""An agent that makes payments, and standing rules that answer for people."""

from __future__ import annotations

from typing import Any

from agentruns import Agent, ToolContext, run_agent, tool
from agentruns.journal.verify import problems
from agentruns.models import ApprovalRule, Run
from agentruns.services import rules
from agentruns.testing import ScriptedModel
from tests.effects import Effects
from tests.shop.agents import act, call

SMALL = {"path": "arguments.cents", "op": "<=", "value": 5000}
DAY = {"of": "arguments.cents", "most": "10000", "seconds": 86400, "per": ["arguments.customer"]}


def pay_tool(**options: Any) -> Any:
    @tool(**{"requires_approval": True, **options})
    def pay(ctx: ToolContext, customer: str, cents: int, note: str = "") -> str:
        """Pay."""
        return act("pay", ctx, customer=customer, cents=cents)

    return pay


def payer(*amounts: int, customer: str = "C1", options: Any = None, pay: Any = None, **agent: Any) -> Agent:
    """Make the agent "payer", whose first reply makes a payment for each of `amounts`."""
    calls = [call("pay", customer=customer, cents=cents) for cents in amounts]
    script = ScriptedModel([{"tools": calls}, {"text": "done"}])
    return Agent(
        "payer", instructions="Pay.", tools=[pay or pay_tool(**(options or {}))], model=script, **agent
    )


def rule(*conditions: Any, active: bool = True, actor: Any = None, **fields: Any) -> ApprovalRule:
    """Write a rule for the payer's tool, and let it decide."""
    given = {"name": "small", "agent": "payer", "tool": "pay", **fields}
    made = rules.draft_rule(actor, conditions=conditions or [SMALL], **given)
    return rules.activate_rule(made.pk, actor) if active else made


def ran(session: str = "s1", agent: str = "payer", **options: Any) -> Run:
    """Run the agent until it ends or waits, and check its journal."""
    result = run_agent(agent, "pay", session, **options)
    run = Run.objects.get(pk=result.run_id)
    assert problems(run.session_id) == []
    return run


def paid(effects: Effects) -> list[int]:
    return [each["cents"] for each in effects.lines() if each.get("tool") == "pay"]
