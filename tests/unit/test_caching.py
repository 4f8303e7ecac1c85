"""What is marked for the provider's cache, and that it pays: the fake counts as the API does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from agentruns.providers.anthropic import AnthropicModel, marked
from agentruns.providers.base import call_model
from tests.fake_anthropic import FakeAnthropic
from tests.providers.asking import FIND, HELLO, NAME, claude, request, sent, went_on

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "plain"])
STEPS = 6
LOOP: list[Any] = [
    *({"text": f"Step {n}.", "tools": [{"name": "find", "input": {"n": n}}]} for n in range(STEPS - 1)),
    {"text": "Done."},
]


@pytest.fixture
def fake() -> Iterator[FakeAnthropic]:
    with FakeAnthropic(LOOP) as running:
        yield running


def looped(fake: FakeAnthropic, asked: Any = request, **options: Any) -> list[dict[str, Any]]:
    """The usage of each reply of a tool loop."""
    model, messages = claude(fake, **options), [HELLO]
    used: list[dict[str, Any]] = []
    while messages[-1]["role"] == "user":
        reply = call_model(model, asked(tools=[FIND], messages=messages))
        messages = went_on(messages, reply, content="An order like many others, and rather long. " * 3)
        used.append(reply.usage)
    return used


def marks(value: Any, at: str = "") -> dict[str, Any]:
    """The marks in a request by where they are."""
    found = {}
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "cache_control":
            found[at] = each
        elif isinstance(each, dict | list):
            found |= marks(each, f"{at}.{key}".strip("."))
    return found


def unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: unmarked(each) for name, each in value.items() if name != "cache_control"}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


@BOTH
def test_a_tool_loop_writes_only_what_is_new(fake: FakeAnthropic, streaming: bool) -> None:
    used, known = looped(fake, streaming=streaming), 0
    assert len(used) == STEPS
    for each in used:
        assert each["cache_read_input_tokens"] == known, "all that was ever written is read"
        known += each["cache_creation_input_tokens"]
        assert each["cache_creation_input_tokens"] > 0 and each["input_tokens"] == 0
    for number, body in enumerate(sent(fake)):
        last_two = [f"messages.{at}.content.0" for at in (2 * number - 2, 2 * number) if at >= 0]
        assert sorted(marks(body)) == sorted(["system.0", *last_two])


def test_an_hour_if_wished_or_nothing_at_all(fake: FakeAnthropic) -> None:
    used = looped(fake, cache="1h")
    for body in sent(fake):
        assert all(mark == HOUR["cache_control"] for mark in marks(body).values()) and marks(body)
    assert used[0]["cache_creation"]["ephemeral_1h_input_tokens"] > 0
    assert used[0]["cache_creation"]["ephemeral_5m_input_tokens"] == 0
    fake.calls.clear()
    used = looped(fake, cache=None)
    assert not any(each["cache_creation_input_tokens"] for each in used)
    assert not any(marks(body) for body in sent(fake))
    with pytest.raises(ValueError, match="5m"):
        AnthropicModel(NAME, cache="10m")  # type: ignore[arg-type]


def test_a_retried_request_reads_what_the_failed_one_wrote_and_a_single_one_is_not_marked() -> None:
    with FakeAnthropic(LOOP) as fake:
        fake.fault("truncate", after=3)
        model, asked = claude(fake), request(tools=[FIND])
        with pytest.raises(Exception, match="cut off"):
            call_model(model, asked)
        assert call_model(model, asked).usage["cache_read_input_tokens"] > 0
    with FakeAnthropic([{"text": "1"}, {"text": "2"}]) as fake:
        model = claude(fake)
        first = call_model(model, request())  # without tools
        assert first.usage["cache_creation_input_tokens"] == 0
        model.propose(request(messages=[*went_on([HELLO], first), HELLO]))
        assert [bool(marks(body)) for body in sent(fake)] == [False, True]


@pytest.mark.parametrize(
    "own",
    [
        {"params": {**HOUR}},
        {"tools": [{**FIND, **HOUR}]},
        {"params": {"tools": [{"type": "web_search_20260318", "name": "web_search", **HOUR}]}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **HOUR}]}]},
    ],
)
def test_marks_of_the_developers_own_are_left_alone(fake: FakeAnthropic, own: dict[str, Any]) -> None:
    claude(fake).propose(request(**{"tools": [FIND], **own}))
    (body,) = sent(fake)
    assert [*marks(body).values()] == [HOUR["cache_control"]]


@BOTH
def test_only_the_marks_differ_and_nothing_that_was_given(fake: FakeAnthropic, streaming: bool) -> None:
    given: list[Any] = []

    def asked(**changes: Any) -> Any:
        made = request(**changes)
        given.append((made, copy.deepcopy(made)))
        return made

    looped(fake, asked, streaming=streaming)
    bodies = sent(fake)
    for (made, before), body in zip(given, bodies, strict=True):
        assert made == before and made.messages == before.messages
        assert unmarked(body["messages"]) == made.messages
        assert unmarked(body["tools"]) == made.tools
        assert unmarked(body["system"]) == [{"type": "text", "text": made.system}]


def test_without_a_system_the_last_tool_is_marked_and_what_cannot_be_is_not() -> None:
    body = {"messages": [HELLO], "tools": [{**FIND, "name": "other"}, FIND]}
    assert marks(marked(body)) == dict.fromkeys(["tools.1", "messages.0.content.0"], MARK["cache_control"])
    user = {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}
    empty = {"role": "user", "content": []}
    assistant = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    body = {"messages": [empty, assistant, user], "tools": [FIND]}
    assert [*marks(marked(body))] == ["tools.0"]
    said = [{"role": "user", "content": text} for text in ("as text", "x")]
    spoken = {"messages": [said[0], assistant, said[1]]}
    assert marked(spoken)["messages"][0]["content"] == [{"type": "text", "text": "as text", **MARK}]
    assert marks(spoken) == {}
    paused = {"messages": [HELLO, assistant], "tools": [FIND]}
    assert [*marks(marked(paused))] == ["messages.0.content.0", "tools.0"]
