"""Refusals: no credentials, no CSRF token, not yours, not allowed, throttled; and what a token opens."""

from __future__ import annotations

import hmac
import re
import string
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django import urls
from django.conf import settings as django_settings
from django.contrib.auth.models import Group
from django.core.cache import cache
from django.core.cache.backends.dummy import DummyCache
from django.db import connection, connections
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils.crypto import get_random_string

from agentruns import start_run
from agentruns.agents.agent import Agent
from agentruns.api import auth
from agentruns.api.auth import channel_of, require_token_scope, token_of
from agentruns.api.errors import Problem
from agentruns.api.stream import Poller
from agentruns.checks.settings import check_values
from agentruns.exceptions import NotFoundError, PermissionDeniedError
from agentruns.models import ApiToken, Approval, Run
from agentruns.services import api_tokens
from agentruns.services.api_tokens import authenticate, create_token, revoke
from agentruns.services.runs.lifecycle import run_agent
from agentruns.testing import frozen_clock
from tests.api.hosting import host
from tests.api.http import Api, Program, endpoints, make_user, refused
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

Pending = Callable[..., Approval]


@pytest.mark.parametrize("csrf", [False, True])
def test_without_credentials_everything_is_401(pending: Pending, csrf: bool, settings: Any) -> None:
    approval = pending()
    nobody = Api(csrf=csrf)
    for method, path, body in endpoints(approval.run_id, approval.pk):
        refused(nobody.ask(method, path, body), 401, "not-authenticated")
    nobody.client.cookies[django_settings.SESSION_COOKIE_NAME] = "made-up"
    assert nobody.get("/runs")[0] == 401
    # Strangers learn nothing about errors in a request.
    assert nobody.post("/runs", "{")[0] == 401
    assert Run.objects.count() == 1
    # Nor is an inactive user anybody, whom a backend of the project lets in.
    settings.AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.AllowAllUsersModelBackend"]
    api = Api(approval.run.owner)
    assert api.get("/runs")[0] == 200
    type(approval.run.owner).objects.update(is_active=False)
    assert api.get("/runs")[0] == 401


def test_a_session_needs_a_csrf_token_and_a_form_is_no_way_around(pending: Pending) -> None:
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
    # A cross-site form can send multipart; it is read by the CSRF check and then refused.
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


def test_an_id_that_is_none_is_not_found_and_any_form_of_a_uuid_is(api: Api, owner: Any, shop: Agent) -> None:
    root = Api(make_user("root", is_superuser=True))
    for bad in ("x", "0", "None", "%00", "a%0Ab", "%F0%9F%98%80", "g" * 32, "x" * 5000):
        for method, path, body in (each for each in endpoints(bad, bad) if bad in each[1]):
            refused(root.ask(method, path, body), 404, "not-found")
    run = start_run(shop, "hi", "s1", actor=owner)
    for form in (str(run.pk).upper(), run.pk.hex, run.pk.urn):
        assert api.get(f"/runs/{form}")[1]["id"] == str(run.pk)


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


def test_a_user_is_counted_by_session_and_token_together(owner: Any, decider: Any, settings: Any) -> None:
    session, program = Api(owner), Program(create_token(owner, ApiToken.Scope.values)[1])
    assert {session.get("/runs")[0] for _request in range(50)} == {200}, "it is off by default"
    settings.AGENTRUNS_API_THROTTLE = {"user": "3/d"}
    statuses = [session.get("/runs")[0], program.get("/runs")[0], program.post("/runs", "{")[0]]
    assert statuses == [200, 200, 400]
    for api in (session, program):
        problem = refused(api.get("/runs"), 429, "throttled")
        assert api.response["Retry-After"] == str(problem["retry_after"])
        assert 1 <= problem["retry_after"] <= 86_400
    assert Api(decider).get("/runs")[0] == 200
    assert [Api().get("/runs")[0] for _request in range(5)] == [401] * 5


