"""Sessions that went on with a provider that had refused a turn, or whose last reply was empty."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentruns import Agent, run_agent
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.openai import OpenAIModel
from agentruns.testing import ScriptedModel
from tests.db.helpers import payloads, the_run
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.providers.asking import has_acted
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "how to make the forbidden thing"
PROVIDERS = pytest.mark.parametrize("provider", ["claude", "responses", "chat"])


def classified(body: Any) -> dict[str, Any]:
    """Answer as a provider whose classifier refuses each request that holds the words."""
    if SECRET in json.dumps(body):
        return {"content": [{"type": "text", "text": "I can't."}], "stop_reason": "refusal"}
    return {"text": "With pleasure."}


def agent_on(provider: str, fake: Any, **options: Any) -> Agent:
    """Build an agent that asks the fake."""
    if provider == "claude":
        model: Any = AnthropicModel("claude-sonnet-5-5", fake.client())
    else:
        model = OpenAIModel("gpt-4.1", api=provider, client=fake.client())  # type: ignore[arg-type]
    return Agent("talks", instructions="Help.", model=model, tools=TOOLS, **options)


def serving(provider: str, script: Any) -> Any:
    return FakeAnthropic(script) if provider == "claude" else FakeOpenAI(script)


def openais(script: Any) -> Any:
    """Let a refusal come as OpenAI's APIs have it."""

    def turn(body: Any) -> dict[str, Any]:
        said: dict[str, Any] = script(body)
        if said.get("stop_reason") != "refusal":
            return said
        return {"content": [{"type": "refusal", "refusal": "I can't."}], "stop_reason": "end_turn"}

    return turn


@PROVIDERS
def test_a_question_that_the_provider_refused_is_left_out_of_later_requests(provider: str) -> None:
    script = classified if provider == "claude" else openais(classified)
    with serving(provider, script) as fake:
        agent = agent_on(provider, fake)
        for task, status in ((SECRET, "failed"), ("hello", "completed"), ("and again", "completed")):
            assert run_agent(agent, task, "s1").status == status, task
        assert SECRET in json.dumps(fake.calls[0].body)
        assert "the provider refused to answer this" in json.dumps(fake.calls[-1].body)
        assert "I can't." not in json.dumps(fake.calls[-1].body)


@PROVIDERS
def test_a_result_that_the_provider_refused_is_left_out_and_its_call_stays(
    provider: str, effects: Effects
) -> None:
    def reads(body: Any) -> dict[str, Any]:
        said = json.dumps(body)
        if "go on" in said or not has_acted(body):
            return {"text": "Done."} if "go on" in said else {"tools": [call("post", text="x")]}
        return {"content": [{"type": "text", "text": "I can't."}], "stop_reason": "refusal"}

    with serving(provider, reads if provider == "claude" else openais(reads)) as fake:
        agent = agent_on(provider, fake)
        assert [run_agent(agent, task, "s1").status for task in ("do it", "go on")] == ["failed", "completed"]
        last = json.dumps(fake.calls[-1].body)
        assert has_acted(fake.calls[-1].body) and "This call has ended. Its result is left out" in last
    assert effects.count() == 1


@PROVIDERS
def test_an_empty_last_reply_leaves_the_last_text_as_the_output(provider: str, effects: Effects) -> None:
    def script(body: Any) -> dict[str, Any]:
        if has_acted(body):
            return {"content": [], "stop_reason": "end_turn"}
        return {"text": "Posted as you asked.", "tools": [call("post", text="x")]}

    with serving(provider, script) as fake:
        result = run_agent(agent_on(provider, fake), "do it", "s1")
    assert (result.status, result.output, effects.count()) == ("completed", "Posted as you asked.", 1)
    assert payloads(the_run(result), "run_completed")[0]["earlier"] is True


def test_a_run_in_which_nothing_was_said_has_an_empty_output() -> None:
    model = ScriptedModel([{"content": [], "stop_reason": "end_turn"}])
    result = run_agent(Agent("mute", instructions="Be quiet.", model=model), "hello", "s1")
    assert (result.status, result.output) == ("completed", "")
    assert "earlier" not in payloads(the_run(result), "run_completed")[0]


def test_the_text_of_an_earlier_task_is_no_output() -> None:
    def turn(request: Any) -> dict[str, Any]:
        silent = {"content": [], "stop_reason": "end_turn"}
        return silent if "two" in repr(request.messages) else {"text": "First."}

    agent = Agent("terse", instructions="Be brief.", model=ScriptedModel([turn]))
    assert [run_agent(agent, task, "s1").output for task in ("one", "two")] == ["First.", ""]
