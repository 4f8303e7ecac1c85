"""A Claude model in front of a FakeAnthropic."""

from __future__ import annotations

from typing import Any

from agentruns.providers.anthropic import AnthropicModel
from tests.fake_anthropic import FakeAnthropic

NAME = "claude-sonnet-5-5"


def claude(fake: FakeAnthropic, **options: Any) -> AnthropicModel:
    """Build a model that asks the fake."""
    return AnthropicModel(NAME, options.pop("client", None) or fake.client(), **options)


def sent(fake: FakeAnthropic, path: str = "/v1/messages") -> list[Any]:
    """List the bodies of the requests to a path."""
    return [call.body for call in fake.calls if call.path.partition("?")[0] == path]
