"""Without a session nothing is stored: no database is touched."""

from __future__ import annotations

import pytest

from agentruns import MemoryStore, run_agent, tool
from agentruns.exceptions import NotDurableError
from agentruns.providers.base import ProviderError
from agentruns.testing import check_messages
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

READS = [one for one in TOOLS if one.name != "annotate"]

# No django_db mark: pytest-django makes any query an error.


def test_a_stateless_run_touches_no_database(effects: Effects) -> None:
    turns = [
        {"tools": [call("lookup", number="A1"), call("search", query="x"), call("post", text="hi")]},
        {"tools": [call("broken"), call("post"), call("nothing")]},
    ]
    agent = shop_agent("stateless", *turns, tools=READS)
    result = run_agent(agent, "do it")
    assert (result.status, result.output, result.run_id) == ("completed", "all done", None)
    assert [line["tool"] for line in effects.lines()] == ["lookup", "search", "post", "broken"]
    check_messages(result.messages)
    assert run_agent(agent, "do it", store=MemoryStore()).status == "completed"


def test_a_call_that_would_ask_is_denied(effects: Effects) -> None:
    agent = shop_agent("asker", {"tools": [call("refund", cents=5000), call("refund", cents=5)]}, tools=READS)
    result = run_agent(agent, "do it")
    assert result.status == "completed"
    assert [line["cents"] for line in effects.lines()] == [5]
    assert "nobody can be asked in a stateless run" in result.messages[2]["content"][0]["content"]


def test_an_agent_that_always_asks_is_refused_before_the_model() -> None:
    asked = []

    @tool(requires_approval=True)
    def launch() -> str:
        return "launched"

    agent = shop_agent("launcher", lambda request: asked.append(request) or {"text": "hi"}, tools=[launch])
    with pytest.raises(NotDurableError, match="launch"):
        run_agent(agent, "do it")
    assert asked == []


def test_a_model_that_cannot_be_reached_fails_the_run() -> None:
    def fail(request: object) -> dict[str, str]:
        raise ProviderError("the provider is overloaded", disposition="retry", type="overloaded_error")

    result = run_agent(shop_agent("unlucky", fail, tools=READS), "do it")
    assert (result.status, result.error) == ("failed", "overloaded_error: the provider is overloaded")


def test_budgets_hold_without_a_database(effects: Effects) -> None:
    agent = shop_agent("endless", *[{"tools": [call("lookup", number="A1")]}] * 5, tools=READS, max_steps=3)
    result = run_agent(agent, "do it")
    assert result.status == "failed"
    assert "max_steps: 3 of 3" in result.error
    assert effects.count() == 3
