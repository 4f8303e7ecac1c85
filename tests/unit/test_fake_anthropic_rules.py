"""The fake refuses what the Messages API refuses, in its words, through the real SDK."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_anthropic import FakeAnthropic
from tests.fake_anthropic.replies import sign
from tests.pictures import NOTE, PDF, PNG, png
from tests.unit import sdk
from tests.unit.conversations import ASK, HELLO, STRANGE, create, stream, went_on, wire

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
TOOL = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
EPHEMERAL: dict[str, Any] = {"type": "ephemeral"}
THINKING: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeAnthropic]:
    with FakeAnthropic(lambda body: {"text": "Yes."}) as running:
        yield running


def text(value: str = "hi", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "look", "input": {}, **more}


def result(id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": "ok", **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def refusal(fake: FakeAnthropic, **changes: Any) -> str:
    """Return the refusal of a request; fields that the SDK does not know are added to its body."""
    extra = {name: changes.pop(name) for name in list(changes) if name in ("temperature", "top_k", "colour")}
    with pytest.raises(sdk.BadRequestError) as caught:
        create(fake, **changes, extra_body=extra)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.api_message == fake.calls[-1].error
    return str(caught.value.api_message)


def test_an_unknown_model_is_not_found(fake: FakeAnthropic) -> None:
    for ask in (create, stream, count):
        with pytest.raises(sdk.NotFoundError) as caught:
            ask(fake, model="gpt-9")
        assert (caught.value.type, caught.value.api_message) == ("not_found_error", "model: gpt-9")


def count(fake: FakeAnthropic, **changes: Any) -> Any:
    asked = {"model": ASK["model"], "messages": ASK["messages"], **changes}
    return fake.client().messages.count_tokens(**asked)


# Fields

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.5}, "temperature: Extra inputs are not permitted"),
    ({"top_k": 3}, "top_k: Extra inputs are not permitted"),
    ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 1"),
    ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    (
        {"max_tokens": 200_000, "timeout": 5},
        "max_tokens: 200000 > 128000, which is the maximum allowed number of output tokens for "
        "claude-sonnet-5-5",
    ),
    ({"messages": "hi"}, "messages: Input should be a valid list"),
    ({"model": 3}, "model: Input should be a valid string"),
    ({"stop_sequences": [" "]}, "stop_sequences: each stop sequence must contain non-whitespace"),
    ({"stop_sequences": [3]}, "stop_sequences.0: Input should be a valid string"),
    ({"service_tier": "gold"}, "service_tier: Input should be 'auto' or 'standard_only'"),
    ({"speed": "slow"}, "speed: Input should be 'fast' or 'standard'"),
    ({"metadata": {"user": "x"}}, "metadata.user: Extra inputs are not permitted"),
    ({"cache_control": {"type": "for ever"}}, "cache_control.type: Input should be 'ephemeral'"),
    ({"cache_control": {**EPHEMERAL, "ttl": "2h"}}, "cache_control.ttl: Input should be '1h' or '5m'"),
    ({"system": [text("")]}, "system: text content blocks must be non-empty"),
    ({"system": [text("\n")]}, "system: text content blocks must contain non-whitespace text"),
    (
        {"system": [{"type": "image"}]},
        "system.0: Input tag 'image' found using 'type' does not match any of the expected tags: 'text'",
    ),
    # Thinking
    ({"thinking": {"type": "enabled"}}, "thinking.enabled.budget_tokens: Field required"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1023}},
        "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
    ),
    (
        {"thinking": THINKING, "max_tokens": 1024},
        "`max_tokens` must be greater than `thinking.budget_tokens`.",
    ),
    (
        {"thinking": {"type": "hard"}},
        "thinking: Input tag 'hard' found using 'type' does not match any of the expected tags: "
        "'adaptive', 'between_tools', 'disabled', 'enabled'",
    ),
    (
        {"thinking": {"type": "adaptive", "budget_tokens": 2000}},
        "thinking.adaptive.budget_tokens: Extra inputs are not permitted",
    ),
    (
        {"thinking": {"type": "adaptive", "display": "all"}},
        "thinking.adaptive.display: Input should be 'omitted' or 'summarized'",
    ),
    # Tools
    (
        {"tools": [{**TOOL, "name": "look up"}]},
        "tools.0.custom.name: String should match pattern '^[a-zA-Z0-9_-]{1,64}$'",
    ),
    ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
    ({"tools": [{"name": "look"}]}, "tools.0.custom.input_schema: Field required"),
    ({"tools": [{**TOOL, "input_schema": {}}]}, "tools.0.custom.input_schema.type: Field required"),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "array"}}]},
        "tools.0.custom.input_schema.type: Input should be 'object'",
    ),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "object", "anyOf": []}}]},
        "tools.0.custom.input_schema: input_schema does not support oneOf, allOf, or anyOf at the top level",
    ),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "object", "properties": {"a b": {}}}}]},
        "tools.0.custom.input_schema.properties: Property keys should match pattern '^[a-zA-Z0-9_.-]{1,64}$'",
    ),
    ({"tools": [{**TOOL, "risk": "high"}]}, "tools.0.custom.risk: Extra inputs are not permitted"),
    (
        {"tools": [{**TOOL, "strict": True}]},
        "tools.0.custom.input_schema: For 'object' type, 'additionalProperties' must be explicitly set to "
        "false",
    ),
    (
        {"tools": [{"type": "laser_20260101", "name": "laser"}]},
        "tools.0: Input tag 'laser_20260101' found using 'type' does not match any of the expected tags",
    ),
    # Tool choice
    (
        {"tool_choice": {"type": "any"}},
        "tool_choice: tool_choice may only be specified while providing `tools`.",
    ),
    (
        {"tool_choice": {"type": "tool", "name": "find"}, "tools": [TOOL]},
        "Tool 'find' not found in provided tools",
    ),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.tool.name: Field required"),
    (
        {"tool_choice": {"type": "any"}, "tools": [TOOL], "thinking": {"type": "adaptive"}},
        "Thinking may not be enabled when tool_choice forces tool use.",
    ),
    # Output
    (
        {"output_config": {"effort": "none"}},
        "output_config.effort: Input should be 'high', 'low', 'max', 'medium' or 'xhigh'",
    ),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: Field required"),
    (
        {"output_config": {"format": {"type": "json_schema", "name": "x", "schema": CLOSED}}},
        "output_config.format.name: Extra inputs are not permitted",
    ),
    (
        {
            "output_config": {
                "format": {
                    "type": "json_schema",
                    "schema": {**CLOSED, "properties": {"a": {"type": "array", "items": SCHEMA}}},
                }
            }
        },
        "output_config.format.schema: For 'object' type, 'additionalProperties' must be explicitly set to "
        "false",
    ),
]


@pytest.mark.parametrize(("changes", "message"), FIELDS)
def test_fields_that_are_refused(fake: FakeAnthropic, changes: dict[str, Any], message: str) -> None:
    assert refusal(fake, **dict(changes)) == message


@pytest.mark.parametrize("field", ["model", "max_tokens", "messages"])
def test_fields_that_are_required(fake: FakeAnthropic, field: str) -> None:
    body = {name: value for name, value in ASK.items() if name != field}
    with pytest.raises(sdk.BadRequestError) as caught:
        fake.client().post("/v1/messages", body=body, cast_to=object)
    assert caught.value.api_message == f"{field}: Field required"


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "Help.", "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"system": [text(cache_control=EPHEMERAL)], "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"thinking": THINKING, "max_tokens": 1025},
        {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
        {"tools": [{**TOOL, "strict": True, "input_schema": CLOSED}], "tool_choice": {"type": "none"}},
        {"tools": [{"type": "web_search_20260318", "name": "web_search", "max_uses": 3}, TOOL]},
        {"output_config": {"format": {"type": "json_schema", "schema": CLOSED}}},
    ],
)
def test_fields_that_are_accepted(fake: FakeAnthropic, changes: Any) -> None:
    assert create(fake, **changes).content[0].text == "Yes."


def test_counting_tokens_has_the_same_rules(fake: FakeAnthropic) -> None:
    with pytest.raises(sdk.BadRequestError, match="`tool_use` ids were found without"):
        count(fake, messages=[HELLO, assistant(use()), HELLO])
    with pytest.raises(sdk.BadRequestError, match="max_tokens: Extra inputs"):
        count(fake, extra_body={"max_tokens": 3})
    assert count(fake, thinking=THINKING).input_tokens > 0


# The conversation

WITHOUT = (
    "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: {}. Each "
    "`tool_use` block must have a corresponding `tool_result` block in the next message."
)
UNEXPECTED = (
    "{}: unexpected `tool_use_id` found in `tool_result` blocks: {}. Each `tool_result` block must have a "
    "corresponding `tool_use` block in the previous message."
)
EMPTY = "{}: all messages must have non-empty content except for the optional final assistant message"
CALLED = [HELLO, assistant(use("t1"), use("t2"))]

CONVERSATIONS: list[tuple[list[Any], str]] = [
    ([], "messages: at least one message is required"),
    ([assistant(text())], 'messages: first message must use the "user" role'),
    ([{"role": "tool", "content": "x"}], "messages.0.role: Input should be 'assistant' or 'user'"),
    ([{**HELLO, "name": "x"}], "messages.0.name: Extra inputs are not permitted"),
    ([{"role": "user"}], "messages.0.content: Field required"),
    ([user()], EMPTY.format("messages.0")),
    ([HELLO, assistant(), HELLO], EMPTY.format("messages.1")),
    ([{"role": "user", "content": ""}], EMPTY.format("messages.0")),
    ([user(text(""))], "messages: text content blocks must be non-empty"),
    ([user(text(" \n"))], "messages: text content blocks must contain non-whitespace text"),
    ([user({"type": "text"})], "messages.0.content.0.text.text: Field required"),
    ([*CALLED, user(text())], WITHOUT.format("t1, t2")),
    ([*CALLED, user(result("t1"))], WITHOUT.format("t2")),
    ([*CALLED, user(result("t1"), text(), result("t2"))], WITHOUT.format("t2")),
    ([*CALLED, user(text(), result("t1"), result("t2"))], WITHOUT.format("t1, t2")),
    (CALLED, WITHOUT.format("t1, t2")),
    (
        [*CALLED, user(result("t1"), result("t2"), result("t9"))],
        UNEXPECTED.format("messages.2.content.2", "t9"),
    ),
    ([user(result("t1"))], UNEXPECTED.format("messages.0.content.0", "t1")),
    (
        [*CALLED, user(result("t1"), result("t2"), result("t1"))],
        "messages.2.content.0: each tool_use must have a single result. Found multiple `tool_result` blocks "
        "with id: t1",
    ),
    (
        [HELLO, assistant(use()), user(result()), assistant(use()), user(result())],
        "messages.3.content.0: `tool_use` ids must be unique",
    ),
    (
        [HELLO, assistant(use(), text("after")), user(result())],
        "messages.1.content.1: nothing but tool_use may follow a tool_use",
    ),
    ([user(use())], "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages"),
    (
        [HELLO, assistant(result())],
        "messages.1.content.0: `tool_result` blocks can only be in `user` messages",
    ),
    (
        [HELLO, assistant({"type": "tool_use", "name": "look", "input": {}}), HELLO],
        "messages.1.content.0.tool_use.id: Field required",
    ),
    (
        [HELLO, assistant(use(input="{}")), user(result())],
        "messages.1.content.0: the input of a tool_use is an object",
    ),
    (
        [HELLO, assistant(text(parsed_output=None)), HELLO],
        "messages.1.content.0.text.parsed_output: Extra inputs are not permitted",
    ),
    ([user(text(citations=[]))], "messages.0.content.0.text.citations: Extra inputs are not permitted"),
    (
        [HELLO, assistant(use()), user(result(outcome="ok"))],
        "messages.2.content.0.tool_result.outcome: Extra inputs are not permitted",
    ),
    (
        [HELLO, assistant(use()), user(result(content=[text("")]))],
        "messages: text content blocks must be non-empty",
    ),
    (
        [HELLO, assistant(use()), user(result(content=[{"type": "video"}]))],
        "messages.2.content.0.tool_result.content.0: Input tag 'video' found using 'type' does not match "
        "any of the expected tags: 'browser_state', 'document', 'image', 'search_result', 'text', "
        "'tool_reference'",
    ),
    (
        [HELLO, assistant(text())],
        "This model does not support assistant message prefill. The conversation must end with a user "
        "message.",
    ),
    (
        [user(*[text(f"{n}", cache_control=EPHEMERAL) for n in range(5)])],
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    (
        [user(text("a", cache_control=EPHEMERAL), text("b", cache_control={**EPHEMERAL, "ttl": "1h"}))],
        "cache_control: a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. "
        "Note that blocks are processed in the following order: `tools`, `system`, `messages`.",
    ),
]


def picture(data: bytes | str = PNG, media_type: str = "image/png") -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": text}}


def paper(data: bytes = PDF, media_type: str = "application/pdf", **more: Any) -> dict[str, Any]:
    return {**picture(data, media_type), "type": "document", **more}


IMAGE = "image.source.base64"
FILES = [
    (picture(media_type="image/svg+xml"), f"{IMAGE}.media_type: Input should be 'image/gif', 'image/jpeg', "
     "'image/png' or 'image/webp'"),
    (picture(media_type="image/jpeg"), f"{IMAGE}.data: The image does not match the provided media type "
     "image/jpeg"),
    (picture("no base64!"), f"{IMAGE}.data: Invalid base64 data"),
    (picture(png(note=b"x" * 4_000_000)), f"{IMAGE}: image exceeds 5 MB maximum: "),
    ({**picture(), "title": "x"}, "image.title: Extra inputs are not permitted"),
    ({"type": "image"}, "image.source: Field required"),
    (paper(NOTE), "document.source.base64.data: The PDF specified was not valid."),
    (paper(title=""), "document.title: String should have between 1 and 500 characters"),
    (paper(media_type="text/plain"), "document.source.base64.media_type: Input should be 'application/pdf'"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "message"), FILES)
def test_files_that_are_refused(fake: FakeAnthropic, block: Any, message: str) -> None:
    assert refusal(fake, messages=[user(block)]).startswith(f"messages.0.content.0.{message}")
    said = refusal(fake, messages=[HELLO, assistant(use()), user(result(content=[block]))])
    assert said.startswith(f"messages.2.content.0.tool_result.content.0.{message}")


def test_where_files_may_not_be(fake: FakeAnthropic) -> None:
    said = refusal(fake, messages=[HELLO, assistant(picture()), HELLO])
    assert said.startswith("messages.1.content.0: Input tag 'image'")
    failed = result(content=[picture()], is_error=True)
    said = refusal(fake, messages=[HELLO, assistant(use()), user(failed)])
    assert said.endswith("all content must be type `text` if `is_error` is true")


@pytest.mark.parametrize(("messages", "message"), CONVERSATIONS)
def test_conversations_that_are_refused(fake: FakeAnthropic, messages: Any, message: str) -> None:
    assert refusal(fake, messages=messages) == message


@pytest.mark.parametrize(
    "messages",
    [
        [HELLO, HELLO],
        [HELLO, assistant(text(citations=None)), HELLO],
        [*CALLED, user(result("t2", is_error=True), result("t1", content=[text()]), text("and"))],
        [HELLO, assistant(use("a")), assistant(use("b")), user(result("a")), user(result("b"))],
        [user({"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}, text())],
        [user(*[text(f"{n}", cache_control=EPHEMERAL) for n in range(4)])],
        [user(picture(), paper(title="a.pdf"))],
        [HELLO, assistant(use()), user(result(content=[text(), picture(), paper()]))],
    ],
)
def test_conversations_that_are_accepted(fake: FakeAnthropic, messages: Any) -> None:
    assert create(fake, messages=messages).stop_reason == "end_turn"


def test_five_breakpoints_are_counted_wherever_they_are(fake: FakeAnthropic) -> None:
    marked: dict[str, Any] = {"cache_control": EPHEMERAL}
    options: dict[str, Any] = {"tools": [{**TOOL, **marked}], "system": [text(**marked)], **marked}
    inner = user(result(content=[text(**marked)], **marked))
    assert refusal(fake, messages=[HELLO, assistant(use()), inner], **options).endswith("Found 5.")


# Thinking

CANNOT = (
    "{}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These "
    "blocks must remain as they were in the original response."
)


@pytest.fixture
def thinker() -> Iterator[FakeAnthropic]:
    with FakeAnthropic([{"content": STRANGE}, {"text": "Done."}, {"text": "Bye."}]) as running:
        yield running


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[0].update(thinking="Let me see: a."),
        lambda content: content[0].update(signature=sign("other", "other")),
        lambda content: content[0].update(signature="not base64!"),
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
    assert error.startswith("messages.1.content.") and CANNOT[3:] in error
    assert refusal(thinker, messages=messages) == error, "some models think unless told not to"
    if len(messages[1]["content"]) == len(STRANGE) - 2:
        create(thinker, messages=messages, thinking={"type": "disabled"})


def test_manual_thinking_must_begin_every_turn_of_a_tool_loop(thinker: FakeAnthropic) -> None:
    messages = went_on(create(thinker, thinking=THINKING))
    assert create(thinker, messages=messages, thinking=THINKING).stop_reason == "end_turn"
    error = refusal(thinker, messages=[HELLO, assistant(use()), user(result())], thinking=THINKING)
    assert error.startswith(
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When "
        "`thinking` is enabled, a final `assistant` message must start with a thinking block"
    )
    said = [*messages, assistant(text("Done.")), HELLO]
    assert create(thinker, messages=said, thinking=THINKING).content[0].text == "Bye."


def test_thinking_of_an_earlier_turn_may_be_dropped_but_not_forged(thinker: FakeAnthropic) -> None:
    messages = [*went_on(create(thinker)), assistant(text("Done.")), HELLO]
    content = messages[1]["content"]
    content[0]["thinking"] = "Forged."
    assert (
        refusal(thinker, messages=messages) == "messages.1.content.0: Invalid `signature` in `thinking` block"
    )
    del content[0]
    assert create(thinker, messages=messages).content[0].text == "Bye."
    content[0]["data"] = "forged"
    assert refusal(thinker, messages=messages) == (
        "messages.1.content.0: Invalid `data` in `redacted_thinking` block"
    )


def test_an_unknown_block_is_accepted_only_as_it_was_given(thinker: FakeAnthropic) -> None:
    messages = went_on(create(thinker))
    messages[1]["content"][3]["data"] = [2]
    assert refusal(thinker, messages=messages).startswith(
        "messages.1.content.3: Input tag 'block_of_the_future' found using 'type' does not match"
    )
    messages = went_on(create(thinker))
    messages[1]["content"][4]["odd"] = {"a": 2}
    assert refusal(thinker, messages=messages) == (
        "messages.1.content.4.text.odd: Extra inputs are not permitted"
    )
    messages = went_on(create(thinker))
    messages[0] = user(messages[1]["content"][3])
    assert "Input tag 'block_of_the_future'" in refusal(thinker, messages=messages)


def test_a_paused_turn_is_sent_back_and_goes_on() -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    turns: list[Any] = [
        {"content": [STRANGE[0], search, text("")], "stop_reason": "pause_turn"},
        {"content": [{"type": "thinking", "thinking": "More."}, use()]},
        {"text": "Done."},
    ]
    with FakeAnthropic(turns) as fake:
        paused = wire(create(fake))["content"][:2]  # the empty text may not go back
        again = create(fake, messages=[HELLO, assistant(*paused)])
        assert again.stop_reason == "tool_use"
        answered = [assistant(*wire(again)["content"]), user(result())]
        assert create(fake, messages=[HELLO, assistant(*paused), *answered]).stop_reason == "end_turn"
        search["id"] = "srvtoolu_2"
        assert "prefill" in refusal(fake, messages=[HELLO, assistant(paused[0], search)])
