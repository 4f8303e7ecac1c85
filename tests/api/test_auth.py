"""Refusals: no credentials, no CSRF token, not yours, not allowed, or more often than the throttle allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django import urls
from django.conf import settings as django_settings
from django.contrib.auth.models import Group
from django.core.cache import cache
from django.utils.crypto import get_random_string

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.api import auth
from agentruns.api.poller import Poller
from agentruns.checks.settings import check_values
from agentruns.models import ApiToken, Approval, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.runs import run_agent
from tests.api.hosting import host
from tests.api.http import Api, Program, endpoints, make_user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

Pending = Callable[..., Approval]


@pytest.mark.parametrize("csrf", [False, True])
def test_without_credentials_everything_is_401(pending: Pending, csrf: bool) -> None:
    approval = pending()
    nobody = Api(csrf=csrf)
    for method, path, body in endpoints(approval.run_id, approval.pk):
        status, problem = nobody.ask(method, path, body)
        assert (status, problem["type"]) == (401, "urn:agentruns:not-authenticated"), path
    nobody.client.cookies[django_settings.SESSION_COOKIE_NAME] = "made-up"
    assert nobody.get("/runs")[0] == 401
    # Strangers learn nothing about errors in a request.
    assert nobody.post("/runs", "{")[0] == 401
    assert Run.objects.count() == 1


def test_an_inactive_user_is_nobody(owner: Any, settings: Any) -> None:
    settings.AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.AllowAllUsersModelBackend"]
    api = Api(owner)
    assert api.get("/runs")[0] == 200
    owner.is_active = False
    owner.save()
    assert api.get("/runs")[0] == 401


def test_a_session_without_a_csrf_token_is_403_and_changes_nothing(pending: Pending) -> None:
    approval = pending()
    root = Api(make_user("root", is_superuser=True), csrf=True)
    for method, path, body in endpoints(approval.run_id, approval.pk):
        status, problem = root.ask(method, path, body)
        if method == "GET":
            assert status == 200
        else:
            assert (status, problem["type"]) == (403, "urn:agentruns:csrf"), path
    assert Run.objects.count() == 1
    assert Approval.objects.get().status == "pending"


def test_a_csrf_token_opens_the_door_and_a_form_is_no_way_around(pending: Pending) -> None:
    """A cross-site form can send multipart; it is read by the CSRF check and then refused."""
    approval = pending()
    root = Api(make_user("root", is_superuser=True), csrf=True)
    root.client.cookies["csrftoken"] = token = get_random_string(32)
    for data in ({"agent": "shop"}, {"agent": "shop", "csrfmiddlewaretoken": token}):
        response = root.client.post("/api/runs", data)
        assert response.status_code == (400 if "csrfmiddlewaretoken" in data else 403)
        assert response["Content-Type"] == "application/problem+json"
    broken = root.client.post("/api/runs", b"x", content_type="multipart/form-data; boundary=")
    assert (broken.status_code, broken["Content-Type"]) == (400, "application/problem+json")
    assert Run.objects.count() == 1
    path, body = f"/approvals/{approval.pk}/approve", {"digest": approval.digest}
    assert root.post(path, body, **{"X-CSRFToken": "x" * 32})[0] == 403
    assert root.post(path, body, **{"X-CSRFToken": token})[0] == 200


def test_who_sees_which_runs(owner: Any, shop: Agent) -> None:
    other = make_user("other")
    runs = {
        "own": start_run(shop, "hi", "s1", actor=owner),
        "other's": start_run(shop, "hi", "s2", actor=other),
        "nobody's": start_run(shop, "hi", "s3"),
    }
    sees = {
        owner: {"own"},
        make_user("stranger"): set(),
        make_user("staff", is_staff=True): set(),
        make_user("decides", "decide_approval", "view_approval", "resume_run", "cancel_run"): set(),
        make_user("views", "view_run"): set(runs),
        make_user("root", is_superuser=True): set(runs),
    }
    for user, expected in sees.items():
        api = Api(user)
        assert {item["id"] for item in api.get("/runs")[1]["items"]} == {
            str(runs[name].pk) for name in expected
        }
        for name, run in runs.items():
            paths = [("GET", ""), ("GET", "/messages")]
            paths += [] if name in expected else [("POST", "/resume"), ("POST", "/cancel")]
            for method, path in paths:
                status, body = api.ask(method, f"/runs/{run.pk}{path}", {})
                assert status == (200 if name in expected else 404), (user, name, path)
                if status == 404:
                    there = without_ids(body, run.pk)
                    unknown = uuid4()
                    status, body = api.ask(method, f"/runs/{unknown}{path}", {})
                    assert (status, without_ids(body, unknown)) == (404, there)
    assert set(Run.objects.values_list("status", flat=True)) == {"queued"}


def without_ids(problem: dict[str, Any], pk: Any) -> dict[str, Any]:
    return {name: str(value).replace(str(pk), "ID") for name, value in problem.items()}


def test_who_sees_and_decides_which_approvals(owner: Any, pending: Pending) -> None:
    own, unowned = pending("s1"), pending("s2", None)
    sees = {owner: {own}, make_user("stranger"): set(), make_user("staff", is_staff=True): set()}
    for permission in ("view_run", "view_approval", "decide_approval"):
        sees[make_user(permission, permission)] = {own, unowned}
    for user, expected in sees.items():
        api = Api(user)
        shown = {item["id"] for item in api.get("/approvals")[1]["items"]}
        assert shown == {str(approval.pk) for approval in expected}, user
        for approval in (own, unowned):
            status = 200 if approval in expected else 404
            assert api.get(f"/approvals/{approval.pk}")[0] == status
            if user.get_username() == "decide_approval":
                continue
            for verb, more in (("approve", {}), ("deny", {"reason": "no"})):
                refused, problem = api.post(
                    f"/approvals/{approval.pk}/{verb}", {"digest": approval.digest, **more}
                )
                assert refused == (403 if approval in expected else 404), (user, verb)
                if refused == 403:
                    assert problem["type"] == "urn:agentruns:permission-denied"
                    assert "agentruns.decide_approval" in problem["detail"]
    assert {item.status for item in Approval.objects.all()} == {"pending"}


def test_the_rules_of_the_service_hold(owner: Any, decider: Any, settings: Any) -> None:
    from agentruns import ToolContext, tool

    @tool(requires_approval=True, approvers="Treasury")
    def pay(ctx: ToolContext, cents: int) -> str:
        """Pay."""
        return "paid"

    agent = shop_agent("payer", {"tools": [call("pay", cents=1)]}, tools=[pay])
    approval = run_agent(agent, "pay", "s1", actor=decider).pending[0]
    path, body = f"/approvals/{approval.pk}/approve", {"digest": approval.digest}
    status, problem = Api(decider).post(path, body)
    assert (status, "Treasury" in problem["detail"]) == (403, True)
    decider.groups.add(Group.objects.create(name="Treasury"))
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    assert Api(decider).post(path, body)[0] == 403
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = True
    assert Api(decider).post(path, body)[0] == 200


@pytest.mark.parametrize("bad", ["x", "0", "None", "%00", "a%0Ab", "%F0%9F%98%80", "g" * 32, "x" * 5000])
def test_an_id_that_is_none_is_not_found(bad: str) -> None:
    root = Api(make_user("root", is_superuser=True))
    for method, path, body in endpoints(bad, bad):
        if bad in path:
            status, problem = root.ask(method, path, body)
            assert (status, problem["type"]) == (404, "urn:agentruns:not-found"), path


def test_an_id_may_be_written_in_any_form_of_a_uuid(api: Api, owner: Any, shop: Agent) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    for form in (str(run.pk).upper(), run.pk.hex, run.pk.urn):
        assert api.get(f"/runs/{form}")[1]["id"] == str(run.pk)


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
    for seen, status in (("made-up, 192.0.2.7", 401), ("other, 192.0.2.7", 429), ("made-up, 192.0.2.8", 401)):
        assert Api().client.get("/api/runs", headers={"X-Forwarded-For": seen}).status_code == status


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
    urlconf(urls.path("host/", host(errors=False).urls))
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
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.Gone"}}
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