def test_users_of_two_schemas_are_counted_apart(api: Api, settings: Any, monkeypatch: Any) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "1/d"}
    for schema in ("north", "south"):  # other users, with the same key
        monkeypatch.setattr(connections["default"], "schema_name", schema, raising=False)
        assert [api.get("/runs")[0] for _request in range(2)] == [200, 429]


def test_who_is_not_let_in_is_counted_by_address(owner: Any, settings: Any, monkeypatch: Any) -> None:
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
    # Behind a proxy the address is the one it saw.
    cache.clear()
    settings.AGENTRUNS_API_THROTTLE = {"anonymous": "1/h"}
    monkeypatch.setattr(auth.ninja_settings, "NUM_PROXIES", 1)
    for seen, status in (("made-up, 192.0.2.7", 401), ("other, 192.0.2.7", 429), ("made-up, 192.0.2.8", 401)):
        assert Api().client.get("/api/runs", headers={"X-Forwarded-For": seen}).status_code == status


def test_after_the_time_that_it_says_one_may_come_again_also_in_somebody_elses_api(
    api: Api, urlconf: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_API_THROTTLE = {"user": "1/h"}
    clock = [1_700_000_000.0]
    monkeypatch.setattr(auth.Throttle, "timer", lambda throttle: clock[0])
    assert [api.get("/runs")[0] for _request in range(2)] == [200, 429]
    clock[0] += int(api.response["Retry-After"]) - 1
    assert api.get("/runs")[0] == 429
    clock[0] += 1
    assert api.get("/runs")[0] == 200
    cache.clear()
    urlconf(urls.path("host/", host(errors=False).urls))
    answers = [api.client.get("/host/agents/runs") for _request in range(2)]
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


class Gone(DummyCache):
    """A cache that cannot be reached."""

    def get(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the cache is gone")


def test_a_setting_that_says_nothing_is_an_error_with_the_fix(settings: Any) -> None:
    wrong = ["100/m", {"users": "1/m"}, {"user": "0/m"}, {"user": "100"}, {"user": "1/w"}, {"user": 100}, []]
    for bad in (*wrong, {"user": ("1", "m")}):
        settings.AGENTRUNS_API_THROTTLE = bad
        (found,) = check_values(None)
        assert (found.id, "'user': '100/m'" in found.hint) == ("agentruns.E013", True)
    settings.AGENTRUNS_API_THROTTLE = {"user": "100/m", "anonymous": None}
    assert check_values(None) == []


# Bearer tokens: who is let in, for what, and that nothing else of the request counts then

READ, WRITE, ACT_FOR, DECIDE, OWN, EVENTS, _RULES = ApiToken.Scope.values


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def sealed(text: str) -> str:
    """The text of a token with the checksum that belongs to it, as the documentation says it is made."""
    letters = string.digits + string.ascii_uppercase + string.ascii_lowercase
    number = zlib.crc32(text.encode())
    return text + "".join(letters[number // 62**place % 62] for place in range(5, -1, -1))


def test_only_its_digest_is_stored(owner: Any) -> None:
    token, text = create_token(owner, [WRITE, READ], name="nightly", expires_in=timedelta(days=1))
    assert re.fullmatch(r"ar_[a-z0-9]{12}_[0-9A-Za-z]{49}", text)  # 43 of 62 characters are 256 bits
    assert text.startswith(f"{token.prefix}_")
    stored = ApiToken.objects.values().get()
    assert (stored["scopes"], stored["name"], stored["owner_id"]) == ([READ, WRITE], "nightly", owner.pk)
    assert text.removeprefix(f"{token.prefix}_") not in repr(stored)
    assert sealed(text[:-6]) == text, "the form that scanners know"
    assert create_token(owner, [READ])[1] != text


def test_a_token_that_makes_no_sense_is_not_made(owner: Any) -> None:
    for bad in (
        {"scopes": []}, {"scopes": ["runs:delete"]}, {"name": "x" * 101}, {"name": "a\nb"},
        {"expires_in": timedelta()}, {"expires_in": timedelta(days=367)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="A token"):
            create_token(owner, **{"scopes": [READ], **bad})
    assert not ApiToken.objects.exists()


def test_it_acts_as_its_owner_without_csrf_or_a_session(shop: Agent, owner: Any) -> None:
    program = Program(create_token(owner, [READ, WRITE])[1])
    status, run = program.post("/runs", {"agent": "shop", "input": "hi"})
    assert (status, run["owner"]) == (201, str(owner.pk))
    assert program.get(f"/runs/{run['id']}")[0] == 200
    assert program.post(f"/runs/{run['id']}/cancel")[0] == 200
    assert Run.objects.get().status == "cancelled"
    assert program.response.cookies == {}


def test_the_session_beside_a_token_counts_for_nothing(shop: Agent, owner: Any, decider: Any) -> None:
    start_run(shop, "hi", "s1", actor=owner)
    api = Api(owner)
    assert len(api.get("/runs")[1]["items"]) == 1
    nobody, text = Api(), create_token(decider, [READ])[1]
    assert nobody.get("/runs")[0] == 401
    assert nobody.response["WWW-Authenticate"] == "Bearer"
    for header, expected in (
        (f"Bearer {text}", 200), (f"bearer  {text} ", 200), (text, 401), (f"Bearer {text}x", 401),
        ("Bearer", 401), ("Bearer é", 401), ("", 401), ("Basic b3duZXI6", 401), (f"Token {text}", 401),
    ):  # fmt: skip
        response = api.client.get("/api/runs", headers={"Authorization": header})
        assert response.status_code == expected, header
        if expected == 200:
            assert response.json()["items"] == []  # what the token's owner sees, not the session's user
        else:
            assert response["WWW-Authenticate"] == "Bearer"
            assert response.json()["type"] == "urn:agentruns:not-authenticated"


def test_who_is_not_let_in(owner: Any) -> None:
    with frozen_clock() as clock:
        _token, text = create_token(owner, [READ], expires_in=timedelta(hours=1))
        program = Program(text)
        clock.forward(minutes=59)
        assert program.get("/runs")[0] == 200
        clock.forward(minutes=2)
        expired = program.get("/runs")
        program = Program((kept := create_token(owner, [READ]))[1])
        type(owner).objects.update(is_active=False)
        inactive = program.get("/runs")
        type(owner).objects.update(is_active=True)
        assert program.get("/runs")[0] == 200
        assert (revoke(kept[0].pk, owner), revoke(kept[0].pk, owner)) == (True, False)
        revoked = program.get("/runs")
        gone = Program(create_token(owner, [READ])[1])
        owner.delete()
    other = Program(sealed(text[:16] + "x" * 43)).get("/runs")
    assert expired == inactive == revoked == other == gone.get("/runs")
    assert expired[0] == 401


def test_an_unknown_token_costs_what_a_wrong_one_does(owner: Any) -> None:
    token, text = create_token(owner, [READ])
    costs = []
    for wrong in (sealed(token.prefix + "_" + "x" * 43), sealed("ar_" + "0" * 12 + text[15:-6])):
        with CaptureQueriesContext(connection) as queries:
            assert authenticate(wrong) is None
        costs.append(len(queries))
    assert costs == [1, 1]
    slip = "x" if text[20] != "x" else "y"
    with CaptureQueriesContext(connection) as queries:  # mistyped: nobody is asked
        mistyped = ["ar_x", "", text[:20] + slip + text[21:], text[:-1] + "é"]
        for wrong in (*mistyped, "ar_" + "\x00" * 12 + text[15:]):
            assert authenticate(wrong) is None
    assert len(queries) == 0


def test_what_may_be_done_with_which_scope(pending: Pending) -> None:
    approval = pending()
    root = make_user("root", is_superuser=True)
    programs = {scope: Program(create_token(root, [scope])[1]) for scope in ApiToken.Scope.values}
    for method, where, body in endpoints(approval.run_id, approval.pk):
        allowed = {READ} if method == "GET" else {WRITE}
        if where.startswith("/approvals"):
            allowed = {READ, DECIDE} if method == "GET" else {DECIDE, OWN}
        for scope, program in programs.items():
            if method == "POST" and scope in allowed:
                continue
            status, problem = program.ask(method, where, "{" if body else None)  # not even read
            assert status == (200 if scope in allowed else 403), (method, where, scope)
            if status == 403:
                assert (problem["type"], set(problem["scopes"])) == ("urn:agentruns:scope", allowed)
                assert all(name in problem["detail"] for name in allowed)
    assert Approval.objects.get().status == "pending"
    assert (Run.objects.count(), Run.objects.get().status) == (1, "awaiting-approval")
    path = f"/approvals/{approval.pk}/approve"
    assert programs[DECIDE].post(path, {"digest": approval.digest})[0] == 200


def test_it_may_do_what_its_owner_may_do_now(pending: Pending, decider: Any) -> None:
    approval = pending()
    where, body = f"/approvals/{approval.pk}/approve", {"digest": approval.digest}
    program = Program(create_token(decider, [DECIDE])[1])
    permissions = list(decider.user_permissions.all())
    decider.user_permissions.clear()
    assert program.post(where, body)[0] == 404
    decider.user_permissions.set(permissions)
    assert program.post(where, body)[1]["decided_by"] == str(decider.pk)


def test_when_it_was_used_is_noted_once_a_minute(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with frozen_clock() as clock:
        token, text = create_token(owner, [READ])
        program, used = Program(text), []
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
        for seconds in (0, 59, 2, 61):
            clock.forward(seconds=seconds)
            with CaptureQueriesContext(connection) as queries:
                assert program.get("/runs")[0] == 200
            writes = [one for one in queries if one["sql"].startswith("UPDATE")]
            token.refresh_from_db()
            used.append((clock.now - token.last_used_at).seconds)
            assert len(writes) == (0 if seconds == 59 else 1)
    assert used == [0, 59, 0, 0]


def test_who_may_revoke(owner: Any, decider: Any) -> None:
    token = create_token(owner, [READ])[0]
    with pytest.raises(PermissionDeniedError, match=token.prefix):
        revoke(token.pk, decider)
    type(owner).objects.filter(pk=owner.pk).update(is_active=False)
    owner.refresh_from_db()
    with pytest.raises(PermissionDeniedError):
        revoke(token.pk, owner)
    assert revoke(str(token.pk), make_user("guard", "revoke_api_token"))
    assert revoke(create_token(owner, [READ])[0].pk, None)  # the program itself
    with pytest.raises(NotFoundError):
        revoke("x", None)


def test_what_is_open_to_everybody_can_ask_for_the_token(owner: Any) -> None:
    token, text = create_token(owner, [READ])
    request = RequestFactory().get("/", headers=bearer(text))
    found = token_of(request)
    assert (found, found.owner if found else None) == (token, owner)
    assert channel_of(request) == "api"  # nobody acts
    request.auth = found  # type: ignore[attr-defined]
    assert channel_of(request) == f"api:{token.prefix}"
    for header in ({}, bearer(text + "x"), {"Authorization": text}):
        assert token_of(RequestFactory().get("/", headers=header)) is None
    assert Program("nonsense").get("/health")[0] == 200


def test_in_somebody_elses_api(shop: Agent, owner: Any, urlconf: Any) -> None:
    text = create_token(owner, [READ])[1]
    urlconf(urls.path("v1/", urls.include("agentruns.urls")), urls.path("host/", host(errors=False).urls))
    for root in ("/v1", "/host/agents"):
        client = Program(text).client
        assert client.get(f"{root}/runs").status_code == 200
        refused = client.post(f"{root}/runs", {}, content_type="application/json")
        assert refused.status_code == 403
        client.defaults["HTTP_AUTHORIZATION"] += "x"
        assert client.get(f"{root}/runs")["WWW-Authenticate"] == "Bearer"


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_tokens_are_where_the_journal_is(owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_DATABASE = "other"
    token, text = create_token(owner, [READ])
    assert (token._state.db, token.owner) == ("other", owner)
    assert Program(text).get("/runs")[0] == 200
    assert ApiToken.objects.using("other").get().last_used_at
    assert not ApiToken.objects.using("default").exists()
    assert revoke(token.pk, owner)
    assert Program(text).get("/runs")[0] == 401


@pytest.mark.parametrize("password", ["copied", ""], ids=["of-a-copied-account", "of-nobody-behind-a-proxy"])
def test_another_user_of_the_same_key_does_not_inherit_it(owner: Any, password: str) -> None:
    owner.password, key = password, owner.pk
    owner.save()
    text = create_token(owner, [READ])[1]
    assert Program(text).get("/runs")[0] == 200
    owner.delete()
    newcomer = type(owner).objects.create(pk=key, username="newcomer", password=password)
    assert authenticate(text) is None
    assert Program(text).get("/runs")[0] == 401
    assert Program(create_token(newcomer, [READ])[1]).get("/runs")[0] == 200


@pytest.mark.parametrize("change", ["set_password", "set_unusable_password"])
def test_a_new_password_ends_it(owner: Any, change: str) -> None:
    owner.set_unusable_password()  # an account of a program
    owner.save()
    token, text = create_token(owner, [READ])
    assert authenticate(text) == token
    getattr(owner, change)(*["secret"] if change == "set_password" else [])
    owner.save()
    assert authenticate(text) is None
    assert Program(text).get("/runs")[0] == 401


def test_it_outlives_a_rotation_of_the_secret_key(owner: Any, settings: Any) -> None:
    token, text = create_token(owner, [READ])
    old, before = settings.SECRET_KEY, token.credential
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new", [old]
    assert Program(text).get("/runs")[0] == 200
    token.refresh_from_db()
    assert token.credential != before  # bound anew, so that the fallback can go
    settings.SECRET_KEY_FALLBACKS = []
    assert Program(text).get("/runs")[0] == 200
    settings.SECRET_KEY = "another"
    assert Program(text).get("/runs")[0] == 401


def test_a_user_model_of_another_kind_is_bound_to_what_it_has() -> None:
    class Named:
        password = "hash"

        def get_username(self) -> str:
            return "ann"

    bound = hmac.new(b"token", b"ann hash", "sha256").hexdigest()
    assert api_tokens.credentials("token", Named()) == [bound]


def test_none_is_without_an_end(owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_TOKEN_DAYS = 7
    with frozen_clock() as clock:
        token, text = create_token(owner, [READ])
        assert token.expires_at - clock.now == timedelta(days=7)
        clock.forward(days=8)
        assert authenticate(text) is None
    settings.AGENTRUNS_TOKEN_MAX_DAYS = 5
    with pytest.raises(ValueError, match="at most 5 days"):
        create_token(owner, [READ])


def test_a_program_names_others_only_with_the_scope(shop: Agent, owner: Any) -> None:
    boss, request = make_user("boss", "act_for", "start_run"), RequestFactory().get("/")
    body = {"agent": "shop", "input": "hi", "owner": str(owner.pk)}
    require_token_scope(request, ACT_FOR)  # a Django session has all
    for scopes, allowed in (([READ, WRITE], False), ([WRITE, ACT_FOR], True)):
        request.auth, text = create_token(boss, scopes)  # type: ignore[attr-defined]
        with nullcontext() if allowed else pytest.raises(Problem, match=ACT_FOR):
            require_token_scope(request, ACT_FOR)
        status, answer = Program(text).post("/runs", body)
        assert (status, answer.get("scopes")) == ((201, None) if allowed else (403, [ACT_FOR]))
        assert Run.objects.count() == allowed
    assert Run.objects.get().owner == owner
