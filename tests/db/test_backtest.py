"""A rule tried on the past, on its dry run, and suggested from cards that people have decided."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import Agent, ToolContext, approve, deny, erase_call, run_agent, tool
from agentruns.exceptions import PermissionDeniedError
from agentruns.models import Approval
from agentruns.services import rules
from agentruns.services.backtest import agreement, backtest, suggest
from agentruns.testing import ScriptedModel, run_until_blocked
from tests.db.helpers import user
from tests.effects import Effects
from tests.shop.agents import act, call

pytestmark = pytest.mark.django_db(transaction=True)

SMALL = {"path": "arguments.cents", "op": "<=", "value": 5000}
DAY = {"of": "arguments.cents", "most": "10000", "seconds": 86400, "per": ["arguments.customer"]}


@tool(requires_approval=True, sensitive=["secret"])
def pay(ctx: ToolContext, customer: str, cents: int, kind: str = "refund", secret: str = "") -> str:
    """Pay."""
    return act("pay", ctx, customer=customer, cents=cents)


def card(cents: int, customer: str = "C1", session: str = "", **arguments: Any) -> Approval:
    """Ask for one payment, in a session of its own."""
    calls = [call("pay", customer=customer, cents=cents, **arguments)]
    script = ScriptedModel([{"tools": calls}, {"text": "done"}])
    Agent("payer", instructions="Pay.", tools=[pay], model=script)
    key = session or f"s{Approval.objects.count()}"
    result = run_agent("payer", "pay", key)
    return Approval.objects.get(run_id=result.run_id)


def decide(*verdicts: str, cents: int = 1000, **arguments: Any) -> list[Approval]:
    """Ask for a payment for each verdict, and decide it: "approve", "deny" or "edit"."""
    cards = []
    for verdict in verdicts:
        cards.append(asked := card(cents, **arguments))
        if verdict == "deny":
            deny(asked.pk, None, "no")
        elif verdict == "edit":
            approve(asked.pk, None, arguments={**asked.arguments, "cents": 1}, digest=asked.digest)
        else:
            approve(asked.pk, None)
        run_until_blocked()
    return cards


def draft(**fields: Any) -> Any:
    card(1)
    given: dict[str, Any] = {
        "name": "small",
        "agent": "payer",
        "tool": "pay",
        "conditions": [SMALL],
        **fields,
    }
    return rules.draft_rule(None, **given)


def test_a_backtest_counts_where_people_agreed_and_links_where_they_did_not() -> None:
    _one, _two, denied, edited, _large = [
        *decide("approve", "approve", "deny", "edit"),
        *decide("approve", cents=9000),
    ]
    done = backtest(draft())
    assert (done.tried, done.fits, done.decided, done.agreed, done.disagreed) == (5, 4, 4, 2, 2)
    assert done.disagreements == [(edited.pk, "edited"), (denied.pk, "denied")], "the newest first"


def test_an_edited_card_is_tried_with_what_the_model_asked_for() -> None:
    decide("edit", cents=9000)
    assert backtest(draft()).fits == 0, "the person made it 1 cent"


def test_caps_are_simulated_in_order() -> None:
    decide("approve", "approve", "approve", cents=4000)
    decide("approve", cents=4000, customer="C2")
    done = backtest(draft(caps=[DAY]))
    assert (done.fits, done.capped, done.agreed) == (4, 1, 3)


def test_cards_that_rules_decided_expired_or_were_erased_are_left_out() -> None:
    (first, *_rest) = decide("approve", "approve")
    made = draft()
    rules.activate_rule(made.pk, None)
    decide_by_rule = card(2000)
    assert decide_by_rule.decided_by_name == "rule:small:1"
    erase_call(first.run_id, first.call_id, actor=None, reason="asked")
    done = backtest(made)
    assert (done.tried, done.left_out) == (1, 1)


def test_progress_is_told_and_a_newest_part_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.services.backtest.AT_ONCE", 2)
    decide("deny", "approve", "approve", "approve")
    told: list[int] = []
    assert backtest(draft(), progress=told.append).tried == 4
    assert told == [2, 4]
    assert backtest(rules.list_rules().get(), most=3).disagreed == 0


def test_a_backtest_takes_the_permission_and_links_only_what_its_reader_sees(settings: Any) -> None:
    decide("deny")
    made = draft()
    with pytest.raises(PermissionDeniedError):
        backtest(made, user("reader", "view_approvalrule"))
    assert backtest(made, user("writer", "write_rule")).disagreements == []
    assert len(backtest(made, user("lead", "write_rule", "decide_approval")).disagreements) == 1


def test_a_dry_run_is_compared_with_people(effects: Effects) -> None:
    made = draft()
    rules.try_rule(made.pk, None)
    cards = decide("approve", "deny", "edit")
    card(1000)
    done = agreement(made)
    assert (done.decided, done.agreed, done.disagreed, done.open) == (3, 1, 2, 1)
    assert done.disagreements == [(cards[2].pk, "edited"), (cards[1].pk, "denied")]


def test_a_card_with_precedents_suggests_a_rule_that_can_be_drafted() -> None:
    for customer in ("C1", "C2", "C1", "C2", "C3"):
        decide("approve", cents=1000, customer=customer)
    decide("approve", cents=3000, customer="C4")
    writer = user("writer", "write_rule", "decide_approval")
    asked = card(2000, customer="C9", secret="s3cret")
    offer = suggest(asked, writer)
    assert offer is not None
    assert offer.count == 6
    assert offer.conditions == [
        {"path": "arguments.cents", "op": "<=", "value": 3000},
        {"path": "arguments.kind", "op": "==", "value": "refund"},
    ]
    made = rules.draft_rule(writer, name=offer.name, agent="payer", tool="pay", conditions=offer.conditions)
    assert made.status == "draft"
    assert suggest(asked, user("nobody", "decide_approval")) is None


@pytest.mark.parametrize("verdict", ["deny", "edit"])
def test_no_rule_is_suggested_where_people_decided_otherwise(verdict: str) -> None:
    decide("approve", "approve", "approve", "approve", "approve", verdict)
    assert suggest(card(500), user("writer", "write_rule", "view_approval")) is None


def test_no_rule_is_suggested_where_people_raised_what_the_model_asked_for() -> None:
    asked = decide(*["approve"] * 5)[0]
    raised = card(900)
    approve(raised.pk, None, arguments={**asked.arguments, "cents": 9000}, digest=raised.digest)
    run_until_blocked()
    assert suggest(card(500), user("writer", "write_rule", "view_approval")) is None


def test_no_rule_is_suggested_beyond_what_people_have_approved() -> None:
    decide(*["approve"] * 5)
    writer = user("writer", "write_rule", "view_approval")
    assert suggest(card(500, kind="bonus"), writer) is not None
    offer = suggest(card(5000), writer)
    assert offer is None or all(each["path"] != "arguments.cents" for each in offer.conditions)


def test_a_suggestion_repeats_no_value_that_its_card_masks() -> None:
    secret = {"secret": "s3cret-77", "kind": "s3cret-77"}
    decide(*["approve"] * 5, **secret)
    offer = suggest(card(500, **secret), user("writer", "write_rule", "view_approval"))
    assert offer is not None
    assert [each["path"] for each in offer.conditions] == ["arguments.cents", "arguments.customer"]
    assert "s3cret" not in offer.sentence
