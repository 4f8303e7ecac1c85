"""Clients of one's own, on any platform, and the keys they hold."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agentruns import Agent, run_agent
from agentruns.models import Message
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import call_model
from agentruns.testing import ScriptedModel
from tests.db.helpers import payloads, the_run
from tests.fake_anthropic import FakeAnthropic
from tests.unit.claude import FIND, HELLO, KEY, NAME, claude, failure, request, sent, went_on

TOKEN = "ya29.of-another-platform"
BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "plain"])


@pytest.mark.parametrize("streaming", [True, False])
def test_the_retries_of_a_given_client_are_off(streaming: bool) -> None:
    with FakeAnthropic([{"text": "1"}], faults=dict.fromkeys(range(1, 9), 529)) as fake:
        client = fake.client(max_retries=5)
        assert failure(claude(fake, client=client, streaming=streaming)).status == 529
        assert len(fake.calls) == 1
        assert client.max_retries == 5, "the client is the developer's own"


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
        make: Callable[..., Any] = (
            anthropic.AnthropicVertex if sort == "vertex" else anthropic.AnthropicBedrock
        )
        given = {"region": "eu", "project_id": "p", "access_token": TOKEN}
        if sort != "vertex":
            given = {"aws_region": "eu-west-1", "api_key": TOKEN}
        yield make(base_url="http://gateway.invalid", http_client=http, max_retries=5, **given)


@pytest.mark.parametrize("sort", ["vertex", "bedrock"])
def test_claude_on_other_platforms_by_their_own_client(sort: str) -> None:
    turns: list[Any] = [{"tools": [{"name": "find", "input": {"n": 1}}]}, {"text": "Found."}]
    # Streams of Bedrock are in a form of its own, which takes botocore to read.
    with FakeAnthropic(turns) as fake, platform(fake, sort) as client:
        model = claude(fake, client=client, streaming=sort == "vertex")
        first = call_model(model, request(tools=[FIND]))
        second = call_model(model, request(tools=[FIND], messages=went_on([HELLO], first)))
        assert second.content == [{"type": "text", "text": "Found."}]
        assert second.usage["cache_read_input_tokens"] > 0
        fake.fault(529, times=3, message=f"busy: {TOKEN}")
        error = failure(model, request(tools=[FIND]))
        assert (error.disposition, str(error)) == ("retry", "Anthropic answered 529: busy: ***")
        assert len(fake.calls) == 3


def test_a_stream_of_bedrock_says_which_package_it_needs() -> None:
    with FakeAnthropic([{"text": "1"}]) as fake, platform(fake, "bedrock") as client:
        error = failure(claude(fake, client=client))
    assert (error.disposition, error.type) == ("pause", "not_installed")
    assert "botocore" in str(error)


def test_where_tokens_cannot_be_counted_the_provider_decides() -> None:
    long = {"role": "user", "content": [{"type": "text", "text": "word " * 100}]}
    with FakeAnthropic([{"text": "1"}]) as fake, platform(fake, "bedrock") as client:
        asked = request(messages=[long])
        model = claude(fake, client=client, streaming=False, context_window=50)
        assert call_model(model, asked).stop_reason == "end_turn"
        shortened = claude(
            fake, client=client, streaming=False, context_window=50, compact=lambda m, tokens, limit: [HELLO]
        )
        call_model(shortened, asked)
        assert [body["messages"] for body in sent(fake)] == [[long], [HELLO]]


# Secrets


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


def test_threads_share_a_model() -> None:
    with FakeAnthropic([{"text": "Hello you."}]) as fake:
        model, replies = claude(fake), list[Any]()
        threads = [
            threading.Thread(target=lambda: replies.append(call_model(model, request()))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [reply.content for reply in replies] == [[{"type": "text", "text": "Hello you."}]] * 8


def test_a_wrong_cache_setting_is_found_at_once() -> None:
    with pytest.raises(ValueError, match="5m"):
        AnthropicModel(NAME, cache="10m")  # type: ignore[arg-type]


def test_a_script_and_the_fake_say_the_same() -> None:
    turns: list[Any] = [{"text": "Hello you."}]
    with FakeAnthropic(turns) as fake:
        assert call_model(claude(fake), request()).content == ScriptedModel(turns).propose(request()).content
