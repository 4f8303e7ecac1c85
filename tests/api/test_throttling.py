"""AGENTRUNS_API_THROTTLE: requests up to the rate are answered, others are 429 with Retry-After."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.cache import cache
from django.urls import path

from agentruns.api import auth
from agentruns.api.poller import Poller
from agentruns.checks.settings import check_values
from agentruns.models import ApiToken
from agentruns.services.api_tokens import create_token
from tests.api.hosting import host
from tests.api.http import Api, Program

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


def test_it_is_off_by_default(api: Api) -> None:
    assert {api.get("/runs")[0] for _request in range(50)} == {200}


def test_a_user_is_counted_by_session_and_token_together(owner: Any, decider: Any, settings: Any) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "3/d"}
    session, program = Api(owner), Program(create_token(owner, ApiToken.Scope.values)[1])
    statuses = [session.get("/runs")[0], program.get("/runs")[0], program.post("/runs", "{")[0]]
    assert statuses == [200, 200, 400]
    for api in (session, program):
        status, problem = api.get("/runs")
        assert (status, problem["type"]) == (429, "urn:agentruns:throttled")
        assert api.response["Retry-After"] == str(problem["retry_after"])
        assert 1 <= problem["retry_after"] <= 86_400
    assert Api(decider).get("/runs")[0] == 200
    assert [Api().get("/runs")[0] for _request in range(5)] == [401] * 5


def test_who_is_not_let_in_is_counted_by_address(owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": None, "anonymous": "2/h"}
    nobody, guesser = Api(), Program("ar_guess")
    assert [nobody.get("/runs")[0], guesser.get("/runs")[0]] == [401, 401]
    assert [nobody.get("/runs")[0], guesser.get("/runs")[0]] == [429, 429]
    assert int(guesser.response["Retry-After"]) > 0
    # What a client says of its address does not help it, and nobody else suffers.
    assert nobody.client.get("/api/runs", headers={"X-Forwarded-For": "192.0.2.7"}).status_code == 429
    assert nobody.client.get("/api/runs", REMOTE_ADDR="192.0.2.7").status_code == 401
    assert Api(owner).get("/runs")[0] == 200
    assert [nobody.get("/health")[0] for _request in range(5)] == [200] * 5  # what asks whether we live


def test_behind_a_proxy_the_address_is_the_one_it_saw(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"anonymous": "1/h"}
    monkeypatch.setattr(auth.ninja_settings, "NUM_PROXIES", 1)
    client, statuses = Api().client, []
    for seen in ("made-up, 192.0.2.7", "other, 192.0.2.7", "made-up, 192.0.2.8"):
        statuses.append(client.get("/api/runs", headers={"X-Forwarded-For": seen}).status_code)
    assert statuses == [401, 429, 401]


def test_after_the_time_that_it_says_one_may_come_again(
    api: Api, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "1/h"}
    clock = [1_700_000_000.0]
    monkeypatch.setattr(auth.Throttle, "timer", lambda throttle: clock[0])
    assert [api.get("/runs")[0] for _request in range(2)] == [200, 429]
    clock[0] += int(api.response["Retry-After"]) - 1
    assert api.get("/runs")[0] == 429
    clock[0] += 1
    assert api.get("/runs")[0] == 200


def test_in_somebody_elses_api(urlconf: Any, owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "1/d"}
    urlconf(path("host/", host(errors=False).urls))
    client = Api(owner).client
    answers = [client.get("/host/agents/runs") for _request in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert int(answers[1]["Retry-After"]) > 0


def test_a_stream_that_authenticates_again_counts_once(
    pending: Any, owner: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pending().run
    settings.AGENTRUNS_API_THROTTLE, settings.AGENTRUNS_API_PING_SECONDS = {"user": "1/d"}, 0
    monkeypatch.setattr(Poller, "FIRST_PAUSE", 0)
    program = Program(create_token(owner, ["runs:read"])[1])
    response = program.client.get(f"/api/runs/{run.pk}/events")
    stream = iter(response.streaming_content)
    pings = [next(stream) for _poll in range(4)]
    assert [b": ping" in each for each in pings] == [False, True, True, True]
    response.close()
    assert program.get(f"/runs/{run.pk}")[0] == 429


def test_without_a_cache_nobody_is_kept_out(
    api: Api, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "1/d"}
    settings.CACHES = {"default": {"BACKEND": "tests.api.test_throttling.Gone"}}
    assert [api.get("/runs")[0] for _request in range(3)] == [200] * 3
    assert "The cache failed" in caplog.text


class Gone:
    """A cache that cannot be reached."""

    def __init__(self, location: str, params: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def get(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the cache is gone")


@pytest.mark.parametrize(
    "bad",
    [
        "100/m", {"users": "1/m"}, {"user": "0/m"}, {"user": "100"}, {"user": "1/w"}, {"user": 100},
        {"user": ("1", "m")}, [],
    ],
)  # fmt: skip
def test_a_setting_that_says_nothing_is_an_error_with_the_fix(settings: Any, bad: Any) -> None:
    settings.AGENTRUNS_API_THROTTLE = bad
    (found,) = check_values(None)
    assert (found.id, "'user': '100/m'" in found.hint) == ("agentruns.E013", True)
    settings.AGENTRUNS_API_THROTTLE = {"user": "100/m", "anonymous": None}
    assert check_values(None) == []
