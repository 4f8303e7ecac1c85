"""Models that are coroutines: one event loop of the process, on which an async HTTP client stays alive."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from django.db import connection, connections

from agentruns import Agent, ModelReply, ModelRequest, cancel_run, run_agent
from agentruns.models import Run
from agentruns.providers.base import call_model
from agentruns.utils import calls
from tests.db.dying import elsewhere
from tests.db.helpers import kill, payloads
from tests.programs import run_program
from tests.providers.asking import request
from tests.shop.agents import TOOLS
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

FORKED = """
import os, sys
import django
django.setup()
from django.db import connections
from tests.db.test_async_models import Remote, answered

model = Remote(sys.argv[1])
answered(model, "parent")
connections.close_all()
codes = []
for name in ("child", "other"):
    if (pid := os.fork()) == 0:
        answered(model, name)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
answered(model, "again")
sys.exit(max(codes))
"""


class Remote:
    """A model behind an HTTP server; it keeps its client, as one that is written for speed does."""

    identity = "remote"

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=LIMIT)

    async def propose(self, request: ModelRequest) -> ModelReply:
        """Ask for one call and then for the words, one request after the other."""
        answer = (await self.client.post("/", json={"step": request.step, "run": request.run_id})).json()
        assert answer["run"] == request.run_id
        if request.step == 0:
            name = {"type": "tool_use", "id": "t1", "name": "lookup", "input": {"number": "A1"}}
            return ModelReply([name], "tool_use")
        return ModelReply([{"type": "text", "text": answer["said"]}], "end_turn")


class Api(BaseHTTPRequestHandler):
    """Says over which connection each request came."""

    protocol_version = "HTTP/1.1"
    numbers = itertools.count()

    def setup(self) -> None:
        self.number = next(self.numbers)
        super().setup()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(self.number)  # type: ignore[attr-defined]
        self.server.meet(asked)  # type: ignore[attr-defined]
        body = json.dumps({"said": "two requests", "run": asked["run"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    """An HTTP server that keeps connections open; `seen` has the connection of each request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as made:
        made.seen, made.meet = [], lambda asked: None  # type: ignore[attr-defined]
        made.url = f"http://127.0.0.1:{made.server_port}"  # type: ignore[attr-defined]
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def remote(server: Any) -> Iterator[Remote]:
    """A model that asks the server."""
    model = Remote(server.url)
    yield model
    calls.on_loop(model.client.aclose(), model)


def answered(model: Any, session: str = "s1") -> None:
    """Drive a run of two requests."""
    agent = Agent("async", instructions="Ask.", tools=TOOLS, model=model)
    assert run_agent(agent, "do it", session).output == "two requests"


def test_a_client_is_used_again_in_a_drive_and_in_the_next(server: Any, remote: Remote) -> None:
    answered(remote)
    answered(remote, "s2")
    assert len(server.seen) == 4
    assert len(set(server.seen)) == 1, "they all came over one connection"


def test_a_client_is_used_in_threads_at_once(server: Any, remote: Remote) -> None:
    """Each first request waits for those of the other drives."""
    together = threading.Barrier(4, timeout=LIMIT)
    server.meet = lambda asked: asked["step"] == 0 and together.wait()
    failed = list[BaseException]()

    def drive(session: str) -> None:
        try:
            elsewhere(lambda: answered(remote, session))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=drive, args=(f"s{each}",)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert (failed, len(server.seen), Run.objects.filter(status="completed").count()) == ([], 8, 4)


def test_a_fork_shares_neither_loop_nor_connection(server: Any) -> None:
    database = {"AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"])}
    run_program(sys.executable, "-c", FORKED, server.url, DJANGO_SETTINGS_MODULE="tests.settings", **database)
    parent, child, other, again = (server.seen[each : each + 2] for each in (0, 2, 4, 6))
    assert parent == again, "the parent's connection lives"
    assert len({*parent, *child, *other}) == 3


variable: ContextVar[str] = ContextVar("variable", default="")


