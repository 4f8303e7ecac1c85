"""A budget that is used up pauses its run; a person raises it, and the run goes on."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from agentruns import Agent, cancel_run, fork_run, pause_run, raise_budget, resume_run, run_agent, state_at
from agentruns.engine.driver import Driver
from agentruns.exceptions import PermissionDeniedError, RunStateError
from agentruns.models import Notification, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.openai import OpenAIModel
from agentruns.services.sweep import sweep
from agentruns.testing import Script
from tests.db.helpers import payloads, sound, the_run, user
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

MODEL = "claude-sonnet-5-5"
POST = {"tools": [call("post", text="x")], "usage": {"input_tokens": 1000, "output_tokens": 1000}}  # 0.018
MORE = {**POST, "usage": {"input_tokens": 5000, "output_tokens": 1000}}  # 0.03, as nobody foresaw
DONE = {"text": "all done"}
LIMITS: dict[str, tuple[dict[str, Any], str, dict[str, Any], Any]] = {
    "steps": ({"max_steps": 2}, "max_steps: 2 of 2 replies used.", {"max_steps": 3}, 3),
    "tokens": (
        {"token_budget": 7000},
        "token_budget: 8000 of 7000 tokens used.",
        {"token_budget": 20_000},
        20_000,
    ),
    "cost": ({"cost_budget": 0.04}, "cost_budget: 0.048 of 0.04 used.", {"cost_budget": 0.2}, "0.2"),
    "time": (
        {"deadline": timedelta(hours=1.5)},
        "deadline: 7200 of 5400 s used.",
        {"deadline": timedelta(hours=3)},
        10800.0,
    ),
}


@pytest.fixture(autouse=True)
def _priced(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {MODEL: {"input": 3, "output": 15}}


def spender(*turns: Any, **options: Any) -> Script:
    """Declare the agent; return its model, which keeps its requests."""
    script = Script(turns, MODEL)
    Agent("spender", instructions="Spend.", tools=TOOLS, model=script, **options)
    return script


def spent(session: str = "s1") -> Run:
    return the_run(run_agent("spender", "do it", session, idempotency_key=session))


@pytest.mark.parametrize("limit", LIMITS)
def test_a_used_up_budget_pauses_until_it_is_raised(
    limit: str, database_clock: Any, effects: Effects
) -> None:
    options, said, higher, stored = LIMITS[limit]

    def slow(request: Any) -> Any:
        database_clock.forward(hours=1)
        return MORE if request.step else POST

    script = spender(slow, slow, DONE, **options)
    run = spent()
    done = f"{said} So far: replies 2, tokens 8000, cost 0.048, calls that may have had an effect 2."
    assert (run.status, run.blocked_reason) == ("paused", f"budget_exhausted: {done}")
    assert (len(script.requests), effects.count(), sweep().found) == (2, 2, 0)
    (name,) = higher
    assert payloads(run, "run_paused")[0]["budget"] == name
    assert resume_run(run.pk).status == "paused", "nobody has raised it"
    database_clock.forward(hours=10)  # while it is paused: that is free
    maria = user("maria", "raise_budget")
    assert raise_budget(run.pk, maria, **higher, reason="a long one").status == "queued"
    (row,) = payloads(run, "budget_raised")
    assert (row["limits"], row["actor"]["name"], row["reason"]) == ({name: stored}, "maria", "a long one")
    assert (sweep().completed, effects.count()) == (1, 2)
    assert sound(run).blocked_reason == ""


def test_a_limit_that_stands_after_a_crash_is_the_raised_one() -> None:
    script = spender(POST, POST, POST, DONE, max_steps=2)
    run = spent()
    assert run.status == "paused"
    raise_budget(run.pk, max_steps=3)
    sweep()
    assert (sound(run).status, len(script.requests)) == ("paused", 3)
    assert "max_steps: 3 of 3" in run.blocked_reason
    assert state_at(run.pk, 1).limits == {}
    fork = fork_run(run.pk, run.messages.filter(kind="tool_result").latest("seq").seq)
    assert sweep().found == 1
    assert sound(fork).status == "completed", "a fork counts from its own beginning"


def test_what_is_refused() -> None:
    spender(POST, POST, DONE, max_steps=2, cost_budget=1)
    run = spent()
    for limits, why in (
        ({}, "has the limits max_steps, cost_budget. Name one"),
        ({"token_budget": 10}, "has the limits max_steps, cost_budget. Name one"),
        ({"max_steps": 2}, r"max_steps: 2 of 2 replies used. Give a limit that is higher"),
        ({"cost_budget": Decimal("0.5")}, "0.036 of 1 used. Give a limit that is higher"),
    ):
        with pytest.raises(RunStateError, match=why):
            raise_budget(run.pk, **limits)  # type: ignore[arg-type]
    for limits, error in (
        ({"max_steps": "9"}, TypeError), ({"cost_budget": True}, TypeError), ({"deadline": 60}, TypeError),
        ({"max_steps": 0}, ValueError), ({"cost_budget": float("nan")}, ValueError),
        ({"deadline": timedelta(0)}, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match="raise_budget: "):
            raise_budget(run.pk, **limits)  # type: ignore[arg-type]
    with pytest.raises(PermissionDeniedError):
        raise_budget(run.pk, user("ann", "resume_run", "pause_run"), max_steps=9)
    assert payloads(run, "budget_raised") == []
    cancel_run(run.pk)
    with pytest.raises(RunStateError, match="has ended"):
        raise_budget(run.pk, max_steps=9)


def test_a_run_that_is_paused_for_another_reason_stays_paused() -> None:
    spender(MORE, POST, DONE, max_steps=1, cost_budget=0.025)
    run = spent()
    assert raise_budget(run.pk, max_steps=9).status == "paused", "the cost is used up as well"
    resume_run(run.pk)  # which finds the other budget
    assert sound(run).blocked_reason.startswith("budget_exhausted: cost_budget: 0.03 of 0.025 used.")
    assert raise_budget(run.pk, cost_budget="1").status == "queued"
    pause_run(run.pk, reason="lunch")
    assert raise_budget(run.pk, cost_budget=2).status == "paused"
    assert sweep().found == 0


def test_a_limit_that_is_raised_while_a_worker_drives_the_run() -> None:
    def raising(request: Any) -> Any:
        assert raise_budget(request.run_id, max_steps=2).status == "running"
        return POST

    spender(raising, DONE, max_steps=1)
    assert spent().status == "completed"


def test_a_limit_that_is_raised_at_the_very_moment_of_the_pause(
    monkeypatch: pytest.MonkeyPatch, database_clock: Any
) -> None:
    def slow(request: Any) -> Any:
        database_clock.forward(hours=2)
        return POST

    now = Driver.now

    def raising(driver: Driver) -> Any:
        moment = now(driver)
        if driver.run.step and not driver.run.limits and not payloads(Run.objects.get(), "budget_raised"):
            raise_budget(driver.run.run_id, deadline=timedelta(hours=5))
        return moment

    spender(slow, DONE, deadline=timedelta(hours=1))
    monkeypatch.setattr(Driver, "now", raising)
    run = spent()
    assert (run.status, payloads(run, "run_paused")) == ("completed", [])


def test_a_notice_is_sent_once_for_each_limit(settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.remember"]
    told.clear()
    spender(*[POST] * 8, DONE, max_steps=5)
    run = spent()
    assert payloads(run, "budget_low") == [{"v": 1, "budget": "max_steps", "used": "4", "limit": "5"}]
    raise_budget(run.pk, max_steps=10)
    sweep()
    assert sound(run).status == "completed"
    assert [row["used"] for row in payloads(run, "budget_low")] == ["4", "8"]
    low = [notice for notice in told if notice.type == "budget.low"]
    assert [notice.title for notice in low] == ["max_steps: 4 of 5 used", "max_steps: 8 of 10 used"]
    assert Notification.objects.filter(event="budget.low").count() == 2


told: list[Any] = []


def remember(notice: Any) -> None:
    told.append(notice)


def sent(script: Script) -> list[Any]:
    return [request.params.get("max_tokens") for request in script.requests]


def test_a_reply_may_take_what_the_budgets_leave() -> None:
    script = spender(POST, POST, DONE, token_budget=9000, model_params={"max_tokens": 5000})
    run = spent()
    assert (run.status, sent(script)) == ("completed", [5000, 5000, 3000]), "9000 - 4000 - 2000 to read"
    script = spender(POST, POST, DONE, cost_budget=0.1, version="2")  # nothing limits its replies
    assert (spent("s2").status, sent(script)) == ("completed", [None, None, 4066]), (
        "(0.1 - 0.036 - 0.003) / 15"
    )
    script = spender(POST, DONE, token_budget=50_000, version="3")
    assert (spent("s3").status, sent(script)) == ("completed", [None, None]), (
        "what a model may write is not known"
    )


def test_a_run_pauses_when_less_than_a_reply_is_left(effects: Effects) -> None:
    script = spender(POST, DONE, token_budget=5000)
    run = spent()
    why = (
        "budget_exhausted: token_budget: 2000 of 5000 tokens used. "
        "What the next request sends, and a reply of 1024 tokens, need more."
    )
    assert (run.status, run.blocked_reason[: len(why)], len(script.requests)) == ("paused", why, 1)
    assert raise_budget(run.pk, token_budget=5100).status == "queued"
    sweep()
    assert (sound(run).status, len(script.requests)) == ("completed", 2)
    script = spender(POST, DONE, token_budget=5000, model_params={"max_tokens": 1000}, version="2")
    assert (spent("s2").status, sent(script)) == ("completed", [1000, 1000])
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096}
    script = spender(POST, DONE, token_budget=6000, model_params=thinking, version="3")
    run = spent("s3")
    assert (run.status, "a reply of 2048 tokens" in run.blocked_reason) == ("paused", True)


def test_the_fallback_fits_into_the_budget_by_its_own_price(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {"a": {"input": 0, "output": 1}, "b": {"input": 0, "output": 100}}

    def busy(request: Any) -> Any:
        from agentruns.providers.base import ProviderError

        raise ProviderError("busy", disposition="retry", status=529)

    first, other = Script([busy], "a"), Script([DONE], "b")
    options: dict[str, Any] = {"model": first, "fallback": other, "model_params": {"max_tokens": 4000}}
    Agent("spender", instructions="Spend.", cost_budget=0.2, **options)
    assert (spent().status, sent(first), sent(other)) == ("completed", [4000], [2000])
    Agent("spender", instructions="Spend.", cost_budget=0.1, version="2", **options)
    run = spent("s2")
    assert (run.status, len(other.requests)) == ("paused", 1)


@pytest.mark.parametrize("api", ["responses", "chat", "azure", "claude"])
@pytest.mark.parametrize("own", [{}, {"max_output_tokens": 6000}, {"max_completion_tokens": 6000}])
def test_each_provider_is_told_the_limit_by_its_own_name(
    api: str, own: dict[str, int], settings: Any
) -> None:
    settings.AGENTRUNS_PRICES = {
        name: {"input": 0, "output": 1000} for name in (MODEL, "openai:llama3.3", "azure:gpt-5.4")
    }
    names = {"responses": "max_output_tokens", "chat": "max_tokens", "azure": "max_completion_tokens"}
    fakes: dict[str, Any] = {"claude": FakeAnthropic}
    with fakes.get(api, FakeOpenAI)([DONE]) as fake:
        if api == "claude":
            model: Any = AnthropicModel(MODEL, client=fake.client())
        else:
            name, provider = ("gpt-5.4", "azure") if api == "azure" else ("llama3.3", "openai")
            options: dict[str, Any] = {"provider": provider, "client": fake.client(), **own}
            model = OpenAIModel(name, api="responses" if api == "responses" else "chat", **options)
        Agent("spender", instructions="Spend.", model=model, cost_budget=2)
        assert spent().status == "completed"
        body = fake.calls[0].body
    limits = {name: body[name] for name in names.values() if name in body}
    assert limits == {names.get(api, "max_tokens"): 2000}
