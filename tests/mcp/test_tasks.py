"""Calls that a server answers with a task: they wait like calls for an event, and the sweep polls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from agentruns import Occurred, cancel_run, deliver_event, mcp_tools, run_agent, stop_waiting
from agentruns.journal.verify import problems
from agentruns.models import Event, Message, Run
from agentruns.services import events
from agentruns.services.events import settle_due
from agentruns.services.sweep import sweep
from agentruns.testing import expire_leases, frozen_clock, run_until_blocked
from agentruns.tools import Tool, mcp as declared
from agentruns.tools.mcp import client
from tests.crash.processes import run_and_die
from tests.db.racing import at_once
from tests.effects import VARIABLE, Effects
from tests.mcp.servers import KILLS, SLOW, TASKED, done, drive, lock, results
from tests.shop.agents import call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

WORKING: dict[str, Any] = {}


class Served:
    """The server over one transport; `start` and `stop` it, and run an agent that calls its tool."""

    def __init__(self, folder: Path, effects: Effects, is_http: bool, stack: ExitStack) -> None:
        self.folder, self.is_http, self.stack, self.port = folder, is_http, stack, 0
        self.env = {"LEDGER": str(effects.path), "TASKS": str(folder)}
        self.start()

    def start(self) -> None:
        """Start it over HTTP, at the same port as before; as a child it starts with the next request."""
        if not self.is_http:
            return
        command, env = [sys.executable, TASKED, str(self.port)], {**os.environ, **self.env}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self.stack.callback(self.stop)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        """End it."""
        if not self.is_http:
            client.close()
            return
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def tools(self, **options: Any) -> list[Tool]:
        """Declare it."""
        options = {"requires_approval": False, "name": "h", "file": self.folder / "h.json", **options}
        if self.is_http:
            return lock(f"http://127.0.0.1:{self.port}/mcp", **options)
        return lock([sys.executable, TASKED], env=self.env, **options)

    def waits(self, *polls: dict[str, Any], created: Any = SLOW, **options: Any) -> Run:
        """Let an agent call its tool, and check that the run waits for the task."""
        run = drive(self.tools(**options), "work", created=created, polls=[*polls])
        assert (run.status, run.lease_owner) == ("waiting", "")
        return run


@pytest.fixture(params=["stdio", "http"])
def served(request: pytest.FixtureRequest, tmp_path: Path, effects: Effects) -> Iterator[Served]:
    """The server over each transport."""
    with ExitStack() as stack:
        yield Served(tmp_path, effects, request.param == "http", stack)


@pytest.fixture
def child(tmp_path: Path, effects: Effects) -> Served:
    """The server as a child."""
    return Served(tmp_path, effects, False, ExitStack())


def calls(effects: Effects) -> int:
    """Count how often the tool was called at the server."""
    return sum(line.get("tool") == "work" for line in effects.lines())


def result(run: Run) -> dict[str, Any]:
    """Find the payload of a run's only result."""
    payload: dict[str, Any] = Message.objects.get(run=run, kind="tool_result").payload
    return payload


def ended(run: Run, effects: Effects) -> Run:
    """Poll at the server's pace until the run ends; check its journal, and that the call was sent once."""
    run_until_blocked(run, fast_forward=True)
    run.refresh_from_db()
    assert calls(effects) == 1
    assert problems(run.session_id) == []
    assert not Event.objects.unsettled().exists()
    return run


def overdue(run: Run) -> None:
    """Let the next poll of a run be due."""
    waits = Event.objects.unsettled().filter(run=run)
    assert waits.update(due_at=Now() - timedelta(seconds=1))


def polled(run: Run) -> float:
    """Poll once by a sweep, at an unfrozen clock; return the seconds to the next poll."""
    overdue(run)
    with frozen_clock() as clock:
        settle_due()
        due = Event.objects.unsettled().get(run=run).due_at
        return round((due - clock.now).total_seconds())


def test_a_task_is_polled_at_its_pace_until_it_is_completed(served: Served, effects: Effects) -> None:
    run = served.waits(WORKING, WORKING, done("it is done"))
    event = Event.objects.get()
    (created,) = [line for line in effects.lines() if line.get("tool") == "work"]
    assert (event.name, event.key) == ("agentruns.task", f"h/{created['task']}")
    assert event.due_at - event.waits_since == timedelta(seconds=30), "at the server's pace"
    started, awaited = (Message.objects.get(kind=kind).payload for kind in ("tool_started", "event_awaited"))
    assert created["key"] == started["key"], "the server is told the idempotency key"
    assert (awaited["every"], awaited["until"] is None) == (30, False)
    assert settle_due() == 0 and effects.count("poll") == 0, "not before it is due"
    assert ended(run, effects).status == "completed"
    assert results(run) == ["it is done"]
    assert effects.count("poll") == 3


