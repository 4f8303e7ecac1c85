"""Conversations that a provider used to refuse: what it cannot take is left out, and the session goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from agentruns.providers import schemas
from agentruns.providers.base import ModelReply, call_model, check_reply
from agentruns.providers.failures import answered
from agentruns.providers.openai import OpenAIModel
from agentruns.providers.scripted import ScriptedModel
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.providers.asking import FIND, HELLO, KEY, claude, failure, request, sent, texts, went_on

BOTH = pytest.mark.parametrize("streaming", [True, False])
CALL = {"type": "tool_use", "id": "t1", "name": "find", "input": {"n": 1}}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096}
THOUGHT = {"type": "thinking", "thinking": "Hm."}


def one_by_one(*turns: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Script a fake by the order of its requests, not by the replies in their conversations."""
    left = iter(turns)
    return lambda _body: next(left)


def gpt(fake: FakeOpenAI, name: str = "gpt-5.4", **options: Any) -> OpenAIModel:
    return OpenAIModel(name, client=fake.client(), **options)


@BOTH
def test_a_turn_that_began_without_thinking_ends_without(streaming: bool) -> None:
    asked = request(tools=[FIND], params=THINKS)
    with FakeAnthropic(one_by_one({"text": "Found."}, {"text": "And now?"})) as fake:
        model = claude(fake, streaming=streaming)
        # By a fallback, or before the definition with thinking was adopted.
        messages = went_on([HELLO], ModelReply([CALL], "tool_use"))
        assert texts(call_model(model, request(tools=[FIND], params=THINKS, messages=messages))) == "Found."
        call_model(model, asked)
        assert [body["thinking"]["type"] for body in sent(fake)] == ["disabled", "enabled"]


@BOTH
def test_a_turn_in_which_only_some_replies_think(streaming: bool) -> None:
    with FakeAnthropic(one_by_one({"content": [THOUGHT, CALL]}, {"text": "Found."})) as fake:
        model = claude(fake, streaming=streaming)
        first = call_model(model, request(tools=[FIND], params=THINKS))
        other = ModelReply([{**CALL, "id": "t2"}], "tool_use")
        messages = went_on(went_on([HELLO], first), other)
        assert texts(call_model(model, request(tools=[FIND], params=THINKS, messages=messages))) == "Found."
        assert "Hm." not in json.dumps(sent(fake)[1])
        assert "Hm." in json.dumps(messages), "the journal's own messages are not altered"


@BOTH
def test_a_reply_of_reasoning_only(streaming: bool) -> None:
    with FakeAnthropic(
        one_by_one({"content": [THOUGHT], "stop_reason": "max_tokens"}, {"text": "So."})
    ) as fake:
        model = claude(fake, streaming=streaming)
        reply = call_model(model, request(params=THINKS))
        messages = [*went_on([HELLO], reply), HELLO]
        assert texts(call_model(model, request(messages=messages, params=THINKS))) == "So."
    item = {"type": "reasoning", "encrypted_content": "secret"}
    for api in ("responses", "chat"):
        thought = item if api == "responses" else {"type": "reasoning", "reasoning": "Hm."}
        turns = one_by_one({"content": [thought], "stop_reason": "max_tokens"}, {"text": "So."})
        with FakeOpenAI(turns) as server:
            name = "gpt-5.4" if api == "responses" else "qwen3"
            of: dict[str, Any] = {} if api == "responses" else {"provider": "vllm"}
            gpt_model = gpt(server, name, api=api, streaming=streaming, **of)
            reply = call_model(gpt_model, request())
            messages = [*went_on([HELLO], reply), HELLO]
            assert texts(call_model(gpt_model, request(messages=messages))) == "So."
            body = server.calls[1].body
            roles = [each["role"] for each in body.get("messages", [])]
            assert roles in ([], ["system", "user"]), "a template may want turns"


@BOTH
def test_a_servers_own_members_of_a_call_come_back_to_it_alone(streaming: bool) -> None:
    signed = {**CALL, "extra_content": {"google": {"thought_signature": "c2ln"}}}
    script = one_by_one({"content": [signed]}, {"text": "So."})
    with FakeOpenAI(script) as fake, FakeAnthropic(one_by_one({"text": "So."})) as other:
        model = gpt(fake, "gemini-3-pro", provider="gemini", api="chat", streaming=streaming)
        reply = call_model(model, request(tools=[FIND]))
        messages = went_on([HELLO], reply)
        call_model(model, request(tools=[FIND], messages=messages))
        (call,) = fake.calls[1].body["messages"][2]["tool_calls"]
        assert call["extra_content"] == signed["extra_content"]
        call_model(claude(other, streaming=streaming), request(tools=[FIND], messages=messages))
        assert "thought_signature" not in json.dumps(sent(other))


