"""Conversations with the fake API through the SDK."""

from __future__ import annotations

from typing import Any

from tests.fake_anthropic import FakeAnthropic

HELLO = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": "claude-sonnet-5-5", "max_tokens": 4096, "messages": [HELLO]}
STRANGE: list[Any] = [
    {"type": "thinking", "thinking": "Let me see: ä."},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "block_of_the_future", "data": [1, {"b": None}], "n": 1e16},
    {"type": "text", "text": "So.", "citations": [{"type": "page", "cited_text": "x"}], "odd": {"a": 1}},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}, "caller": {"type": "direct"}},
]


def create(fake: FakeAnthropic, **changes: Any) -> Any:
    return fake.client().messages.create(**{**ASK, **changes})


def stream(fake: FakeAnthropic, **changes: Any) -> Any:
    with fake.client().messages.stream(**{**ASK, **changes}) as opened:
        return opened.get_final_message()


def wire(message: Any) -> Any:
    return message.to_dict(mode="json", warnings=False)


def went_on(reply: Any) -> list[Any]:
    """The conversation after a reply whose calls were answered."""
    content = wire(reply)["content"]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    answers = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in ids]
    return [HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": answers}]
