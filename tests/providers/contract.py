"""The contract of a provider, as one suite: every provider says, takes and refuses the same things.

A test module subclasses it and gives it a Provider, which says how the model and its server are made.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from agentruns.agents.output import schema_of
from agentruns.providers.base import Model, ModelReply, ModelRequest, ProviderError, call_model
from agentruns.signals import text_streamed
from agentruns.testing import check_messages
from tests.providers.types import Answer

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


def png() -> bytes:
    """Return the smallest picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = b"\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00"
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\x00\x00"))
        + chunk(b"IEND", b"")
    )


def source(media_type: str, data: bytes) -> dict[str, Any]:
    """Return the source of a file."""
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


IMAGE: dict[str, Any] = {"type": "image", "source": source("image/png", png())}
PDF: dict[str, Any] = {
    "type": "document",
    "source": source("application/pdf", b"%PDF-1.4\n%%EOF"),
    "title": "bill.pdf",
}
NOTE: dict[str, Any] = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Paid on Monday."},
    "title": "note.txt",
}


def request(**changes: Any) -> ModelRequest:
    """Return a small request."""
    return ModelRequest("any", **{"system": "Help.", "messages": [HELLO], **changes})


def went_on(messages: list[dict[str, Any]], reply: ModelReply, content: Any = "found") -> list[Any]:
    """Return the conversation after a reply whose calls were answered, as the journal builds it."""
    calls = [block for block in reply.content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": content} for call in calls]
    answered = [{"role": "user", "content": results}] if results else []
    return [*messages, {"role": "assistant", "content": reply.content}, *answered]


def texts(reply: ModelReply) -> str:
    """Return the text of a reply."""
    return "".join(block["text"] for block in reply.content if block["type"] == "text")


def failure(model: Model, asked: ModelRequest | None = None) -> ProviderError:
    """Return the error of a request; neither it nor what is behind it shows the key."""
    with pytest.raises(ProviderError) as caught:
        call_model(model, asked or request())
    error = caught.value
    assert KEY not in str(error) and KEY not in repr(error.__dict__)
    assert error.__cause__ is None and error.__context__ is None
    return error


@contextmanager
def heard() -> Iterator[list[str]]:
    """What a listener is told of text as it streams in."""
    said: list[str] = []

    def listen(*, text: str, **told: Any) -> None:
        said.append(text)

    text_streamed.connect(listen)
    try:
        yield said
    finally:
        text_streamed.disconnect(listen)


class Provider:
    """How a provider is reached in these tests."""

    has_network = True
    reads_files = True
    identity = ""

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        """Return the server that says these turns."""
        raise NotImplementedError

    def model(self, server: Any, **options: Any) -> Any:
        """Return the model that asks it."""
        raise NotImplementedError

    def bodies(self, server: Any) -> list[Any]:
        """Return what was asked."""
        return [call.body for call in server.calls]


class Contract:
    """What every provider does."""

    provider: Provider

    @pytest.fixture(autouse=True, params=["streaming", "plain"])
    def _form(self, request: pytest.FixtureRequest) -> None:
        self.streaming = request.param == "streaming"

    def model(self, server: Any, **options: Any) -> Any:
        return self.provider.model(server, **{"streaming": self.streaming, **options})

    # What it is

    def test_its_identity_is_the_same_whatever_the_server_and_the_key(self) -> None:
        with self.provider.serving([]) as one, self.provider.serving([]) as other:
            found = {self.model(server).identity for server in (one, other)}
        assert found == {self.provider.identity}

    # A reply

    def test_a_text(self) -> None:
        with self.provider.serving([{"text": "Good day, ä 🙂."}]) as server:
            reply = call_model(self.model(server), request())
        assert (texts(reply), reply.stop_reason) == ("Good day, ä 🙂.", "end_turn")
        if self.provider.has_network:
            assert reply.request_id == server.calls[0].request_id
            assert reply.usage["input_tokens"] + reply.usage["cache_read_input_tokens"] >= 1
            assert reply.usage["output_tokens"] >= 1
            assert reply.model

    def test_parallel_calls_and_the_conversation_that_goes_on(self) -> None:
        calls = [{"name": "find", "input": {"n": 17, "s": 'ä"\n'}}, {"name": "find", "input": {}}]
        turns: list[Any] = [{"text": "Looking.", "tools": calls}, {"text": "Both found."}]
        with self.provider.serving(turns) as server:
            model = self.model(server)
            first = call_model(model, request(tools=[FIND]))
            assert first.stop_reason == "tool_use"
            asked = [block for block in first.content if block["type"] == "tool_use"]
            assert [(each["name"], each["input"]) for each in asked] == [
                ("find", {"n": 17, "s": 'ä"\n'}),
                ("find", {}),
            ]
            assert len({each["id"] for each in asked}) == 2
            messages = went_on([HELLO], first)
            check_messages(messages)
            second = call_model(model, request(tools=[FIND], messages=messages, step=1))
            assert (texts(second), second.stop_reason) == ("Both found.", "end_turn")
            messages = [*went_on(messages, second), HELLO]
            check_messages(messages)

    def test_a_call_without_text_and_an_error_as_its_result(self) -> None:
        with self.provider.serving(
            [{"tools": [{"name": "find", "input": {"n": 1}}]}, {"text": "Sorry."}]
        ) as s:
            model = self.model(s)
            first = call_model(model, request(tools=[FIND]))
            messages = went_on([HELLO], first, "no such order")
            messages[-1]["content"][0]["is_error"] = True
            messages[-1]["content"].append({"type": "text", "text": "And hurry."})
            assert texts(call_model(model, request(tools=[FIND], messages=messages, step=1))) == "Sorry."
            if self.provider.has_network:
                assert "no such order" in repr(self.provider.bodies(s)[-1])

    def test_max_tokens(self) -> None:
        cut = {"type": "tool_use", "id": "t1", "name": "find", "input": {"n": 1}}
        turns = [{"content": [{"type": "text", "text": "Once upon"}, cut], "stop_reason": "max_tokens"}]
        with self.provider.serving(turns) as server:
            reply = call_model(self.model(server), request(tools=[FIND], params={"max_tokens": 64}))
            assert reply.stop_reason == "max_tokens"
            if self.provider.has_network:
                assert 64 in self.provider.bodies(server)[0].values()

    # Files

    def test_files_in_what_the_user_says_and_in_results(self) -> None:
        turns: list[Any] = [{"tools": [{"name": "find", "input": {"n": 1}}] * 2}, {"text": "Seen."}]
        with self.provider.serving(turns) as server:
            model = self.model(server)
            files = [IMAGE, NOTE, *([PDF] if self.provider.reads_files else [])]
            messages = [{"role": "user", "content": [{"type": "text", "text": "See."}, *files]}]
            first = call_model(model, request(tools=[FIND], messages=messages))
            seen = [{"type": "text", "text": "Here:"}, *files]
            messages = went_on(messages, first, seen)
            assert texts(call_model(model, request(tools=[FIND], messages=messages, step=1))) == "Seen."
            if self.provider.has_network:
                body = repr(self.provider.bodies(server)[-1])
                assert body.count(IMAGE["source"]["data"]) == 3
                assert body.count("Paid on Monday.") == 3
                assert body.count(PDF["source"]["data"]) == 3 * self.provider.reads_files

    # Structured output

    def test_structured_output(self) -> None:
        with self.provider.serving([{"text": '{"right": true, "why": "", "parts": []}'}]) as server:
            asked = request(output_schema=schema_of(Answer))
            reply = call_model(self.model(server), asked)
            assert Answer.model_validate_json(texts(reply)).right
            if self.provider.has_network:
                assert "'right'" in repr(self.provider.bodies(server)[0])

    # What it says while it writes

    def test_the_pieces_of_a_text_and_a_reply_that_is_stopped(self) -> None:
        if not self.streaming:
            return
        turns = [{"text": "One after the other, in order.", "tools": [{"name": "find", "input": {"n": 1}}]}]
        with self.provider.serving(turns) as server, heard() as said:
            model, pieces = self.model(server), list[str]()
            reply = call_model(model, request(tools=[FIND], on_text=pieces.append))
            assert "".join(pieces) == "".join(said) == texts(reply)
            assert len([piece for piece in pieces if piece]) > 3

            def stop(piece: str) -> None:
                raise ProviderError("Stopped.", disposition="pause", type="reply_stopped")

            error = failure(model, request(tools=[FIND], on_text=stop))
            assert (error.type, error.disposition) == ("reply_stopped", "pause")

    # Conversations that come from elsewhere

    def test_anothers_reasoning_is_left_out(self) -> None:
        theirs = [
            {"type": "thinking", "thinking": "hidden thought", "signature": "s"},
            {"type": "redacted_thinking", "data": "hidden thought"},
            *(
                {
                    "type": "provider_item",
                    "from": identity,
                    "item": {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "encrypted_content": "hidden thought",
                    },
                }
                for identity in ("openai:gpt-1", "elsewhere:gpt-5")
            ),
        ]
        if self.provider.identity.startswith("claude"):
            theirs = theirs[2:]  # its own come with a signature that it knows
        call = {"type": "tool_use", "id": "call_of_another-1", "name": "find", "input": {"n": 1}}
        said = {"type": "text", "text": "I look.", "phase": "commentary", "annotations": []}
        replied = {"role": "assistant", "content": [*theirs, said, call]}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "found"}
        thought = {"role": "assistant", "content": theirs}
        messages = [HELLO, replied, {"role": "user", "content": [result]}, thought, HELLO]
        with self.provider.serving(lambda body: {"text": "On it goes."}) as server:
            reply = call_model(self.model(server), request(tools=[FIND], messages=messages))
            assert texts(reply) == "On it goes."
            if self.provider.has_network:
                assert "hidden thought" not in repr(self.provider.bodies(server))

    def test_what_only_another_can_read_is_an_error_before_the_request(self) -> None:
        if not self.provider.has_network:
            return
        item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
        theirs = [
            {"type": "provider_item", "from": "elsewhere:gpt-5", "item": item},
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        ]
        if self.provider.identity.startswith("claude"):
            theirs = theirs[:1]
        with self.provider.serving([]) as server:
            for block in theirs:
                replied = {"role": "assistant", "content": [block, {"type": "text", "text": "x"}]}
                error = failure(self.model(server), request(messages=[HELLO, replied, HELLO]))
                assert (error.type, error.disposition) == ("foreign_block", "pause")
                assert block.get("item", block)["type"] in str(error)
            assert server.calls == []


