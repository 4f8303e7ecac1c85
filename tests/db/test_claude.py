"""Whole durable runs with Claude: the real SDK over HTTP, to a server that refuses what the API refuses."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from agentruns import Agent, Document, Image, Text, approve, run_agent
from agentruns.models import Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at, expire_leases, run_until_blocked
from tests.db.helpers import forget_backoff, names, outcomes, payloads, the_run
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.pictures import BIG, NOTE, PDF, PNG, photograph
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

MODEL = "claude-sonnet-5-5"
THINKING = {"thinking": {"type": "adaptive"}}
ALWAYS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
HIDDEN = {"type": "redacted_thinking", "data": "b3BhcXVl"}
DONE = {"text": "all done"}
POST = {"tools": [call("post", text="x")]}


@pytest.fixture
def claude() -> Iterator[Any]:
    """Start the provider of a test; afterwards all that it was asked turns out to have been valid."""
    started: list[FakeAnthropic] = []

    def declare(*turns: Any, **options: Any) -> FakeAnthropic:
        started.append(FakeAnthropic(turns).start())
        served(started[-1], **options)
        return started[-1]

    yield declare
    for fake in started:
        fake.stop()
        assert [one.error for one in fake.calls if one.status == 400 and not one.fault] == []
        assert {one.headers["anthropic-version"] for one in fake.calls} <= {"2026-10-21"}


def served(fake: FakeAnthropic, **options: Any) -> None:
    """Declare the agent, with a client and a model object of their own, as a new process does."""
    given = {"instructions": "Serve the shop.", "tools": TOOLS, "model_params": THINKING, **options}
    Agent("claude", model=AnthropicModel(MODEL, client=fake.client()), **given)


def start() -> Run:
    return the_run(run_agent("claude", "do it", "s1", idempotency_key="k"))


def thinking(text: str, *calls: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """Build a turn that thinks aloud and then calls tools."""
    uses = [{"type": "tool_use", "id": f"toolu_{number}_{at}", **each} for at, each in enumerate(calls)]
    spoken = [] if calls else [{"type": "text", "text": text}]
    stop = "tool_use" if calls else "end_turn"
    content = [{"type": "thinking", "thinking": text}, HIDDEN, *spoken, *uses]
    return {"content": content, "stop_reason": stop}


def test_a_thinking_tool_loop_goes_on_where_one_process_died_with_what_it_had_thought(
    claude: Any, effects: Effects
) -> None:
    fake = claude(
        thinking("First: look.", call("search", query="a"), call("search", query="b"), number=1),
        thinking("Then: pay.", call("refund", cents=5000), call("post", text="paid"), number=2),
        thinking("Done, I think."),
        model_params=ALWAYS,
    )
    with crashing_at("after_result:2"), isolated_registry():
        served(fake, model_params=ALWAYS)
        start()
    expire_leases()
    (result,) = run_until_blocked()
    assert result.status == "awaiting-approval"
    approve(result.pending[0].pk, None)
    with isolated_registry():
        served(fake, model_params=ALWAYS)
        with crashing_at("before_model"):
            sweep()
    expire_leases()
    (result,) = run_until_blocked()
    run = the_run(result)
    assert (result.status, result.output) == ("completed", "Done, I think.")
    assert names(effects) == ["search", "search", "refund", "post"]
    assert outcomes(run) == ["ok"] * 4
    replies = [turn for turn in fake.calls[-1].body["messages"] if turn["role"] == "assistant"]
    blocks = [[block["type"] for block in turn["content"]] for turn in replies]
    assert blocks == [["thinking", "redacted_thinking", "tool_use", "tool_use"]] * 2
    assert [turn["content"] for turn in replies] == [row["content"] for row in payloads(run, "assistant")[:2]]
    assert all(turn["content"][0]["signature"] for turn in replies)


def test_usage_cache_and_request_ids_are_journaled(claude: Any, settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {MODEL: {"input": 3, "output": 15}}
    fake = claude(POST, POST, DONE)
    run = start()
    rows = payloads(run, "assistant")
    assert [row["request_id"] for row in rows] == [one.request_id for one in fake.calls]
    assert {row["model"] for row in rows} == {MODEL}
    prices = {"input_tokens": "3", "output_tokens": "15"}
    prices |= {"cache_read_input_tokens": "0.3", "cache_creation_input_tokens": "3.75"}
    for kind in prices:
        assert run.usage[kind] == sum(row["usage"][kind] for row in rows)
    assert run.usage["cache_read_input_tokens"] > run.usage["cache_creation_input_tokens"] > 0
    paid = sum(run.usage[kind] * Decimal(price) for kind, price in prices.items())
    assert Decimal(run.usage["cost"]) == sum(Decimal(row["cost"]) for row in rows) == paid / 1_000_000


@pytest.mark.parametrize("fault", [{"kind": 529, "retry_after": 1000}, {"kind": "truncate"}])
def test_an_answer_that_breaks_off_is_a_failed_attempt_and_never_a_turn(
    fault: dict[str, Any], claude: Any, effects: Effects
) -> None:
    fake = claude(thinking("One.", call("post", text="1"), number=1), POST, DONE)
    fake.fault(**fault, at=2)
    run = start()
    assert (run.status, run.step, run.attempts, effects.count()) == ("queued", 1, 0, 1)
    if "retry_after" in fault:
        assert run.not_before - run.updated_at > timedelta(seconds=900)
        (failed,) = payloads(run, "model_failed")
        assert (failed["status"], failed["error"]["type"]) == (529, "overloaded_error")
        assert failed["request_id"] == fake.calls[1].request_id
        assert sweep().found == 0
    forget_backoff(run)
    sweep()
    run.refresh_from_db()
    assert (run.status, run.output, run.step) == ("completed", "all done", 3)
    assert (len(payloads(run, "model_failed")), len(fake.calls), outcomes(run)) == (1, 4, ["ok", "ok"])
    assert len({line["key"] for line in effects.lines()}) == effects.count() == 2


def test_pictures_and_documents_are_sent_as_the_api_takes_them(claude: Any) -> None:
    blocks = [Text("see"), Image(data=PNG), Document(data=PDF, name="a.pdf"), Document(data=NOTE)]
    fake = claude({"tools": [call("photograph", big=True)]}, DONE, DONE, tools=[photograph])
    result = run_agent("claude", blocks, "s1", idempotency_key="k")
    assert (result.status, [one.status for one in fake.calls]) == ("completed", [200, 200])
    sent = fake.calls[1].body["messages"]
    assert [block["type"] for block in sent[0]["content"]] == ["text", "image", "document", "document"]
    assert sent[2]["content"][0]["content"][0]["source"]["data"] == base64.b64encode(BIG).decode()
    assert run_agent("claude", "and now?", "s1", idempotency_key="k2").status == "completed"
    assert {one.path for one in fake.calls} == {"/v1/messages"}, "no picture makes a request seem too long"
