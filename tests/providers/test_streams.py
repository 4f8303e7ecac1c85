"""Calls whose arguments arrive in pieces, as servers number and order them: they run as written, or not."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from agentruns import Agent, run_agent, tool
from agentruns.models import Run
from agentruns.providers import chat, responses
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ModelReply, ProviderError, call_model
from agentruns.providers.openai import OpenAIModel
from agentruns.tools.base import InvalidArguments
from tests.db.helpers import outcomes, the_run
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.providers.asking import has_acted, request

Piece = dict[str, Any]
Events = list[Any]

WRITTEN = {"days": 365, "dry_run": True}


@tool
def purge(days: int = 30, dry_run: bool = False) -> str:
    """Delete old records."""
    Effects.from_environment().record("purge", days=days, dry_run=dry_run)
    return "purged"


@tool
def sync() -> str:
    """Fetch what is new."""
    Effects.from_environment().record("sync")
    return "synced"


TOOLS = [purge, sync]
BY_NAME = {each.name: each for each in TOOLS}
SCHEMAS = [each.provider_schema() for each in TOOLS]


def turns(*calls: dict[str, Any]) -> Callable[[Any], Any]:
    """Act once, then say so."""

    return lambda body: {"text": "all done"} if has_acted(body) else {"tools": [*calls]}


def run_over(model: Any) -> Run:
    agent = Agent("keeper", instructions="Tidy up.", model=model, tools=TOOLS)
    return the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))


def facts(effects: Effects) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "key"} for line in effects.lines()]


# Chat Completions, whole runs


def with_first_piece(events: Events) -> Events:
    """Put a call and the first piece of its arguments into one list of one event."""
    found: Events = []
    for event in events:
        calls = [each["delta"].get("tool_calls") for each in event["choices"]]
        before = found[-1]["choices"] if found else []
        begun = [each["delta"].get("tool_calls", [{}])[0].get("id") for each in before]
        if any(calls) and "id" not in calls[0][0] and any(begun):
            found[-1]["choices"][0]["delta"]["tool_calls"] += calls[0]
        else:
            found.append(copy.deepcopy(event))
    return found


@pytest.mark.django_db(transaction=True)
def test_a_call_and_the_first_piece_of_its_arguments_in_one_event(effects: Effects) -> None:
    """As vLLM with speculative decoding and Kimi say it: once it ran with the defaults."""
    script = turns({"name": "purge", "input": WRITTEN})
    with FakeOpenAI(script, bend=with_first_piece) as fake:
        run = run_over(OpenAIModel("qwen3", provider="vllm", client=fake.client()))
    assert (run.status, outcomes(run), facts(effects)) == ("completed", ["ok"], [WRITTEN])


# Chat Completions, every form


def collected(chunks: Events, tools: list[Any] = SCHEMAS) -> ModelReply:
    """Collect the reply of chunks, each a list of pieces of calls."""
    whole = chat.Collected(tools)
    for pieces in chunks:
        whole.add({"choices": [{"delta": {"tool_calls": copy.deepcopy(pieces)}}]})
    whole.add({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    return chat.reply(whole.whole(), "vllm:qwen3")


def calls_of(reply: ModelReply) -> list[tuple[Any, Any]]:
    return [(block["name"], block["input"]) for block in reply.content if block["type"] == "tool_use"]


def piece(text: Any = None, name: str | None = None, **labels: Any) -> Piece:
    said = {"name": name, "arguments": text}
    return {**labels, "function": {each: value for each, value in said.items() if value is not None}}


AS_A, AS_B = (piece("", "purge", index=at, id="ab"[at]) for at in (0, 1))
NO_NUMBERS = [piece("", "purge", id="a"), piece("", "purge", id="b")]
ONE, TWO = '{"days": 1}', '{"days": 2}'
BOTH = [("purge", {"days": 1}), ("purge", {"days": 2})]
RIGHT: dict[str, tuple[Events, Events]] = {
    "a name before, and again in each piece": (
        [[AS_A], [piece('{"days"', "purge", index=0, id="a")], [piece(": 1}", "purge", index=0, id="a")]],
        BOTH[:1],
    ),
    "a name in pieces": (
        [[piece("", "pur", index=0, id="a")], [piece("", "ge", index=0, id="a")], [piece(ONE, index=0)]],
        BOTH[:1],
    ),
    "pieces before the name":
        ([[piece('{"days"', index=0)], [piece(": 1}", "purge", index=0, id="a")]], BOTH[:1]),
    "no numbers at all": ([[piece('{"days"', "purge", id="a")], [piece(": 1}")]], BOTH[:1]),
    "no numbers and no ids": ([[piece(ONE, "purge"), piece(TWO, "purge")]], BOTH),
    "interleaved by number": (
        [[AS_A, AS_B],
         [piece('{"days"', index=1), piece('{"days"', index=0)],
         [piece(": 1}", index=0), piece(": 2}", index=1)]],
        BOTH,
    ),
    "interleaved by id": (
        [[*NO_NUMBERS],
         [piece('{"days"', id="b"), piece('{"days"', id="a")],
         [piece(": 1}", id="a"), piece(": 2}", id="b")]],
        BOTH,
    ),
    "each number 0": (
        [[piece("", "sync", index=0, id="a")], [piece("", "purge", index=0, id="b")],
         [piece('{"days"', index=0)], [piece(": 1}", index=0)],
         [piece("", "purge", index=0, id="c")], [piece(TWO, index=0)]],
        [("sync", {}), *BOTH],
    ),
    "each number 0, ids null":
        ([[piece(ONE, "purge", index=0, id=None)], [piece(TWO, "purge", index=0, id=None)]], BOTH),
    "one id for all": (
        [[piece("", "purge", index=0, id="x")], [piece(ONE, index=0)],
         [piece("", "purge", index=1, id="x")], [piece(TWO, index=1)]],
        BOTH,
    ),
    "objects": (
        [[piece({"days": 1}, "purge", index=0, id="a")], [piece({"days": 2}, "purge", index=1, id="b")]],
        BOTH,
    ),
    "no arguments": ([[AS_A], [piece("{}", "sync", index=1, id="b")]], [("purge", {}), ("sync", {})]),
    "an empty piece at the end": (
        [[piece(ONE, "purge", index=0, id="a")], [piece("", "", index=0), {"index": 1, "function": {}}]],
        BOTH[:1],
    ),
    "a name in pieces, without an id":
        ([[piece("", "pur", index=0)], [piece("", "ge", index=0)], [piece(ONE, index=0)]], BOTH[:1]),
    "the text null before, and null": (
        [[piece("null", "purge", index=0, id="a"), piece(None, "sync", index=1, id="b")],
         [piece(ONE, index=0)]],
        [*BOTH[:1], ("sync", {})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", RIGHT)
def test_forms_that_are_right(form: str) -> None:
    chunks, expected = RIGHT[form]
    assert calls_of(collected(chunks)) == expected
    assert calls_of(collected([[*itertools.chain(*chunks)]])) == expected, "all in one event"


UNREADABLE: dict[str, Events] = {
    "no name": [[AS_A], [piece(ONE, index=1)]],
    "the number of another": [[AS_A, AS_B], [piece(ONE, index=0), piece(TWO, index=0)]],
    "two that wait, and no number": [[*NO_NUMBERS], [piece(ONE)]],
    "two that wait, with one number": [[AS_A, piece("", "purge", index=0, id="b")], [piece(ONE, index=0)]],
    "an id that no call has": [[piece("", "purge", id="a")], [piece(ONE, id="b")]],
    "a number that moves": [[AS_A], [piece(ONE, "purge", index=1, id="a")]],
    "in the middle of another's":
        [[piece('{"days"', "purge", index=0, id="a"), AS_B], [piece(ONE, index=0), piece(": 1}", index=0)]],
    "before its call": [[AS_A], [piece(ONE)], [AS_B]],
    "a name again after a placeholder": [
        [piece("{}", "purge", index=0, id="a")], [piece('{"days": 90}', "purge", index=0)],
    ],
    "a name again after a placeholder, without ids": [
        [piece("{}", "purge", index=0)], [piece('{"days": 90}', "purge", index=0)],
    ],
    "a name again before a placeholder, without numbers": [[piece(ONE, "purge")], [piece("{}", "purge")]],
    "a name again with more of the arguments": [
        [piece(ONE, "purge", index=0)], [piece('{"days": 1, "dry_run": true}', "purge", index=0)],
    ],
    "a name again without its id": [[piece(ONE, "purge", index=0, id="a")], [piece(TWO, "purge", index=0)]],
    "a name after a tool's, without an id": [[piece("", "sync", index=0)], [piece(ONE, "purge", index=0)]],
    "null, and the number of another": [
        [piece("null", "purge", index=0, id="a"), piece("null", "purge", index=1, id="b")],
        [piece(ONE, index=0), piece(TWO, index=0)],
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", UNREADABLE)
def test_forms_that_leave_a_doubt_are_asked_again(form: str) -> None:
    with pytest.raises(ProviderError, match="which arguments belong to which call") as caught:
        collected(UNREADABLE[form])
    assert (caught.value.disposition, caught.value.type) == ("retry", "incomplete_reply")


NAMED: list[Any] = [
    {"name": name, "input_schema": {"properties": {}}} for name in ("delete", "_all", "delete_all", "noargs")
]


@pytest.mark.parametrize("labels", [{"index": 0}, {"index": 0, "id": "a"}, {}])
@pytest.mark.parametrize("text", ["", "{}", None])
def test_two_names_make_no_third(labels: Any, text: Any) -> None:
    """Neither does a tool run whose name is the beginning of another's, or one that grows without an id."""
    forms = [("delete", then, labels, text, "", NAMED) for then in ("_all", "_al")]
    forms += [("delete_", "draft", {"index": 0}, "", "{}", [])]
    forms += [("delete_", "delete_all", {"index": 0}, "", "{}", NAMED)]
    for first, then, named, begun, more, tools in forms:
        chunks = [[piece(begun, first, **named)], [piece(more, then, **{**named, "id": None})]]
        with pytest.raises(ProviderError, match="which arguments belong to which call"):
            collected(chunks, tools)


