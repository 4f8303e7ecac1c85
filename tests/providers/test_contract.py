"""The contract of a provider, as one suite: every provider says, takes and refuses the same things."""

from __future__ import annotations

import base64
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from agentruns.agents.output import schema_of
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError, call_model
from agentruns.providers.openai import OpenAIModel
from agentruns.providers.scripted import ScriptedModel
from agentruns.testing import check_messages
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.pictures import PDF as PDF_FILE, PNG
from tests.providers.asking import FIND, HELLO, KEY, Answer, failure, heard, request, texts, went_on


def source(media_type: str, data: bytes) -> dict[str, Any]:
    """Build the source of a file."""
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


IMAGE: dict[str, Any] = {"type": "image", "source": source("image/png", PNG)}
PDF: dict[str, Any] = {"type": "document", "source": source("application/pdf", PDF_FILE), "title": "bill.pdf"}
NOTE: dict[str, Any] = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Paid on Monday."},
    "title": "note.txt",
}


class Provider:
    """How a provider is reached in these tests.

    `serving(turns)` builds a server that says these turns, `model(server)` the model that asks it, perhaps
    with options of its `client`.
    """

    has_network = True
    reads_files = True
    identity: str
    serving: Any
    model: Any

    def bodies(self, server: Any) -> list[Any]:
        """List what was asked."""
        return [call.body for call in server.calls]


class Scripted(Provider):
    """A script: nothing goes over a network, and nothing is lost there."""

    has_network = False
    identity = "agentruns.providers.scripted.ScriptedModel"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext([turns] if callable(turns) else turns)

    def model(self, server: Any, client: Any = None, **options: Any) -> Any:
        return ScriptedModel(server, pace=0.001 if options["streaming"] else 0)


class Claude(Provider):
    """Claude at Anthropic."""

    identity = "claude-sonnet-5-5"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return FakeAnthropic(turns, **{"api_key": KEY, **options})

    def model(self, server: Any, client: Any = None, **options: Any) -> Any:
        given = {"api_key": KEY, "max_retries": 5, **(client or {})}
        return AnthropicModel(self.identity, server.client(**given), **options)


class OpenAI(Provider):
    """OpenAI, and servers that speak its Chat Completions."""

    def __init__(self, name: str, provider: str, *, reads_files: bool = True, **options: Any) -> None:
        self.name, self.of, self.reads_files, self.options = name, provider, reads_files, options
        self.identity = f"{provider}:{name}"

    def serving(self, turns: Any, **options: Any) -> AbstractContextManager[Any]:
        return FakeOpenAI(turns, **{"api_key": KEY, "takes_files": self.reads_files, **options})

    def model(self, server: Any, client: Any = None, **options: Any) -> Any:
        made = server.client(**{"api_key": KEY, **(client or {})})
        return OpenAIModel(self.name, provider=self.of, client=made, **self.options, **options)


