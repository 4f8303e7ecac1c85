"""A decision from a terminal: by the service of the console, in the name of somebody who may."""

from __future__ import annotations

import pytest

from agentruns import run_agent, tool
from agentruns.models import Approval, Message
from agentruns.services.sweep import sweep
from tests.commands.running import run
from tests.db.helpers import user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def approval(db: None) -> Approval:
    user("ann", "decide_approval")
    user("bob")
    return run_agent("calls-refund", "do it", "s1", idempotency_key="k1").pending[0]


def test_approve(approval: Approval, effects: Effects) -> None:
    outcome = run(
        "approve_call", str(approval.pk), "--user=ann", "--reason=fine", f"--digest={approval.digest}"
    )
    assert (outcome.code, outcome.out) == (0, f"Approval {approval.pk} of refund is approved.\n")
    assert (sweep().completed, effects.count()) == (1, 1)
    decided = Message.objects.get(kind="approval_decided").payload
    assert (decided["actor"]["name"], decided["channel"], decided["reason"]) == ("ann", "terminal", "fine")


def test_deny(approval: Approval, effects: Effects) -> None:
    outcome = run("deny_call", str(approval.pk), "--user=ann", "--reason=too much", "--json")
    assert outcome.lines == [
        {
            "id": str(approval.pk),
            "run": str(approval.run_id),
            "status": "denied",
            "approvals": 0,
            "required": 1,
        }
    ]
    assert (sweep().completed, effects.lines()) == (1, [])
    assert "too much" in str(Message.objects.get(kind="tool_result").payload["content"])


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        (("approve_call", "{id}", "--user=bob"), 1, "lacks the permission"),
        (("approve_call", "{id}", "--user=nobody"), 2, "nobody"),
        (("approve_call", "{id}", "--user=ann", "--digest=00"), 1, "were edited since you looked"),
        (("approve_call", "x", "--user=ann"), 1, "There is no approval x"),
        (("deny_call", "{id}", "--user=ann", "--reason= "), 1, "needs a reason"),
    ],
)
def test_refused(approval: Approval, command: tuple[str, ...], code: int, why: str) -> None:
    outcome = run(*(word.format(id=approval.pk) for word in command))
    assert (outcome.code, why in outcome.err) == (code, True), outcome.err
    assert Approval.objects.get().status == "pending"


def test_one_of_two_says_so() -> None:
    @tool(requires_approval=True, approvals=2)
    def wire() -> str:
        """Wire it."""
        return "wired"

    user("ann", "decide_approval")
    agent = shop_agent("wires", {"tools": [call("wire")]}, tools=[wire])
    card = run_agent(agent, "do it", "s1", idempotency_key="k1").pending[0]
    outcome = run("approve_call", str(card.pk), "--user=ann")
    assert outcome.out == f"Approval {card.pk} of wire is pending (1 of 2 approvals).\n"
    assert run("approve_call", str(card.pk), "--user=ann").code == 1