@pytest.mark.parametrize("text", [None, "", "null", " null ", {}])
def test_a_call_without_arguments_however_it_is_said(text: Any) -> None:
    call = {"id": "a", "function": {"name": "sync", "arguments": text}}
    absent = {"id": "a", "function": {"name": "sync"}}
    for each in (call, absent):
        assert calls_of(collected([[{"index": 0, **each}]])) == [("sync", {})]
        whole = {"choices": [{"message": {"tool_calls": [each]}, "finish_reason": "stop"}]}
        assert calls_of(chat.reply(whole, "x:y")) == [("sync", {})]
    done = event(ITEM_DONE, item={**item(text), "name": "sync"})
    assert calls_of(responded([done])) == [("sync", {})]


@pytest.mark.parametrize("again", [WRITTEN, {"days": 1}, json.dumps(WRITTEN), "{}"])
def test_an_object_that_is_said_again_is_for_the_gate_to_refuse(again: Any) -> None:
    chunks = [[piece(WRITTEN, "purge", index=0, id="a")], [piece(again, index=0, id="a")]]
    assert not isinstance(calls_of(collected(chunks))[0][1], dict)


def test_a_reply_that_was_cut_is_not_asked_again_and_a_thought_may_come_in_two_pieces() -> None:
    whole = chat.Collected(SCHEMAS)
    whole.add({"choices": [{"delta": {"tool_calls": [piece('{"da', index=3)]}, "finish_reason": "length"}]})
    assert chat.reply(whole.whole(), "x:y").stop_reason == "max_tokens"
    whole = chat.Collected()
    for texts in (["Let ", "me "], ["see."]):
        details = [{"type": "reasoning.text", "text": each, "index": 0} for each in texts]
        whole.add({"choices": [{"delta": {"reasoning_details": details}, "finish_reason": "stop"}]})
    (kept,) = chat.reply(whole.whole(), "x:y").content[0]["item"]["reasoning_details"]
    assert kept["text"] == "Let me see."


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("sync"), st.sampled_from(["", "{}"])),
        st.tuples(
            st.just("purge"),
            st.sampled_from(["", "{}", ONE, TWO, '{"dry_run": true}', '{"days": 1, "dry_run": true}']),
        ),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[list[tuple[str, str]], Events]:
    """Draw calls, and chunks in which a server might say them."""
    calls = draw(CALLS)
    numbers = draw(st.sampled_from(["own", "zero", "none", "first"]))
    ids = draw(st.sampled_from(["first", "each", "none", "same", "same in each", "null"]))
    names = draw(st.sampled_from(["first", "each", "split", "late"]))
    streams: list[list[Piece]] = []
    for at, (name, text) in enumerate(calls):
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
        texts = ["", *(text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]))]
        if draw(st.booleans()):
            texts = texts[1:]
        said = []
        for number, each in enumerate(texts):
            first = number == 0
            labels: Piece = {}
            if numbers in ("own", "zero") or (numbers == "first" and first):
                labels["index"] = 0 if numbers == "zero" else at
            if (first and ids != "none") or ids in ("each", "same in each"):
                labels["id"] = {"null": None, "same": "x", "same in each": "x"}.get(ids, f"id{at}")
            named = {"first": name, "each": name, "split": name[:2], "late": None}[names] if first else None
            named = name if names == "each" else named
            if names == "split" and number == 1:
                named = name[2:]
            if names == "late" and number == len(texts) - 1:
                named = name
            said.append(piece(each, named, **labels))
        if names == "split" and len(said) == 1:
            said.append(piece("", name[2:], **({"index": said[0]["index"]} if "index" in said[0] else {})))
        streams.append(said)
    # Texts that are mixed without any label could make another text that is right: no server does that.
    if (numbers == "own" or ids == "each") and draw(st.booleans()):
        order = draw(st.permutations([at for at, said in enumerate(streams) for _ in said]))
        pieces = [streams[at].pop(0) for at in order]
    else:
        pieces = [*itertools.chain(*streams)]
    chunks: Events = []
    while pieces:
        size = draw(st.integers(1, 3))
        chunks.append(pieces[:size])
        pieces = pieces[size:]
    return calls, chunks