def test_an_error_that_comes_as_a_list() -> None:
    import openai

    said = [{"error": {"code": 400, "message": "Function call is missing a thought_signature."}}]
    assert "missing a thought_signature" in str(answered(said, status=400))
    http = import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
    transport = http.MockTransport(lambda _request: http.Response(400, json=said))
    client = openai.OpenAI(api_key=KEY, http_client=openai.DefaultHttpxClient(transport=transport))
    error = failure(OpenAIModel("gemini-3-pro", provider="gemini", api="chat", client=client))
    assert "missing a thought_signature" in str(error) and error.status == 400


def test_a_reply_with_calls_is_one_whatever_its_stop_reason_says() -> None:
    for stop in ("end_turn", "tool_use"):
        assert check_reply(ModelReply([CALL], stop)).stop_reason == "tool_use"
    for stop in ("max_tokens", "refusal", "pause_turn", "stop_sequence"):
        assert check_reply(ModelReply([CALL], stop)).stop_reason == stop
    turn = {"content": [CALL], "stop_reason": "end_turn"}
    for model in (ScriptedModel([turn]),):
        assert call_model(model, request(tools=[FIND])).stop_reason == "tool_use"
    with FakeAnthropic([turn]) as fake:
        assert call_model(claude(fake), request(tools=[FIND])).stop_reason == "tool_use"


ODD: dict[str, dict[str, Any]] = {
    "no properties": {"type": "object"},
    "nothing": {},
    "a choice": {
        "type": "object",
        "anyOf": [
            {"properties": {"id": {"type": "string"}}, "required": ["id"]},
            {"$ref": "#/$defs/Named"},
        ],
        "$defs": {"Named": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
    },
    "all of several": {
        "allOf": [
            {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
            {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        ]
    },
    "names of OData": {
        "type": "object",
        "properties": {
            "$select": {"type": "string"},
            "_select": {"type": "string"},
            "x" * 70: {},
            "x" * 64: {},
        },
        "required": ["$select"],
    },
}


@BOTH
@pytest.mark.parametrize("kind", ODD)
def test_schemas_that_are_valid_and_were_refused(streaming: bool, kind: str) -> None:
    tools = [FIND, {"name": "odd", "description": "Odd.", "input_schema": ODD[kind]}]
    with FakeAnthropic([{"text": "So."}]) as fake:
        call_model(claude(fake, streaming=streaming), request(tools=tools))
    for api in ("responses", "chat"):
        name, of = ("gpt-5.4", {}) if api == "responses" else ("qwen3", {"provider": "vllm"})
        with FakeOpenAI([{"text": "So."}]) as server:
            call_model(gpt(server, name, api=api, streaming=streaming, **of), request(tools=tools))


@BOTH
def test_arguments_keep_the_names_that_the_tool_knows(streaming: bool) -> None:
    tools = [{"name": "odd", "description": "Odd.", "input_schema": ODD["names of OData"]}]
    given, sends = {"$select": "a", "_select": "b"}, {"_select_2": "a", "_select": "b"}
    turns = [{"tools": [{"name": "odd", "input": sends}]}, {"text": "So."}]
    with FakeAnthropic(turns) as fake:
        model = claude(fake, streaming=streaming)
        reply = call_model(model, request(tools=tools))
        assert reply.content[0]["input"] == given
        call_model(model, request(tools=tools, messages=went_on([HELLO], reply)))
        assert sent(fake)[1]["messages"][1]["content"][0]["input"] == sends


def test_the_merged_schema_requires_what_every_choice_requires() -> None:
    def merged(schema: dict[str, Any]) -> dict[str, Any]:
        asked = request(tools=[{"name": "odd", "description": "", "input_schema": schema}])
        tool: dict[str, Any] = schemas.acceptable(asked)[0].tools[0]["input_schema"]
        return tool

    assert merged({}) == {"type": "object", "properties": {}}
    choice = merged(ODD["a choice"])
    assert ({*choice["properties"]}, choice.get("required")) == ({"id", "name"}, None)
    both = merged(ODD["all of several"])
    assert ({*both["properties"]}, both["required"]) == ({"n", "a", "b"}, ["n"])
    assert merged(FIND["input_schema"]) == FIND["input_schema"]
