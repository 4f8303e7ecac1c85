"""What tests of the provider rely on: the fake follows its script, and its cache is no better than the API's.

Its streams, faults, counts and threads are met by the provider in test_anthropic.py and those beside it.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_anthropic import FakeAnthropic
from tests.fake_anthropic.faults import Fault
from tests.unit import sdk
from tests.unit.conversations import create, stream, went_on, wire

LOOK = {"name": "look", "input": {"id": "ä-17", "deep": {"list": [1, 2.5, None, True]}, "empty": {}}}
TURNS: list[Any] = [{"text": "Looking … 🔎", "tools": [LOOK, {"name": "look"}]}, {"text": "Done."}]


@pytest.fixture
def fake() -> Iterator[FakeAnthropic]:
    with FakeAnthropic(TURNS) as running:
        yield running


BOTH = pytest.mark.parametrize("ask", [create, stream])


# Answers


@BOTH
def test_the_turn_is_chosen_by_the_depth_of_the_conversation(fake: FakeAnthropic, ask: Any) -> None:
    first = ask(fake)
    content = wire(first)["content"]
    assert content[0] == {"type": "text", "text": "Looking … 🔎"}
    assert [block["input"] for block in content[1:]] == [LOOK["input"], {}]
    assert all(block["id"].startswith("toolu_") for block in content[1:])
    assert (first.role, first.type, first.model) == ("assistant", "message", "claude-sonnet-5-5")
    assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
    assert first.id.startswith("msg_")
    second = ask(fake, messages=went_on(first))
    assert wire(second)["content"] == [{"type": "text", "text": "Done."}]
    assert second.stop_reason == "end_turn"
    assert wire(ask(fake))["content"][0] == content[0], "it keeps no place in the script"


def test_every_generation_has_ids_of_its_own_unless_the_script_gives_them() -> None:
    with FakeAnthropic([{"tools": [{"name": "a"}, {"name": "b", "id": "toolu_given"}]}]) as fake:
        replies = [create(fake), create(fake), stream(fake)]
    assert len({reply.content[0].id for reply in replies}) == 3
    assert len({reply.id for reply in replies}) == 3
    assert {reply.content[1].id for reply in replies} == {"toolu_given"}


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([], "script exhausted: The script has 0 turns and was asked for number 1."),
        (lambda body: {"txt": ""}, "The script failed: ValueError: Turn 1 has txt"),
        (lambda body: body["nothing"], "The script failed: KeyError: 'nothing'"),
        (lambda body: {"content": [{"type": "x", "n": object()}]}, "The script failed: TypeError"),
        ([{"content": [{"type": "tool_use", "id": "t"}]}], "ValueError: block 0 is a tool_use without name"),
        ([{"content": [{"text": "x"}]}], "The script failed: KeyError: 'type'"),
    ],
)
def test_a_script_that_cannot_go_on_is_a_400_so_that_nobody_retries(script: Any, text: str) -> None:
    with FakeAnthropic(script) as fake, pytest.raises(sdk.BadRequestError, match=text):
        create(fake)


# The cache


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


def test_an_entry_more_than_twenty_blocks_back_is_not_found(fake: FakeAnthropic) -> None:
    def asked(blocks: int) -> Any:
        content = [{"type": "text", "text": f"block number {n}"} for n in range(blocks)]
        messages = [{"role": "user", "content": content}]
        return create(fake, messages=messages, cache_control={"type": "ephemeral"}).usage

    first = asked(5).cache_creation_input_tokens
    assert asked(24).cache_read_input_tokens == first
    fake.cache.clear()
    asked(5)
    assert asked(25).cache_read_input_tokens == 0


@pytest.mark.parametrize("kind", [200, "dorp"])
def test_a_fault_that_is_none_is_found_at_once(kind: Any) -> None:
    with pytest.raises(ValueError, match="fault"):
        Fault(kind)