@settings(max_examples=300)
@given(chunkings())
def test_the_arguments_that_were_written_or_none(drawn: Any) -> None:
    """However a reply is cut, numbered and ordered, no call runs with arguments of another."""
    calls, chunks = drawn
    written = [(name, json.loads(text or "{}")) for name, text in calls]
    wanted = [(name, BY_NAME[name].effective(input)) for name, input in written]
    try:
        said = calls_of(collected(chunks))
    except ProviderError as error:
        assert error.disposition == "retry"
        return
    for name, input in said:
        with suppress(KeyError, InvalidArguments):  # as at the gate
            call = name, BY_NAME[name].effective(input)
            assert call in wanted, (said, chunks)
            wanted.remove(call)


# The Responses API


def event(kind: str, place: int | None = 0, **members: Any) -> Piece:
    places = {} if place is None else {"output_index": place}
    return {"type": f"response.{kind}", **places, **members}


def item(arguments: Any, at: str = "a") -> Piece:
    return {"type": "function_call", "id": f"fc_{at}", "call_id": at, "name": "purge", "arguments": arguments}


def responded(events: Events, *output: Piece) -> ModelReply:
    whole = responses.Collected(SCHEMAS)
    for each in [*events, event("completed", response={"status": "completed", "output": [*output]})]:
        whole.add(copy.deepcopy(each))
    return responses.reply(whole.whole(), "openai:x")


