"""What goes to OpenAI and its like, and what comes back: beside what every provider does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agentruns.agents.output import schema_of
from agentruns.providers import blocks, chat, responses
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ModelRequest, ProviderError, call_model
from agentruns.providers.openai import OpenAIModel
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.providers.asking import FIND, HELLO, KEY, Answer, failure, request, texts, went_on

BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "plain"])
APIS = pytest.mark.parametrize("api", ["responses", "chat"])
CALL: dict[str, Any] = {"name": "find", "input": {"n": 17}}


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    """A server that says one thing."""
    with FakeOpenAI([{"text": "x"}]) as running:
        yield running


def gpt(fake: FakeOpenAI, name: str = "gpt-5.4", **options: Any) -> OpenAIModel:
    """Build a model of OpenAI's that asks the fake."""
    return OpenAIModel(name, **{"client": fake.client(), "api": "responses", **options})


def bodies(fake: FakeOpenAI) -> list[Any]:
    return [call.body for call in fake.calls]


# Requests


def test_a_request_over_responses(fake: FakeOpenAI) -> None:
    model = gpt(fake, reasoning={"effort": "low"})
    asked = request(tools=[FIND], params={"max_tokens": 99, "tools": [{"type": "web_search"}]})
    call_model(model, asked)
    (body,) = bodies(fake)
    function = {"type": "function", "name": "find", "description": FIND["description"]}
    assert body == {
        **{"model": "gpt-5.4", "store": False, "stream": True, "instructions": "Help."},
        "include": ["reasoning.encrypted_content"],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "max_output_tokens": 99,
        "reasoning": {"effort": "low"},
        "tools": [{**function, "parameters": FIND["input_schema"], "strict": False}, {"type": "web_search"}],
    }


def test_a_request_over_chat_completions(fake: FakeOpenAI) -> None:
    call_model(gpt(fake, "gpt-4o", api="chat"), request(tools=[FIND], params={"max_tokens": 99}))
    (body,) = bodies(fake)
    function = {"name": "find", "description": FIND["description"], "parameters": FIND["input_schema"]}
    assert body == {
        **{"model": "gpt-4o", "stream": True, "stream_options": {"include_usage": True}},
        "messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "hi"}],
        "max_tokens": 99,
        "tools": [{"type": "function", "function": function}],
    }


@APIS
def test_own_parameters_are_kept_apart_and_an_agents_count_more(fake: FakeOpenAI, api: str) -> None:
    name = "gpt-5.4" if api == "responses" else "gpt-4o"
    model = gpt(fake, name, api=api, temperature=0.1, top_p=0.5, max_tokens=50)
    call_model(model, request(params={"temperature": 0.9}))
    (body,) = bodies(fake)
    assert (body["temperature"], body["top_p"]) == (0.9, 0.5)
    assert 50 in body.values() and model.identity == f"openai:{name}"
    with pytest.raises(ValueError, match="api must be"):
        OpenAIModel("gpt-5.4", api="assistants")  # type: ignore[arg-type]
    if api == "chat":  # there a model of OpenAI's that reasons takes no tools
        error = failure(gpt(fake, api="chat"), request(tools=[FIND]))
        assert error.disposition == "fail" and "use /v1/responses" in str(error)


# Reasoning


@BOTH
def test_reasoning_goes_back_as_it_came_and_only_to_its_own_model(streaming: bool) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    spoken = {"type": "text", "text": "I look.", "phase": "commentary"}
    called = {"type": "tool_use", "id": "call_1", **CALL}
    turns: list[Any] = [{"content": [thought, spoken, called]}, {"text": "So."}]
    with FakeOpenAI(turns) as fake:
        reply = call_model(gpt(fake, streaming=streaming), request(tools=[FIND]))
        kept = reply.content[0]
        assert (kept["type"], kept["from"]) == ("provider_item", "openai:gpt-5.4")
        assert kept["item"]["encrypted_content"] in fake.encrypted
        assert reply.content[1] == {"type": "text", "text": "I look.", "phase": "commentary"}
        asked = request(tools=[FIND], messages=went_on([HELLO], reply))
        call_model(gpt(fake, streaming=streaming), asked)
        assert bodies(fake)[1]["input"][1:3] == [
            kept["item"],
            {"role": "assistant", "content": "I look.", "phase": "commentary"},
        ]
        call_model(gpt(fake, "gpt-5.5", streaming=streaming), asked)
        assert not [item for item in bodies(fake)[2]["input"] if item.get("type") == "reasoning"]


