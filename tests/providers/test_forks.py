"""Processes forked from one that has asked a model: no two of them share a connection, a lock or a thread."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from django.db import connection

from agentruns.models import Run
from agentruns.utils.forks import without_connections
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.programs import run_program
from tests.waiting import LIMIT

WORKER = """
import os, sys
import django
django.setup()
from django.db import connections
from agentruns import Agent, run_agent
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.openai import OpenAIModel

kind, whose, url, key = sys.argv[1:]
if kind == "openai":
    import openai
    given = openai.OpenAI(base_url=url, api_key=key) if whose == "given" else None
    model = OpenAIModel("qwen3", provider="vllm", base_url=url, api_key=key, client=given)
else:
    import anthropic
    os.environ |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    model = AnthropicModel("claude-sonnet-5-5", anthropic.Anthropic() if whose == "given" else None)
agent = Agent("talks", instructions="Talk.", model=model)
run_agent(agent, "task of the parent", "parent")
connections.close_all()
children = []
for name in ("one", "two"):
    pid = os.fork()
    if pid == 0:
        run_agent(agent, f"task of {name}", name)
        os._exit(0)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
run_agent(agent, "task of the parent, again", "again")
sys.exit(max(codes))
"""


def interpret(program: str, *words: str) -> str:
    """Run a program in an interpreter of its own, on this test's database; return what it prints."""
    database = {"AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"])}
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings", **database}
    return run_program(sys.executable, "-c", program, *words, **settings).stdout


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("whose", ["own", "given"])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_forked_workers_store_the_replies_to_their_own_requests(kind: str, whose: str) -> None:
    """Both ask before either is answered, which two requests over one connection cannot."""
    both = threading.Barrier(2, timeout=LIMIT)

    def answer(body: Any) -> dict[str, Any]:
        said = repr(body["messages"])
        task = "parent" if "parent" in said else "one" if "task of one" in said else "two"
        if task != "parent":
            try:
                both.wait()
            except threading.BrokenBarrierError:
                sys.exit("an answer over one connection would reach either: this closes it")
        return {"text": f"reply to {task}"}

    fakes: dict[str, Any] = {"openai": FakeOpenAI, "anthropic": FakeAnthropic}
    with fakes[kind](answer) as fake:
        interpret(WORKER, kind, whose, fake.url, fake.api_key)
    said = {run.session.key: (run.status, run.output) for run in Run.objects.select_related("session")}
    assert said == {
        "parent": ("completed", "reply to parent"), "one": ("completed", "reply to one"),
        "two": ("completed", "reply to two"), "again": ("completed", "reply to parent"),
    }  # fmt: skip


LOCKED = """
import os, sys, threading
import django
django.setup()
from agentruns.agents import agent
from agentruns.api import stream as poller
from agentruns.journal import anchor, payloads, telemetry
from agentruns.tools import card, mcp
from agentruns.tools.mcp import client
from agentruns.utils import ids

locks = {
    "ids": ids._lock, "telemetry": telemetry._making, "agents": agent._lock, "mcp": mcp._lock,
    "client": client._lock, "poller": poller.poller._lock, "card": card._lane._free,
    "anchor": anchor._lane._free, "payloads": payloads._lane._free, "turns": poller.turns,
}
held, done = threading.Event(), threading.Event()

def hold():
    for lock in locks.values():
        while lock.acquire(blocking=False) and hasattr(lock, "_value"):
            pass
    held.set()
    done.wait()

threading.Thread(target=hold).start()
held.wait()
pid = os.fork()
if pid == 0:
    locks["poller"] = poller.poller._lock
    print(sorted(name for name, lock in locks.items() if not lock.acquire(blocking=False)), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
os._exit(0)  # what runs at the end of an interpreter waits for these locks
"""


def test_what_a_thread_of_the_parent_holds_is_free_in_a_fork() -> None:
    assert interpret(LOCKED) == "[]\n"


class Wrapped:
    """A transport of a project's own around another."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def handle_request(self, request: Any) -> Any:
        return self.inner.handle_request(request)

    def close(self) -> None:
        self.inner.close()


def test_a_client_of_a_projects_own_keeps_its_transports_and_no_connection() -> None:
    import httpx2

    def pools(client: Any) -> list[Any]:
        return [client._transport.inner._pool, *(each._pool for each in client._mounts.values())]

    with FakeOpenAI([{"text": "x"}]) as fake:
        wrapped: Any = Wrapped(httpx2.HTTPTransport())
        mounts = {"all://127.0.0.1": httpx2.HTTPTransport()}
        given = httpx2.Client(transport=wrapped, mounts=mounts, trust_env=False)
        for url in (fake.url, fake.url.replace("127.0.0.1", "localhost")):
            assert given.post(f"{url}/nowhere", json={}).status_code == 404
        copied = without_connections(given)
        assert [len(pool.connections) for pool in pools(given)] == [1, 1]
        assert [len(pool.connections) for pool in pools(copied)] == [0, 0]
        assert copied.post(f"{fake.url}/nowhere", json={}).status_code == 404
        assert pools(copied)[1]._optional_thread_lock is not pools(given)[1]._optional_thread_lock
        copied.close()
        assert given.post(f"{fake.url}/nowhere", json={}).status_code == 404, "the parent's lives on"
        given.close()
