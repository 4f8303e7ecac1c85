"""Everything that goes wrong between here and Claude: what it is called, and what becomes of the run."""

from __future__ import annotations

import json
import pickle
import sys
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError, call_model
from agentruns.providers.failures import classify as classified
from agentruns.providers.failures import retry_after
from tests.fake_anthropic import FakeAnthropic
from tests.unit.claude import FIND, KEY, NAME, claude, failure, request, sent

classify = partial(classified, "anthropic")
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
    ("status", "type", "disposition"),
    [
        (400, "invalid_request_error", "fail"),
        (401, "authentication_error", "pause"),
        (402, "billing_error", "pause"),
        (403, "permission_error", "pause"),
        (404, "not_found_error", "pause"),
        (408, "timeout_error", "retry"),
        (409, "conflict_error", "retry"),
        (413, "request_too_large", "fail"),
        (418, "invalid_request_error", "fail"),
        (422, "invalid_request_error", "fail"),
        (429, "rate_limit_error", "retry"),
        (500, "api_error", "retry"),
        (503, "api_error", "retry"),
        (504, "timeout_error", "retry"),
        (529, "overloaded_error", "retry"),
    ],
)
def test_a_status(streaming: bool, status: int, type: str, disposition: str) -> None:
    error = meeting(status, streaming=streaming, message=f"no: {KEY}", error_code="some_code")
    assert (error.disposition, error.status, error.type) == (disposition, status, type)
    assert (error.code, error.retry_after, error.usage) == ("some_code", None, None)
    assert error.request_id.startswith("req_")
    assert str(error) == f"Anthropic answered {status}: no: ***"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
    assert KEY.encode() not in pickle.dumps(error)


@BOTH
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "enforced_spend_limit_reached"),
        (429, "contract_spend_limit_reached"),
        (400, "organization_on_hold"),
    ],
)
def test_a_limit_that_no_waiting_lifts_pauses_whatever_its_status(
    streaming: bool, status: int, code: str
) -> None:
    error = meeting(status, streaming=streaming, error_code=code)
    assert (error.disposition, error.code, error.status) == ("pause", code, status)


@BOTH
@pytest.mark.parametrize(
    ("said", "seconds"),
    [({"retry_after": 17}, 17), ({"retry_after": "2.5"}, 2.5), ({"retry_after_ms": 1500}, 1.5)],
)
def test_how_long_to_wait(streaming: bool, said: dict[str, Any], seconds: float) -> None:
    for status in (429, 529):
        assert meeting(status, streaming=streaming, **said).retry_after == seconds


