"""What every model answers, and what of it can be used."""

from __future__ import annotations

import asyncio
import pickle
import sys
from typing import Any

import pytest

from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import Model, ModelReply, ModelRequest, ProviderError, call_model, check_reply
from agentruns.providers.names import model_identity, resolve
from tests.programs import run_program
from tests.unit.claude import failure, request

TEXT = {"type": "text", "text": "Hello."}


def test_importing_the_providers_does_not_import_the_sdk() -> None:
    code = (
        "import sys, agentruns.agents.agent, agentruns.providers.anthropic, agentruns.testing as t;"
        "print([m for m in ('anthropic', 'httpx2', 'agentruns.models') if m in sys.modules])"
    )
    found = run_program(sys.executable, "-c", code)
    assert found.stdout.strip() == "[]"


class Fixed:
    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def propose(self, request: ModelRequest) -> ModelReply:
        return self.reply  # type: ignore[no-any-return]


class Later(Fixed):
    async def propose(self, request: ModelRequest) -> ModelReply:  # type: ignore[override]
        await asyncio.sleep(0)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply  # type: ignore[no-any-return]


def test_sync_and_async_models() -> None:
    reply = ModelReply([TEXT], "end_turn")
    assert call_model(Fixed(reply), request()) is reply
    assert call_model(Later(reply), request()) is reply

    async def outside() -> ModelReply:
        return call_model(Later(reply), request())

    assert asyncio.run(outside()) is reply
    with pytest.raises(LookupError):
        call_model(Later(LookupError("x")), request())


@pytest.mark.parametrize(
    ("reply", "disposition", "words"),
    [
        (None, "fail", "NoneType"),
        ({"content": []}, "fail", "dict"),
        (ModelReply(None, "end_turn"), "fail", "content"),  # type: ignore[arg-type]
        (ModelReply("text", "end_turn"), "fail", "content"),  # type: ignore[arg-type]
        (ModelReply(["text"], "end_turn"), "fail", "block 0"),  # type: ignore[list-item]
        (ModelReply([TEXT, {"text": "x"}], "end_turn"), "fail", "block 1"),
        (ModelReply([{"type": 3}], "end_turn"), "fail", "block 0"),
        (ModelReply([{"type": "image", "data": b"x"}], "end_turn"), "fail", "JSON"),
        (ModelReply([{"type": "text", "text": b"x"}], "end_turn"), "fail", "not a string"),
        (ModelReply([{"type": "tool_result"}], "end_turn"), "fail", "a model may not send"),
        (ModelReply([], "end_turn", usage=None), "fail", "usage"),  # type: ignore[arg-type]
        (ModelReply([], 3), "fail", "stop_reason"),  # type: ignore[arg-type]
        (ModelReply([TEXT], None, usage={"output_tokens": 5}), "retry", "cut off"),
    ],
)
def test_replies_that_cannot_be_used(reply: Any, disposition: str, words: str) -> None:
    error = failure(Fixed(reply))
    assert error.disposition == disposition
    assert words in str(error)
    assert error.usage == ({"output_tokens": 5} if disposition == "retry" else None)


def test_an_empty_reply_and_odd_texts_can_be_used() -> None:
    for reply in (ModelReply([], "end_turn"), ModelReply([{"type": "x", "a": "\ud800\x00"}], "refusal")):
        assert check_reply(reply) is reply


def test_errors_can_be_pickled() -> None:
    error = ProviderError("x", disposition="retry", type="t", code="c", status=429, retry_after=1.5)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__dict__) == ("x", error.__dict__)


def test_identity_and_resolution() -> None:
    assert model_identity("claude-x") == "claude-x"
    assert model_identity(AnthropicModel("claude-x", object())) == "claude-x"
    assert model_identity(Fixed(None)) == f"{__name__}.Fixed"
    fixed = Fixed(None)
    assert resolve(fixed) is fixed
    assert resolve("claude-x") is resolve("claude-x")
    assert isinstance(resolve("claude-x"), AnthropicModel)
    assert resolve("claude-x") is not resolve("claude-y")
    assert isinstance(fixed, Model)
