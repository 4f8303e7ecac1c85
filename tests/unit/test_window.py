"""Conversations that may not fit: counted when it matters, refused with figures, or compacted."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from agentruns.providers import window
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError, call_model
from agentruns.testing import check_messages
from tests.fake_anthropic import FakeAnthropic
from tests.fake_anthropic.tokens import count_request
from tests.providers.asking import FIND, HELLO, NAME, claude, failure, request, sent

COUNT = "/v1/messages/count_tokens"
Messages = list[dict[str, Any]]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def exchange(number: int, length: int = 40) -> Messages:
    """Two calls and their results."""
    ids = [f"toolu_{number}_{each}" for each in (0, 1)]
    calls = [{"type": "tool_use", "id": id, "name": "find", "input": {}} for id in ids]
    results = [{"type": "tool_result", "tool_use_id": id, "content": "word " * length} for id in ids]
    return [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]


def loop(count: int, length: int = 40) -> Messages:
    return [HELLO, *(message for number in range(count) for message in exchange(number, length))]


LONG = request(messages=loop(10), tools=[FIND])
TOO_LONG = request(messages=loop(12, length=4_000))  # for the smallest window there is


@contextmanager
def fake() -> Iterator[FakeAnthropic]:
    """A fake that says one thing, however long the conversation."""
    with FakeAnthropic(lambda body: {"text": "Done."}) as running:
        yield running


@pytest.fixture
def running() -> Iterator[FakeAnthropic]:
    with fake() as started:
        yield started


def never(messages: Messages, tokens: int, limit: int) -> Messages:
    raise AssertionError("compact() is not asked when the conversation fits")


def tokens_of(asked: Any) -> int:
    return count_request({"messages": asked.messages, "tools": asked.tools, "system": asked.system})


def test_small_requests_are_not_counted_and_an_estimate_is_never_too_low(running: FakeAnthropic) -> None:
    call_model(claude(running, compact=never), LONG)
    call_model(claude(running, context_window=10_000), LONG)
    assert [call.path for call in running.calls] == ["/v1/messages"] * 2
    for text in ("word " * 50, "ä" * 50, "🔎" * 50, '"\\\n' * 50):
        body = {"messages": [said("user", text)], "tools": [FIND], "system": text}
        assert window.most_tokens(body) >= count_request(body)


def test_near_the_window_the_provider_counts_and_what_fits_is_sent_as_it_is(running: FakeAnthropic) -> None:
    params = {"max_tokens": 100, "thinking": {"type": "adaptive"}, "service_tier": "auto", "betas": ["b"]}
    asked = request(messages=LONG.messages, tools=[FIND], params=params)
    least = tokens_of(LONG) + 5
    call_model(claude(running, context_window=least, compact=never, cache=None), asked)
    counted, answered = running.calls
    assert (counted.path.partition("?")[0], counted.status, answered.status) == (COUNT, 200, 200)
    assert "b" in counted.headers["anthropic-beta"].split(",")
    assert counted.body.keys() == {"model", "messages", "tools", "system", "thinking"}
    assert answered.body["messages"] == LONG.messages


@pytest.mark.parametrize(
    ("compact", "words"),
    [(None, [NAME, "compact", "drop_oldest"]), (lambda messages, *figures: messages, ["after compact()"])],
    ids=["as it is", "compacted"],
)
def test_what_does_not_fit_fails(running: FakeAnthropic, compact: Any, words: list[str]) -> None:
    limit = tokens_of(LONG) - 1
    error = failure(claude(running, context_window=limit, compact=compact), LONG)
    assert (error.disposition, error.type) == ("fail", "context_window_exceeded")
    for figure in (str(limit), str(limit + 1), *words):
        assert figure in str(error)
    wrong = running.client(api_key="sk-ant-wrong")  # an error while counting is an error like others
    error = failure(claude(running, client=wrong, context_window=limit, compact=compact), LONG)
    assert (error.disposition, error.type, sent(running)) == ("pause", "authentication_error", [])


def test_the_window_is_asked_for_once_and_has_a_default_where_nobody_knows(running: FakeAnthropic) -> None:
    assert window.most_tokens({"messages": TOO_LONG.messages}) > window.SMALLEST > tokens_of(TOO_LONG)
    model = claude(running)
    for _ in range(2):
        call_model(model, TOO_LONG)
    paths = [(call.method, call.path) for call in running.calls]
    assert paths[0] == ("GET", f"/v1/models/{NAME}")
    assert [path for _, path in paths[1:]] == [COUNT, "/v1/messages"] * 2
    assert model.context_window == window.SMALLEST
    model = claude(running)
    with ThreadPoolExecutor(4) as threads:  # which may ask at once
        replies = [*threads.map(lambda _: call_model(model, TOO_LONG).content, range(4))]
    assert model.context_window == window.SMALLEST
    assert replies == [[{"type": "text", "text": "Done."}]] * 4


@contextmanager
def asked_for_its_window(status: int, **page: Any) -> Iterator[tuple[AnthropicModel, list[str]]]:
    """A model whose provider answers so where it has its models' windows, and the paths asked for."""
    import anthropic
    import httpx2

    asked: list[str] = []

    class Models(httpx2.HTTPTransport):
        """The page the fake does not have."""

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.method != "GET":
                return super().handle_request(request)
            asked.append(request.url.path)
            return httpx2.Response(status, json=page)

    with fake() as running, httpx2.Client(transport=Models(), trust_env=False) as http:
        client = anthropic.Anthropic(api_key=running.api_key, base_url=running.url, http_client=http)
        yield claude(running, client=client), asked


