"""A budget is used up, and somebody raises it on the page of the run."""

from __future__ import annotations

from datetime import timedelta

from agentruns import run_agent
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor
from tests.effects import Effects
from tests.shop.agents import call, shop_agent


def test_she_raises_a_budget(visitor: Visitor, effects: Effects) -> None:
    turn = {"tools": [call("post", text="Hello")], "usage": {"input_tokens": 2500, "output_tokens": 500}}
    agent = shop_agent("desk", turn, max_steps=1, token_budget=50_000, deadline=timedelta(hours=2))
    run = Run.objects.get(pk=run_agent(agent, "Say hello", "ticket-1").run_id)
    page = visitor.open(run)
    visitor.wait_for("It is paused: a budget is used up. It goes on when somebody raises it.")
    visitor.wait_for("budget_exhausted: max_steps: 1 of 1 replies used.")
    visitor.unfold()
    assert_sound(page)
    with visitor.refused():
        visitor.choose("Raise the budget", **{"Model replies, new limit": "1"})
    visitor.wait_for("Give a limit that is higher than both.")
    visitor.choose("Raise the budget", **{"Model replies, new limit": "5", "Reason": "A long story."})
    visitor.wait_for("The budget is raised.")
    sweep()
    visitor.open(run)
    visitor.wait_for("Budget raised: superuser: max_steps 5. A long story.")
    assert_sound(page)
    assert (Run.objects.get().status, effects.count()) == ("completed", 1)