DELTA, DONE = "function_call_arguments.delta", "function_call_arguments.done"
ADDED, ITEM_DONE = "output_item.added", "output_item.done"
DONE_A, DONE_B = event(ITEM_DONE, item=item("")), event(ITEM_DONE, 1, item=item("", "b"))
DELTAS = [event(DELTA, delta='{"days"', item_id="fc_a"), event(DELTA, delta=": 1}", item_id="fc_a")]
RESPONDED: dict[str, tuple[Events, Events, int]] = {
    "only in pieces": ([event(ADDED, item=item("")), *DELTAS, DONE_A], [], 1),
    "pieces before their item": ([*DELTAS, event(ADDED, item=item("")), DONE_A], [], 1),
    "only in the event at their end": (
        [event(DONE, arguments=ONE, item_id="fc_a"), event(ITEM_DONE, item=item(None))], [], 1,
    ),
    "only in the last event": ([DONE_A], [item(ONE)], 1),
    "pieces, and items in the last event only": ([event(ADDED, item=item("")), *DELTAS], [item("")], 1),
    "another id in the pieces": ([event(DELTA, delta=ONE, item_id="fc_z"), DONE_A], [], 1),
    "one place for two": (
        [event(ITEM_DONE, item=item(ONE)), event(ITEM_DONE, item=item(TWO, "b"))],
        [item(ONE), item(TWO, "b")],
        2,
    ),
    "one item without its event": ([event(ITEM_DONE, item=item(ONE))], [item(ONE), item(TWO, "b")], 2),
    "listed in another order": ([DONE_A, DONE_B], [item(TWO, "b"), item(ONE)], 2),
    "a call that the provider ran": (
        [event(ITEM_DONE, item=item(ONE)),
         event(ITEM_DONE, 1, item={"type": "mcp_call", "id": "m", "arguments": TWO})],
        [item(ONE), {"type": "mcp_call", "id": "m", "arguments": TWO}],
        1,
    ),
    "an item without a place": (
        [event(DELTA, None, delta=ONE, item_id="fc_a"), event(ITEM_DONE, None, item=item(""))], [], 1,
    ),
    "null in the item": ([*DELTAS, event(ITEM_DONE, item=item("null"))], [], 1),
}  # fmt: skip


@pytest.mark.parametrize("form", RESPONDED)
def test_arguments_of_a_response_wherever_they_are(form: str) -> None:
    events, output, count = RESPONDED[form]
    assert calls_of(responded(events, *output)) == BOTH[:count]


