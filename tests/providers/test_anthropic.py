"""The provider contract for Claude."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from agentruns.providers.anthropic import AnthropicModel
from tests.fake_anthropic import FakeAnthropic
from tests.providers import contract


class Claude(contract.Provider):
    """Claude at Anthropic."""

    identity = "claude-sonnet-5-5"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return FakeAnthropic(turns, **{"api_key": contract.KEY, **options})

    def model(self, server: Any, **options: Any) -> Any:
        return AnthropicModel(self.identity, server.client(api_key=contract.KEY), **options)


class TestClaude(contract.NetworkContract):
    provider = Claude()
    refusal = {"text": "I cannot help with that.", "stop_reason": "refusal"}