def test_a_server_that_is_started_anew_is_polled_again(served: Served, effects: Effects) -> None:
    run = served.waits(WORKING, done("it is done"))
    assert polled(run) == 30
    served.stop()
    if served.is_http:
        assert polled(run) == 5, "nobody answers: a short back-off"
        Event.objects.update(waits_since=Now() - timedelta(hours=5))
        assert polled(run) == 300, "which grows with the time of the wait"
        served.start()
    ended(run, effects)
    assert results(run) == ["it is done"]


def test_the_outcome_of_a_task_that_the_server_forgot_is_unknown(served: Served, effects: Effects) -> None:
    run = served.waits(WORKING)
    for file in served.folder.glob("*.task"):
        file.unlink()
    assert ended(run, effects).status == "completed"
    assert result(run)["outcome"] == "unknown"
    assert "does not know the task any more" in result(run)["content"]


def test_the_outcome_is_unknown_when_the_time_is_over(served: Served, effects: Effects) -> None:
    run = served.waits(WORKING, task_timeout=timedelta(seconds=70))
    assert ended(run, effects).status == "completed"
    assert result(run)["outcome"] == "unknown"
    assert effects.count("poll") == 3, "after 30 and 60 seconds, and at the end"


def test_a_task_that_is_done_when_its_time_is_over_has_a_result(child: Served, effects: Effects) -> None:
    """As after a night without workers."""
    run = child.waits(done("it is done"), task_timeout=timedelta(seconds=1))
    with frozen_clock() as clock:
        clock.forward(hours=10)
        ended(run, effects)
    assert results(run) == ["it is done"]


def test_a_server_that_is_away_until_the_time_is_over(served: Served, effects: Effects) -> None:
    run = served.waits({"code": -32603, "message": "out of order"}, task_timeout=timedelta(seconds=30))
    served.stop()
    assert ended(run, effects).status == "completed"
    assert result(run)["outcome"] == "unknown"


UNREADABLE = {
    "no status": {"status": "sleeping"},
    "no result": {"status": "completed"},
    "no content": {"status": "completed", "result": {"content": "text"}},
    "another task": {**done("of another"), "taskId": "another"},
    "no id": {**done("of another"), "taskId": 7},
    "no pace": {"pollIntervalMs": "often"},
    "an error": {"code": -32603, "message": "out of order"},
    "no such method": {"code": -32601, "message": "unknown"},
}


@pytest.mark.parametrize("poll", UNREADABLE.values(), ids=UNREADABLE)
def test_an_answer_that_cannot_be_read_is_none(child: Served, effects: Effects, poll: Any) -> None:
    run = child.waits(poll, done("it is done"))
    assert polled(run) == 5
    assert Run.objects.get().status == "waiting"
    ended(run, effects)
    assert results(run) == ["it is done"]


def test_an_answer_that_is_too_large_is_none(served: Served, effects: Effects) -> None:
    run = served.waits({"huge": 51 * 2**20}, done("it is done"))
    assert polled(run) == 5
    ended(run, effects)
    assert results(run) == ["it is done"]


@pytest.mark.parametrize(("asked", "given"), [(-5, 1), (0, 5), (10**300, 3600), (None, 5), (7_000, 7)])
def test_the_pace_has_limits(child: Served, effects: Effects, asked: Any, given: int) -> None:
    run = child.waits({"pollIntervalMs": asked}, done("it is done"), created={"pollIntervalMs": asked})
    assert Message.objects.get(kind="event_awaited").payload["every"] == given
    assert polled(run) == given
    ended(run, effects)


@pytest.mark.parametrize("id", [None, 7, "", "two words", "x" * 151, "\u202e", ["a"]])
def test_a_task_whose_id_cannot_be_kept_is_in_doubt(child: Served, effects: Effects, id: Any) -> None:
    run = drive(child.tools(), "work", created={"taskId": id})
    assert (run.status, calls(effects)) == ("orphaned", 1)
    assert problems(run.session_id) == []


def test_a_task_of_another_call_is_nobodys(child: Served, effects: Effects) -> None:
    first = child.waits(WORKING, created={"taskId": "same"})
    second = drive(child.tools(), "work", created={"taskId": "same"}, polls=[done("of the first")])
    assert (second.status, result(second)["outcome"]) == ("completed", "unknown")
    assert "another call waits" in result(second)["content"]
    assert Run.objects.get(pk=first.pk).status == "waiting"
    assert calls(effects) == 2


FAILS = {
    "failed": {"status": "failed", "error": {"code": -32000, "message": "sesame broke"}},
    "cancelled": {"status": "cancelled", "statusMessage": "by sesame"},
    "asks": {"status": "input_required", "statusMessage": "by sesame", "inputRequests": {}},
    "error": done("sesame broke", isError=True),
}


