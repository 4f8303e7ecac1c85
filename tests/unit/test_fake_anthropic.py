"""What tests of the provider rely on: the fake follows its script, and is no more lenient than the API.

Its streams, faults, counts and threads are met by the provider in test_anthropic.py and those beside it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_anthropic import FakeAnthropic
from tests.pictures import PNG
from tests.unit.messages import HELLO, assistant, result, text, use, user

ASK: dict[str, Any] = {"model": "claude-sonnet-5-5", "max_tokens": 4096, "messages": [HELLO]}
STRANGE: list[Any] = [
    {"type": "thinking", "thinking": "Let me see: ä."},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "block_of_the_future", "data": [1, {"b": None}], "n": 1e16},
    {"type": "text", "text": "So.", "citations": [{"type": "page", "cited_text": "x"}], "odd": {"a": 1}},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}, "caller": {"type": "direct"}},
]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
OPEN = {**CLOSED, "properties": {"a": {"type": "array", "items": SCHEMA}}}
TOOL = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
EPHEMERAL: dict[str, Any] = {"type": "ephemeral"}
MARK: dict[str, Any] = {"cache_control": EPHEMERAL}
HOUR: dict[str, Any] = {"cache_control": {**EPHEMERAL, "ttl": "1h"}}
THINKING: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
LINK = {"type": "document", "source": {"type": "url"}}
PICTURE: dict[str, Any] = {"type": "image", "source": SOURCE}


@pytest.fixture
def fake() -> Iterator[FakeAnthropic]:
    with FakeAnthropic([{"text": "Yes."}]) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[FakeAnthropic]:
    with FakeAnthropic(lambda body: {"text": "Yes."}) as running:
        yield running


@pytest.fixture
def thinker() -> Iterator[FakeAnthropic]:
    with FakeAnthropic([{"content": STRANGE}, {"text": "Done."}, {"text": "Bye."}]) as running:
        yield running


def create(fake: FakeAnthropic, **changes: Any) -> Any:
    return fake.client().messages.create(**{**ASK, **changes})


def stream(fake: FakeAnthropic, **changes: Any) -> Any:
    with fake.client().messages.stream(**{**ASK, **changes}) as opened:
        return opened.get_final_message()


def count(fake: FakeAnthropic, **changes: Any) -> Any:
    asked = {"model": ASK["model"], "messages": ASK["messages"], **changes}
    return fake.client().messages.count_tokens(**asked)


def refusal(fake: FakeAnthropic, ask: Any = create, **changes: Any) -> str:
    """Find the text with which a request is refused."""
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(fake, **changes)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.api_message == fake.calls[-1].error
    return str(caught.value.api_message)


def wire(message: Any) -> Any:
    return message.to_dict(mode="json", warnings=False)["content"]


def went_on(reply: Any) -> list[Any]:
    """Build the conversation after a reply whose calls were answered."""
    content = wire(reply)
    return [HELLO, assistant(*content), user(*(result(b["id"]) for b in content if b["type"] == "tool_use"))]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([], "script exhausted: The script has 0 turns and was asked for number 1."),
        (lambda body: {"txt": ""}, "The script failed: ValueError: Turn 1 has txt"),
        (lambda body: body["nothing"], "The script failed: KeyError: 'nothing'"),
        (lambda body: {"content": [{"type": "x", "n": object()}]}, "The script failed: TypeError"),
    ],
)
def test_a_script_that_cannot_go_on_is_a_400_so_that_nobody_retries(script: Any, told: str) -> None:
    with FakeAnthropic(script) as fake:
        assert refusal(fake).startswith(told)


def paid(usage: Any) -> tuple[int, int, int]:
    return usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens


def test_a_breakpoint_caches_what_is_before_it_and_nothing_else(fake: FakeAnthropic) -> None:
    long = {"type": "text", "text": "x" * 400, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    rest, created, read = paid(create(fake, system=[long]).usage)
    assert rest > 0 and created > 100 and read == 0
    again = create(fake, system=[long], messages=[{"role": "user", "content": "something else"}])
    assert paid(again.usage)[1:] == (0, created)
    assert create(fake, system=[long], model="claude-opus-5").usage.cache_read_input_tokens == 0
    changed = create(fake, system=[{**long, "text": "y" + "x" * 399}])
    assert paid(changed.usage)[1:] == (created, 0)
    assert changed.usage.cache_creation.ephemeral_1h_input_tokens == created
    assert create(fake, system=[{"type": "text", "text": "x" * 400}]).usage.cache_read_input_tokens == 0
    for blocks, is_found in ((24, True), (25, False)):  # 19 and 20 blocks after the entry
        fake.cache.clear()
        for number in (5, blocks):
            content = [text(f"block number {n}") for n in range(number)]
            content[-1] |= MARK
            usage = create(fake, messages=[user(*content)]).usage
        assert bool(usage.cache_read_input_tokens) == is_found


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"extra_body": {"temperature": 0.5}}, "temperature: Extra inputs are not permitted"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens: Input should be a valid integer"),
        ({"system": [text("\n")]}, "system: text content blocks must contain non-whitespace text"),
        ({"system": [text(cache_control={"type": "for ever"})]}, "system.0.cache_control: Input tag"),
        ({"system": [text(cache_control={**EPHEMERAL, "ttl": "2h"})]}, "system.0.cache_control.ttl: Input"),
        ({"tools": [{**TOOL, "name": "look up"}]}, "tools.0.custom.name: String should match pattern"),
        ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
        ({"tools": [{"name": "look"}]}, "tools.0.custom.input_schema: Field required"),
        ({"tools": [{**TOOL, "input_schema": {}}]}, "tools.0.custom.input_schema.type: Input should be"),
        ({"tools": [{**TOOL, "input_schema": {**SCHEMA, "anyOf": []}}]}, "tools.0.custom.input_schema:"),
        ({"tools": [{**TOOL, "input_schema": {**SCHEMA, "properties": {"a b": {}}}}]}, "tools.0.custom"),
        ({"tools": [{**TOOL, "risk": "high"}]}, "tools.0.custom.risk: Extra inputs are not permitted"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: Field"),
        ({"output_config": {"format": {"type": "json_schema", "schema": OPEN}}}, "output_config.format"),
        ({"messages": [user(*[text(f"{n}", **MARK) for n in range(5)])]}, "A maximum of 4 blocks"),
        ({"messages": [user(text("a", **MARK), text("b", **HOUR))]}, "cache_control: a ttl='1h' block must"),
        # How calls and results have to follow one another is in test_check_messages.py.
        ({"messages": [HELLO, assistant(use()), HELLO]}, "messages.2.content.0: tool_use t1 has no"),
        ({"messages": [HELLO, assistant(text())]}, "This model does not support assistant message prefill."),
        ({"messages": [HELLO, assistant(text(parsed_output=None)), HELLO]}, "messages.1.content.0.text"),
        ({"messages": [user(text(citations=[]))]}, "messages.0.content.0.text.citations: Extra inputs"),
        ({"messages": [HELLO, assistant(use()), user(result(outcome="ok"))]}, "messages.2.content.0.tool"),
        ({"messages": [HELLO, assistant(use()), user(result(content=[text(odd=1)]))]}, "messages.2.content"),
        ({"messages": [HELLO, assistant({"type": "mine"}), HELLO]}, "messages.1.content.0: Input tag"),
        ({"messages": [user({**PICTURE, "title": "x"})]}, "messages.0.content.0.image.title: Extra inputs"),
        ({"messages": [user({**LINK, "title": ""})]}, "messages.0.content.0.title: String should have"),
    ],
)  # fmt: skip
def test_what_is_refused(strict: FakeAnthropic, changes: Any, told: str) -> None:
    assert refusal(strict, **changes).startswith(told)


def test_breakpoints_are_counted_wherever_they_are(strict: FakeAnthropic) -> None:
    options: dict[str, Any] = {"tools": [{**TOOL, **MARK}], "system": [text(**MARK)]}
    inner = user(result(content=[text(**MARK)], **MARK), text(**MARK))
    assert refusal(strict, messages=[HELLO, assistant(use()), inner], **options).endswith("Found 5.")


def test_an_unknown_model_is_not_found_and_counting_tokens_has_the_same_rules(strict: FakeAnthropic) -> None:
    import anthropic

    for ask in (create, stream, count):
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask(strict, model="gpt-9")
        assert (caught.value.type, caught.value.api_message) == ("not_found_error", "model: gpt-9")
    assert "has no tool_result" in refusal(strict, count, messages=[HELLO, assistant(use()), HELLO])
    assert refusal(strict, count, extra_body={"max_tokens": 3}).startswith("max_tokens: Extra inputs")
    assert count(strict, thinking=THINKING).input_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[0].update(thinking="Let me see: a."),
        lambda content: content[0].update(signature="of another"),
        lambda content: content[0].update(MARK),
        lambda content: content[1].update(data="b3RoZXI="),
        lambda content: content.pop(0),
        lambda content: content.pop(1),
        lambda content: content.insert(0, content.pop(1)),
        lambda content: [content.pop(0) for _ in range(2)],
    ],
)
def test_thinking_that_was_altered_or_dropped(thinker: FakeAnthropic, change: Any) -> None:
    messages = went_on(create(thinker))
    change(messages[1]["content"])
    error = refusal(thinker, messages=messages, thinking={"type": "adaptive"})
    assert error.startswith("messages.1.content.")
    assert "cannot be modified" in error or "cache_control: Extra inputs" in error
    assert refusal(thinker, messages=messages) == error, "some models think unless told not to"
    if len(messages[1]["content"]) == len(STRANGE) - 2:
        create(thinker, messages=messages, thinking={"type": "disabled"})


def test_manual_thinking_begins_every_turn_of_a_tool_loop_and_is_never_forged(thinker: FakeAnthropic) -> None:
    messages = went_on(create(thinker, thinking=THINKING))
    assert create(thinker, messages=messages, thinking=THINKING).stop_reason == "end_turn"
    error = refusal(thinker, messages=[HELLO, assistant(use()), user(result())], thinking=THINKING)
    assert error.startswith("messages.1.content.0.type: Expected `thinking`, but found `tool_use`.")
    said = [*messages, assistant(text("Done.")), HELLO]
    assert create(thinker, messages=said, thinking=THINKING).content[0].text == "Bye."
    content = said[1]["content"]
    content[0]["thinking"] = "Forged."
    assert refusal(thinker, messages=said) == "messages.1.content.0: Invalid `signature`"
    del content[0]
    assert create(thinker, messages=said).content[0].text == "Bye.", "dropped of an earlier turn"