def test_reasoning_that_the_provider_cannot_read_or_give_is_left_out() -> None:
    turns: list[Any] = [{"content": [{"type": "reasoning"}, {"type": "text", "text": "x"}]}] * 2
    with FakeOpenAI(turns) as one, FakeOpenAI(turns) as other:
        reply = call_model(gpt(one), request())
        asked = request(messages=[*went_on([HELLO], reply), HELLO])
        assert texts(call_model(gpt(other), asked)) == "x"
        assert [call.status for call in other.calls] == [400, 200]
        assert len(bodies(other)[1]["input"]) == 3
    with FakeOpenAI([{"text": "x"}]) as fake:
        model = gpt(fake, "gpt-4o")
        assert texts(call_model(model, request())) == texts(call_model(model, request())) == "x"
        assert [call.status for call in fake.calls] == [400, 200, 200], "it remembers"


def test_items_that_only_openai_understands_go_back_to_it() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}}
    cited = {"type": "url_citation", "url": "https://example.org", "start_index": 0, "end_index": 1}
    said = {"type": "text", "text": "Found.", "annotations": [{**cited, "title": "x"}]}
    with FakeOpenAI([{"content": [search, said]}, {"text": "x"}]) as fake:
        reply = call_model(gpt(fake), request())
        assert reply.content[1]["annotations"][0]["url"] == "https://example.org"
        asked = request(messages=[*went_on([HELLO], reply), HELLO])
        call_model(gpt(fake, "gpt-5.5"), asked)
        assert bodies(fake)[1]["input"][1] == search
        call_model(gpt(fake, "gpt-4.1", api="chat"), asked)
        call_model(gpt(fake, provider="azure", api="responses"), asked)
        assert all(
            "web_search_call.]" in repr(body) and "'ws_1'" not in repr(body) for body in bodies(fake)[2:]
        )


@BOTH
@pytest.mark.parametrize(
    ("provider", "member", "value"),
    [
        ("ollama", "reasoning", "Let me see, and then let me see again."),
        ("vllm", "reasoning", "Let me see, and then let me see again."),
        (
            "openrouter",
            "reasoning_details",
            [
                {"type": "reasoning.text", "text": "Let me see, once.", "index": 0, "signature": "s1"},
                {"type": "reasoning.text", "text": "And again.", "index": 1, "signature": "s2"},
            ],
        ),
        ("elsewhere", "reasoning", "Let me see."),
    ],
)
def test_reasoning_of_other_servers(streaming: bool, provider: str, member: str, value: Any) -> None:
    thought = {"type": "reasoning", member: value}
    turns = [
        {"content": [thought, {"type": "tool_use", "id": "c1", **CALL}]},
        {"text": "So."},
        {"text": "Yes?"},
    ]
    with FakeOpenAI(turns) as fake:
        model = gpt(fake, "qwen3", api=None, provider=provider, streaming=streaming)
        reply = call_model(model, request(tools=[FIND]))
        assert reply.content[0]["item"] == thought
        call_model(model, request(tools=[FIND], messages=went_on([HELLO], reply)))
        assert bodies(fake)[1]["messages"][2][member] == value
        # A server without a name of its own has it back until the user speaks again.
        call_model(model, request(tools=[FIND], messages=[*went_on([HELLO], reply), HELLO]))
        assert (member in bodies(fake)[2]["messages"][2]) == (provider != "elsewhere")


# Replies