@pytest.mark.parametrize("status", [200, 403, 400, 401, 429, 500])
def test_a_window_nobody_tells_is_no_reason_to_fail_unless_asking_again_may_tell_it(status: int) -> None:
    page = {"id": NAME, "type": "model", "max_input_tokens": 100} if status == 200 else {}
    with asked_for_its_window(status, **page) as (model, asked):
        if status == 200:
            for _ in range(2):
                assert "accepts 100." in str(failure(model, TOO_LONG))
            assert asked == [f"/v1/models/{NAME}"]
        elif status in (403, 400):
            assert call_model(model, TOO_LONG).stop_reason == "end_turn"
        else:
            assert failure(model, TOO_LONG).status == status
    assert (model.context_window is None) == (status in (401, 429, 500))


def test_compact_is_told_the_figures_and_decides_what_is_sent(running: FakeAnthropic) -> None:
    told: list[Any] = []

    def compact(messages: Messages, tokens: int, limit: int) -> Messages:
        told.append((copy.deepcopy(messages), tokens, limit))
        messages[0]["content"].append("nonsense")  # what it was given is its own
        return [{"role": "user", "content": "In short."}, *exchange(9)]

    before = copy.deepcopy(LONG)
    call_model(claude(running, context_window=300, compact=compact, cache=None), LONG)
    assert [body["messages"] for body in sent(running)] == [compact(copy.deepcopy(LONG.messages), 0, 0)]
    assert len(sent(running, COUNT)) == 2, "what it returned is counted again"
    assert told[0] == (before.messages, tokens_of(LONG), 300)
    assert before == LONG
    call_model(claude(running, context_window=300, compact=compact), LONG)
    assert "cache_control" in json.dumps(sent(running)[1]["messages"][0]), "also a plain text"


WHOLE = loop(3)


@pytest.mark.parametrize(
    ("shorter", "words"),
    [
        (None, "not a list"),
        ("text", "not a list"),
        ([3], "not a list"),
        ([{"role": "user"}], "not a list"),
        ([{"role": "system", "content": "x"}], "not a list"),
        ([{"role": "user", "content": [3]}], "not a list"),
        (tuple(WHOLE), "not a list"),
        ([], "does not begin"),
        (WHOLE[1:], "does not begin"),
        ([HELLO, *WHOLE[2:]], "were parted"),
        ([*WHOLE[:2], *WHOLE[3:]], "has no tool_result after it"),
        ([*WHOLE[:2], HELLO, *WHOLE[3:]], "were parted"),
        (WHOLE[:-1], "last tool_use has no"),
        ([HELLO], "does not end"),
        (WHOLE[:-2], "does not end"),
        ([*WHOLE, said("assistant", "x")], "does not end"),
    ],
)
def test_what_cannot_be_sent_needs_a_person(running: FakeAnthropic, shorter: Any, words: str) -> None:
    model = claude(running, context_window=100, compact=lambda messages, tokens, limit: shorter)
    error = failure(model, request(messages=WHOLE, tools=[FIND]))
    assert sent(running) == []
    assert (error.disposition, error.type) == ("pause", "compact_failed")
    assert "compact()" in str(error) and words in str(error)


