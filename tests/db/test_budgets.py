"""What replies cost is journaled with them, and a budget is looked at before each request."""

from __future__ import annotations

import decimal
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from agentruns import Agent, cancel_run, resume_run, run_agent
from agentruns.models import Run
from agentruns.providers.base import ModelReply, ProviderError
from agentruns.services.sweep import sweep
from agentruns.testing import Script
from tests.db.helpers import forget_backoff, payloads, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, post

pytestmark = pytest.mark.django_db(transaction=True)

MODEL = "claude-sonnet-5-5"
PRICES = {MODEL: {"input": 3, "output": 15}}
USAGE = {"input_tokens": 100_000, "output_tokens": 10_000}  # 0.45
POST = {"tools": [call("post", text="x")], "usage": USAGE}
DONE = {"text": "all done", "usage": USAGE}


@pytest.fixture(autouse=True)
def _priced(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = PRICES


def saver(*turns: Any, **options: Any) -> Script:
    """Declare the agent; return its model, which keeps what it was asked."""
    script = Script(turns, MODEL)
    Agent("saver", instructions="Save.", tools=TOOLS, model=script, **options)
    return script


def start(text: str = "do it") -> Run:
    return the_run(run_agent("saver", text, "s1", idempotency_key=text))


def raises(error: Exception) -> Any:
    raise error


def failed(**facts: Any) -> ProviderError:
    return ProviderError("no luck", disposition="retry", type="overloaded_error", **facts)


def again(run: Run) -> Run:
    """Let a worker drive the run once its back-off is over."""
    forget_backoff(run)
    sweep()
    run.refresh_from_db()
    return run


def costs(run: Run, kind: str = "assistant") -> list[Any]:
    return [payload.get("cost") for payload in payloads(run, kind)]


def test_the_cost_of_every_reply_is_journaled_and_adds_up_exactly(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {MODEL: {"input": 0.1, "output": 0}}
    tenth = {"input_tokens": 1_000_000, "service_tier": "standard", "cost": 7}  # a cost that is not ours
    saver(*[{**POST, "usage": tenth}] * 2, {"text": "ok", "usage": tenth})
    run = start()
    assert costs(run) == ["0.1"] * 3
    assert run.usage == {"input_tokens": 3_000_000, "cost": "0.3"}


def test_a_failed_attempt_costs_what_it_used() -> None:
    errors = [failed(usage={"input_tokens": 1000}), failed()]
    saver(lambda request: raises(errors.pop(0)) if errors else DONE)
    run = start()
    again(run)
    again(run)
    assert (run.status, costs(run, "model_failed")) == ("completed", ["0.003", None])
    assert run.usage == {"input_tokens": 101_000, "output_tokens": 10_000, "cost": "0.453"}
    saver(lambda request: raises(failed(usage=USAGE)), cost_budget=0.4, version="2")
    run = again(start("more"))
    assert "cost_budget: 0.45 of 0.4 used." in run.blocked_reason
    cancel_run(run.pk)
    saver(DONE, cost_budget=0.4, version="3")
    assert start("last").status == "completed", "a run that ends within its reply may go over"
    replies = [ModelReply([], None, usage="much")]  # type: ignore[arg-type]
    saver(lambda request: replies.pop() if replies else DONE, version="4")
    run = start("cut off")
    assert (run.status, len(payloads(run, "model_failed")), run.usage) == ("queued", 1, {})


def test_the_price_counts_that_the_model_that_answered_had_then(settings: Any) -> None:
    later = {MODEL: {"input": 6, "output": 30}, f"{MODEL}-20260901": {"input": 30, "output": 150}}

    def dearer(request: Any) -> Any:
        settings.AGENTRUNS_PRICES = later
        return POST

    content = [{"type": "text", "text": "all done"}]
    saver(POST, dearer, lambda request: ModelReply(content, "end_turn", USAGE, model=f"{MODEL}-20260901"))
    run = start()
    assert (costs(run), run.usage["cost"]) == (["0.45", "0.9", "4.5"], "5.85")
    settings.AGENTRUNS_PRICES = {}
    with decimal.localcontext(prec=2):
        resumed = run_agent("saver", "do it", "s1", idempotency_key="do it")
    assert (the_run(resumed), resumed.usage["cost"]) == (run, "5.85")


@pytest.mark.parametrize("prices", [{}, {MODEL: {"input": "dear"}}, None])
def test_a_reply_nobody_can_price_is_kept_all_the_same(prices: Any, settings: Any) -> None:
    settings.AGENTRUNS_PRICES = prices
    saver(POST, DONE)
    run = start()
    assert (run.status, costs(run)) == ("completed", [None, None])
    assert run.usage == {"input_tokens": 200_000, "output_tokens": 20_000}


@pytest.mark.parametrize(
    ("options", "said", "asked"),
    [
        ({"cost_budget": 0.4}, "cost_budget: 0.45 of 0.4 used.", 1),
        ({"cost_budget": 0.5}, "cost_budget: 0.9 of 0.5 used.", 2),
        ({"cost_budget": Decimal("0.9")}, "cost_budget: 0.9 of 0.9 used.", 2),
        ({"cost_budget": 100, "token_budget": 220_000}, "token_budget: 220000 of 220000 tokens used.", 2),
        ({"cost_budget": 100, "max_steps": 1}, "max_steps: 1 of 1 replies used.", 1),
        ({"cost_budget": 100, "deadline": timedelta(microseconds=1)}, "deadline: 0 of 0 s used.", 0),
    ],
)
def test_a_budget_is_enforced_before_the_next_request(
    options: dict[str, Any], said: str, asked: int, effects: Effects
) -> None:
    script = saver(*[POST] * 4, DONE, on_budget="fail", **options)
    run = start()
    assert (run.status, run.error) == ("failed", f"BudgetExceededError: {said}")
    assert (len(script.requests), effects.count()) == (asked, asked)


def test_the_deadline_passes_with_a_clock_that_stands_still(database_clock: Any) -> None:
    def slow(request: Any) -> Any:
        database_clock.forward(minutes=61)
        return POST

    saver(slow, DONE, deadline=timedelta(hours=1), on_budget="fail")
    assert start().error == "BudgetExceededError: deadline: 3660 of 3600 s used."


def test_a_run_whose_cost_nobody_can_know_is_paused_before_the_request(
    settings: Any, effects: Effects
) -> None:
    settings.AGENTRUNS_PRICES = {}

    def unpriced(request: Any) -> Any:
        settings.AGENTRUNS_PRICES = {}
        return POST

    script = saver(POST, unpriced, DONE, cost_budget=100)
    run = start()
    why = f"no_price: AGENTRUNS_PRICES has no price for {MODEL}, so cost_budget cannot be kept."
    assert (run.status, run.blocked_reason, script.requests) == ("paused", why, [])
    assert resume_run(run.pk).status == "paused"
    settings.AGENTRUNS_PRICES = PRICES
    assert sweep().found == 0, "nobody has asked it to go on"
    assert resume_run(run.pk).status == "paused", "the price was taken away meanwhile"
    assert (len(script.requests), effects.count()) == (2, 2)
    settings.AGENTRUNS_PRICES = PRICES
    result = resume_run(run.pk)
    assert (result.status, result.usage["cost"], effects.count()) == ("completed", "0.9", 2)
    run = the_run(result)
    assert (run.blocked_reason, costs(run)) == ("", ["0.45", None, "0.45"])


def test_stateless_runs_have_the_same_budgets(settings: Any) -> None:
    script = Script([POST, POST, DONE], MODEL)
    agent = Agent("saver", instructions="Save.", tools=[post], model=script, cost_budget=0.5)
    result = run_agent(agent, "do it")
    assert result.error == f"BudgetExceededError: cost_budget: {result.usage['cost']} of 0.5 used."
    settings.AGENTRUNS_PRICES = {}
    result = run_agent(agent, "do it")
    assert (result.status, len(script.requests)) == ("failed", 2)
    assert result.error.startswith(f"no_price: AGENTRUNS_PRICES has no price for {MODEL}")