@BOTH
@APIS
def test_the_usage_in_the_kinds_that_prices_have_and_a_content_filter(streaming: bool, api: str) -> None:
    usage = {"sent": 100, "cached": 60, "written": 9}
    with FakeOpenAI([{"text": "It", "stop_reason": "content_filter", "usage": usage}]) as fake:
        reply = call_model(gpt(fake, api=api, streaming=streaming), request())
    assert (texts(reply), reply.stop_reason) == ("It", "content_filter")
    assert reply.usage == {
        "input_tokens": 40, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 0,
        "output_tokens": 9, "reasoning_tokens": 4,
    }  # fmt: skip
    assert reply.model == "openai:gpt-5.4-2026-03-05"


def test_calls_as_other_servers_write_them() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}
    whole = chat.Collected()
    whole.add({"choices": [{"delta": {"tool_calls": [{"index": 0, **call}]}}]})
    whole.add({"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]})
    reply = chat.reply(whole.whole(), "x:y")
    assert reply.stop_reason == "tool_use"
    assert [(call["id"], call["input"]) for call in reply.content] == [("a", {"n": 1})]
    deep = '{"n": ' * 3_000 + "1" + "}" * 3_000
    assert blocks.call_block("a", "find", deep)["input"] == deep, "the gate refuses it"
    assert blocks.call_block("a", "find", '{"n"')["input"] == '{"n"', "the gate refuses it"
    assert blocks.call_block("a", "find", {"n": 1})["input"] == {"n": 1}
    finished = {"choices": [{"message": {"content": "x"}, "finish_reason": "tool_calls"}]}
    assert chat.reply(finished, "x:y").stop_reason == "end_turn"


def form(schema: Any) -> tuple[Any, bool]:
    """Build a schema as it is sent, and tell whether it is enforced."""
    found = blocks.answer_form(request(output_schema=schema)) or {}
    return found["schema"], found["strict"]


def test_schemas_that_cannot_be_enforced_are_sent_as_they_are() -> None:
    named = {"type": "object", "properties": {"by_name": {"type": "object", "additionalProperties": True}}}
    assert form(named) == (named, False)
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node", "description": "x"}}}
    schema, is_strict = form({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    assert is_strict and schema["type"] == "object" and schema["required"] == ["next"]
    assert schema["properties"]["next"] == {"$ref": "#/$defs/Node"}
    found, is_strict = form(schema_of(Answer))
    assert is_strict and "default" not in found["properties"]["why"]
    assert "default" in found["$defs"]["Letter"]["properties"], "as a name it stays"
    assert blocks.answer_form(request()) is None


# Errors


@BOTH
@pytest.mark.parametrize(
    ("status", "code", "disposition"),
    [
        (429, "insufficient_quota", "pause"), (400, "billing_hard_limit_reached", "pause"),
        (404, "model_not_found", "pause"), (400, "context_length_exceeded", "fail"),
        (400, "content_filter", "fail"), (429, "rate_limit_exceeded", "retry"),
    ],
)  # fmt: skip
def test_a_code_beside_a_status(
    fake: FakeOpenAI, streaming: bool, status: int, code: str, disposition: str
) -> None:
    fake.fault(status, error_code=code)
    error = failure(gpt(fake, streaming=streaming))
    assert (error.disposition, error.code, error.status) == (disposition, code, status)


@APIS
@pytest.mark.parametrize(
    ("code", "disposition"),
    [
        ("server_error", "retry"), ("rate_limit_exceeded", "retry"), ("code_of_the_future", "retry"),
        ("503", "retry"), ("402", "pause"), ("400", "fail"), ("insufficient_quota", "pause"),
        ("invalid_prompt", "fail"), ("image_too_large", "fail"), ("misalignment_policy_violation", "fail"),
    ],
)  # fmt: skip
def test_an_error_in_the_middle_of_a_stream_is_judged_by_its_code(
    api: str, code: str, disposition: str
) -> None:
    with FakeOpenAI([{"text": "It begins, and goes on."}]) as fake:
        for after in (0, 3):
            fake.fault("error", type=code, after=after, message=f"no: {fake.api_key}")
            error = failure(gpt(fake, api=api))
            assert (error.disposition, error.code, error.status) == (disposition, code, None)
            assert error.request_id == fake.calls[-1].request_id
            assert str(error) == f"The provider answered {code}: no: ***"
            assert error.is_overload == (code == "rate_limit_exceeded")


def test_a_response_that_failed_and_a_completion_that_is_none() -> None:
    said = {"status": "failed", "error": {"code": "server_error", "message": "Boom."}, "output": []}
    for raised, code in (
        (lambda: responses.reply(said, "openai:x"), "server_error"),
        (lambda: chat.reply({"error": {"code": 502, "message": "Boom."}}, "openai:x"), "502"),
        (lambda: chat.reply({"choices": [{"finish_reason": "error"}]}, "openai:x"), ""),
    ):
        with pytest.raises(ProviderError) as caught:
            raised()
        assert (caught.value.disposition, caught.value.code) == ("retry", code)


class Says:
    """A server that answers each request with one text, whole, whatever was asked."""

    def __init__(self, said: Any, kind: str = "application/json", base_url: str = "http://x/v1") -> None:
        import httpx2
        import openai

        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.paths: list[str] = []

        def answer(asked: httpx2.Request) -> httpx2.Response:
            self.paths.append(asked.url.path)
            return httpx2.Response(200, content=body, headers={"content-type": kind})

        http_client = httpx2.Client(transport=httpx2.MockTransport(answer))
        self.client = openai.OpenAI(api_key=KEY, base_url=base_url, http_client=http_client)


RESPONSE = {
    "object": "response",
    "status": "completed",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "Whole."}]}],
}