@pytest.mark.parametrize(
    ("raised", "disposition"),
    [
        (KeyError("x"), "pause"),
        (RuntimeError("x"), "pause"),
        (ConnectionResetError("x"), "retry"),
        (ProviderError("busy", disposition="retry", type="busy"), "retry"),
    ],
)
def test_a_compact_that_raises_is_named(running: FakeAnthropic, raised: Exception, disposition: str) -> None:
    def compact(messages: Messages, tokens: int, limit: int) -> Messages:
        raise raised

    error = failure(claude(running, context_window=100, compact=compact), LONG)
    assert error.disposition == disposition
    assert str(error).startswith("compact() failed: ")


def test_drop_oldest_keeps_what_the_user_said_last_and_leaves_words_out_only_after_tools() -> None:
    before = [HELLO, *exchange(0), said("assistant", "Done."), said("user", "Now something else.")]
    messages = [*before, *(each for number in range(1, 10) for each in exchange(number))]
    kept = window.drop_oldest(messages, 1000, 300)
    assert kept[:3] == [HELLO, *before[-2:]]
    assert kept[-2:] == messages[-2:] and len(kept) < len(messages)
    messages = [*before, *exchange(1), said("assistant", "Done."), said("user", "Now?"), *exchange(2)]
    kept = window.drop_oldest(messages, 1000, 700)
    assert before[-1] in kept and len(kept) < len(messages)
    assert before[-1] not in window.drop_oldest(messages, 1000, 1)
    paused = [said("assistant", "1"), said("assistant", "2"), *exchange(3)]  # replies stay with their results
    assert window.exchanges([HELLO, *paused, *exchange(4)]) == [[HELLO], paused, exchange(4)]


@pytest.mark.parametrize("limit", [1, 100, 300, 600, 900, 2000])
@pytest.mark.parametrize("spoken", [(), (3,), (3, 6), (9,)])
def test_whatever_drop_oldest_leaves_can_be_sent(limit: int, spoken: tuple[int, ...]) -> None:
    messages: Messages = [HELLO]
    for number in range(10):
        messages += exchange(number)
        if number in spoken:
            messages[-1]["content"].append({"type": "text", "text": f"Question {number}."})
    given = copy.deepcopy(messages)
    kept = window.drop_oldest(messages, 1000, limit)
    assert messages == given
    assert window.broken_pairs(kept, messages) == ""
    check_messages(kept)
    assert kept[0] == messages[0] and kept[-2:] == messages[-2:]
    if spoken:
        assert f"Question {spoken[-1]}." in json.dumps(kept)
        assert [each for each in messages if each in kept] == kept, "in their order"
    else:
        assert kept == [HELLO, *messages[1 - len(kept) :]], "how it began, and the newest"
    assert (len(kept) < len(messages)) == (limit < 1000)
    assert window.drop_oldest([HELLO], 1000, limit) == [HELLO]


@pytest.mark.parametrize("text", ["word ", "\U0001f50e", "\x01", '"\\'])
@pytest.mark.parametrize("count", [1, 30])
def test_drop_oldest_shortens_results_that_would_not_fit_alone(text: str, count: int) -> None:
    ids = [f"toolu_{number}" for number in range(count)]
    results = [{"type": "tool_result", "tool_use_id": id, "content": text * 50_000} for id in ids]
    calls = [{"type": "tool_use", "id": id, "name": "find", "input": {}} for id in ids]
    newest = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    messages = [HELLO, *exchange(0), *newest]
    kept = window.drop_oldest(messages, window.most_tokens({"messages": messages}), 40_000)
    assert window.broken_pairs(kept, messages) == "" and "left out here" in str(kept[-1])
    assert window.most_tokens({"messages": kept}) <= 32_000
    assert count > 1 or kept[:3] == messages[:3], "no exchange is left out if long results can be shortened"
