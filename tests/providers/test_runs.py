"""Runs on other models than Claude: what is journaled, what a swap is, and who answers instead."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import (
    Agent,
    Document,
    Image,
    Text,
    replay_run,
    resume_run,
    run_agent,
    send_message,
    start_run,
    tool,
)
from agentruns.engine import leases
from agentruns.exceptions import ContentError
from agentruns.models import Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError
from agentruns.providers.openai import OpenAIModel
from agentruns.services.sweep import sweep
from agentruns.services.switches import switch
from agentruns.testing import ScriptedModel
from tests.db.helpers import forget_backoff, outcomes, payloads, the_run
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.pictures import ANIMATED, GIF, PDF, png
from tests.providers.asking import has_acted
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

APIS = pytest.mark.parametrize("api", ["responses", "chat"])


def turns(body: Any) -> dict[str, Any]:
    """Act once, then say so."""
    acts = {"text": "I post it.", "tools": [call("post", text="x")]}
    return {"text": "all done"} if has_acted(body) else acts


@APIS
def test_a_run_with_calls_its_cost_and_its_journal(api: str, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {"openai:llama3.3": {"input": 1, "output": 1}}
    with FakeOpenAI(turns) as fake:
        model = OpenAIModel("llama3.3", api=api, client=fake.client())  # type: ignore[arg-type]
        agent = Agent("posts", instructions="Post.", model=model, tools=TOOLS, cost_budget=1)
        result = run_agent(agent, "do it", "s1", idempotency_key="k")
        run = the_run(result)
    assert (run.status, result.output, outcomes(run), effects.count()) == ("completed", "all done", ["ok"], 1)
    replies = payloads(run, "assistant")
    assert [reply["model"].partition("-2026")[0] for reply in replies] == ["openai:llama3.3"] * 2
    assert all(reply["request_id"].startswith("req_") and float(reply["cost"]) > 0 for reply in replies)
    assert run.definition.body["model"] == "openai:llama3.3"


@pytest.mark.parametrize(
    ("model", "fallback", "block", "refusal"),
    [
        ("ollama:llava", None, Document(data=PDF, name="a.pdf"), r"takes no application/pdf: 'a.pdf'"),
        ("openai:gpt-5.4", "vllm:qwen3", Document(data=PDF, name="a.pdf"), "takes no application/pdf"),
        ("ollama:llava", None, Image(data=GIF, name="a.gif"), r"takes no image/gif: 'a.gif'"),
        ("vllm:qwen3", None, Image(data=GIF), ""),
        ("openai:gpt-5.4", None, Image(data=png(note=b"x" * 4_000_000)), ""),
        ("claude-sonnet-5-5", None, Image(data=png(note=b"x" * 4_000_000)), "images up to 3932160 bytes"),
        ("claude-sonnet-5-5", None, Image(data=ANIMATED), ""),
        ("openai:gpt-5.4", None, Image(data=ANIMATED), "no animated GIF"),
        ("claude-sonnet-5-5", "openai:gpt-5.4", Image(data=ANIMATED), "no animated GIF"),
        ("openai:gpt-5.4", None, Image(data=png(size=(8_001, 1))), ""),
        ("openai:gpt-5.4", "claude-sonnet-5-5", Image(data=png(size=(8_001, 1))), "8000 x 8000 pixels"),
        ("azure:gpt-5.4", None, [Image(data=png(n)) for n in range(11)], "takes 10 files"),
    ],
)
def test_files_that_a_model_or_its_fallback_would_refuse_start_no_run(
    model: str, fallback: str | None, block: Any, refusal: str
) -> None:
    agent = Agent("sees", instructions="Look.", model=model, fallback=fallback)
    said = [Text("See."), *(block if isinstance(block, list) else [block])]
    if not refusal:
        assert start_run(agent, said, "s1").status == "queued"
        return
    with pytest.raises(ContentError, match=refusal):
        start_run(agent, said, "s1")
    with pytest.raises(ContentError, match=refusal):
        send_message("s1", said, agent=agent)
    assert not Run.objects.exists()


@tool
def scan() -> list[Any]:
    """Scan a page."""
    return [Text("Both:"), Image(data=png()), Image(data=GIF, name="a.gif"), Document(data=PDF, name="a.pdf")]


def test_a_file_of_a_result_that_the_provider_does_not_take_is_told_and_not_sent() -> None:
    said: list[Any] = [{"tools": [{"name": "scan", "input": {}}]}, {"text": "Seen."}]
    with FakeOpenAI(said) as fake:
        model = OpenAIModel("llava", provider="ollama", client=fake.client())
        agent = Agent("scans", instructions="Scan.", model=model, tools=[scan])
        assert run_agent(agent, "do it", "s1").output == "Seen."
        sent = repr(fake.calls[1].body)
        assert sent.count("data:image/png;base64,") == sent.count("data:") == 1
        assert "[image a.gif: image/gif," in sent and "[document a.pdf: application/pdf," in sent
        asked: list[Any] = []
        another = ScriptedModel([said[0], lambda request: asked.append(request.messages) or said[1]])
        replay_run(Run.objects.get().pk, model=another)
    assert repr(asked).count("'media_type': 'image/") == 1, "a replay asks with what was sent"


@tool
def film() -> list[Any]:
    """Film a page."""
    return [Image(data=ANIMATED, name="loop.gif"), Image(data=png())]


@APIS
def test_an_animation_in_a_result_is_told_and_not_sent_to_openai(api: str) -> None:
    with FakeOpenAI(
        [{"tools": [{"name": "film", "input": {}}]}, {"text": "Seen."}, {"text": "Yes."}]
    ) as fake:
        model = OpenAIModel("gpt-4.1", api=api, client=fake.client())  # type: ignore[arg-type]
        agent = Agent("films", instructions="Film.", model=model, tools=[film])
        assert run_agent(agent, "do it", "s1").output == "Seen."
        assert run_agent(agent, "again?", "s1").output == "Yes."
        sent = repr(fake.calls[2].body)
    assert sent.count("data:image/png;base64,") == sent.count("data:") == 1
    assert "'loop.gif' has 2 frames" in sent


@pytest.mark.parametrize(
    ("stop", "status", "error"),
    [
        ("content_filter", "failed", "content filter"),
        ("max_tokens", "completed", ""),
        ("refusal", "failed", "refused"),
    ],
)
def test_replies_that_end_otherwise(stop: str, status: str, error: str, effects: Effects) -> None:
    refused = [{"type": "refusal", "refusal": "No."}]
    content: list[Any] = [{"type": "tool_use", "id": "c1", "name": "post", "input": {"text": "x"}}]
    turn = {"content": refused if stop == "refusal" else content, "stop_reason": stop}
    with FakeOpenAI(lambda body: turn if len(body["input"]) < 2 else {"text": "x"}) as fake:
        model = OpenAIModel("gpt-5.4", api="responses", client=fake.client())
        agent = Agent("posts", instructions="Post.", model=model, tools=TOOLS)
        run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
    assert (run.status, effects.count()) == (status, 0)
    assert error in str(run.error)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_fallback_answers_when_the_first_is_overloaded(
    streaming: bool, effects: Effects, settings: Any
) -> None:
    settings.AGENTRUNS_PRICES = {
        "claude-sonnet-5-5": {"input": 1000, "output": 1000},
        "openai:gpt-5.4": {"input": 1, "output": 1},
    }
    with FakeAnthropic(turns) as anthropic, FakeOpenAI(turns) as openai:
        model = AnthropicModel("claude-sonnet-5-5", anthropic.client(), streaming=streaming)
        other = OpenAIModel("gpt-5.4", api="responses", client=openai.client(), streaming=streaming)
        options: dict[str, Any] = {"model_params": {"max_tokens": 500, "thinking": {"type": "adaptive"}}}
        agent = Agent("posts", instructions="Post.", model=model, fallback=other, tools=TOOLS, **options)
        anthropic.fault(529)
        run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
        assert openai.calls[0].body["max_output_tokens"] == 500
        assert "thinking" not in openai.calls[0].body
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["ok"], 1)
    (failed,) = payloads(run, "model_failed")
    assert (failed["fallback"], failed["status"], "retry_in" in failed) == ("openai:gpt-5.4", 529, False)
    first, second = payloads(run, "assistant")
    assert (first["fallback"], first["model"]) == ("openai:gpt-5.4", "openai:gpt-5.4-2026-03-05")
    assert ("fallback" in second, second["model"]) == (False, "claude-sonnet-5-5")
    assert float(first["cost"]) < 0.01 < float(second["cost"])


class Busy:
    """Has too much to do, or another trouble."""

    def __init__(self, identity: str, **facts: Any) -> None:
        self.identity, self.facts, self.asked = identity, facts, 0

    def propose(self, request: Any) -> Any:
        self.asked += 1
        raise ProviderError("no luck", **self.facts)


OVERLOADED: dict[str, Any] = {"disposition": "retry", "type": "overloaded_error"}


def run_busy(first: Any, other: Any, **options: Any) -> Run:
    agent = Agent("busy", instructions="Try.", model=first, fallback=other, **options)
    return the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))


def test_a_fallback_that_is_overloaded_as_well_backs_off() -> None:
    models = [Busy(name, status=429, disposition="retry") for name in ("a", "b")]
    run = run_busy(*models)
    assert (run.status, [model.asked for model in models]) == ("queued", [1, 1])
    assert run.not_before is not None
    assert ["retry_in" in row for row in payloads(run, "model_failed")] == [False, True]
    forget_backoff(run)
    sweep()
    assert [model.asked for model in models] == [2, 2]


@pytest.mark.parametrize(
    "facts",
    [
        {"disposition": "fail", "status": 400, "type": "invalid_request_error"},
        {"disposition": "pause", "type": "foreign_block"},
        {"disposition": "pause", "status": 401},
    ],
)
def test_a_fallback_that_cannot_answer_ends_and_holds_no_run_that_would_only_wait(facts: Any) -> None:
    first, other = Busy("a", **OVERLOADED, retry_after=900), Busy("b", **facts)
    run = run_busy(first, other)
    assert (run.status, first.asked, other.asked) == ("queued", 1, 1)
    last = payloads(run, "model_failed")[-1]
    assert (last["error"]["text"], last["retry_in"]) == ("no luck", 900), "as the first one asked for"
    first.propose = ScriptedModel([{"text": "Here."}]).propose  # type: ignore[method-assign]
    forget_backoff(run)
    assert resume_run(run.pk).output == "Here."


def test_the_fallback_is_not_asked_after_its_agent_was_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "DRAIN_CHECK_SECONDS", 0.0)

    class Slow(Busy):
        def propose(self, request: Any) -> Any:
            switch("agent", "busy", "off", reason="it costs too much")
            return super().propose(request)

    other = Busy("b", **OVERLOADED)
    run = run_busy(Slow("a", **OVERLOADED), other)
    assert (run.status, run.attempts, other.asked) == ("queued", 0, 0)
    leases.forget_switches()


def test_the_fallback_is_not_asked_for_what_no_budget_pays(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {name: {"input": 1000, "output": 1000} for name in ("a", "b")}
    first, other = Busy("a", **OVERLOADED, usage={"input_tokens": 10**6}), Busy("b", **OVERLOADED)
    run = run_busy(first, other, cost_budget=1, on_budget="fail")
    assert (run.status, first.asked, other.asked) == ("failed", 1, 0)
    assert "cost_budget: 1000 of 1 used" in str(run.error)


@pytest.mark.parametrize(
    "facts",
    [
        {"disposition": "retry", "status": 500},
        {"disposition": "pause", "status": 429, "code": "insufficient_quota"},
        {"disposition": "fail", "status": 400},
    ],
)
def test_the_fallback_is_not_for_other_troubles(facts: dict[str, Any]) -> None:
    other = Busy("b", **OVERLOADED)
    run_busy(Busy("a", **facts), other)
    assert other.asked == 0


def test_a_stateless_run_has_a_fallback_too() -> None:
    other = ScriptedModel([{"text": "Here."}])
    agent = Agent("busy", instructions="Try.", model=Busy("a", **OVERLOADED), fallback=other)
    assert agent.run("do it").output == "Here."
    assert not Run.objects.exists()
