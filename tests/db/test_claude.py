"""Whole durable runs with Claude: the real SDK over HTTP, to a server that refuses what the API refuses."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from agentruns import Agent, Document, Image, Text, approve, resume_run, run_agent
from agentruns.exceptions import DurableConfigMismatchError
from agentruns.models import Message, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at, expire_leases, run_until_blocked
from tests.db.helpers import forget_backoff, outcomes, payloads, the_run
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
ROUGH = [
    {"kind": "error", "type": "overloaded_error"},
    {"kind": "drop"},
    {"kind": "drop", "after": 6},
    {"kind": "truncate"},
    {"kind": "corrupt"},
    {"kind": "empty"},
    {"kind": 500},
]


@pytest.fixture
def fakes() -> Iterator[list[FakeAnthropic]]:
    """The servers of a test; afterwards all that they were asked turns out to have been valid."""
    started: list[FakeAnthropic] = []
    yield started
    for fake in started:
        fake.stop()
        assert [one.error for one in fake.calls if one.status == 400 and not one.fault] == []
        assert {one.headers["anthropic-version"] for one in fake.calls} <= {"2026-10-21"}


@pytest.fixture
def claude(fakes: list[FakeAnthropic]) -> Any:
    def declare(*turns: Any, **options: Any) -> FakeAnthropic:
        fake = FakeAnthropic(turns).start()
        fakes.append(fake)
        served(fake, **options)
        return fake

    return declare


def served(fake: FakeAnthropic, **options: Any) -> None:
    """Declare the agent, with a client and a model object of their own, as a new process does."""
    given = {"instructions": "Serve the shop.", "tools": TOOLS, "model_params": THINKING, **options}
    Agent("claude", model=AnthropicModel(MODEL, client=fake.client()), **given)


def start() -> Run:
    return the_run(run_agent("claude", "do it", "s1", idempotency_key="k"))


def go_on(run: Run) -> Run:
    """Let another worker drive the run when its back-off is over."""
    forget_backoff(run)
    sweep()
    run.refresh_from_db()
    return run


def thinking(text: str, *calls: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """A turn that thinks aloud and then calls tools."""
    uses = [
        {"type": "tool_use", "id": f"toolu_{number}_{position}", **each}
        for position, each in enumerate(calls)
    ]
    spoken = [] if calls else [{"type": "text", "text": text}]
    return {
        "content": [{"type": "thinking", "thinking": text}, HIDDEN, *spoken, *uses],
        "stop_reason": "tool_use" if calls else "end_turn",
    }


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
    assert [line["tool"] for line in effects.lines()].count("search") == 2
    assert [line["tool"] for line in effects.lines()][2:] == ["refund", "post"]
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
    prices = {
        "input_tokens": "3", "output_tokens": "15", "cache_read_input_tokens": "0.3",
        "cache_creation_input_tokens": "3.75",
    }  # fmt: skip
    for kind in prices:
        assert run.usage[kind] == sum(row["usage"][kind] for row in rows)
    assert run.usage["cache_read_input_tokens"] > run.usage["cache_creation_input_tokens"] > 0
    paid = sum(run.usage[kind] * Decimal(price) for kind, price in prices.items())
    assert Decimal(run.usage["cost"]) == sum(Decimal(row["cost"]) for row in rows) == paid / 1_000_000


def test_another_thinking_setting_does_not_go_on_with_a_run_that_waits(claude: Any, effects: Effects) -> None:
    turns = thinking("Pay.", call("refund", cents=5000), number=1), thinking("Paid.")
    fake = claude(*turns, model_params=ALWAYS)
    run = start()
    assert run.status == "awaiting-approval"
    changed = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    with isolated_registry():
        served(fake, model_params=changed)
        approve(run.approvals.get().pk, None)
        with pytest.raises(DurableConfigMismatchError, match="model_params") as refused:
            resume_run(run.pk)
        assert refused.value.parts == ("model_params",)
        assert sweep().blocked == 1
    assert effects.count() == 0
    assert resume_run(run.pk).output == "Paid."


def test_a_paused_turn_is_sent_back_unchanged_and_not_for_ever(claude: Any) -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    paused = {"content": [search, found], "stop_reason": "pause_turn"}
    params = {"tools": [{"type": "web_search_20260318", "name": "web_search"}]}
    server = {"model_params": params, "unjournaled_tools": True}
    fake = claude(paused, DONE, **server)
    assert (start().status, fake.calls[1].body["messages"][-1]["role"]) == ("completed", "assistant")
    assert fake.calls[1].body["messages"][-1]["content"] == [search, found]
    assert fake.calls[1].body["tools"][-1]["name"] == "web_search"
    fake = claude(*[paused] * 20, **server, version="2")
    result = run_agent("claude", "again", "s2", idempotency_key="k2")
    assert (result.status, result.error) == ("failed", "pause_turn: 10 replies paused in a row.")
    assert len(fake.calls) == 10


def test_a_refusal_fails_the_run_and_runs_nothing(claude: Any, effects: Effects) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "post", "input": {"text": "x"}}
    claude({"content": [use], "stop_reason": "refusal"})
    run = start()
    assert (run.status, run.error, effects.count()) == ("failed", "refusal: The model refused.", 0)
    assert outcomes(run) == ["error"]


def test_a_call_cut_off_by_max_tokens_is_answered_and_not_run(claude: Any, effects: Effects) -> None:
    cut = {"type": "tool_use", "id": "toolu_1", "name": "post", "input": '{"text": "hel'}
    claude({"content": [cut], "stop_reason": "max_tokens"}, POST, DONE)
    run = start()
    assert (run.status, effects.count(), outcomes(run)) == ("completed", 1, ["error", "ok"])


def test_an_overloaded_provider_is_asked_again_when_it_said(claude: Any, effects: Effects) -> None:
    fake = claude(POST, DONE)
    fake.fault(529, at=2, retry_after=1000)
    run = start()
    assert (run.status, run.step, run.attempts) == ("queued", 1, 0)
    assert run.not_before - run.updated_at > timedelta(seconds=900)
    (failed,) = payloads(run, "model_failed")
    assert (failed["status"], failed["error"]["type"]) == (529, "overloaded_error")
    assert failed["request_id"] == fake.calls[1].request_id
    assert sweep().found == 0
    run = go_on(run)
    assert (run.status, run.step, effects.count()) == ("completed", 2, 1)


@pytest.mark.parametrize("fault", ROUGH, ids=lambda fault: f"{fault['kind']}{fault.get('after', '')}")
def test_an_answer_that_breaks_off_is_a_failed_attempt_and_never_a_turn(
    fault: dict[str, Any], claude: Any, effects: Effects
) -> None:
    fake = claude(thinking("One.", call("post", text="1"), number=1), POST, DONE)
    fake.fault(**fault, at=2)
    run = start()
    assert (run.status, run.step, effects.count()) == ("queued", 1, 1)
    run = go_on(run)
    assert (run.status, run.output, run.step) == ("completed", "all done", 3)
    assert (len(payloads(run, "model_failed")), len(fake.calls)) == (1, 4)
    assert outcomes(run) == ["ok", "ok"]
    assert len({line["key"] for line in effects.lines()}) == effects.count() == 2


def test_what_a_broken_answer_used_is_counted_and_paid(claude: Any, settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {MODEL: {"input": 3, "output": 15}}
    fake = claude(DONE)
    fake.fault("truncate", after=4)
    run = start()
    (failed,) = payloads(run, "model_failed")
    assert failed["usage"]["cache_creation_input_tokens"] > 0  # sent and written to the cache: to be paid
    assert run.usage["cost"] == failed["cost"] > "0"
    assert the_run(run_until_blocked(run, fast_forward=True)[0]).status == "completed"


def test_a_wrong_key_pauses_the_run_and_hides_it(claude: Any, effects: Effects) -> None:
    fake = claude(POST, DONE)
    secret, fake.api_key = fake.api_key, "sk-ant-another"
    run = start()
    assert (run.status, run.step) == ("paused", 0)
    assert run.blocked_reason.startswith("authentication_error: Anthropic answered 401")
    fake.api_key = secret
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 1
    rows = Message.objects.filter(run=run)
    assert not any(secret in str(row.payload) for row in rows)
    assert {one.error for one in fake.calls} == {"", "invalid x-api-key"}


def test_a_bad_request_fails_the_run(claude: Any, effects: Effects) -> None:
    fake = claude(POST, DONE)
    fake.fault(400, at=2, message="messages: something is wrong")
    run = start()
    assert (run.status, effects.count()) == ("failed", 1)
    assert run.error == "invalid_request_error: Anthropic answered 400: messages: something is wrong"


def test_a_structured_answer_is_asked_for_and_sent_back_once(claude: Any) -> None:
    class Refund(BaseModel):
        order: str
        cents: int

    right = thinking('{"order": "A1", "cents": 5}')
    fake = claude(thinking("Look.", call("post", text="x"), number=1), DONE, right, output_type=Refund)
    with crashing_at("after_finish"):
        start()
    expire_leases()
    (result,) = run_until_blocked()
    assert result.output == Refund(order="A1", cents=5)
    form = fake.calls[-1].body["output_config"]["format"]
    assert (form["type"], sorted(form["schema"]["properties"])) == ("json_schema", ["cents", "order"])
    assert len(fake.calls) == 3


def test_pictures_and_documents_are_sent_as_the_api_takes_them(claude: Any) -> None:
    blocks = [
        Text("see"),
        Image(data=PNG, name="mug.png"),
        Document(data=PDF, name="a.pdf"),
        Document(data=NOTE),
    ]
    fake = claude({"tools": [call("photograph", big=True)]}, DONE, DONE, tools=[photograph])
    result = run_agent("claude", blocks, "s1", idempotency_key="k")
    assert (result.status, [one.status for one in fake.calls]) == ("completed", [200, 200])
    sent = fake.calls[1].body["messages"]
    assert [block["type"] for block in sent[0]["content"]] == ["text", "image", "document", "document"]
    assert sent[2]["content"][0]["content"][0]["source"]["data"] == base64.b64encode(BIG).decode()
    assert run_agent("claude", "and now?", "s1", idempotency_key="k2").status == "completed"
    assert {one.path for one in fake.calls} == {"/v1/messages"}, "no picture makes a request seem too long"
