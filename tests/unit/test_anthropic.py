"""What goes to Claude and what comes back, through the real SDK."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentruns import Agent, run_agent
from agentruns.models import Message
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError, call_model
from agentruns.providers.blocks import GONE, for_claude
from agentruns.signals import text_streamed
from agentruns.utils import json as canonical
from tests.db.helpers import payloads, the_run
from tests.fake_anthropic import FakeAnthropic
from tests.providers.asking import FIND, HELLO, NAME, claude, failure, heard, request, sent, went_on

BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "plain"])
PAGE = {"url": "https://example.org", "title": "x", "page_age": None, "encrypted_content": "zz"}
FOUND = {"type": "web_search_result", **PAGE}
STRANGE: list[Any] = [
    {"type": "thinking", "thinking": "Let me see: ä."},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [FOUND]},
    {"type": "block_of_the_future", "data": [1, {"b": None}], "n": 1e16},
    {"type": "text", "text": "So.", "citations": [{"type": "page", "cited_text": "x"}], "odd": {"a": 1}},
    {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"n": 1e16, "m": -0.0}},
]


@pytest.fixture
def fake() -> Iterator[FakeAnthropic]:
    """A server that says one thing."""
    with FakeAnthropic([{"text": "1"}]) as running:
        yield running


@BOTH
def test_what_is_sent(streaming: bool) -> None:
    assistant = {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}
    messages = [HELLO, assistant, {"role": "user", "content": "a\x00\ud800"}]
    params: dict[str, Any] = {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "u1"}}
    asked = request(tools=[FIND], messages=messages, params=params)
    with FakeAnthropic([{"text": "1"}, {"text": "2"}]) as fake:
        model = claude(fake, cache=None, **({} if streaming else {"streaming": False}))
        model.propose(asked)
        model.propose(request(system="", params={"max_tokens": 5}))
        first, second = sent(fake)
    assert first == {
        **{"model": NAME, "max_tokens": 8192, "system": "Help."},
        "messages": [*messages[:2], {"role": "user", "content": "a\ufffd\ufffd"}],
        "tools": [FIND],
        **params,
        **({"stream": True} if streaming else {}),
    }
    assert second.keys() - {"stream"} == {"model", "max_tokens", "messages"}
    assert second["max_tokens"] == 5


def test_long_replies_have_time_and_tools_of_the_provider_follow_the_agents_own(
    fake: FakeAnthropic,
) -> None:
    for options in ({}, {"streaming": False}, {"timeout": 5}, {"timeout": 5, "streaming": False}):
        claude(fake, **options).propose(request(params={"max_tokens": 64_000}))
    found = [call.headers["x-stainless-read-timeout"] for call in fake.calls]
    assert found == ["600", "1800.0", "5", "5"]
    search = {"type": "web_search_20260318", "name": "web_search", "max_uses": 3}
    params = {"tools": [search], "tool_choice": {"type": "auto"}}
    claude(fake, cache=None).propose(request(tools=[FIND], params=params))
    claude(fake, cache=None).propose(request(params={"tools": [search]}))
    assert [body["tools"] for body in sent(fake)[4:]] == [[FIND, search], [search]]
    assert params["tools"] == [search]


@BOTH
def test_betas_are_a_header_and_their_blocks_come_and_go_whole(streaming: bool) -> None:
    used = {"id": "mcptoolu_1", "name": "look", "server_name": "crm", "input": {"id": "ä-17", "deep": [1]}}
    content = [
        {"type": "mcp_tool_use", **used},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": []},
        {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"n": 1}},
    ]
    params = {"betas": ["mcp-client-2025-11-20", "b"]}
    with FakeAnthropic([{"content": content}, {"text": "2"}]) as fake:
        model = claude(fake, streaming=streaming)
        reply = call_model(model, request(tools=[FIND], params=params))
        assert canonical.dumps(reply.content) == canonical.dumps(content)
        model.propose(request(tools=[FIND], params=params, messages=went_on([HELLO], reply)))
        assert [call.status for call in fake.calls] == [200, 200]
        assert fake.calls[0].headers["anthropic-beta"] == "mcp-client-2025-11-20,b"
        assert not any("betas" in body for body in sent(fake))
        assert (reply.request_id, reply.model) == (fake.calls[0].request_id, NAME)
        claude(fake, streaming=False).propose(request(params={"betas": []}))
        assert "anthropic-beta" not in fake.calls[-1].headers


def test_a_block_the_sdk_would_lose_parts_of_is_never_stored() -> None:
    used = {"type": "mcp_tool_use", "id": "m1", "name": "look", "server_name": "crm", "input": {"id": 1}}
    with FakeAnthropic([{"content": [used], "stop_reason": "end_turn"}]) as fake:
        error = failure(claude(fake))
        assert call_model(claude(fake, streaming=False), request()).content == [used]
    assert (error.disposition, error.type) == ("pause", "unknown_delta")
    assert "mcp_tool_use" in str(error) and "betas" in str(error) and error.usage


def test_the_form_of_the_output_is_told_as_the_provider_wants_it() -> None:
    number = {"type": "integer", "exclusiveMinimum": 0}
    schema = {"type": "object", "title": "Answer", "properties": {"n": number}, "required": ["n"]}
    before = copy.deepcopy(schema)
    with FakeAnthropic([{"text": '{"n": 1}'}]) as fake:
        asked = request(output_schema=schema, params={"output_config": {"effort": "low"}})
        assert call_model(claude(fake), asked).content == [{"type": "text", "text": '{"n": 1}'}]
        (config,) = [body["output_config"] for body in sent(fake)]
    assert (schema, config["effort"], config["format"]["type"]) == (before, "low", "json_schema")
    told = config["format"]["schema"]
    assert told["additionalProperties"] is False
    assert "exclusiveMinimum" in told["properties"]["n"]["description"]


@BOTH
def test_a_reply_is_kept_as_it_came_and_goes_back_untouched(streaming: bool) -> None:
    with FakeAnthropic([{"content": STRANGE}, {"text": "Done."}]) as fake:
        model = claude(fake, streaming=streaming)
        params = {"thinking": {"type": "adaptive"}}
        reply = call_model(model, request(tools=[FIND], params=params))
        content = copy.deepcopy(reply.content)
        assert content[0].pop("signature")
        assert canonical.dumps(content) == canonical.dumps(STRANGE)
        stored = json.loads(canonical.dumps(reply.content))
        assert (reply.stop_reason, reply.model) == ("tool_use", NAME)
        assert reply.request_id == fake.calls[0].request_id
        messages = went_on([HELLO], reply)
        messages[1]["content"] = stored  # as it is read back from the journal
        again = call_model(model, request(tools=[FIND], params=params, messages=messages))
        assert again.content == [{"type": "text", "text": "Done."}]
        assert sent(fake)[1]["messages"][1] == {"role": "assistant", "content": reply.content}

        messages[1]["content"] = [*stored[:3], {**stored[3], "content": []}, *stored[4:]]
        messages[1]["content"][0] = {**stored[0], "thinking": "Altered."}
        error = failure(model, request(tools=[FIND], params=params, messages=messages))
        assert error.disposition == "fail" and "cannot be modified" in str(error)

        params["thinking"]["display"] = "omitted"
        reply = call_model(model, request(tools=[FIND], params=params))
        assert reply.content[0]["thinking"] == "" and reply.content[0]["signature"]
        model.propose(request(tools=[FIND], params=params, messages=went_on([HELLO], reply)))


@pytest.mark.parametrize(
    ("says", "types", "kind"),
    [
        ("user", "hello", "enabled"),
        ("user", GONE, "enabled"),  # the user typed it
        ("assistant", GONE, "disabled"),  # a reply was left out
    ],
)
def test_a_reply_that_was_left_out_switches_thinking_off_in_its_turn(
    says: str, types: str, kind: str
) -> None:
    reasoned = {"type": "thinking", "thinking": "deep", "signature": "s"}
    messages, text = [HELLO], {"type": "text", "text": types}
    for id, first in (("t1", reasoned), ("t2", text if says == "assistant" else reasoned)):
        reply = [first, {"type": "tool_use", "id": id, "name": "find", "input": {}}]
        messages += [{"role": "assistant", "content": reply}]
        messages += [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "r"}]}
        ]
    messages[-1]["content"] += [text] if says == "user" else []
    sent, thinking = for_claude(messages, {"type": "enabled", "budget_tokens": 1024})
    assert (thinking["type"], "deep" in repr(sent)) == (kind, kind == "enabled")


@BOTH
@pytest.mark.parametrize("reason", ["stop_sequence", "pause_turn", "refusal", "reason_of_the_future"])
def test_every_stop_reason_is_handed_on(streaming: bool, reason: str) -> None:
    content = [{"type": "text", "text": "So."}, {"type": "tool_use", "id": "t", "name": "find", "input": {}}]
    turn = {"content": content, "stop_reason": reason, "usage": {"output_tokens": 7}}
    with FakeAnthropic([turn]) as fake:
        reply = call_model(claude(fake, streaming=streaming), request(tools=[FIND]))
    assert (reply.stop_reason, reply.content) == (reason, content)
    assert reply.usage["output_tokens"] == 7 and reply.usage["cache_creation_input_tokens"] > 0


def test_text_is_told_as_it_comes_and_the_run_may_want_no_more() -> None:
    turn = {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Grüße … 🔎"}]}
    told: list[str] = []
    with FakeAnthropic([turn]) as fake, heard() as said:
        asked = request(run_id="r1", step=0, on_text=told.append)
        claude(fake).propose(asked)
        assert len(said) > 1 and "".join(each.pop("text") for each in said) == "".join(told) == "Grüße … 🔎"
        assert all(each == {"sender": AnthropicModel, "run_id": "r1", "step": 0} for each in said)
        assert told[0] == "", "it thinks"
        del said[:]
        claude(fake, streaming=False).propose(asked)
        assert said == []

        def enough(piece: str) -> None:
            raise ProviderError("enough", disposition="pause", type="reply_stopped")

        stopped = failure(claude(fake), replace(asked, on_text=enough))
    assert (stopped.type, stopped.disposition) == ("reply_stopped", "pause")
    assert stopped.usage and stopped.usage["input_tokens"] > 0, "as far as it is known"


@pytest.mark.django_db(transaction=True)
def test_what_streams_is_never_journaled_and_a_listener_that_raises_hurts_nobody() -> None:
    rows: list[int] = []

    def count(**told: Any) -> None:
        rows.append(Message.objects.count())
        raise RuntimeError("no")

    text_streamed.connect(count)
    try:
        with FakeAnthropic([{"text": "Hello you."}]) as fake, heard() as said:
            agent = Agent("live", instructions="Help.", model=claude(fake))
            run = the_run(run_agent(agent, "hi", "s1", idempotency_key="k"))
    finally:
        text_streamed.disconnect(count)
    assert {(told["run_id"], told["step"]) for told in said} == {(str(run.pk), 0)}
    assert "".join(told["text"] for told in said) == "Hello you."
    assert len(set(rows)) == 1
    (reply,) = payloads(run, "assistant")
    assert reply["content"] == [{"type": "text", "text": "Hello you."}]
