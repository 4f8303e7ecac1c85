"""Names of models, what they stand for, and what a definition and prices have of them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from agentruns import Agent
from agentruns.agents.agent import unpriced
from agentruns.agents.prices import cost_of, price_of
from agentruns.checks.agents import check_agents
from agentruns.checks.settings import check_models
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.names import model_identity, provider_of, resolve
from agentruns.providers.openai import OpenAIModel
from agentruns.testing import ScriptedModel

LOCAL = {"provider": "ollama", "model": "llama3.3", "base_url": "http://one:1/v1", "api_key": "k-secret"}
NAMES = [
    ("claude-sonnet-5-5", "claude-sonnet-5-5", "anthropic"),
    ("eu.anthropic.claude-sonnet-5-5-v1:0", "eu.anthropic.claude-sonnet-5-5-v1:0", "anthropic"),
    ("anthropic:claude-sonnet-5-5", "claude-sonnet-5-5", "anthropic"),
    ("openai:gpt-5.4", "openai:gpt-5.4", "openai"),
    ("azure:gpt-5.4", "azure:gpt-5.4", "azure"),
    ("ollama:llama3.3:70b", "ollama:llama3.3:70b", "ollama"),
    ("openrouter:openai/gpt-5.4", "openrouter:openai/gpt-5.4", "openrouter"),
    ("local", "ollama:llama3.3", "ollama"),
    ("plain", "openai:gpt-5.5", "openai"),
]


@pytest.fixture(autouse=True)
def _models(settings: Any) -> None:
    settings.AGENTRUNS_MODELS = {"local": LOCAL, "plain": {"model": "gpt-5.5"}}


@pytest.mark.parametrize(("name", "identity", "provider"), NAMES)
def test_a_name(name: str, identity: str, provider: str) -> None:
    made = resolve(name)
    assert isinstance(made, AnthropicModel if provider == "anthropic" else OpenAIModel)
    assert resolve(name) is made, "one client in a process"
    assert resolve("claude-y") is not made
    for model in (name, made):
        assert (model_identity(model), provider_of(model)) == (identity, provider)
    assert Agent("any", instructions="", model=name).definition()["model"] == identity


def test_the_model_behind_a_name_may_move_and_not_change_unnoticed(settings: Any) -> None:
    before = Agent("any", instructions="", model="local").definition_hash
    made = resolve("local")
    moved = {**LOCAL, "base_url": "http://two:2/v1", "api_key": "other", "temperature": 0.5}
    settings.AGENTRUNS_MODELS = {"local": moved}
    assert resolve("local") is not made
    assert Agent("any", instructions="", model="local").definition_hash == before
    settings.AGENTRUNS_MODELS = {"local": {**LOCAL, "model": "llama4"}}
    assert Agent("any", instructions="", model="local").definition_hash != before


def test_no_key_is_in_a_definition_or_shown(settings: Any) -> None:
    agent = Agent("any", instructions="", model="local")
    assert "secret" not in repr(agent.definition()) + repr(resolve("local"))
    settings.AGENTRUNS_MODELS = {
        "a": {**LOCAL, "api": "assistants"},
        "b": {"provider": "anthropic", "model": "claude-sonnet-5-5", "api_key": "k-secret"},
        "c": {"provider": "openai"},
        "d": {**LOCAL, "extra_body": {"tools": [{"type": "mcp", "server_label": "crm"}]}},
        "e": LOCAL,
    }
    found = check_models(None)
    assert [(one.id, one.msg[:21]) for one in found] == [
        ("agentruns.E022", f"AGENTRUNS_MODELS['{name}']") for name in "abcd"
    ]
    assert "secret" not in repr(found)


def test_a_model_object_without_an_identity_is_refused() -> None:
    class Nameless:
        def propose(self, request: Any) -> Any:
            raise NotImplementedError

    class Named(Nameless):
        identity = "ours:echo"

    Agent("scripted", instructions="", model=ScriptedModel([]))
    Agent("named", instructions="", model=Named())
    Agent("local", instructions="", model="local", fallback="openai:gpt-5.4")
    assert check_agents(None) == []
    Agent("nameless", instructions="", model=Nameless(), fallback="gpt-7")
    assert [one.id for one in check_agents(None)] == ["agentruns.E021", "agentruns.W011"]


def test_prices_go_by_identity(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {
        "openai:gpt-5.4": {"input": 2, "output": 10, "cache_read": 0.5},
        "gpt-5.4": {"input": 900, "output": 900},
    }
    used = {"input_tokens": 1_000_000, "cache_read_input_tokens": 1_000_000, "output_tokens": 100_000}
    assert cost_of(used, "openai:gpt-5.4-2026-03-05") == Decimal("3.5")
    assert price_of("openai:gpt-5.4-mini") is None and price_of("azure:gpt-5.4") is None
    agent = Agent("a", instructions="", model="openai:gpt-5.4", fallback="local", cost_budget=1)
    assert "no price for ollama:llama3.3" in unpriced(agent)
    settings.AGENTRUNS_PRICES |= {"ollama:llama3.3": {"input": 0, "output": 0}}
    assert unpriced(agent) == ""


def test_a_fallback_is_another_model() -> None:
    plain = Agent("a", instructions="", model="claude-sonnet-5-5")
    assert "fallback" not in plain.definition()
    other = Agent("a", instructions="", model="claude-sonnet-5-5", fallback="plain")
    assert other.definition()["fallback"] == "openai:gpt-5.5"
    with pytest.raises(ValueError, match="another model"):
        Agent("a", instructions="", model="claude-x", fallback="anthropic:claude-x")
    with pytest.raises(TypeError, match="fallback must be"):
        Agent("a", instructions="", model="claude-x", fallback=3)  # type: ignore[arg-type]