class Contract:
    """What every provider does."""

    provider: Provider

    @pytest.fixture(autouse=True, params=["streaming", "plain"])
    def _form(self, request: pytest.FixtureRequest) -> None:
        self.streaming = request.param == "streaming"

    def model(self, server: Any, **options: Any) -> Any:
        return self.provider.model(server, **{"streaming": self.streaming, **options})

    def test_a_text(self) -> None:
        text = "Good day, ä 🙂."
        with self.provider.serving([{"text": text}]) as server, self.provider.serving([]) as other:
            assert {self.model(each).identity for each in (server, other)} == {self.provider.identity}
            reply = call_model(self.model(server), request())
        assert (texts(reply), reply.stop_reason) == (text, "end_turn")
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
            given = [(each["name"], each["input"]) for each in asked]
            assert given == [("find", {"n": 17, "s": 'ä"\n'}), ("find", {})]
            assert len({each["id"] for each in asked}) == 2
            messages = went_on([HELLO], first)
            check_messages(messages)
            second = call_model(model, request(tools=[FIND], messages=messages, step=1))
            assert (texts(second), second.stop_reason) == ("Both found.", "end_turn")
            messages = [*went_on(messages, second), HELLO]
            check_messages(messages)

    def test_a_call_without_text_and_an_error_as_its_result(self) -> None:
        turns = [{"tools": [{"name": "find", "input": {"n": 1}}]}, {"text": "Sorry."}]
        with self.provider.serving(turns) as s:
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

    def test_structured_output(self) -> None:
        with self.provider.serving([{"text": '{"right": true, "why": "", "parts": []}'}]) as server:
            asked = request(output_schema=schema_of(Answer))
            reply = call_model(self.model(server), asked)
            assert Answer.model_validate_json(texts(reply)).right
            if self.provider.has_network:
                assert "'right'" in repr(self.provider.bodies(server)[0])

    def test_the_pieces_of_a_text_and_a_reply_that_is_stopped(self) -> None:
        if not self.streaming:
            return
        turns = [{"text": "One after the other, in order.", "tools": [{"name": "find", "input": {"n": 1}}]}]
        with self.provider.serving(turns) as server, heard() as said:
            model, pieces = self.model(server), list[str]()
            reply = call_model(model, request(tools=[FIND], on_text=pieces.append))
            assert "".join(pieces) == "".join(told["text"] for told in said) == texts(reply)
            assert len([piece for piece in pieces if piece]) > 3

            def stop(piece: str) -> None:
                raise ProviderError("Stopped.", disposition="pause", type="reply_stopped")

            error = failure(model, request(tools=[FIND], on_text=stop))
            assert (error.type, error.disposition) == ("reply_stopped", "pause")

    def test_anothers_reasoning_is_left_out(self) -> None:
        item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "hidden thought"}
        theirs = [
            {"type": "thinking", "thinking": "hidden thought", "signature": "s"},
            {"type": "redacted_thinking", "data": "hidden thought"},
            {"type": "provider_item", "from": "openai:gpt-1", "item": item},
            {"type": "provider_item", "from": "elsewhere:gpt-5", "item": item},
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

    def test_what_only_another_can_read_is_told_in_words(self) -> None:
        item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
        theirs = [
            {"type": "provider_item", "from": "elsewhere:gpt-5", "item": item},
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        ]
        if self.provider.identity.startswith("claude"):
            theirs = theirs[:1]
        if not self.provider.has_network:
            return
        with self.provider.serving(lambda body: {"text": "On it goes."}) as server:
            replied = {"role": "assistant", "content": [*theirs, {"type": "text", "text": "x"}]}
            call_model(self.model(server), request(messages=[HELLO, replied, HELLO]))
            (sent,) = self.provider.bodies(server)
            told = [
                f"tool of its provider: {each}.]" in repr(sent) for each in ("web_search_call", "web_search")
            ]
            assert told == [True, len(theirs) > 1] and "web_search_tool_result" not in repr(sent)


class NetworkContract(Contract):
    """What every provider does that is asked over the network."""

    overloaded = "server_error"
    mistakes: tuple[dict[str, Any], ...] = ()  # in model_params
    refusal: dict[str, Any] = {
        "content": [{"type": "refusal", "refusal": "I cannot help with that."}],
        "stop_reason": "end_turn",
    }

    def test_a_status(self) -> None:
        dispositions = {
            **dict.fromkeys((400, 413, 418, 422), "fail"),
            **dict.fromkeys((401, 402, 403, 404), "pause"),
            **dict.fromkeys((408, 409, 429, 500, 503, 504, 529), "retry"),
        }
        with self.provider.serving([{"text": "x"}]) as server:
            model = self.model(server)
            for status, disposition in dispositions.items():
                server.fault(status, message=f"no: {KEY}", retry_after=17)
                error = failure(model)
                assert (error.disposition, error.status, error.retry_after) == (disposition, status, 17)
                assert "***" in str(error) and error.request_id == server.calls[-1].request_id
                assert error.type and error.is_overload == (status in (429, 503, 529))
                assert texts(call_model(model, request())) == "x"
            assert len(server.calls) == 2 * len(dispositions), "the SDK must not retry by itself"

    @pytest.mark.parametrize("kind", ["drop", "truncate", "corrupt", "empty", "error"])
    def test_an_answer_that_breaks_is_asked_for_again(self, kind: str) -> None:
        turns = [{"text": "Looking for it now.", "tools": [{"name": "find", "input": {"n": 17}}]}]
        with self.provider.serving(turns) as server:
            model = self.model(server)
            overloaded = {"type": self.overloaded} if kind == "error" else {}
            for after in (None, 0, 2, 5):
                server.fault(kind, after=after, **overloaded)
                error = failure(model, request(tools=[FIND]))
                assert error.disposition == "retry" and (kind == "error" or error.status is None)
                assert call_model(model, request(tools=[FIND])).stop_reason == "tool_use"
            assert len(server.calls) == 8

    def test_a_time_out_and_nobody_there(self) -> None:
        with self.provider.serving([{"text": "x"}]) as server:
            server.fault("slow", delay=0.01)
            assert texts(call_model(self.model(server), request())) == "x"
            server.fault("slow", delay=60)
            error = failure(self.model(server, timeout=0.1))
            assert error.disposition == "retry" and "Timeout" in error.type
            error = failure(self.model(server, client={"base_url": "http://127.0.0.1:9/v1"}))
            assert (error.disposition, error.type) == ("retry", "APIConnectionError")
            assert "ConnectError" in str(error)

    def test_mistakes_of_our_own_pause_and_nothing_is_sent(self) -> None:
        with self.provider.serving([{"text": "x"}]) as server:
            for params in ({"stream": True}, {"model": "other"}, {"metadata": object()}, *self.mistakes):
                error = failure(self.model(server), request(params=params))
                assert error.disposition == "pause", params
                assert next(iter(params)) in str(error) or error.type == "TypeError"
            assert server.calls == []
            # Of these only the server can judge.
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
            assert error.request_id == server.calls[1].request_id
            assert error.usage or self.streaming, "a stream may tell it at its end"


class TestScripted(Contract):
    provider = Scripted()


class TestClaude(NetworkContract):
    provider = Claude()
    refusal = {"text": "I cannot help with that.", "stop_reason": "refusal"}
    overloaded = "overloaded_error"
    mistakes = ({"max_tokens": "many"}, {"tools": 3})


class TestResponses(NetworkContract):
    provider = OpenAI("gpt-5.4", "openai", api="responses")


class TestChat(NetworkContract):
    provider = OpenAI("llama3.3", "openai")


class TestOllama(NetworkContract):
    provider = OpenAI("llama3.3", "ollama", reads_files=False)


class TestOpenRouter(NetworkContract):
    provider = OpenAI("qwen/qwen3", "openrouter")
    overloaded = "503"  # of the server that it asked
