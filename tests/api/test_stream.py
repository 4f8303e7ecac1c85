"""Server-Sent Events: the journal, row by row, each exactly once, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.handlers.asgi import ASGIHandler
from django.db import connection, connections, transaction
from django.db.models.functions import Now
from django.http import HttpRequest
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path
from ninja import NinjaAPI
from pytest_django.live_server_helper import LiveServer

import agentruns
from agentruns import ModelReply, cancel_run, deny, run_agent, start_run
from agentruns.agents.agent import Agent
from agentruns.api import router
from agentruns.api.errors import Problem
from agentruns.api.stream import Places, Poller, _place, places
from agentruns.models import ApiToken, Message, Run, SessionBearer
from agentruns.services import api_tokens
from agentruns.services.sweep import sweep
from agentruns.utils.ids import uuid7
from tests.api.hosting import Bearer, Broken, host
from tests.api.http import Api, make_user
from tests.api.streaming import (
    Guest,
    Listener,
    Stream,
    connected,
    cookies,
    in_a_thread,
    journal,
    read,
    rows,
    serving,
    url,
    wait_until_nobody_is_served,
)
from tests.db.dying import elsewhere
from tests.redacting import HIDE, leaks, story
from tests.shop.agents import call, search, shop_agent
from tests.waiting import LIMIT, pause, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

LISTENERS = 20
OF_LISTENERS = ("agentruns_apitoken", "auth_user", "auth_group_permissions", "django_session")
CUTS = 200


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.api.stream.poller", Poller())
    monkeypatch.setattr(Poller, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(Poller, "LONGEST_PAUSE", 0.3)


@pytest.fixture(scope="session")
def server(django_db_setup: None, live_server: LiveServer) -> str:
    """The address of a server that was started after the tests' database: it looks which one that is."""
    return str(live_server.url)


@pytest.fixture
def nobody_left() -> Iterator[None]:
    """Every thread that served somebody has ended when the test has."""
    yield
    wait_until_nobody_is_served()


# What is sent


