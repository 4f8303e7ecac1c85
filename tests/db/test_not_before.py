"""Runs that start later or back off: nobody takes them before their time by the database's clock.

A model attempt that fails is a row of its own, never a turn, and never the end of the session.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from agentruns import Agent, adopt_definition, cancel_run, pause_run, resume_run, run_agent, start_run
from agentruns.models import Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.runs.waiting import waits
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, run_until_blocked
from tests.api.http import Api
from tests.db.failures import Flaky, failing, start
from tests.db.helpers import forget_backoff, outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

SOON = timedelta(hours=2)


def later(delay: timedelta = SOON) -> datetime:
    return datetime.now(UTC) + delay


def said(run: Run) -> list[str]:
    """List the kinds of events that a run waits for."""
    return [wait.kind for wait in waits("default", [Run.objects.get(pk=run.pk)]).get(run.pk, [])]


def test_it_is_driven_when_it_is_due() -> None:
    agent, due = shop_agent("later"), later()
    run = start_run(agent, "do it", "s1", not_before=due)
    assert start_run(agent, "do it", "s1").pk == run.pk, "the same task, whatever its time"
    keyed = [start_run(agent, "do it", "k", not_before=later(n * SOON), idempotency_key="k") for n in (1, 2)]
    assert keyed[0] == keyed[1]
    assert (run.status, run.not_before, said(run)) == ("queued", due, ["scheduled"])
    assert payloads(run, "run_started")[0]["not_before"] == due.isoformat(timespec="microseconds")
    assert (sweep().found, run_agent(agent, "do it", "s1").status) == (0, "queued")
    forget_backoff(run)
    assert (said(run), sweep().completed) == ([], 1)
    past = agent.start("do it", "s2", not_before=later(-SOON))
    assert (sweep().completed, Run.objects.get(pk=past.pk).not_before) == (1, None)


def test_the_time_before_does_not_count_for_its_deadline() -> None:
    agent = shop_agent("quick", deadline=timedelta(minutes=1))
    run = start_run(agent, "do it", "s1", not_before=later())
    (result,) = run_until_blocked(run, fast_forward=True)
    assert result.status == "completed"
    early = start_run(agent, "do it", "s2", not_before=later())
    pause_run(early.pk)
    resume_run(early.pk, drive=False)
    state = waits("default", [Run.objects.get(pk=early.pk)])
    assert (state, sweep().completed) == ({}, 1)


def test_adoption_leaves_the_time_alone_and_resume_or_cancel_end_the_wait() -> None:
    run, other = (start_run(shop_agent("later"), "do it", key, not_before=later()) for key in ("s1", "s2"))
    shop_agent("later", max_steps=3)
    adopted = adopt_definition(run.pk)
    assert (adopted.not_before, said(run), sweep().found) == (run.not_before, ["scheduled"], 0)
    assert (resume_run(run.pk).status, cancel_run(other.pk).status) == ("completed", "cancelled")


def test_what_is_no_time_is_refused() -> None:
    agent: Any = shop_agent("later")
    for moment, error, words in (
        ("2030-01-01", TypeError, "must be a datetime, not '2030-01-01'"),
        (date(2030, 1, 1), TypeError, "must be a datetime"),
        (datetime(2030, 1, 1), ValueError, "must be aware"),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), ValueError, "must be a time in UTC"),
    ):
        with pytest.raises(error, match=words):
            start_run(agent, "do it", "s1", not_before=moment)
    for run in (agent.run, partial(run_agent, agent)):  # who drives here takes none
        with pytest.raises(TypeError, match="not_before"):
            run("do it", "s1", not_before=later())
    assert Run.objects.count() == 0


def test_the_doors_show_it(client: Client) -> None:
    boss = user("boss", "view_run", "resume_run", is_staff=True)
    shop_agent("later")
    api = Api(boss)
    body = {"agent": "later", "input": "do it", "session": "s1"}
    for wrong in ("2030-01-01T00:00:00", "tomorrow", 7.5e300, True):
        assert api.post("/runs", {**body, "not_before": wrong})[0] == 422, wrong
    status, run = api.post("/runs", {**body, "not_before": "2130-01-01T01:00:00+01:00"})
    assert (status, run["not_before"]) == (201, "2130-01-01T00:00:00.000000Z")
    client.force_login(boss)
    page = client.get(reverse("admin:agentruns_run_change", args=[run["id"]])).content.decode()
    listed = client.get(reverse("admin:agentruns_run_changelist")).content.decode()
    assert "It starts at 2129-12-31 18:00:00 CST." in page
    assert "It starts at once, before its time." in page
    assert "Starts at 2129-12-31 18:00:00 CST" in listed
    assert api.get("/health")[1]["oldest_queued_at"] is None


def test_a_retryable_error_backs_off_without_holding_anything(effects: Effects) -> None:
    run = start([failing("retry", retry_after=1000.0), failing("retry")], {"tools": [call("post", text="x")]})
    assert (run.status, run.lease_expires_at, run.attempts) == ("queued", None, 0)
    assert run.not_before is not None
    assert run.not_before - run.updated_at > timedelta(seconds=900), "the provider said when"
    assert (said(run), sweep().found) == (["back-off"], 0)
    again = run_agent("flaky", "do it", "s1", idempotency_key="k")
    assert (again.status, again.run_id) == ("queued", str(run.pk))
    for _ in range(2):
        forget_backoff(run)
        sweep()
    run = Run.objects.get()
    assert (run.status, run.step, effects.count()) == ("completed", 2, 1)
    assert [one["attempt"] for one in payloads(run, "model_failed")] == [1, 2]


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
    why = "some_error: no luck"  # as on a request that is refused, and on a wrong key
    assert (run.error, run.blocked_reason) == (why * (end == "failed"), why * (end == "paused"))
    again = run_agent("agent-s1", "do it", "s1", idempotency_key="s1")
    assert (again.status, sweep().found) == (end, 0), "nobody goes on with it unasked"
    forget_backoff(run)
    sweep()
    if end == "paused":
        resume_run(run.pk)
    run = Run.objects.get()
    assert (run.status, outcomes(run)) == ("failed" if end == "failed" else "completed", ["ok"])
    assert (effects.count(), run.blocked_reason) == (1, "")


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
    assert (run.status, run.attempts) == ("paused", 3)
    assert run.blocked_reason == "attempts_exhausted: KeyError: 'oops'"
    assert (resume_run(run.pk).status, Run.objects.get().attempts) == ("completed", 0)


def test_pause_turn_is_sent_back_unchanged_and_capped() -> None:
    block = {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"q": "x"}}
    paused = {"content": [block], "stop_reason": "pause_turn"}
    run = start([], paused, paused)
    assert (run.status, run.step) == ("completed", 3)
    agent = Agent("endless", instructions="Go on.", model=ScriptedModel([paused] * 99))
    result = run_agent(agent, "do it", "s2", idempotency_key="k2")
    assert (result.status, "pause" in result.error) == ("failed", True)


SPENT = {"input_tokens": 10, "output_tokens": 5, "service_tier": "standard"}
CACHED = {"cache_read_input_tokens": 400, "output_tokens": 1}


TWICE = {"input_tokens": 20, "output_tokens": 10}
BUDGETS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, int]]] = {
    "steps": ({"max_steps": 2}, SPENT, "max_steps: 2 of 2 replies used", TWICE),
    "tokens": ({"token_budget": 25}, SPENT, "token_budget: 30 of 25", TWICE),
    "cached tokens": ({"token_budget": 400}, CACHED, "token_budget: 401 of 400", CACHED),
    "time": ({"deadline": timedelta(microseconds=1)}, SPENT, "deadline", {}),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_exceeded_budget_fails_the_run_with_the_figure(budget: str) -> None:
    options, usage, said, total = BUDGETS[budget]
    turns = [{"tools": [call("post", text="x")], "usage": usage}] * 3
    run = start([], *turns, on_budget="fail", **options)
    assert (run.status, run.usage) == ("failed", total)
    assert run.error.startswith(f"BudgetExceededError: {said}")


@pytest.mark.parametrize("retry_after", [1e12, 1e308, float("inf"), float("nan"), 1.7e9, 600.0])
def test_no_retry_after_puts_a_run_out_of_reach(retry_after: float) -> None:
    """Where the run has a deadline, a back-off ends at that."""
    deadline = timedelta(seconds=30) if retry_after == 600 else None
    busy = failing("retry", retry_after=retry_after, usage={"input_tokens": 7})
    run = start([busy], deadline=deadline)
    assert run.not_before is not None
    assert run.not_before - run.updated_at < timedelta(minutes=2 if deadline else 61)
    assert run.usage == {"input_tokens": 7}
    assert deadline or resume_run(run.pk).status == "completed"