@pytest.mark.parametrize("poll", FAILS.values(), ids=FAILS)
@pytest.mark.parametrize("safe", [False, True])
def test_a_task_that_fails_is_a_handler_that_raises(
    child: Served, effects: Effects, poll: Any, safe: bool, caplog: pytest.LogCaptureFixture
) -> None:
    child.env["SECRET"] = "sesame"
    run = ended(child.waits(poll, safe_to_retry=safe), effects)
    assert run.status == "completed"
    assert (result(run)["outcome"], result(run).get("in_doubt", False)) == ("error", not safe)
    assert result(run)["content"].startswith("McpError: ")
    assert ("may or may not have happened" in result(run)["content"]) is not safe
    told = str(result(run)["content"]) + caplog.text
    assert "sesame" not in told and "***" in told


def test_a_tool_that_can_ask_asks_when_a_task_fails(child: Served, effects: Effects) -> None:
    run = child.waits(FAILS["failed"], reconcile=lambda ctx, arguments: Occurred("it is there"), timeout=1)
    ended(run, effects)
    assert results(run) == ["it is there"]
    kinds = [*Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True)]
    assert kinds.index("orphan_found") < kinds.index("orphan_resolved") < kinds.index("tool_result")


def test_an_error_that_the_project_knows_is_a_refusal(child: Served, effects: Effects) -> None:
    run = ended(child.waits(FAILS["failed"], refuses=declared.McpError), effects)
    assert result(run)["content"].endswith("Nothing happened.")
    assert "in_doubt" not in result(run)


def test_headers_are_those_of_the_call(served: Served, effects: Effects) -> None:
    if not served.is_http:
        return
    tools = served.tools(headers=lambda ctx: {"X-Who": f"{ctx.context.get('tenant')}-{ctx.idempotency_key}"})
    agent = shop_agent("tenant", {"tools": [call("h__work", polls=[done("x")])]}, tools=tools)
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1", context={"tenant": 7}).run_id)
    ended(run, effects)
    key = Message.objects.get(kind="tool_started").payload["key"]
    asked = {line["mcp-method"]: line for line in effects.lines() if line.get("x-who") == f"7-{key}"}
    assert {"tools/call", "tasks/get"} <= {*asked}
    (event,) = Event.objects.all()
    assert asked["tasks/get"]["mcp-name"] == event.key.removeprefix("h/"), "gateways route by it"


def test_two_sweeps_at_once_poll_and_deliver_once(child: Served, effects: Effects) -> None:
    run = child.waits(done("it is done"))
    overdue(run)
    assert sorted(at_once(*[settle_due] * 4)) == [0, 0, 0, 1]
    assert effects.count("poll") == 1
    ended(run, effects)
    assert results(run) == ["it is done"]


def test_two_polls_at_once_deliver_once(child: Served, effects: Effects) -> None:
    """As by two processes, when the first one's poll takes longer than its claim."""
    run = child.waits(done("it is done"))
    overdue(run)
    event = Event.objects.select_related("run__session").get()
    settled = set[Any](), set[Any]()
    first = events._poll("default", event, settled[0])
    answers = [next(first)]
    overdue(run)
    second = events._poll("default", Event.objects.select_related("run__session").get(), settled[1])
    answers.append(next(second))
    wait_for(lambda: all(each.done() for each in answers), "both answers")
    assert [*first, *second] == []
    assert settled == ({event.pk}, set())
    ended(run, effects)
    assert results(run) == ["it is done"]


