"""The crash harness that users get: a store that stops at the nth append of a drive."""

from __future__ import annotations

import pytest

from agentruns import DatabaseStore, run_agent
from agentruns.models import Message, Run
from agentruns.testing import Crash, crash_after_tool_results
from agentruns.utils.failpoints import arm
from tests.db.helpers import outcomes, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def crash(tool: str, nth: int, **arguments: object) -> Run:
    agent = shop_agent(f"crashes-{tool}", {"tools": [call(tool, **arguments)]})
    store = crash_after_tool_results(DatabaseStore(), nth)
    with pytest.raises(Crash, match=r"tool_result|assistant"):
        run_agent(agent, "do it", "s1", store=store, idempotency_key="k")
    return Run.objects.get()


def test_a_tool_that_declares_nothing_acts_once_and_the_model_is_told(effects: Effects) -> None:
    run = crash("post", 2, text="x")
    assert (effects.count(), Message.objects.filter(kind="tool_result").count()) == (1, 0)
    result = run_agent(run.agent, "do it", "s1", idempotency_key="k")
    assert (result.status, effects.count()) == ("completed", 1)
    assert outcomes(the_run(result)) == ["unknown"]
    assert "tool-durability-error" in str(result.messages)


def test_a_safe_tool_acts_twice_and_the_model_never_sees_the_crash(effects: Effects) -> None:
    run = crash("lookup", 2, number="A1")
    result = run_agent(run.agent, "do it", "s1", idempotency_key="k")
    assert (result.status, effects.count()) == ("completed", 2)
    assert outcomes(the_run(result)) == ["ok"]
    assert "tool-durability-error" not in str(result.messages)


def test_the_first_append_is_the_reply(effects: Effects) -> None:
    run = crash("post", 1, text="x")
    assert (effects.count(), run.step) == (0, 0)
    assert run_agent(run.agent, "do it", "s1", idempotency_key="k").status == "completed"
    assert effects.count() == 1


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(ValueError, match="before_tool"):
        arm("somewhere")