NOT_TOLD: dict[str, tuple[Events, Events]] = {
    "pieces of another place": ([event(DELTA, 5, delta=ONE), DONE_A], []),
    "an item that differs": ([*DELTAS, event(ITEM_DONE, item=item("{}"))], []),
    "two ends that differ": ([event(ITEM_DONE, item=item(ONE))], [item("{}")]),
    "a call that never ends": ([event(ADDED, item=item("")), *DELTAS], []),
    "one place for two": ([event(ITEM_DONE, item=item(ONE)), event(ITEM_DONE, item=item("", "b"))], []),
    "pieces of another's": (
        [event(DELTA, delta='{"days"'), event(DELTA, delta=TWO), event(DELTA, delta=": 1}"), DONE_A, DONE_B],
        [],
    ),
    "the id of one and the place of another":
        ([event(DELTA, 1, delta=ONE, item_id="fc_a"), DONE_A, DONE_B], []),
    "places that are shifted": (
        [
            event(ITEM_DONE, item={"type": "reasoning", "id": "r"}), event(DELTA, delta=ONE),
            event(DELTA, 1, delta=TWO), event(ITEM_DONE, 1, item=item("")),
            event(ITEM_DONE, 2, item=item(TWO, "b")),
        ],
        [],
    ),
    "a place of two":
        ([DONE_A, event(DELTA, delta=TWO), event(ITEM_DONE, item=item("", "b"))], [item(""), item("", "b")]),
    "pieces with a place, items without": (
        [
            event(DELTA, 0, delta=ONE), event(DELTA, 1, delta=TWO),
            event(ITEM_DONE, None, item=item("", "b")), event(ITEM_DONE, None, item=item("")),
        ],
        [],
    ),
    "arguments of a call that only the last event has":
        ([DONE_A, event(ITEM_DONE, 1, item={"type": "reasoning", "id": "r"})], [item(ONE, "b")]),
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_TOLD)
def test_a_response_that_leaves_a_doubt_is_asked_again(form: str) -> None:
    events, output = NOT_TOLD[form]
    with pytest.raises(ProviderError, match="which arguments belong to which call") as caught:
        responded(events, *output)
    assert caught.value.disposition == "retry"


# Messages of Claude, as gateways pass them on


def claude(script: Any, bend: Callable[[Events], Events]) -> ModelReply:
    with FakeAnthropic(script, bend=bend) as fake:
        return call_model(AnthropicModel("claude-sonnet-5-5", fake.client()), request(tools=SCHEMAS))


def is_piece(event: Piece) -> bool:
    return event["type"] == "content_block_delta" and bool(event["delta"].get("partial_json"))


@pytest.mark.django_db(transaction=True)
def test_an_input_that_lacks_its_end_is_for_the_gate_to_refuse(effects: Effects) -> None:
    """The SDK reads half of an object as an object with less in it."""

    def cut(events: Events) -> Events:
        pieces = [*filter(is_piece, events)]
        return [each for each in events if each is not (pieces or [None])[-1]]

    with FakeAnthropic(turns({"name": "purge", "input": WRITTEN}), bend=cut) as fake:
        run = run_over(AnthropicModel("claude-sonnet-5-5", fake.client()))
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"], 0)


def swapped(events: Events) -> Events:
    one, two = [at for at, each in enumerate(events) if each["type"] == "content_block_start"]
    events[one], events[two] = events[two], events[one]
    return [each for each in events if each["type"] != "content_block_stop"]


def moved(events: Events) -> Events:
    begun = [each for each in events if each["type"] == "content_block_start"]
    for each in filter(is_piece, events):
        each["index"] = 0
    return [*events[:1], *begun, *(each for each in events[1:] if each not in begun)]


@pytest.mark.parametrize("bend", [swapped, moved])
def test_blocks_that_begin_in_another_order_are_asked_for_again(bend: Any) -> None:
    """The SDK numbers blocks by their order: it would give one's input to the other."""
    calls = [{"name": "purge", "input": WRITTEN}, {"name": "purge", "input": {"days": 1}}]
    with pytest.raises(ProviderError, match="which arguments belong") as caught:
        claude([{"tools": calls}], bend)
    assert (caught.value.disposition, caught.value.request_id != "") == ("retry", True)


def test_an_input_of_null_is_none() -> None:
    def nulled(events: Events) -> Events:
        first = next(each for each in events if is_piece(each))
        first["delta"]["partial_json"] = "null"
        return [each for each in events if each is first or not is_piece(each)]

    reply = claude([{"tools": [{"name": "purge", "input": WRITTEN}]}], nulled)
    assert calls_of(reply) == [("purge", {})]
