"""Words as they are written, whom a run waits for, and one look for two hundred listeners."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.core.handlers.asgi import ASGIHandler
from django.db import OperationalError, connection, connections
from django.db.backends.utils import CursorWrapper
from django.db.models.functions import Now

from agentruns import Agent, ModelReply, ModelRequest, cancel_run, deny, pause_run, run_agent, start_run
from agentruns.api import stream
from agentruns.api.stream import Poller
from agentruns.engine import drafts
from agentruns.models import Draft, Run
from agentruns.services.sweep import sweep
from agentruns.services.transfer import export_run
from tests.api.http import Api, make_user
from tests.api.streaming import Event, Guest, Stream, connected, cookies, in_a_thread, journal, rows
from tests.db.dying import elsewhere
from tests.settings import BRIEF
from tests.shop.agents import shop_agent
from tests.waiting import LIMIT, wait_for, wait_for_async

pytestmark = pytest.mark.django_db(transaction=True)

MANY = 200


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "poller", Poller())
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE", "WRITING_PAUSE"):
        monkeypatch.setattr(Poller, name, 0.05)
    monkeypatch.setattr(drafts, "PERIODS", {})
    monkeypatch.setattr(drafts, "PERIOD", 0.05)
    monkeypatch.setattr(drafts, "LOOKS", 0.05)


def running(user: Any, session: str = "s1") -> Run:
    """Return a run as if its model were writing."""
    run = start_run(shop_agent("writes"), "do it", session, actor=user)
    Run.objects.filter(pk=run.pk).update(status="running", lease_epoch=2, lease_expires_at=Now())
    run.refresh_from_db()
    return run


def write(run: Run, text: str, *, epoch: int = 2, step: int = 0) -> None:
    """Write what a worker writes."""
    assert Draft.objects.filter(pk=run.pk).update(epoch=epoch, step=step, text=text) == 1


class Writing:
    """A model that writes until its listener has been shown three drafts, and ends then."""

    identity = "writing"

    def __init__(self) -> None:
        self.shown: Callable[[], int] = lambda: 0
        self.said = ""

    def propose(self, request: ModelRequest) -> ModelReply:
        """Write."""
        assert request.on_text is not None
        write = request.on_text

        def is_shown() -> bool:
            self.said += "words "
            write("words ")
            return self.shown() >= 3

        wait_for(is_shown, "three drafts")
        return ModelReply([{"type": "text", "text": self.said}], "end_turn")


def test_the_words_come_as_they_are_written_and_then_the_row(owner: Any) -> None:
    model = Writing()
    run = start_run(Agent("paced", instructions="Say.", model=model), "where?", "s1", actor=owner)
    listener = Stream(owner, run)
    model.shown = lambda: len(listener.drafted())
    worker = threading.Thread(target=elsewhere, args=(sweep,))
    worker.start()
    listener.to_the_end()
    worker.join()
    texts = listener.drafted()
    assert len(texts) >= 3
    assert all(later.startswith(one) for one, later in pairwise(texts))
    assert model.said.startswith(texts[-1])
    assert {(event.id, event.data["run"], event.data["step"]) for event in listener.notes} == {
        ("", str(run.pk), 0)
    }
    assert rows(listener.events) == journal(run)
    assert listener.events[-1].name == "end"
    assert Draft.objects.get(pk=run.pk).text == ""


def test_a_draft_is_shown_only_for_the_runs_epoch_and_next_step(owner: Any) -> None:
    run = running(owner)
    listener = Stream(owner, run)
    listener.poll()
    assert Draft.objects.get(pk=run.pk).watched_until > run.created_at
    for epoch, step, seen in ((1, 0, False), (3, 0, False), (2, 1, False), (2, 0, True)):
        write(run, f"{epoch} {step}", epoch=epoch, step=step)
        listener.poll()
        assert listener.drafted() == ([f"{epoch} {step}"] if seen else [])
    listener.poll()
    assert len(listener.drafted()) == 1, "once"
    Run.objects.filter(pk=run.pk).update(status="queued")
    write(run, "given back")
    listener.poll()
    assert len(listener.drafted()) == 1
    listener.response.close()


def test_a_draft_is_in_no_other_exit(owner: Any, api: Api) -> None:
    run = running(owner)
    Draft.objects.create(run=run, watched_until=Now() + timedelta(minutes=1), epoch=2, text="half a wo")
    shown = [api.get(f"/runs/{run.pk}{path}") for path in ("", "/messages", "/state")] + [
        api.get("/sessions/s1/messages"),
        api.get("/runs"),
    ]
    Run.objects.filter(pk=run.pk).update(status="queued", lease_expires_at=None)
    sweep()
    assert "half a wo" not in str(shown) + str(list(export_run(run.pk))) + str(
        list(run.messages.values_list("content", flat=True))
    )


def test_who_lost_the_permission_gets_no_more_words(owner: Any, settings: Any) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 0
    run, watcher = running(owner), make_user("watcher", "view_run")
    listener = Stream(watcher, run)
    listener.poll()
    write(run, "one")
    listener.poll()
    watcher.user_permissions.remove(Permission.objects.get(codename="view_run"))
    write(run, "one two")
    listener.poll()
    listener.poll()
    assert (listener.is_open, listener.drafted()) == (False, ["one"])


def test_it_says_whom_the_run_waits_for_and_when_no_more(pending: Any, owner: Any, decider: Any) -> None:
    approval = pending()
    listener = Stream(owner, approval.run)
    listener.poll()
    about = {"run": str(approval.run_id), "status": "awaiting-approval", "waits_for": "approval"}
    assert listener.notes == [Event("", "waits_for", about)]
    deny(approval.pk, decider, "no")
    listener.poll()
    assert listener.notes[1].data == {**about, "status": "queued", "waits_for": None}
    sweep()
    listener.to_the_end()
    assert len(listener.notes) == 2
    assert rows(listener.events) == journal(approval.run)


def test_that_somebody_listens_cannot_be_stored_and_the_rows_come_all_the_same(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*about: Any, **more: Any) -> None:
        raise OperationalError("locked")

    monkeypatch.setattr(Draft.objects.none().__class__, "bulk_create", fail)
    run = running(owner)
    listener = Stream(owner, run)
    assert listener.poll() == journal(run)
    assert not Draft.objects.exists()
    listener.response.close()


def test_who_comes_between_two_looks_takes_no_row_from_the_others(owner: Any) -> None:
    """The newcomer sees a later row than all know, and the others have to read it for themselves."""
    run = running(owner)
    first = Stream(owner, run)
    first.poll()
    pause_run(run.pk, owner)
    first.poll()
    cancel_run(run.pk, owner)
    stream.poller._claimed = math.inf  # nobody looks for all
    second = Stream(owner, run)
    second.poll()
    first.poll()
    assert rows(first.events) == rows(second.events) == journal(run)
    first.response.close()
    second.response.close()


def test_nothing_is_written_for_a_run_that_has_ended(owner: Any) -> None:
    result = run_agent(shop_agent("ended"), "do it", "s1", actor=owner)
    listener = Stream(owner, Run.objects.get(pk=result.run_id))
    listener.to_the_end()
    assert not Draft.objects.exists()


# Two hundred listeners


def is_head(sql: str) -> bool:
    return "lease_epoch" in sql and "agentruns_draft" in sql and sql.startswith("SELECT")


class Count:
    """The statements of all threads of this process, by what they are about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statements: list[str] = []
        self.open: set[int] = set()
        self.most = 0
        execute = CursorWrapper.execute

        def count(wrapper: Any, sql: Any, params: Any = None) -> Any:
            self.statements.append(str(sql))
            here = threading.get_ident()
            self.open.add(here)
            self.most = max(self.most, len(self.open))
            try:
                return execute(wrapper, sql, params)
            finally:
                self.open.discard(here)

        monkeypatch.setattr(CursorWrapper, "execute", count)

    def heads(self) -> int:
        """Return how many reads of the heads there were since it was asked last."""
        return sum(map(is_head, [*self.statements]))

    def taken(self) -> Counter[str]:
        """Return how many reads of the heads there were, and of anything else, since it was asked last."""
        found, self.statements = self.statements, []
        return Counter("heads" if is_head(sql) else sql for sql in found)