@BOTH
@APIS
def test_an_answer_that_is_no_stream_and_an_error_with_status_200(streaming: bool, api: Any) -> None:
    whole = {"choices": [{"message": {"content": "Whole."}, "finish_reason": "stop"}]}

    def model(said: Any) -> OpenAIModel:
        return OpenAIModel("x", client=Says(said).client, api=api, streaming=streaming)

    assert texts(call_model(model(whole if api == "chat" else RESPONSE), request())) == "Whole."
    coded = {"message": "No money.", "code": "insufficient_quota"}
    for error, disposition in ((coded, "pause"), ("No money.", "retry")):
        found = failure(model({"error": error}))
        assert (found.disposition, "No money." in str(found)) == (disposition, True)


@BOTH
@pytest.mark.parametrize(
    ("api", "said"),
    [
        ("responses", {"status": "completed", "output": [{"type": "message", "content": None}]}),
        ("responses", {"status": "completed", "output": [None]}),
        ("chat", {"choices": ["x"]}),
        ("chat", {"choices": [{"message": {"tool_calls": [None]}, "finish_reason": "stop"}]}),
        ("chat", {"choices": [{"message": {"content": [{"text": "x"}]}, "finish_reason": "stop"}]}),
    ],
)
def test_a_whole_reply_that_cannot_be_read_is_paid_and_not_asked_for_again(
    streaming: bool, api: Any, said: Any
) -> None:
    used = {"prompt_tokens": 5, "completion_tokens": 7}
    model = OpenAIModel("x", client=Says({**said, "usage": used}).client, api=api, streaming=streaming)
    error = failure(model)
    assert (error.disposition, error.type) == ("fail", "invalid_reply")
    assert error.usage is not None and error.usage["output_tokens"] == 7


