"""What a caller is told of a run that neither goes on nor has ended, and of a tool that is broken."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from agentruns import Agent, pause_run, run_agent, start_run, tool
from agentruns.models import Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.dying import die_at
from tests.db.failures import failing, start
from tests.db.helpers import forget_backoff, run_turns
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_result_says_why_the_run_does_not_go_on(effects: Effects) -> None:
    run = start([failing("retry"), failing("pause")])
    assert (run.status, result_of(run.pk).error) == ("queued", "some_error: no luck")
    forget_backoff(run)
    told = run_agent("flaky", "do it", "s1", idempotency_key="k")
    assert (told.status, told.error) == ("paused", "some_error: no luck")
    queued = start_run(shop_agent("stopped"), "do it", "s2")
    pause_run(queued.pk, reason="the shop is being moved")
    assert result_of(queued.pk).error == Run.objects.get(pk=queued.pk).blocked_reason != ""
    died = die_at("after_tool", shop_agent("dies", {"tools": [call("post", text="x")]}), "s3")
    sweep()
    told = result_of(died.pk)
    assert (told.status, told.error) == (
        "orphaned",
        f"Nobody knows whether post ({told.orphans[0]}) happened: resolve_orphan or resume_run goes on.",
    )
    assert Run.objects.get(pk=died.pk).error == ""
    asks = run_turns({"tools": [call("refund", cents=5000)]}, session="s4")
    assert (asks.status, asks.error) == ("awaiting-approval", "")


@pytest.mark.parametrize("declared", [{}, {"safe_to_retry": True}, {"transactional": True}])
def test_an_unexpected_exception_is_logged_with_its_traceback(
    declared: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(pin: str) -> str:
        """Read what is not there, as the author of a first tool does."""
        owners: dict[str, str] = {}
        return owners["owner " + pin]

    model = ScriptedModel([{"tools": [call("broken", pin="pin-7306")]}, {"text": "done"}])
    tools: list[Any] = [tool(**declared, sensitive=["pin"])(broken)]
    run_agent(Agent("typo", instructions="Try.", tools=tools, model=model), "do it", "s1")
    [record] = [each for each in caplog.records if each.getMessage().startswith("Tool failed")]
    text = logging.Formatter().format(record)
    assert (record.levelno, 'return owners["owner " + pin]' in text) == (logging.ERROR, True)
    assert "pin-7306" not in text


def test_runs_awaited_together_are_driven_together() -> None:
    together = threading.Barrier(2, timeout=120)

    @tool(safe_to_retry=True)
    def meet() -> str:
        """Wait for the other run."""
        together.wait()
        return "met"

    def agent(name: str) -> Agent:
        model = ScriptedModel([{"tools": [call("meet")]}, {"text": "done"}])
        return Agent(name, instructions="Meet.", tools=[meet], model=model)

    async def both() -> list[Any]:
        return [*await asyncio.gather(agent("one").arun("go", "s1"), agent("two").arun("go", "s2"))]

    assert [result.status for result in asyncio.run(both())] == ["completed", "completed"]
    assert not together.broken