def test_an_ended_run_is_its_journal_and_an_end(api: Api, owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = HIDE
    run = story(make_user("everybody", "view_run", "decide_approval")).done
    watcher = Api(make_user("watcher", "view_run"))
    response = watcher.client.get(url(run))
    assert response["Content-Type"] == "text/event-stream; charset=utf-8"
    assert (response["Cache-Control"], response["X-Accel-Buffering"]) == ("no-cache", "no")
    text = response.getvalue()
    assert leaks(text.decode()) == []
    stream = read([text])
    assert stream.retry.isdigit()
    assert [event.data for event in stream.events[:-1]] == watcher.get(f"/runs/{run.pk}/messages")[1]["items"]
    assert rows(stream.events) == journal(run)
    assert stream.events[-1] == ("", "end", {"status": run.status})
    assert text.count(b"event: end") == 1


def test_it_goes_on_right_after_the_row_that_the_client_had(shop: Agent, owner: Any, api: Api) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    cancel_run(run.pk, owner)
    everything = journal(run)

    def got(query: str = "", **headers: str) -> list[tuple[int, str]]:
        return rows(read(api.client.get(url(run) + query, headers=headers)).events)

    for place, (seq, _kind) in enumerate(everything, start=1):
        assert got(**{"Last-Event-ID": str(seq)}) == got(f"?after={seq}") == everything[place:]
    assert got("?after=0", **{"Last-Event-ID": "1"}) == everything[1:]
    for nonsense in ("x", "-1", "", "1.5", "9" * 19, "0x1", "1 2"):
        response = api.client.get(url(run), {"after": "0"}, headers={"Last-Event-ID": nonsense})
        assert (response.status_code, response["Content-Type"]) == (422, "application/problem+json"), nonsense
    assert api.get(f"/runs/{run.pk}/events", after="x")[0] == 422


def test_nothing_compresses_it(settings: Any, shop: Agent, owner: Any) -> None:
    settings.MIDDLEWARE = ["django.middleware.gzip.GZipMiddleware", *settings.MIDDLEWARE]
    stream = Stream(owner, start_run(shop, "hi", "s1", actor=owner), **{"Accept-Encoding": "gzip"})
    assert [kind for _seq, kind in stream.poll()] == ["run_started", "user"]
    stream.response.close()


@pytest.mark.django_db(transaction=False)
def test_a_test_case_of_a_host_keeps_its_transaction(shop: Agent, owner: Any, api: Api) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    cancel_run(run.pk, owner)
    assert rows(read([api.client.get(url(run)).getvalue()]).events) == journal(run)
    assert connection.in_atomic_block


# Completeness


def test_rows_that_commit_between_polls_and_nobody_elses(shop: Agent, owner: Any, pending: Any) -> None:
    """Each poll finds what was committed since the last one; of a session's other run it finds nothing."""
    earlier = start_run(shop, "first", "s1", actor=owner)
    cancel_run(earlier.pk, owner)
    run = start_run(shop, "second", "s1", actor=owner)
    stream, ended = Stream(owner, run), Stream(owner, earlier)
    assert stream.poll() == journal(run)
    assert ended.poll() == journal(earlier)
    assert ended.events[-1].name == "end"
    seen = len(journal(run))
    with transaction.atomic():
        cancel_run(run.pk, owner)
        assert elsewhere(stream.poll) == []  # not yet committed
    assert stream.poll() == journal(run)[seen:]
    assert journal(run)[seen:]
    assert stream.events[-1].data == {"status": "cancelled"}
    assert rows(stream.events) == journal(run)
    assert stream.poll() == []
    assert not stream.is_open


def test_a_long_journal_comes_in_pages_without_a_wait(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = shop_agent("long", *[{"tools": [call("search", query="x")] * 4}] * 12)
    run = Run.objects.get(pk=run_agent(agent, "go", "s1", actor=owner, idempotency_key="k").run_id)
    monkeypatch.setattr(Poller, "FIRST_PAUSE", 60.0)
    assert len(journal(run)) > 100
    assert rows(read(Stream(owner, run)._chunks).events) == journal(run)


LOSES: dict[str, Callable[[Any, Client], Any]] = {
    "the permission": lambda user, client: user.user_permissions.clear(),
    "the account": lambda user, client: type(user).objects.filter(pk=user.pk).update(is_active=False),
    "the session": lambda user, client: client.logout(),
    "the password": lambda user, client: type(user).objects.filter(pk=user.pk).update(password="another"),
}


@pytest.mark.parametrize("lost", LOSES)
def test_who_may_no_longer_see_the_run_hears_no_more(lost: str, pending: Any, settings: Any) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 0
    watcher = make_user("watcher", "view_run")
    approval = pending()
    stream = Stream(watcher, approval.run)
    assert stream.poll() == journal(approval.run)
    assert stream.poll() == []
    assert set(stream.comments) == {"ping"}
    LOSES[lost](watcher, stream.client)
    deny(approval.pk, make_user("decider", "decide_approval"), "no")
    heard = len(stream.events)
    stream.poll()
    stream.poll()
    assert not stream.is_open
    assert len(stream.events) == heard
    assert stream.client.get(url(approval.run)).status_code in (401, 404)


TOKENS_LOSE: dict[str, Callable[[Any, Any], Any]] = {
    "revoked": lambda tokens, owner: api_tokens.revoke(tokens.get().pk, owner),
    "expired": lambda tokens, owner: tokens.update(expires_at=Now()),
    "deleted": lambda tokens, owner: tokens.delete(),
    "its owner": lambda tokens, owner: type(owner).objects.filter(pk=owner.pk).update(is_active=False),
}


OF_GROUPS: dict[str, Callable[[Any, Group], Any]] = {
    "the group": lambda user, group: user.groups.clear(),
    "the group itself": lambda user, group: group.delete(),
    "the group's permission": lambda user, group: group.permissions.clear(),
    "another of the group": lambda user, group: group.permissions.set(OTHER),
}
OTHER = Permission.objects.filter(codename="view_message")


@pytest.mark.parametrize("lost", [*LOSES, *TOKENS_LOSE, *OF_GROUPS, "another permission"])
def test_one_look_for_all_ends_the_stream_of_who_lost_access_before_the_next_ping(
    lost: str, pending: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 600
    monkeypatch.setattr("agentruns.api.stream.LISTENERS_EVERY", 0)
    watcher, run = make_user("watcher", "view_run"), pending().run
    group = None
    if lost in OF_GROUPS:
        group = Group.objects.create(name="watchers")
        group.permissions.set(watcher.user_permissions.all())
        watcher.groups.add(group)
        watcher.user_permissions.clear()
    token, text = api_tokens.create_token(watcher, [ApiToken.Scope.RUNS_READ])
    bearing = {"Authorization": f"Bearer {text}"} if lost in TOKENS_LOSE else {}
    stream = Stream(None if bearing else watcher, run, **bearing)
    others = [Stream(make_user(f"other{number}", "view_run"), run) for number in range(3)]
    looked: list[str] = []

    def look(times: int) -> bool:
        with CaptureQueriesContext(connection) as captured:
            for one in (*others, stream):
                one.poll()
        looked.extend(query["sql"] for query in captured)
        return len([sql for sql in looked if "agentruns_draft" in sql]) >= times

    wait_for(lambda: look(5), "some looks")
    assert stream.is_open
    heads = len([sql for sql in looked if "agentruns_draft" in sql])
    for table in OF_LISTENERS:
        assert len([sql for sql in looked if f'FROM "{table}"' in sql]) <= heads, "once for all of them"
    if lost in TOKENS_LOSE:
        TOKENS_LOSE[lost](ApiToken.objects.filter(pk=token.pk), watcher)
    elif lost == "another permission":
        watcher.user_permissions.set(OTHER)
    elif group is not None:
        OF_GROUPS[lost](watcher, group)
    else:
        LOSES[lost](watcher, stream.client)
    wait_for(lambda: look(heads + 6), "some more looks")
    assert not stream.is_open
    assert [one.is_open for one in others] == [True] * 3
    asked_all = lost in OF_GROUPS and lost != "the group"  # as it may concern any user
    assert ("ping" in others[0].comments) == asked_all
    for one in others:
        one.response.close()


def test_a_stream_under_asgi_ends_likewise(pending: Any, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.api.stream.LISTENERS_EVERY", 0)
    run, cookie = pending().run, cookies(owner)
    known, accounts = len(journal(run)), type(owner).objects.filter(pk=owner.pk)

    async def listened() -> None:
        guest = Guest(ASGIHandler(), run, cookie)
        await guest.arrive()
        await guest.hear(known)
        await in_a_thread(lambda: accounts.update(is_active=False))
        await guest.to_the_end()
        assert "end" not in {event.name for event in guest.events}

    with override_settings(AGENTRUNS_API_PING_SECONDS=600):
        asyncio.run(listened())


def test_a_revoked_token_hears_no_more(pending: Any, owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 0
    run = pending().run
    token, text = api_tokens.create_token(owner, [ApiToken.Scope.RUNS_READ])
    stream = Stream(None, run, Authorization=f"Bearer {text}")
    assert stream.poll() == journal(run)
    stream.poll()
    assert stream.is_open
    api_tokens.revoke(token.pk, owner)
    stream.poll()
    stream.poll()
    assert not stream.is_open


def test_in_somebody_elses_api_their_auth_is_asked_again(
    urlconf: Any, pending: Any, owner: Any, settings: Any
) -> None:
    """Mounted twice, each time with another way in."""
    settings.AGENTRUNS_API_PING_SECONDS = 0
    run = pending().run

    class Doorkeeper(Bearer):
        """Lets everybody in once."""

        asked = 0

        def authenticate(self, request: HttpRequest, token: str) -> Any:
            self.asked += 1
            return super().authenticate(request, token) if self.asked == 1 else None

    other = NinjaAPI(urls_namespace="other", docs_url=None)
    other.add_router("/agents", router, auth=Bearer())
    urlconf(path("host/", host(auth=Doorkeeper()).urls), path("other/", other.urls))
    client = Client(headers={"Authorization": "Bearer owner"})
    strict = client.get(f"/host/agents/runs/{run.pk}/events")
    assert strict.status_code == 200
    assert read(strict.streaming_content).events == []
    kept = iter(client.get(f"/other/agents/runs/{run.pk}/events").streaming_content)
    assert rows(read(next(kept) for _poll in range(4)).events) == journal(run)


def test_their_auth_may_be_asynchronous_and_raise_anything(
    urlconf: Any, pending: Any, owner: Any, settings: Any
) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 0
    run, asked = pending().run, list[bool]()

    async def theirs(request: HttpRequest) -> bool:
        request.user = owner
        asked.append(True)
        if len(asked) == 4:
            raise LookupError("theirs")
        return True

    urlconf(path("host/", host(auth=theirs).urls))
    stream = read(Client().get(f"/host/agents/runs/{run.pk}/events").streaming_content)
    assert (rows(stream.events), stream.comments.count("ping"), len(asked)) == (journal(run), 2, 4)


# Over a real connection


def test_a_run_that_waits_for_people_goes_on_with_heartbeats(
    server: str, pending: Any, owner: Any, settings: Any, nobody_left: None
) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 0.1
    approval = pending()
    listener = Listener(server, url(approval.run), cookies(owner))
    listener.wait_for(lambda heard: heard.comments.count("ping") >= 3)
    assert rows(listener.events) == journal(approval.run)
    deny(approval.pk, make_user("decider", "decide_approval"), "no")
    sweep()
    events = listener.to_the_end()
    assert rows(events) == journal(approval.run)
    assert (events[-1].name, events[-1].data) == ("end", {"status": "completed"})


@override_settings(AGENTRUNS_POLICY="tests.api.streaming.Unlimited")  # all listeners are one user
@pytest.mark.parametrize("pooled", [False, True], ids=["persistent", "pooled"])
def test_idle_listeners_hold_no_connection_and_leave_nothing(
    pooled: bool, server: str, pending: Any, owner: Any, monkeypatch: pytest.MonkeyPatch, nobody_left: None
) -> None:
    if pooled and connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL has a connection pool")
    approval, cookie = pending(), cookies(owner)
    settings = connections.settings["default"]
    monkeypatch.setitem(settings, "ATOMIC_REQUESTS", True)
    if pooled:
        pool = {"pool": {"min_size": 1, "max_size": 4}}
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **pool})
    else:
        monkeypatch.setitem(settings, "CONN_MAX_AGE", None)
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(Poller, name, 0.7)
    known = len(journal(approval.run))
    listeners = [Listener(server, url(approval.run), cookie) for _number in range(LISTENERS)]
    try:
        for listener in listeners:
            listener.wait_for(lambda heard: len(heard.events) == known)
        assert len(serving()) == LISTENERS
        used: deque[int] = deque(maxlen=15)

        def is_calm() -> bool:
            used.append(in_use(pooled))
            return len(used) == 15 and min(used) == 0 and sorted(used)[7] <= 2

        wait_for(is_calm, "looks that find hardly a connection held")
    finally:
        for listener in listeners:
            listener.cut()
        wait_until_nobody_is_served()
        if pooled:
            connection.close_pool()  # type: ignore[attr-defined]


def in_use(pooled: bool) -> int:
    """Return how many connections to the database others than this thread hold."""
    if pooled:
        pool = connection.pool.get_stats()  # type: ignore[attr-defined]
        assert pool["requests_num"] >= LISTENERS
        return int(pool["pool_size"] - pool["pool_available"])
    return connected()


class Endless:
    """A model that goes on until `enough` is set."""

    def __init__(self) -> None:
        self.enough = Event()
        self.numbers = count()

    def runs(self, owner: Any) -> list[Run]:
        """Start two runs of it in two sessions."""
        agent = Agent("endless", instructions="go", tools=[search], model=self, max_steps=10_000)
        return [start_run(agent, "go", session, actor=owner) for session in ("s1", "s2")]

    def propose(self, request: Any) -> ModelReply:
        pause()
        if self.enough.is_set():
            return ModelReply([{"type": "text", "text": "done"}], "end_turn")
        number = next(self.numbers)
        block = {"type": "tool_use", "id": f"t{number}", "name": "search", "input": {"query": "x" * 200}}
        return ModelReply([block], "tool_use")


def test_cut_off_two_hundred_times_a_client_gets_every_row_once_and_in_order(
    server: str, owner: Any, nobody_left: None
) -> None:
    chance, model = random.Random(7), Endless()
    run, other = model.runs(owner)
    workers = [Thread(target=elsewhere, args=(partial(sweep, run_id=each.pk),)) for each in (run, other)]
    cookie, got, cuts, last = cookies(owner), [], 0, ""
    for worker in workers:
        worker.start()
    try:
        while cuts < CUTS or (workers[0].is_alive() and len(journal(run)) <= CUTS):
            listener = Listener(server, url(run), cookie, last)
            most = chance.randrange(6_000)
            while most > 0 and (size := listener.listen(chance.uniform(0.001, 0.07), most)) > 0:
                most -= size
            listener.cut()
            cuts += 1
            got += listener.events
            last = listener.events[-1].id if listener.events else last
    finally:
        model.enough.set()
    got += Listener(server, url(run), cookie, last).to_the_end()
    for worker in workers:
        worker.join()
    assert rows(got) == journal(run)
    assert len(journal(run)) > CUTS
    assert got[-1].data == {"status": "completed"}


@override_settings(AGENTRUNS_POLICY="tests.api.streaming.Unlimited")
def test_listeners_who_share_a_look_and_come_at_any_time_get_every_row(
    server: str, owner: Any, nobody_left: None
) -> None:
    model, cookie, heard, came = Endless(), cookies(owner), dict[int, list[Any]](), list[int]()
    runs = model.runs(owner)

    def rows_of(number: int) -> int:
        return int(elsewhere(Message.objects.filter(run=runs[number % 2]).count))

    def listen(number: int) -> None:
        wait_for(lambda: rows_of(number) > 3 * number, "some rows more than for the one before")
        listener = Listener(server, url(runs[number % 2]), cookie)
        came.append(number)
        heard[number] = listener.to_the_end()

    listeners = [Thread(target=listen, args=(number,)) for number in range(LISTENERS)]
    workers = [Thread(target=elsewhere, args=(partial(sweep, run_id=run.pk),)) for run in runs]
    for thread in (*listeners, *workers):
        thread.start()
    wait_for(lambda: len(came) == LISTENERS, "all to listen")
    before = rows_of(0)
    wait_for(lambda: rows_of(0) > before + 20, "rows that all of them wait for")
    model.enough.set()
    for thread in (*listeners, *workers):
        thread.join()
    for number, events in heard.items():
        assert rows(events) == journal(runs[number % 2]), number
    assert len(heard) == LISTENERS


def test_a_user_has_so_many_streams_at_once_and_the_server_goes_on(
    server: str, pending: Any, owner: Any, nobody_left: None
) -> None:
    path, other, cookie = url(pending("a").run), url(pending("b").run), cookies(owner)
    listeners = [Listener(server, path, cookie) for _number in range(4)]
    for listener in listeners:
        listener.wait_for(lambda one: one.events)
    request = Request(f"{server}{other}", headers={"Cookie": cookie})
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=LIMIT)
    problem = json.loads(refused.value.read())
    assert (refused.value.code, refused.value.headers["Retry-After"]) == (429, "5")
    assert (problem["type"], problem["retry_after"]) == ("urn:agentruns:streams", 5)
    with urlopen(Request(f"{server}/api/runs", headers={"Cookie": cookie}), timeout=LIMIT) as response:
        assert response.status == 200  # any other request is answered
    listeners[0].cut()  # the server learns of it by writing
    wait_for(lambda: len(places._open[owner.pk]) < 4, "the server to see that one is gone")
    again = Listener(server, other, cookie)
    again.wait_for(lambda one: one.events)
    for listener in [*listeners[1:], again]:
        listener.cut()
    wait_until_nobody_is_served()
    assert owner.pk not in places._open


def test_who_comes_back_before_the_server_has_noticed_takes_the_oldest_place_of_the_run(
    server: str, pending: Any, owner: Any, nobody_left: None
) -> None:
    run = pending("a").run
    path, cookie, everything = url(run), cookies(owner), journal(run)
    listeners = []
    for _number in range(5):  # one after the other, or their threads would take places in any order
        listeners.append(Listener(server, path, cookie))
        listeners[-1].wait_for(lambda one: len(one.events) == len(everything))
    first, *others = listeners
    assert rows(first.to_the_end()) == everything
    assert len(places._open[owner.pk]) == 4
    for listener in others:
        listener.cut()
    wait_until_nobody_is_served()
    assert owner.pk not in places._open


def test_a_process_has_so_many_streams_at_once(
    owner: Any, pending: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_API_STREAMS = 2
    monkeypatch.setattr("agentruns.api.stream.places", Places())
    runs, other = [pending(name).run for name in ("a", "b")], make_user("other", "view_run")
    first, second = Stream(owner, runs[0]), Stream(other, runs[0])
    for run, user in ((runs[1], owner), (runs[1], other), (runs[0], make_user("third", "view_run"))):
        status, problem = (api := Api(user)).get(f"/runs/{run.pk}/events")
        assert (status, problem["type"], problem["retry_after"]) == (429, "urn:agentruns:streams", 5)
        assert (api.response["Retry-After"], "This process has 2" in problem["detail"]) == ("5", True)
    again = Stream(other, runs[0])  # comes back before the server has noticed
    second.to_the_end()
    first.response.close()
    Stream(other, runs[1]).response.close()
    again.response.close()


def test_visitors_leave_streams_to_users(settings: Any) -> None:
    settings.AGENTRUNS_API_STREAMS, found = 10, Places()
    kept = [found.take(uuid7(), uuid7(), 4, visits=True) for _number in range(8)]
    with pytest.raises(Problem, match="This process has 8 streams open"):
        found.take(uuid7(), uuid7(), 4, visits=True)
    kept += [found.take(number, uuid7(), 4) for number in range(2)]
    with pytest.raises(Problem, match="This process has 10 streams open"):
        found.take(2, uuid7(), 4)


def test_a_place_is_given_back_once_however_a_stream_ends(owner: Any) -> None:
    found, run, other = Places(), uuid7(), uuid7()
    first, second = found.take(owner.pk, run, 2), found.take(owner.pk, run, 2)
    with pytest.raises(Problem):
        found.take(owner.pk, other, 2)
    with pytest.raises(Problem):
        found.take("nobody", other, 0)
    third = found.take(owner.pk, run, 2)
    assert [one.over.is_set() for one in (first, second, third)] == [True, False, False]
    first.close()
    assert len(found._open[owner.pk]) == 2, "its place is the third's now"
    second.close()
    second.close()
    assert len(found._open[owner.pk]) == 1
    del third  # a response that a server forgot to close
    gc.collect()
    assert not found._open
    found.take(owner.pk, run, None)


def test_each_schema_has_streams_of_its_own(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.api.stream.places", Places())
    taken = []
    for schema in ("north", "south"):  # four each, of other users with the same key
        monkeypatch.setattr(connections["default"], "schema_name", schema, raising=False)
        taken += [_place(HttpRequest(), owner, uuid7()) for _number in range(4)]
        with pytest.raises(Problem):
            _place(HttpRequest(), owner, uuid7())


def test_each_session_has_streams_of_its_own_for_its_visitors(pending: Any, nobody_left: None) -> None:
    assert SessionBearer.pk is None  # all visitors would be counted together
    with override_settings(AGENTRUNS_POLICY=f"{__name__}.OneEach"):
        runs = [pending(name).run for name in ("a", "b")]
        taken = [_place(HttpRequest(), SessionBearer(run.session_id), run.pk) for run in runs]
        assert [len(places._open[run.session_id]) for run in runs] == [1, 1]
        with pytest.raises(Problem):
            places.take(runs[0].session_id, runs[1].pk, 1)
        for place in taken:
            place.close()
        assert not {run.session_id for run in runs} & set(places._open)


class OneEach(agentruns.Policy):
    """One stream at once."""

    def quota(self, user: Any, agent: Any) -> Any:
        return replace(super().quota(user, agent), streams=1)


def test_a_quota_that_raises_lets_nobody_through(
    server: str, pending: Any, owner: Any, monkeypatch: pytest.MonkeyPatch, nobody_left: None
) -> None:
    path, cookie = url(pending("a").run), cookies(owner)
    monkeypatch.setattr(Broken, "question", "quota")
    with override_settings(AGENTRUNS_POLICY="tests.api.hosting.Broken"):
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"{server}{path}", headers={"Cookie": cookie}), timeout=LIMIT)
        with refused.value:  # its socket
            assert refused.value.code == 429
    assert owner.pk not in places._open
