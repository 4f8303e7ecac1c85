"""What every model answers, and what of it can be used."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import Model, ModelReply, ModelRequest, ProviderError, call_model, check_reply
from agentruns.providers.failures import classify
from agentruns.providers.names import model_identity, resolve
from agentruns.providers.openai import OpenAIModel
from tests.providers.asking import KEY, failure, request

TEXT = {"type": "text", "text": "Hello."}


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
    with pytest.raises(ProviderError, match=words) as caught:
        call_model(Fixed(reply), request())
    assert caught.value.disposition == disposition
    assert caught.value.usage == ({"output_tokens": 5} if disposition == "retry" else None)


def test_an_empty_reply_and_odd_texts_can_be_used_and_errors_be_pickled() -> None:
    for reply in (ModelReply([], "end_turn"), ModelReply([{"type": "x", "a": "\ud800\x00"}], "refusal")):
        assert check_reply(reply) is reply
    error = ProviderError("x", disposition="retry", type="t", code="c", status=429, retry_after=1.5)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__dict__) == ("x", error.__dict__)
    fixed = Fixed(None)
    assert resolve(fixed) is fixed and isinstance(fixed, Model)
    assert model_identity(fixed) == f"{__name__}.Fixed", "that of its class"


PROVIDERS = pytest.mark.parametrize("provider", ["anthropic", "openai"])
MODELS: dict[str, Any] = {"anthropic": AnthropicModel, "openai": OpenAIModel}


@PROVIDERS
def test_a_missing_sdk_and_a_missing_key_pause(
    provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("API_KEY", "AUTH_TOKEN", "PROFILE", "ADMIN_KEY", "BASE_URL"):
        monkeypatch.delenv(f"{provider.upper()}_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    error = failure(MODELS[provider]("any"))
    assert (error.disposition, error.type) == ("pause", "missing_credentials")
    assert f"{provider.upper()}_API_KEY" in str(error)
    monkeypatch.setitem(sys.modules, provider, None)
    error = failure(MODELS[provider]("any"))
    assert (error.disposition, error.type) == ("pause", "not_installed")
    assert f"agentruns[{provider}]" in str(error)


@PROVIDERS
def test_errors_of_every_other_sort(provider: str) -> None:
    given = ProviderError("x")
    assert classify(provider, given) is given
    sdk = import_module(provider)
    for error, disposition in (
        (json.JSONDecodeError("", "", 0), "retry"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), "retry"),
        (ConnectionResetError("x"), "retry"),
        (RecursionError("x"), "fail"),
        (KeyError("x"), "pause"),
        (getattr(sdk, {"openai": "OpenAIError", "anthropic": "AnthropicError"}[provider])("x"), "pause"),
    ):
        assert classify(provider, error).disposition == disposition
        if disposition == "pause":
            assert classify(provider, error, begun=True).disposition == "retry", "an answer began"
    assert "0123" not in str(classify(provider, ValueError(f"Bearer {KEY} {KEY}")))
