"""What goes wrong between here and Claude, beside what every provider does; clients and their keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import partial
from typing import Any

import pytest

from agentruns import Agent, run_agent
from agentruns.models import Message
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError, call_model
from agentruns.providers.failures import classify as classified, judged, retry_after
from tests.db.helpers import payloads, the_run
from tests.fake_anthropic import FakeAnthropic
from tests.providers.asking import FIND, HELLO, KEY, NAME, claude, failure, request, sent, went_on

classify = partial(classified, "anthropic")
TOKEN = "ya29.of-another-platform"
BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "plain"])
TURNS: list[Any] = [{"text": "Looking for it now.", "tools": [{"name": "find", "input": {"n": 17}}]}]


def meeting(kind: Any, *, streaming: bool = True, turns: Any = TURNS, **options: Any) -> ProviderError:
    """The error of a request that meets a fault; only that one request is made, and the next one succeeds."""
    with FakeAnthropic(turns, api_key=KEY) as fake:
        model = claude(fake, streaming=streaming)
        fake.fault(kind, **options)
        error = failure(model, request(tools=[FIND]))
        (call,) = fake.calls
        assert error.request_id in ("", call.request_id)
        assert call_model(model, request(tools=[FIND])).stop_reason == "tool_use"
        assert len(fake.calls) == 2, "the SDK must not retry by itself"
    return error


@BOTH
@pytest.mark.parametrize(
    ("status", "code", "disposition"),
    [
        (529, "some_code", "retry"), (429, "enforced_spend_limit_reached", "pause"),
        (429, "contract_spend_limit_reached", "pause"), (400, "organization_on_hold", "pause"),
    ],
)  # fmt: skip
def test_a_status_with_a_code(streaming: bool, status: int, code: str, disposition: str) -> None:
    """A limit that no waiting lifts pauses, whatever its status."""
    error = meeting(status, streaming=streaming, message=f"no: {KEY}", error_code=code)
    assert (error.disposition, error.code, error.status) == (disposition, code, status)
    assert (error.type.endswith("_error"), error.retry_after, error.usage) == (True, None, None)
    assert str(error) == f"Anthropic answered {status}: no: ***"


@pytest.mark.parametrize(
    ("type", "disposition"),
    [
        ("overloaded_error", "retry"), ("api_error", "retry"), ("rate_limit_error", "retry"),
        ("error_of_the_future", "retry"), ("invalid_request_error", "fail"), ("request_too_large", "fail"),
        ("authentication_error", "pause"), ("permission_error", "pause"), ("billing_error", "pause"),
        ("not_found_error", "pause"),
    ],
)  # fmt: skip
def test_an_error_in_the_middle_of_a_stream_is_judged_by_its_type(type: str, disposition: str) -> None:
    for after in (0, 3):
        error = meeting("error", type=type, after=after, message=f"no: {KEY}", error_code="some_code")
        assert (error.disposition, error.type, error.status) == (disposition, type, 200)
        assert (error.code, error.request_id[:4]) == ("some_code", "req_")
        assert str(error) == "Anthropic answered 200: no: ***"
        assert bool(error.usage) == (after > 0), "known as soon as the message has begun"


WIRE = [
    *(("drop", after, "RemoteProtocolError") for after in (None, 0, 3, 99)),
    ("truncate", 0, "AssertionError"),
    ("truncate", 1, "incomplete_reply"),
    ("truncate", 7, "incomplete_reply"),
    ("corrupt", 0, "JSONDecodeError"),
    ("corrupt", 3, "JSONDecodeError"),
    ("empty", None, "AssertionError"),
]


@pytest.mark.parametrize(("kind", "after", "name"), WIRE)
def test_a_stream_that_breaks_is_asked_for_again_and_what_it_used_is_known(
    kind: str, after: int | None, name: str
) -> None:
    error = meeting(kind, after=after)
    assert error.disposition == "retry"
    assert name in f"{error.type} {error}"
    assert error.status is None and error.retry_after is None
    begun = bool(after)
    assert bool(error.usage) == begun
    if error.usage:
        assert error.usage["cache_creation_input_tokens"] > 0 and error.usage["output_tokens"] >= 1
    assert bool(error.request_id) == (kind != "drop" or after is not None)


def test_only_the_very_end_of_a_stream_may_be_missing() -> None:
    with FakeAnthropic(TURNS) as fake:
        model = claude(fake)
        whole = call_model(model, request(tools=[FIND]))
        found = {}
        for after in range(40):
            fake.fault("truncate", after=after)
            try:
                found[after] = call_model(model, request(tools=[FIND]))
            except ProviderError as error:
                assert error.disposition == "retry"
        assert found, "message_stop alone says nothing new"
        calls = [reply.content[-1]["input"] for reply in found.values()]
        assert calls == [whole.content[-1]["input"]] * len(calls)
        assert sorted(found) == list(range(min(found), 40)) and min(found) > 3


def test_arguments_that_are_no_json_are_the_wires_fault_and_not_shown() -> None:
    wrong = {"type": "tool_use", "id": "t", "name": "find", "input": "{]"}
    with FakeAnthropic([{"content": [wrong], "stop_reason": "tool_use"}]) as fake:
        error = failure(claude(fake), request(tools=[FIND]))
    assert (error.disposition, error.type) == ("retry", "ValueError")
    assert error.usage and len(str(error)) <= 500


@BOTH
def test_a_key_that_is_no_header_does_not_leak(streaming: bool) -> None:
    with FakeAnthropic([{"text": "x"}]) as fake:
        for key in (f"{KEY}\n", f"{KEY} ä", "of-a-gateway-7788\n"):
            error = failure(claude(fake, client=fake.client(api_key=key), streaming=streaming))
            assert "gateway-7788" not in str(error)


def test_a_type_that_means_a_person_counts_more_than_the_status_and_no_text_has_a_secret() -> None:
    import anthropic
    import httpx2

    response = httpx2.Response(400, request=httpx2.Request("POST", "http://gateway.invalid"))
    for type, disposition in (("billing_error", "pause"), ("something", "fail"), (None, "fail")):
        body = {"error": {"type": type, "message": "x"}}
        error = anthropic.APIStatusError("x", response=response, body=body)
        assert classify(error).disposition == disposition
    for text in ("Authorization: Bearer abc.def", "bearer abc.def", "Bearer abc.def", "x sk-ant-abc.def"):
        assert "***" in str(classify(ValueError(text))) and "abc" not in str(classify(ValueError(text)))
    assert "tokenised" not in str(classify(ValueError("it is tokenised"), ["tokenised"]))
    assert len(str(classify(ValueError("long " * 1000)))) == 500


def test_formats_of_retry_after() -> None:
    assert retry_after({}) is None
    assert retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert retry_after({"retry-after": "2.5"}) == 2.5
    for wrong in ("soon", "-1", "nan", "inf", ""):
        assert retry_after({"retry-after": wrong}) is None
    at = {seconds: formatdate(1e9 + seconds, usegmt=True) for seconds in (-60, 0, 60)}
    assert retry_after({"retry-after": at[60], "date": at[0]}) == 60
    assert retry_after({"retry-after": at[-60], "date": at[0]}) == 0
    for own in ({}, {"date": "soon"}, {"date": "Sun, 09 Sep 2001 01:46:40"}):
        assert retry_after({"retry-after": at[60], **own}) is None  # by this machine's clock it may be wrong


def test_the_text_and_the_code_of_an_error_may_hold_numbers_that_python_refuses() -> None:
    asked, text = request(), "messages.{}.content.0: it is refused"
    places = [AnthropicModel(NAME).place_in(asked, text.format(number)) for number in ("0", "9" * 5_000)]
    assert places == [(0, 0), None]
    assert [judged(None, code) for code in ("400", "9" * 5_000)] == ["fail", "retry"]


def test_without_a_client_the_environment_says_whom_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeAnthropic([{"text": "1"}], faults={2: 529}, api_key=KEY) as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        model = AnthropicModel(NAME)
        try:
            assert call_model(model, request()).stop_reason == "end_turn"
            assert failure(model).status == 529
            assert len(fake.calls) == 2
        finally:
            model._client.close()


@contextmanager
def platform(fake: FakeAnthropic, sort: str) -> Iterator[Any]:
    """A client for Vertex or Bedrock whose wire ends at the fake: the path says what the body does not."""
    import anthropic
    import httpx2

    class Gateway(httpx2.HTTPTransport):
        def handle_request(self, asked: httpx2.Request) -> httpx2.Response:
            body = json.loads(asked.read())
            assert "anthropic_version" in body
            del body["anthropic_version"]
            parts = asked.url.path.rpartition("/models/" if sort == "vertex" else "/model/")[2]
            name = parts.partition(":" if sort == "vertex" else "/")[0]
            headers = {"authorization": f"Bearer {fake.api_key}", "anthropic-version": "2026-10-21"}
            where = "/v1/messages/count_tokens" if "count-tokens" in asked.url.path else "/v1/messages"
            model = body.pop("model", name)
            made = httpx2.Request("POST", fake.url + where, headers=headers, json={**body, "model": model})
            return super().handle_request(made)

    with httpx2.Client(transport=Gateway(), trust_env=False) as http:
        make: Callable[..., Any] = anthropic.AnthropicVertex
        given = {"region": "eu", "project_id": "p", "access_token": TOKEN}
        if sort != "vertex":
            make, given = anthropic.AnthropicBedrock, {"aws_region": "eu-west-1", "api_key": TOKEN}
        client = make(base_url="http://gateway.invalid", http_client=http, max_retries=5, **given)
        yield client
        assert client.max_retries == 5, "the client is the developer's own"


@pytest.mark.parametrize("sort", ["vertex", "bedrock"])
def test_claude_on_other_platforms_by_their_own_client(sort: str) -> None:
    turns: list[Any] = [{"tools": [{"name": "find", "input": {"n": 1}}]}, {"text": "Found."}]
    with FakeAnthropic(turns) as fake, platform(fake, sort) as client:
        if sort == "bedrock":  # its streams are in a form of its own, which takes botocore to read
            error = failure(claude(fake, client=client))
            assert (error.disposition, error.type) == ("pause", "not_installed")
            assert "botocore" in str(error)
            fake.calls.clear()
        model = claude(fake, client=client, streaming=sort == "vertex")
        first = call_model(model, request(tools=[FIND]))
        second = call_model(model, request(tools=[FIND], messages=went_on([HELLO], first)))
        assert second.content == [{"type": "text", "text": "Found."}]
        assert second.usage["cache_read_input_tokens"] > 0
        fake.fault(529, times=3, message=f"busy: {TOKEN}")
        error = failure(model, request(tools=[FIND]))
        assert (error.disposition, str(error)) == ("retry", "Anthropic answered 529: busy: ***")
        assert len(fake.calls) == 3


def test_where_tokens_cannot_be_counted_the_provider_decides() -> None:
    long = {"role": "user", "content": [{"type": "text", "text": "word " * 100}]}
    with FakeAnthropic([{"text": "1"}]) as fake, platform(fake, "bedrock") as client:
        asked = request(messages=[long])
        options: dict[str, Any] = {"client": client, "streaming": False, "context_window": 50}
        assert call_model(claude(fake, **options), asked).stop_reason == "end_turn"
        call_model(claude(fake, compact=lambda messages, tokens, limit: [HELLO], **options), asked)
        assert [body["messages"] for body in sent(fake)] == [[long], [HELLO]]


def test_the_key_is_in_no_text_of_the_model_nor_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with FakeAnthropic([{"text": "1"}], api_key=KEY, faults={2: 401}) as fake, caplog.at_level(logging.DEBUG):
        for name in ("agentruns", "anthropic", "httpx2", "httpcore2"):
            caplog.set_level(logging.DEBUG, name)
        model = claude(fake)
        call_model(model, request())
        failure(model)
        assert fake.calls[0].status == 200
    assert KEY not in repr(model) + str(model)
    assert any(record.name.startswith("anthropic") for record in caplog.records)
    assert not [record for record in caplog.records if KEY in record.getMessage() + str(record.args)]


@pytest.mark.django_db(transaction=True)
@BOTH
def test_a_key_the_provider_repeats_is_not_journaled(streaming: bool) -> None:
    with FakeAnthropic([{"text": "1"}], api_key=KEY) as fake:
        fake.fault(401, message=f"Your key {KEY} is wrong, and so is Bearer another.token")
        agent = Agent("echo", instructions="Help.", model=claude(fake, streaming=streaming))
        run = the_run(run_agent(agent, "hi", "s1", idempotency_key="k"))
    assert run.status == "paused"
    (failed,) = payloads(run, "model_failed")
    assert "Your key *** is wrong, and so is Bearer ***" in json.dumps(failed)
    told = [*(row.payload for row in Message.objects.all()), {n: str(v) for n, v in vars(run).items()}]
    assert KEY not in json.dumps(told) and "another.token" not in json.dumps(told)
