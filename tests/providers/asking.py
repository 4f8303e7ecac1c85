"""A small request to a model, what went on after its reply, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import Model, ModelReply, ModelRequest, ProviderError, call_model
from agentruns.signals import text_streamed
from tests.fake_anthropic import FakeAnthropic

NAME = "claude-sonnet-5-5"
KEY = "sk-secret-of-the-test-0123456789"
HELLO: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
FIND: dict[str, Any] = {
    "name": "find",
    "description": "Find an order by its number.",
    "input_schema": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "deep": {"type": "boolean", "default": False}},
        "required": ["n"],
    },
}


def claude(fake: FakeAnthropic, **options: Any) -> AnthropicModel:
    """Build a model that asks the fake."""
    return AnthropicModel(NAME, options.pop("client", None) or fake.client(), **options)


def sent(fake: FakeAnthropic, path: str = "/v1/messages") -> list[Any]:
    """List the bodies of the requests to a path."""
    return [call.body for call in fake.calls if call.path.partition("?")[0] == path]


def request(**changes: Any) -> ModelRequest:
    """Build a small request."""
    return ModelRequest("any", **{"system": "Help.", "messages": [HELLO], **changes})


def went_on(messages: Sequence[dict[str, Any]], reply: ModelReply, content: Any = "found") -> list[Any]:
    """Build the conversation after a reply whose calls were answered, as the journal builds it."""
    calls = [block for block in reply.content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": content} for call in calls]
    answered = [{"role": "user", "content": results}] if results else []
    return [*messages, {"role": "assistant", "content": reply.content}, *answered]


def has_acted(body: Any) -> bool:
    """Tell whether a request of any API holds the result of a call."""
    return any(word in repr(body) for word in ("'tool'", "function_call_output", "tool_result"))


def texts(reply: ModelReply) -> str:
    """Join the text of a reply."""
    return "".join(block["text"] for block in reply.content if block["type"] == "text")


def failure(model: Model, asked: ModelRequest | None = None) -> ProviderError:
    """Catch the error of a request; neither it nor what is behind it shows the key."""
    with pytest.raises(ProviderError) as caught:
        call_model(model, asked or request())
    error = caught.value
    assert KEY not in str(error) and KEY not in repr(error.__dict__)
    assert error.__cause__ is None and error.__context__ is None
    return error


@contextmanager
def heard() -> Iterator[list[dict[str, Any]]]:
    """What a listener is told of text as it streams in."""
    said: list[dict[str, Any]] = []

    def listen(*, signal: Any, **told: Any) -> None:
        said.append(told)

    text_streamed.connect(listen)
    try:
        yield said
    finally:
        text_streamed.disconnect(listen)


class Bill(BaseModel):
    """One of two kinds of parts."""

    kind: Literal["bill"] = "bill"
    cents: int = 0


class Letter(BaseModel):
    """The other kind."""

    kind: Literal["letter"] = "letter"
    default: str | None = None


class Answer(BaseModel):
    """An output type with everything that strict schemas forbid: defaults, a union and parts."""

    right: bool
    why: str = Field("", description="the reason")
    part: Bill | None = None
    parts: list[Bill | Letter] = []