class Looking:
    """A model that tells what it finds around it."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    async def propose(self, request: ModelRequest) -> ModelReply:
        """Look at the database, the context, the thread and its connections."""
        orders = await Order.objects.acount()
        mine = [alias for alias in connections if hasattr(connections._connections, alias)]  # type: ignore[attr-defined]
        self.found.append((orders, variable.get(), threading.current_thread().name, mine))
        return ModelReply([{"type": "text", "text": "seen"}], "end_turn")


def test_a_coroutine_has_the_callers_context_and_connection() -> None:
    Order.objects.create(number="A1", customer="Ann", total_cents=1)
    variable.set("mine")
    model = Looking()
    agent = Agent("looks", instructions="Look.", model=model)
    assert run_agent(agent, "do it", "s1").output == "seen"
    assert agent.run("do it").output == "seen"
    assert model.found == [(1, "mine", "async-models", [])] * 2


def test_a_model_that_drives_another_run_on_the_loop_does_not_wait_for_itself() -> None:
    inner = Agent("inner", instructions="Look.", model=Looking())

    class Outer:
        async def propose(self, request: ModelRequest) -> ModelReply:
            said = inner.run("go").output + (await inner.arun("go")).output
            return ModelReply([{"type": "text", "text": said}], "end_turn")

    assert Agent("outer", instructions="Ask.", model=Outer()).run("go").output == "seenseen"


class Meeting:
    """A model that answers once as many requests as its barrier has parties have come."""

    def __init__(self, parties: int) -> None:
        self.together = threading.Barrier(parties, timeout=LIMIT)

    def propose(self, request: ModelRequest) -> ModelReply:
        """Wait for the others."""
        self.together.wait()
        return ModelReply([{"type": "text", "text": "met"}], "end_turn")


def test_many_runs_of_one_event_loop_do_not_wait_for_each_other() -> None:
    """All 32 ask their model before one is answered, and a start does not wait for them."""
    agent = Agent("meets", instructions="Meet.", model=Meeting(calls.MOST_DRIVES + 1))

    async def drive() -> list[str]:
        runs = [asyncio.ensure_future(agent.arun("go", f"s{each}")) for each in range(calls.MOST_DRIVES)]
        await agent.astart("later", "queued")
        await asyncio.get_running_loop().run_in_executor(None, agent.model.propose, request())  # type: ignore[union-attr]
        return [(await run).output for run in runs]

    assert asyncio.run(drive()) == ["met"] * 32
    assert Run.objects.filter(status="queued").count() == 1


class Endless:
    """A model that answers no more, until it is cancelled or let go."""

    def __init__(self) -> None:
        self.asked, self.cancelled = threading.Event(), threading.Event()
        self.over = asyncio.Event()

    async def propose(self, request: ModelRequest) -> ModelReply:
        """Wait for ever."""
        self.loop = asyncio.get_running_loop()
        self.asked.set()
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return ModelReply(content=[], stop_reason="end_turn")

    def let_go(self) -> None:
        """Let the request return: a drive that outlives its test would meet the next one's database."""
        self.loop.call_soon_threadsafe(self.over.set)


def cancel(settings: Any) -> None:
    cancel_run(Run.objects.get().pk)


def lose(settings: Any) -> None:
    kill(Run.objects.get())
    Run.objects.update(lease_epoch=99)


def hang(settings: Any) -> None:
    settings.AGENTRUNS_TOOL_TIMEOUT = 0.1


@pytest.mark.parametrize(
    ("cut", "status", "reasons"),
    [(cancel, "cancelled", ["reply_stopped"]), (lose, "running", []), (hang, "queued", ["timeout"])],
)
def test_a_drive_that_is_cut_short_cancels_its_request(
    settings: Any, cut: Callable[[Any], None], status: str, reasons: list[str]
) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.1
    settings.AGENTRUNS_LEASE_SECONDS = 1.0 if cut is hang else 60.0
    if cut is hang:
        hang(settings)
    model = Endless()
    agent = Agent("endless", instructions="Wait.", model=model)
    driving = threading.Thread(target=elsewhere, args=(lambda: run_agent(agent, "do it", "s1"),), daemon=True)
    driving.start()
    assert model.asked.wait(LIMIT)
    if cut is not hang:
        cut(settings)
    try:
        assert model.cancelled.wait(LIMIT)
    finally:
        model.let_go()
        driving.join(LIMIT)
    run = Run.objects.get()
    assert run.status == status
    assert [each["error"]["type"] for each in payloads(run, "model_failed")] == reasons


def test_an_exception_in_the_thread_that_waits_cancels_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker's time limit, which a signal raises there."""
    model, waits = Endless(), calls.wait

    def abandoned(awaitable: Any) -> None:
        with suppress(asyncio.CancelledError):
            waits(awaitable)

    def limit(awaitable: Any) -> Any:
        threading.Thread(target=abandoned, args=(awaitable,), daemon=True).start()
        assert model.asked.wait(LIMIT)
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "wait", limit)
    with pytest.raises(KeyboardInterrupt):
        call_model(model, request())
    wait_for(model.cancelled.is_set, "the end of the request")
