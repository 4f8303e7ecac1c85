"""A model attempt that fails is a row of its own, never a turn, and never the end of the session."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agentruns import Agent, resume_run, run_agent
from agentruns.models import Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.failures import Flaky, failing, start
from tests.db.helpers import forget_backoff, outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_retryable_error_backs_off_without_holding_anything(effects: Effects) -> None:
    run = start([failing("retry"), failing("retry")], {"tools": [call("post", text="x")]})
    assert (run.status, run.lease_expires_at, run.attempts) == ("queued", None, 0)
    assert run.not_before is not None
    assert sweep().found == 0
    again = run_agent("flaky", "do it", "s1", idempotency_key="k")
    assert (again.status, again.run_id) == ("queued", str(run.pk))
    for _ in range(2):
        forget_backoff(run)
        sweep()
    run = Run.objects.get()
    assert (run.status, run.step, effects.count()) == ("completed", 2, 1)
    assert [one["attempt"] for one in payloads(run, "model_failed")] == [1, 2]


def test_retry_after_is_honoured() -> None:
    run = start([failing("retry", retry_after=1000.0)])
    assert run.not_before - run.updated_at > timedelta(seconds=900)


def test_many_backoffs_do_not_count_as_attempts() -> None:
    run = start([failing("retry") for _ in range(20)])
    for _ in range(20):
        forget_backoff(run)
        sweep()
    run = Run.objects.get()
    assert (run.status, len(payloads(run, "model_failed"))) == ("completed", 20)


def test_a_wrong_key_pauses_and_resume_goes_on(effects: Effects) -> None:
    run = start([failing("pause", status=401)], {"tools": [call("post", text="x")]})
    assert (run.status, run.blocked_reason) == ("paused", "some_error: no luck")
    assert run_agent("flaky", "do it", "s1", idempotency_key="k").status == "paused"
    result = resume_run(run.pk)
    assert (result.status, effects.count()) == ("completed", 1)
    assert the_run(result).blocked_reason == ""


def test_a_bad_request_fails_the_run_and_settles_its_calls() -> None:
    run = start([failing("fail", status=400)])
    assert (run.status, run.error) == ("failed", "some_error: no luck")


@pytest.mark.parametrize(
    ("disposition", "end"), [("fail", "failed"), ("pause", "paused"), ("retry", "queued")]
)
def test_no_failure_of_the_model_repeats_what_was_done_before_it(
    disposition: str, end: str, effects: Effects
) -> None:
    errors = [failing(disposition)]

    def fail_once(request: Any) -> dict[str, str]:
        if errors:
            raise errors.pop()
        return {"text": "at last"}

    run = the_run(run_turns({"tools": [call("post", text="x")]}, fail_once))
    assert (run.status, effects.count()) == (end, 1)
    forget_backoff(run)
    sweep()
    if end == "paused":
        resume_run(run.pk)
    run = Run.objects.get()
    assert (run.status, outcomes(run)) == ("failed" if end == "failed" else "completed", ["ok"])
    assert effects.count() == 1


def test_a_model_that_raises_counts_as_an_attempt_and_ends_paused(settings: Any) -> None:
    settings.AGENTRUNS_MAX_ATTEMPTS = 3
    model = Flaky([KeyError("oops") for _ in range(3)], [])
    agent = Agent("flaky", instructions="Try.", tools=TOOLS, model=model)
    with pytest.raises(KeyError):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    run = Run.objects.get()
    assert (run.status, run.attempts) == ("queued", 1)
    for _ in range(3):
        forget_backoff(run)
        sweep()
    run = the_run(result_of(run.pk))
    assert (run.status, run.blocked_reason, run.attempts) == ("paused", "attempts_exhausted", 3)
    assert resume_run(run.pk).status == "completed"
    assert Run.objects.get().attempts == 0


def test_pause_turn_is_sent_back_unchanged_and_capped() -> None:
    block = {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"q": "x"}}
    paused = {"content": [block], "stop_reason": "pause_turn"}
    run = start([], paused, paused)
    assert (run.status, run.step) == ("completed", 3)
    agent = Agent("endless", instructions="Go on.", model=ScriptedModel([paused] * 99))
    result = run_agent(agent, "do it", "s2", idempotency_key="k2")
    assert (result.status, "pause" in result.error) == ("failed", True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 2}, "max_steps: 2 of 2 replies used"),
        ({"token_budget": 25}, "token_budget: 30 of 25 tokens used"),
        ({"deadline": timedelta(microseconds=1)}, "deadline"),
    ],
)
def test_an_exceeded_budget_fails_the_run_with_the_figure(options: dict[str, Any], said: str) -> None:
    turn = {"tools": [call("post", text="x")], "usage": {"input_tokens": 10, "output_tokens": 5}}
    run = start([], turn, turn, turn, **options)
    assert run.status == "failed"
    assert run.error.startswith(f"BudgetExceededError: {said}")


def test_usage_adds_up() -> None:
    usage = {"input_tokens": 10, "output_tokens": 5, "service_tier": "standard"}
    run = start([], {"tools": [call("post", text="x")], "usage": usage}, {"text": "ok", "usage": usage})
    assert run.usage == {"input_tokens": 20, "output_tokens": 10}
