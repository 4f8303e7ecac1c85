"""Budgets of a run and its child runs: what is left is divided, and what they used counts for the parent."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import Agent, raise_budget
from agentruns.admin.runs.limits import meters
from agentruns.journal.read import definition_body
from agentruns.models import Run
from agentruns.services.runs.waiting import own_limits
from agentruns.testing import Script
from tests.admin.pages import look, words
from tests.db.families import begin, children, whole, work
from tests.db.helpers import payloads
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

MODEL = "claude-sonnet-5-5"
USAGE = {"input_tokens": 10_000, "output_tokens": 2_000}  # 0.06
DONE = {"text": "all done", "usage": USAGE}
POST = {"tools": [call("post", text="x")], "usage": USAGE}


@pytest.fixture(autouse=True)
def _priced(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {MODEL: {"input": 3, "output": 15}}


def agents(*calls: str, to: Any = (DONE,), model: str = MODEL, own: Any = None, **budgets: Any) -> Agent:
    """Make the agent "boss" with these budgets, whose first reply hands tasks over to the agent "scout"."""
    scout = Agent("scout", instructions="Look.", tools=TOOLS, model=Script([*to], model), **(own or {}))
    asks = [call(each, task="look") if each == "scout" else call(each, text="x") for each in calls]
    turns = [{"tools": asks, "usage": USAGE}, DONE]
    tools = [scout.as_tool(), *TOOLS]
    return Agent("boss", instructions="Lead.", tools=tools, model=Script(turns, MODEL), **budgets)


def limits(run: Run) -> list[Any]:
    return [payloads(child, "run_started")[0].get("limits") for child in children(run)]


def test_what_is_left_is_divided_among_the_calls_of_a_reply() -> None:
    run = begin(agents("scout", "scout", "scout", token_budget=312_000, cost_budget=0.66))
    assert limits(run) == [{"token_budget": 100_000, "cost_budget": "0.200000"}] * 3
    work()
    run, *_rest = whole()
    assert run.status == "completed"
    assert [row["spent"] for row in payloads(run, "tool_result")] == [
        {"token_budget": "12000", "cost_budget": "0.06"}
    ] * 3
    assert run.tokens == 24_000, "the columns have the run's own use, so that nothing is counted twice"


def test_a_later_child_gets_what_the_others_left_and_did_not_set_aside() -> None:
    run = begin(agents("scout", "post", "scout", token_budget=112_000))
    assert limits(run) == [{"token_budget": 50_000}], "the second one has its part still to come"
    work()
    run, *_rest = whole()
    assert limits(run) == [{"token_budget": 50_000}, {"token_budget": 100_000 - 12_000}]


def test_a_childs_own_lower_budget_stays_and_without_a_budget_there_is_none() -> None:
    run = begin(agents("scout", token_budget=112_000, own={"token_budget": 20_000, "max_steps": 3}))
    assert limits(run) == [{"token_budget": 20_000}]
    other = begin(agents("scout"), session="s2")
    assert limits(other) == [None]


def test_what_a_child_used_counts_for_its_parent_also_after_a_raise() -> None:
    run = begin(agents("scout", to=[POST, DONE], token_budget=26_000))
    work()
    run, child = whole()
    assert (run.status, child.status) == ("waiting", "paused")
    raise_budget(child.pk, token_budget=60_000)
    work()
    run, child = whole()
    assert (child.status, run.status) == ("completed", "paused")
    state = payloads(run, "run_paused")[-1]
    assert state["budget"] == "token_budget" and "36000 of 26000" in state["reason"]
    raise_budget(run.pk, token_budget=90_000)
    work()
    assert whole()[0].status == "completed"


def test_the_page_counts_what_child_runs_used() -> None:
    run = begin(agents("scout", token_budget=100_000, cost_budget=1))
    work()
    run.refresh_from_db()
    own, spent = own_limits("default", run)
    definition = definition_body("default", run.definition_id)
    figures = [each.figures for each in meters({**definition, **own}, run.step, run.usage, None, spent)]
    assert figures[1:] == ["36,000 of 100,000", "0.18 of 1"]
    assert "36,000 of 100,000" in words(look(run))
    (child,) = children(run)
    assert "12,000 of 88,000" in words(look(child)), "its limit is its part"


def test_a_cost_budget_needs_a_price_of_the_childs_model() -> None:
    run = begin(agents("scout", model="claude-unknown-1", cost_budget=1))
    work()
    run, child = whole()
    assert (run.status, child.status) == ("waiting", "paused")
    assert child.blocked_reason.startswith("no_price")
