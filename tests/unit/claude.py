"""A Claude model in front of a FakeAnthropic, and what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import Model, ModelReply, ModelRequest, ProviderError, call_model
from tests.fake_anthropic import FakeAnthropic

NAME = "claude-sonnet-5-5"
KEY = "sk-ant-very-secret-0123456789"
HELLO: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
FIND: dict[str, Any] = {
    "name": "find",
    "description": "Find an order by its number, and everything that is known of it and its customer.",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}


def claude(fake: FakeAnthropic, **options: Any) -> AnthropicModel:
    """Return a model that asks the fake."""
    return AnthropicModel(NAME, options.pop("client", None) or fake.client(), **options)


def request(**changes: Any) -> ModelRequest:
    """Return a small request."""
    return ModelRequest(NAME, **{"system": "Help.", "messages": [HELLO], **changes})


def failure(model: Model, asked: ModelRequest | None = None) -> ProviderError:
    """Return the error of a request; it never shows the key, nor the SDK's own error behind it."""
    with pytest.raises(ProviderError) as caught:
        call_model(model, asked or request())
    error = caught.value
    assert KEY not in str(error) and KEY not in repr(error.__dict__)
    assert error.__cause__ is None
    assert error.__context__ is None or not isinstance(model, AnthropicModel)
    return error


def went_on(messages: Sequence[dict[str, Any]], reply: ModelReply, result: str = "ok") -> list[Any]:
    """Return the conversation after a reply whose calls were answered, built as the journal builds it."""
    calls = [block for block in reply.content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
    answered = [{"role": "user", "content": results}] if results else []
    return [*messages, {"role": "assistant", "content": reply.content}, *answered]


def sent(fake: FakeAnthropic, path: str = "/v1/messages") -> list[Any]:
    """Return the bodies of the requests to a path."""
    return [call.body for call in fake.calls if call.path.partition("?")[0] == path]