@pytest.mark.parametrize(
    ("type", "disposition"),
    [
        ("overloaded_error", "retry"),
        ("api_error", "retry"),
        ("rate_limit_error", "retry"),
        ("error_of_the_future", "retry"),
        ("invalid_request_error", "fail"),
        ("request_too_large", "fail"),
        ("authentication_error", "pause"),
        ("permission_error", "pause"),
        ("billing_error", "pause"),
        ("not_found_error", "pause"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_an_error_in_the_middle_of_a_stream_is_judged_by_its_type(
    type: str, disposition: str, after: int
) -> None:
    error = meeting("error", type=type, after=after, message=f"no: {KEY}", error_code="some_code")
    assert (error.disposition, error.type, error.status) == (disposition, type, 200)
    assert (error.code, error.request_id[:4]) == ("some_code", "req_")
    assert str(error) == "Anthropic answered 200: no: ***"
    assert bool(error.usage) == (after > 0), "known as soon as the message has begun"


WIRE = [
    ("drop", None, "RemoteProtocolError"),
    ("drop", 0, "RemoteProtocolError"),
    ("drop", 3, "RemoteProtocolError"),
    ("drop", 99, "RemoteProtocolError"),
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


@pytest.mark.parametrize("kind", ["drop", "truncate", "corrupt", "empty"])
@pytest.mark.parametrize("after", [None, 1])
def test_an_answer_in_one_piece_that_breaks_is_asked_for_again(kind: str, after: int | None) -> None:
    error = meeting(kind, streaming=False, after=after)
    assert error.disposition == "retry" and error.status is None


@BOTH
@pytest.mark.parametrize("reply", [{"content": [], "stop_reason": None}, {"text": "x", "stop_reason": None}])
def test_a_reply_that_does_not_say_why_it_ended_is_a_failed_attempt(streaming: bool, reply: Any) -> None:
    with FakeAnthropic([{**reply, "usage": {"output_tokens": 5}}]) as fake:
        error = failure(claude(fake, streaming=streaming))
        assert (error.disposition, error.type) == ("retry", "incomplete_reply")
        assert error.usage and error.usage["output_tokens"] == 5
        assert error.request_id == fake.calls[0].request_id


@BOTH
def test_a_call_cut_short_is_no_call(streaming: bool) -> None:
    cut = {"type": "tool_use", "id": "t", "name": "find", "input": '{"n": 1, "m": "4'}
    with FakeAnthropic([{"content": [cut], "stop_reason": "max_tokens"}]) as fake:
        reply = call_model(claude(fake, streaming=streaming), request(tools=[FIND]))
    assert reply.stop_reason == "max_tokens", "it may look whole; the engine runs calls of tool_use only"


def test_arguments_that_are_no_json_are_the_wires_fault_and_not_shown() -> None:
    wrong = {"type": "tool_use", "id": "t", "name": "find", "input": "{]"}
    with FakeAnthropic([{"content": [wrong], "stop_reason": "tool_use"}]) as fake:
        error = failure(claude(fake), request(tools=[FIND]))
    assert (error.disposition, error.type) == ("retry", "ValueError")
    assert error.usage and len(str(error)) <= 500


@BOTH
def test_a_slow_answer_comes_whole_or_times_out(streaming: bool) -> None:
    with FakeAnthropic([{"text": "x"}]) as fake:
        fake.fault("slow", delay=0.01)
        assert call_model(claude(fake, streaming=streaming), request()).content[0]["text"] == "x"
        fake.fault("slow", delay=60)
        error = failure(claude(fake, streaming=streaming, timeout=0.1))
    assert error.disposition == "retry" and "Timeout" in error.type


@BOTH
def test_nobody_there_is_retried(streaming: bool) -> None:
    with FakeAnthropic() as fake:
        client = fake.client(base_url="http://127.0.0.1:9")
        error = failure(claude(fake, client=client, streaming=streaming))
    assert (error.disposition, error.type) == ("retry", "APIConnectionError")
    assert "ConnectError" in str(error)


@BOTH
def test_mistakes_of_our_own_pause_and_nothing_is_sent(streaming: bool) -> None:
    with FakeAnthropic([{"text": "x"}]) as fake:
        model = claude(fake, streaming=streaming)
        for params in (
            {"stream": True},
            {"model": "other"},
            {"max_tokens": "many"},
            {"metadata": object()},
            {"tools": 3},
        ):
            error = failure(model, request(params=params))
            assert error.disposition == "pause", params
            assert next(iter(params)) in str(error) or error.type == "TypeError"
        assert sent(fake) == []


@BOTH
def test_a_wrong_key_and_an_unknown_model_pause(streaming: bool) -> None:
    with FakeAnthropic([{"text": "x"}]) as fake:
        error = failure(claude(fake, client=fake.client(api_key=KEY), streaming=streaming))
        assert (error.disposition, error.type) == ("pause", "authentication_error")
        error = failure(AnthropicModel("gpt-4", fake.client(), streaming=streaming))
        assert (error.disposition, error.type) == ("pause", "not_found_error")


@BOTH
def test_a_key_that_is_no_header_does_not_leak(streaming: bool) -> None:
    with FakeAnthropic([{"text": "x"}]) as fake:
        for key in (f"{KEY}\n", f"{KEY} ä", "of-a-gateway-7788\n"):
            error = failure(claude(fake, client=fake.client(api_key=key), streaming=streaming))
            assert "gateway-7788" not in str(error)


def test_secrets_of_any_sort_are_taken_out_of_texts() -> None:
    assert "***" in str(classify(ValueError("Authorization: Bearer abc.def sk-ant-other")))
    for text in ("bearer abc.def", "Bearer abc.def", "x sk-ant-abc.def"):
        assert "abc" not in str(classify(ValueError(text)))
    assert "tokenised" not in str(classify(ValueError("it is tokenised"), ["tokenised"]))
    assert len(str(classify(ValueError("long " * 1000)))) == 500


def test_missing_credentials_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with FakeAnthropic() as fake:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", fake.url)
        error = failure(AnthropicModel(NAME))
        assert fake.calls == []
    assert (error.disposition, error.type) == ("pause", "missing_credentials")
    assert "ANTHROPIC_API_KEY" in str(error)


def test_a_missing_sdk_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    error = failure(AnthropicModel(NAME))
    assert (error.disposition, error.type) == ("pause", "not_installed")
    assert "agentruns[anthropic]" in str(error)


def test_errors_that_were_classified_stay_as_they_are() -> None:
    given = ProviderError("x", disposition="fail")
    assert classify(given) is given
    assert classify(json.JSONDecodeError("", "", 0)).disposition == "retry"
    assert classify(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")).disposition == "retry"
    assert classify(ConnectionResetError("x")).disposition == "retry"
    assert classify(KeyError("x")).disposition == "pause"
    assert classify(KeyError("x"), begun=True).disposition == "retry"


def test_a_type_that_means_a_person_counts_more_than_the_status() -> None:
    import anthropic
    import httpx2

    response = httpx2.Response(400, request=httpx2.Request("POST", "http://gateway.invalid"))
    for type, disposition in (("billing_error", "pause"), ("something", "fail"), (None, "fail")):
        error = anthropic.APIStatusError(
            "x", response=response, body={"error": {"type": type, "message": "x"}}
        )
        assert classify(error).disposition == disposition


def test_formats_of_retry_after() -> None:
    assert retry_after({}) is None
    assert retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    for wrong in ("soon", "-1", "nan", "inf", ""):
        assert retry_after({"retry-after": wrong}) is None
    at = {seconds: formatdate(1e9 + seconds, usegmt=True) for seconds in (-60, 0, 60)}
    assert retry_after({"retry-after": at[60], "date": at[0]}) == 60
    assert retry_after({"retry-after": at[-60], "date": at[0]}) == 0
    for own in ({}, {"date": "soon"}, {"date": "Sun, 09 Sep 2001 01:46:40"}):
        assert retry_after({"retry-after": at[60], **own}) is None  # by this machine's clock it may be wrong
