import asyncio
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentruns import canonical
from agentruns.providers import base
from agentruns.providers.anthropic import AnthropicModel, classify, retry_after
from agentruns.providers.base import (
    Model,
    ModelReply,
    ModelRequest,
    ProviderError,
    call_model,
    check_reply,
    model_identity,
    resolve,
)

KEY = "sk-ant-very-secret-0123456789"
TEXT = {"type": "text", "text": "Hello."}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-test",
    "content": [TEXT],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 5, "cache_read_input_tokens": 0},
}


class Endpoint(ThreadingHTTPServer):
    """Answers every request with `answer`, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.answer(200, MESSAGE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, status: int, body: Any, **headers: str) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = {"content-type": "application/json", "request-id": "req_1", **headers}


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(
            ({name.lower(): value for name, value in self.headers.items()}, json.loads(body))
        )
        if self.server.status == 0:
            self.connection.close()
            return
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def claude(url: str, *, key: str = KEY, timeout: float | None = None) -> Iterator[AnthropicModel]:
    import anthropic

    with anthropic.Anthropic(api_key=key, base_url=url) as client:
        yield AnthropicModel("claude-test", client, timeout=timeout)


@pytest.fixture
def model(endpoint: Endpoint) -> Iterator[AnthropicModel]:
    with claude(endpoint.url) as asked:
        yield asked


def request(**changes: Any) -> ModelRequest:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    return ModelRequest("claude-test", **{"system": "Help.", "messages": messages, **changes})


def failure(model: Model, **changes: Any) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        call_model(model, request(**changes))
    error = caught.value
    assert KEY not in str(error) and KEY not in repr(error.__dict__)
    assert error.__cause__ is None
    assert error.__context__ is None or not isinstance(model, AnthropicModel)
    return error


# Any model


def test_importing_the_providers_does_not_import_the_sdk() -> None:
    code = (
        "import sys, agentruns.agents, agentruns.providers.anthropic, agentruns.testing as t;"
        "print([m for m in ('anthropic', 'httpx2', 'agentruns.models') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
        (ModelReply([{"type": "tool_result"}], "end_turn"), "fail", "only we give"),
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
    base._anthropic.cache_clear()
    assert resolve("claude-x") is resolve("claude-x")
    assert isinstance(resolve("claude-x"), AnthropicModel)
    assert resolve("claude-x") is not resolve("claude-y")
    assert isinstance(fixed, Model)


# Anthropic


def test_a_reply_is_kept_as_it_came_over_the_wire(endpoint: Endpoint, model: AnthropicModel) -> None:
    content = [
        {"type": "thinking", "thinking": "", "signature": "c2ln", "odd": {"a": 1}},
        {"type": "block_of_the_future", "data": [1, {"b": None}]},
        {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"n": 1e16, "m": -0.0}},
    ]
    endpoint.answer(200, {**MESSAGE, "content": content, "stop_reason": "tool_use"})
    reply = call_model(model, request())
    assert reply.content == content
    assert canonical.dumps(reply.content) == canonical.dumps(content)
    assert (reply.stop_reason, reply.model, reply.request_id) == ("tool_use", "claude-test", "req_1")
    assert reply.usage == MESSAGE["usage"]


def test_what_is_sent(endpoint: Endpoint, model: AnthropicModel) -> None:
    tools = [{"name": "find", "description": "", "input_schema": {"type": "object"}}]
    assistant = {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "x"}]}
    messages = [*request().messages, assistant, {"role": "user", "content": "a\x00\ud800"}]
    model.propose(request(tools=tools, messages=messages, params={"thinking": {"type": "adaptive"}}))
    headers, body = endpoint.requests[0]
    assert body == {
        "model": "claude-test",
        "max_tokens": 8192,
        "system": "Help.",
        "messages": [*messages[:2], {"role": "user", "content": "a\ufffd\ufffd"}],
        "tools": tools,
        "thinking": {"type": "adaptive"},
    }
    assert headers["authorization"] == f"Bearer {KEY}"
    model.propose(request(system="", params={"max_tokens": 5}))
    assert endpoint.requests[1][1].keys() == {"model", "max_tokens", "messages"}
    assert endpoint.requests[1][1]["max_tokens"] == 5


def test_long_replies_and_own_time_outs(endpoint: Endpoint, model: AnthropicModel) -> None:
    model.propose(request(params={"max_tokens": 64_000}))
    with claude(endpoint.url, timeout=5) as impatient:
        impatient.propose(request())
    assert [headers["x-stainless-read-timeout"] for headers, _ in endpoint.requests] == ["1800.0", "5"]


@pytest.mark.parametrize(
    ("status", "type", "disposition"),
    [
        (400, "invalid_request_error", "fail"),
        (401, "authentication_error", "pause"),
        (402, "billing_error", "pause"),
        (403, "permission_error", "pause"),
        (404, "not_found_error", "pause"),
        (408, "timeout_error", "retry"),
        (409, "conflict_error", "retry"),
        (413, "request_too_large", "fail"),
        (418, "teapot_error", "fail"),
        (422, "invalid_request_error", "fail"),
        (429, "rate_limit_error", "retry"),
        (500, "api_error", "retry"),
        (503, "api_error", "retry"),
        (529, "overloaded_error", "retry"),
    ],
)
def test_statuses(
    endpoint: Endpoint, model: AnthropicModel, status: int, type: str, disposition: str
) -> None:
    details = {"error_code": "some_code"}
    body = {"type": "error", "error": {"type": type, "message": f"no: {KEY}", "details": details}}
    endpoint.answer(status, body)
    error = failure(model)
    assert (error.disposition, error.status, error.type) == (disposition, status, type)
    assert (error.code, error.request_id, error.retry_after) == ("some_code", "req_1", None)
    assert str(error) == f"Anthropic answered {status}: no: ***"
    assert len(endpoint.requests) == 1, "the SDK must not retry by itself"


def test_retry_after_is_read(endpoint: Endpoint, model: AnthropicModel) -> None:
    endpoint.answer(429, {}, retry_after="17")
    assert failure(model).retry_after == 17
    endpoint.answer(529, b"<html>busy</html>", content_type="text/html", retry_after="2.5")
    error = failure(model)
    assert (error.disposition, error.retry_after, error.type) == ("retry", 2.5, "OverloadedError")


def test_retry_after_formats() -> None:
    assert retry_after({}) is None
    assert retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    for wrong in ("soon", "-1", "nan", "inf", ""):
        assert retry_after({"retry-after": wrong}) is None
    assert 50 < (retry_after({"retry-after": formatdate(time.time() + 60, usegmt=True)}) or 0) <= 60
    assert retry_after({"retry-after": formatdate(0, usegmt=True)}) == 0


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"id": "msg_1", "content": [{"type"', "application/json"),
        (b"{}", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b"<html>proxy</html>", "text/html"),
        (json.dumps({**MESSAGE, "stop_reason": None}).encode(), "application/json"),
    ],
)
def test_answers_that_are_no_messages_are_asked_for_again(
    endpoint: Endpoint, model: AnthropicModel, body: bytes, content_type: str
) -> None:
    endpoint.answer(200, body, content_type=content_type)
    error = failure(model)
    assert error.disposition == "retry", error


def test_connection_trouble_is_retried(endpoint: Endpoint, model: AnthropicModel) -> None:
    endpoint.status = 0
    error = failure(model)
    assert error.disposition == "retry" and "RemoteProtocolError" in str(error)
    with claude("http://127.0.0.1:9") as nobody:
        error = failure(nobody)
    assert (error.disposition, error.type) == ("retry", "APIConnectionError")


def test_an_error_event_inside_a_stream_is_judged_by_its_type(endpoint: Endpoint) -> None:
    import anthropic
    import httpx2

    response = httpx2.Response(200, request=httpx2.Request("POST", endpoint.url))
    for type, disposition in (
        ("overloaded_error", "retry"),
        ("invalid_request_error", "fail"),
        ("authentication_error", "pause"),
    ):
        body = {"error": {"type": type, "message": "x"}}
        error = anthropic.APIStatusError("x", response=response, body=body)
        assert classify(error).disposition == disposition
    for raw in (
        httpx2.RemoteProtocolError("cut"),
        httpx2.ReadTimeout("slow"),
        json.JSONDecodeError("", "", 0),
    ):
        assert classify(raw).disposition == "retry"


def test_a_key_that_is_no_header_does_not_leak(endpoint: Endpoint) -> None:
    with claude(endpoint.url, key=f"{KEY}\n") as broken:
        failure(broken)
    assert "***" in str(classify(ValueError("Authorization: Bearer abc.def sk-ant-other")))
    assert "abc.def" not in str(classify(ValueError("bearer abc.def")))


def test_missing_credentials_pause(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("ANTHROPIC_BASE_URL", endpoint.url)
    error = failure(AnthropicModel("claude-test"))
    assert (error.disposition, error.type) == ("pause", "missing_credentials")
    assert "ANTHROPIC_API_KEY" in str(error)


def test_mistakes_in_the_configuration_pause(model: AnthropicModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for params in ({"stream": True}, {"model": "other"}, {"no_such_option": 1}, {"max_tokens": "many"}):
        error = failure(model, params=params)
        assert error.disposition == "pause"
        assert next(iter(params)) in str(error) or "TypeError" in str(error)
    monkeypatch.setitem(sys.modules, "anthropic", None)
    error = failure(AnthropicModel("claude-test"))
    assert (error.disposition, error.type) == ("pause", "not_installed")