def test_a_slow_server_holds_up_no_other_wait(
    child: Served, effects: Effects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its task is polled again later."""
    monkeypatch.setattr(events, "POLL_SECONDS", 2)
    monkeypatch.setattr(client, "POLL_SECONDS", 20)  # so that only the sweep gives up
    begun = list[Future[Any]]()
    monkeypatch.setattr(events, "wait", lambda polls, seconds: (begun.extend(polls), wait(polls, seconds)))
    gate = tmp_path / "gate"
    slow = child.waits({"after": str(gate), **done("dropped")}, done("at last"))
    fast = child.waits(WORKING, created=SLOW, task_timeout=timedelta(minutes=5))
    Event.objects.filter(run=fast).update(key="h/forgotten")
    overdue(slow), overdue(fast)
    assert settle_due() == 1
    assert [poll.done() for poll in begun].count(False) == 1, "the sweep waited for the slow server"
    assert result(fast)["outcome"] == "unknown"
    assert not Message.objects.filter(run=slow, kind="tool_result").exists()
    gate.touch()
    wait_for(lambda: polled_until_settled(slow), "the next answer")
    assert result(slow)["content"] == "at last"
    assert calls(effects) == 2


def polled_until_settled(run: Run) -> bool:
    """Poll once; tell whether the run has its result."""
    Event.objects.unsettled().filter(run=run).update(due_at=Now() - timedelta(seconds=1))
    return settle_due() == 1


def test_a_person_ends_the_wait_and_a_cancel_does(child: Served, effects: Effects) -> None:
    run = child.waits(done("too late"))
    stop_waiting(run.pk, Event.objects.get().call_id, None)
    assert result(run)["outcome"] == "unknown"
    other = child.waits(done("too late"))
    cancel_run(other.pk, reason="changed my mind")
    assert result(other)["outcome"] == "unknown"
    Event.objects.update(due_at=Now() - timedelta(seconds=1))
    assert settle_due() == 0
    assert effects.count("poll") == 0, "nobody waits for these any more"
    assert [problems(each.session_id) for each in (run, other)] == [[], []]


def test_an_answer_that_comes_after_the_end_of_the_wait_changes_nothing(
    child: Served, effects: Effects
) -> None:
    run = child.waits(done("too late"))
    overdue(run)
    settled = set[Any]()
    poll = events._poll("default", Event.objects.select_related("run__session").get(), settled)
    wait_for(next(poll).done, "the answer")
    cancel_run(run.pk, reason="changed my mind")
    assert [*poll] == []
    assert (settled, result(run)["outcome"]) == (set(), "unknown")
    assert problems(run.session_id) == []


def test_staff_see_the_task_and_cannot_deliver_it(child: Served) -> None:
    run = child.waits(WORKING)
    event, staff = Event.objects.get(), Client()
    staff.force_login(User.objects.create_superuser("root", password="x"))
    page = staff.get(reverse("admin:agentruns_run_change", args=[run.pk])).content.decode()
    text = " ".join(re.sub("<[^>]*>", "", page).split())
    assert f"Waits for a task of the MCP server {event.key[:30]}" in text
    assert "Stop waiting" in page and "Deliver…" not in page
    with pytest.raises(ValueError, match=r"does not begin with 'agentruns\.'"):
        deliver_event(event.name, event.key, "forged")
    url = reverse("admin:agentruns_run_deliver", args=[run.pk, event.call_id])
    staff.post(url, {"payload": '"forged"'})
    assert not Message.objects.filter(run=run, kind="tool_result").exists()
    staff.post(reverse("admin:agentruns_run_stop_waiting", args=[run.pk, event.call_id]))
    assert result(run)["outcome"] == "unknown"


def test_a_stateless_run_cannot_wait(child: Served, effects: Effects) -> None:
    turn = {"tools": [call("h__work", polls=[WORKING])]}
    answer = run_agent(shop_agent("stateless", turn, tools=child.tools()), "do it")
    assert answer.status == "completed"
    assert "a stateless run cannot wait" in str(answer.messages)
    assert calls(effects) == 1


def test_task_timeout_is_a_timedelta(tmp_path: Path) -> None:
    for wrong, error in ((60, TypeError), (timedelta(), ValueError)):
        with pytest.raises(error, match="timeout of Pending"):
            mcp_tools("true", name="w", lock=tmp_path / "w.json", task_timeout=wrong)  # type: ignore[arg-type]


def test_a_worker_killed_before_the_wait_is_stored_leaves_a_doubt(child: Served, effects: Effects) -> None:
    child.tools()
    client.close()
    env = {VARIABLE: str(effects.path), "TASKS": str(child.folder)}
    run_and_die("run", "tasked", "s1", point="after_tool", module="tests.mcp.waiting", **env)
    tools = declare_as_the_child(child)
    run = Run.objects.get()
    expire_leases(run)
    sweep()
    run.refresh_from_db()
    assert (run.status, calls(effects)) == ("orphaned", 1)
    assert not Event.objects.exists()
    assert tools and problems(run.session_id) == []


def test_a_worker_killed_by_the_poll_delivers_nothing_and_the_next_one_once(
    child: Served, effects: Effects
) -> None:
    """The server itself sends its client a SIGKILL, before the answer."""
    declare_as_the_child(child)
    run = Run.objects.get(pk=run_agent("tasked", "do it", "s1").run_id)
    assert run.status == "waiting"
    client.close()
    overdue(run)
    env = {VARIABLE: str(effects.path), "TASKS": str(child.folder)}
    run_and_die("sweep", module="tests.mcp.waiting", **env)
    assert effects.count("poll") == 1
    assert not Message.objects.filter(kind="tool_result").exists()
    ended(run, effects)
    assert results(run) == ["it is done"]
    assert effects.count("poll") == 2


def declare_as_the_child(child: Served) -> list[Tool]:
    """Declare the agent of tests.mcp.waiting in this process as well."""
    tools = child.tools()
    shop_agent("tasked", {"tools": [KILLS]}, tools=tools)
    return tools