@pytest.mark.parametrize("runs", [20] if BRIEF else [1, 20])
def test_two_hundred_listeners_cost_one_query_a_look(
    runs: int, owner: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_POLICY = "tests.api.streaming.Unlimited"  # all listeners are one user
    settings.AGENTRUNS_API_PING_SECONDS = 600  # a look costs this; a ping asks again who may see the run
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE", "WRITING_PAUSE"):
        monkeypatch.setattr(Poller, name, 0.5)
    found = [running(owner, f"s{number}") for number in range(runs)]
    cookie = cookies(owner)
    connections.close_all()
    threads = threading.active_count()
    asyncio.run(listened(found, cookie, Count(monkeypatch)))
    wait_for(lambda: threading.active_count() <= threads + 2, "the threads to end")
    wait_for(lambda: connected() == 0, "the server to see the connections closed")


async def wait_for_looks(counted: Count, times: int) -> None:
    """Wait until the heads were read so many times more."""
    before = counted.heads()

    async def were_read() -> bool:
        return counted.heads() >= before + times

    await wait_for_async(were_read, "a look at the runs")


async def listened(runs: list[Run], cookie: str, counted: Count) -> None:
    application = ASGIHandler()
    guests = [Guest(application, runs[number % len(runs)], cookie) for number in range(MANY)]
    await come(guests)

    async def is_calm() -> bool:
        counted.taken()
        await wait_for_looks(counted, 1)
        return not [sql for sql in counted.taken() if "agentruns_message" in sql or "auth_user" in sql]

    await wait_for_async(is_calm, "the listeners to come to rest")
    held: list[int] = []
    began = time.monotonic()  # waits: for nothing; the looks of a longer time may be more

    async def has_looked() -> bool:
        held.append(await in_a_thread(connected))
        return len(held) >= 20 and counted.heads() >= 4

    await wait_for_async(has_looked, "some looks")
    idle = counted.taken()
    assert idle["heads"] <= 2 + (time.monotonic() - began) / 0.5, idle  # waits: the same
    assert sorted(held)[len(held) // 2] <= 1
    await in_a_thread(lambda: [write(run, "some words") for run in runs])
    await asyncio.gather(*(heard(guest, lambda one: bool(one.notes)) for guest in guests))
    drafting = counted.taken()
    assert drafting["heads"] <= 3
    assert not [sql for sql in drafting if "agentruns_message" in sql]
    assert {guest.notes[0].data["text"] for guest in guests} == {"some words"}
    counted.most = 0
    await in_a_thread(lambda: finish(runs))
    await asyncio.gather(*(guest.to_the_end() for guest in guests))
    assert counted.most <= 9
    for guest, run in zip(guests, runs * (MANY // len(runs)), strict=True):
        assert rows(guest.events) == await in_a_thread(lambda run=run: journal(run))
        assert guest.events[-1].data == {"status": "completed"}


def test_two_hundred_listeners_share_a_pool_of_four(
    owner: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a connection while it holds what the others wait for."""
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL has a connection pool")
    settings.AGENTRUNS_POLICY = "tests.api.streaming.Unlimited"
    run, cookie, aliases = running(owner), cookies(owner), connections.settings["default"]
    connections.close_all()
    pool = {"pool": {"min_size": 1, "max_size": 4, "timeout": LIMIT}}
    with monkeypatch.context() as patch:
        patch.setitem(aliases, "OPTIONS", {**aliases["OPTIONS"], **pool})
        try:
            asyncio.run(pooled(run, cookie, Count(monkeypatch)))
        finally:
            connections.close_all()
            connection.close_pool()  # type: ignore[attr-defined]


async def pooled(run: Run, cookie: str, counted: Count) -> None:
    application = ASGIHandler()
    guests = [Guest(application, run, cookie) for _number in range(MANY)]
    await come(guests)
    await wait_for_looks(counted, 3)
    await in_a_thread(lambda: finish([run]))
    await asyncio.gather(*(guest.to_the_end() for guest in guests))
    everything = await in_a_thread(lambda: journal(run))
    assert all(rows(guest.events) == everything for guest in guests)


async def come(guests: list[Guest]) -> None:
    """Let them come in groups: each request has a connection until its stream begins."""
    for first in range(0, len(guests), 25):
        some = guests[first : first + 25]
        await asyncio.gather(*(guest.arrive() for guest in some))
        await asyncio.gather(*(guest.hear(2) for guest in some))


async def heard(guest: Guest, seen: Callable[[Guest], bool]) -> None:
    while not seen(guest):
        message = await guest._there.receive_output(LIMIT)
        guest.feed(message["body"])


def finish(runs: list[Run]) -> None:
    """Let workers take all of them over, and end them."""
    assert elsewhere(sweep).completed == len(runs)