class NetworkContract(Contract):
    """What every provider does that is asked over the network."""

    @pytest.mark.parametrize(
        ("status", "disposition"),
        [
            (400, "fail"),
            (401, "pause"),
            (402, "pause"),
            (403, "pause"),
            (404, "pause"),
            (408, "retry"),
            (409, "retry"),
            (413, "fail"),
            (422, "fail"),
            (429, "retry"),
            (500, "retry"),
            (503, "retry"),
            (529, "retry"),
        ],
    )
    def test_a_status(self, status: int, disposition: str) -> None:
        with self.provider.serving([{"text": "x"}]) as server:
            model = self.model(server)
            server.fault(status, message=f"no: {KEY}", retry_after=17)
            error = failure(model)
            assert (error.disposition, error.status, error.retry_after) == (disposition, status, 17)
            assert "***" in str(error) and error.request_id == server.calls[0].request_id
            assert error.type and error.is_overload == (status in (429, 503, 529))
            assert texts(call_model(model, request())) == "x"
            assert len(server.calls) == 2, "the SDK must not retry by itself"

    @pytest.mark.parametrize("kind", ["drop", "truncate", "corrupt", "empty", "error"])
    @pytest.mark.parametrize("after", [None, 0, 2, 5])
    def test_an_answer_that_breaks_is_asked_for_again(self, kind: str, after: int | None) -> None:
        turns = [{"text": "Looking for it now.", "tools": [{"name": "find", "input": {"n": 17}}]}]
        with self.provider.serving(turns) as server:
            model = self.model(server)
            overloaded = {"type": self.overloaded} if kind == "error" else {}
            server.fault(kind, after=after, **overloaded)
            error = failure(model, request(tools=[FIND]))
            assert error.disposition == "retry"
            assert call_model(model, request(tools=[FIND])).stop_reason == "tool_use"
            assert len(server.calls) == 2

    overloaded = "overloaded_error"

    def test_a_time_out(self) -> None:
        with self.provider.serving([{"text": "x"}]) as server:
            server.fault("slow", delay=60)
            error = failure(self.model(server, timeout=0.1))
        assert error.disposition == "retry" and "Timeout" in error.type

    def test_mistakes_of_our_own_pause_and_nothing_is_sent(self) -> None:
        with self.provider.serving([{"text": "x"}]) as server:
            for params in ({"stream": True}, {"model": "other"}, {"metadata": object()}):
                error = failure(self.model(server), request(params=params))
                assert error.disposition == "pause", params
            assert server.calls == []

    def test_a_wrong_key_and_parameters_that_only_the_server_judges(self) -> None:
        with self.provider.serving([{"text": "x"}], api_key=KEY) as server:
            error = failure(self.model(server), request(params={"option_of_the_future": 1}))
            assert error.disposition == "fail" and "option_of_the_future" in str(error)
            server.api_key = "another"
            assert failure(self.model(server)).disposition == "pause"

    def test_a_refusal_and_a_reply_that_does_not_end(self) -> None:
        with self.provider.serving([self.refusal, {"text": "so", "stop_reason": None}]) as server:
            model = self.model(server)
            reply = call_model(model, request())
            assert reply.stop_reason == "refusal" and "cannot help" in texts(reply)
            messages = [*went_on([HELLO], reply), HELLO]
            error = failure(model, request(messages=messages, step=1))
            assert (error.disposition, error.type) == ("retry", "incomplete_reply")

    refusal: dict[str, Any] = {
        "content": [{"type": "refusal", "refusal": "I cannot help with that."}],
        "stop_reason": "end_turn",
    }