def test_a_piece_of_text_that_is_none_fails_and_a_usage_of_another_form_costs_no_reply() -> None:
    said = {"choices": [{"delta": {"content": [{"type": "text", "text": "x"}]}, "finish_reason": "stop"}]}
    stream = Says(f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
    error = failure(OpenAIModel("x", client=stream.client, api="chat"))
    assert (error.disposition, error.type) == ("fail", "invalid_reply")
    name = "prompt_tokens_details"
    for odd in ({"prompt_tokens": "12"}, {name: [1]}, {name: {"cached_tokens": "3"}}):
        found = blocks.usage_of({"prompt_tokens": 5, "completion_tokens": 7, **odd})
        assert (found["output_tokens"], found["cache_read_input_tokens"]) == (7, 0)


# Where requests go


@pytest.mark.parametrize("provider", ["azure", "house"])
def test_a_server_without_an_address_is_not_asked_at_openai(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "AZURE_OPENAI_API_KEY", "HOUSE_API_KEY"):
        monkeypatch.setenv(name, KEY)
    with FakeOpenAI([{"text": "x"}], api_key=KEY) as fake:
        monkeypatch.setenv("OPENAI_BASE_URL", fake.url)
        error = failure(OpenAIModel("gpt-5.4", provider=provider))
        assert (error.disposition, error.type, fake.calls) == ("pause", "missing_base_url", [])


def test_each_server_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai-alone")
    with FakeOpenAI([{"text": "x"}], api_key="none") as fake:

        def ask(key: str, name: str, **options: Any) -> str:
            fake.api_key = key
            call_model(OpenAIModel(name, **options), request())
            return fake.calls[-1].path.removeprefix("/v1")

        assert ask("none", "x", provider="our-house", base_url=fake.url, api_key=None) == "/chat/completions"
        monkeypatch.setenv("OUR_HOUSE_API_KEY", "of-the-house")
        ask("of-the-house", "x", provider="our-house", base_url=fake.url)
        monkeypatch.setenv("OPENROUTER_API_KEY", "of-openrouter")
        ask("of-openrouter", "qwen/qwen3", provider="openrouter", base_url=fake.url)
        ask("none", "llama3.3", provider="ollama", base_url=fake.url)
        ask("given", "gpt-4o", base_url=fake.url, api_key="given")
        monkeypatch.delenv("OPENAI_API_KEY")
        assert ask("none", "llama3.3", base_url=fake.url) == "/chat/completions"
        monkeypatch.setenv("OPENAI_BASE_URL", fake.url)
        assert ask("none", "llama3.3") == "/chat/completions"
        assert ask("none", "llama3.3", api="responses", include=[]) == "/responses"
    assert chat.QUIRKS["ollama"].base_url == "http://localhost:11434/v1"


def test_azure(fake: FakeOpenAI) -> None:
    root = fake.url.removesuffix("/v1")
    options = {"azure_endpoint": root, "api_version": "2026-05-01", "base_url": None}
    client = fake.client("AzureOpenAI", **options)
    call_model(OpenAIModel("gpt-4o", provider="azure", client=client, api="chat"), request())
    call_model(OpenAIModel("gpt-5.4", provider="azure", client=client, api="responses"), request())
    assert [call.path.partition("?")[0] for call in fake.calls] == [
        "/openai/deployments/gpt-4o/chat/completions",
        "/openai/responses",
    ]
    assert fake.calls[0].headers["api-key"] == fake.api_key
    azure = Says(RESPONSE, base_url="https://shop.openai.azure.com/openai/v1/")
    assert texts(call_model(OpenAIModel("gpt-5.4", provider="azure", client=azure.client), request()))
    assert azure.paths == ["/openai/v1/responses"]


def test_files_that_a_server_does_not_take() -> None:
    with FakeOpenAI() as fake:
        stored = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
        source = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
        pdf = {"type": "document", "source": source}
        for provider, block in (("ollama", pdf), ("openrouter", stored), ("vllm", {"type": "search_result"})):
            model = gpt(fake, api=None, provider=provider)
            error = failure(model, request(messages=[{"role": "user", "content": [block]}]))
            assert (error.type, error.disposition) == ("foreign_block", "pause")
        assert fake.calls == []


# From one to the other


def test_a_conversation_goes_from_one_provider_to_the_other_and_back() -> None:
    thought, called = {"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", **CALL}
    claudes = [{"content": [thought, {**called, "id": "t1"}]}, {"text": "-"}, {"text": "Back at Claude."}]
    theirs = [{"text": "-"}, {"content": [{"type": "reasoning"}, {**called, "id": "call_2"}]}, {"text": "."}]
    with FakeAnthropic(claudes) as anthropic, FakeOpenAI(theirs) as openai:
        claude = AnthropicModel("claude-sonnet-5-5", anthropic.client())
        for other in (gpt(openai), gpt(openai, "qwen3", api="chat")):
            messages: list[Any] = [HELLO]
            for model in (claude, other, claude):
                asked = ModelRequest("any", system="", messages=messages, tools=[FIND])
                messages = went_on(messages, call_model(model, asked))
            assert messages[-1]["content"][-1] == {"type": "text", "text": "Back at Claude."}
