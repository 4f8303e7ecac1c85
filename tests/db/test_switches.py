"""The kill switch: what is off waits or is refused, at every boundary, until it is switched on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.urls import reverse

from agentruns import ToolContext, approve, resume_run, run_agent, start_run, tool
from agentruns.engine import leases
from agentruns.engine.worker import answer
from agentruns.exceptions import PermissionDeniedError, SwitchedOffError, ToolDurabilityError
from agentruns.models import Approval, Control, Run
from agentruns.services.sweep import sweep
from agentruns.services.switches import switch, switched_off
from agentruns.utils import failpoints
from tests.admin.people import browser
from tests.db.helpers import payloads, sound, user
from tests.effects import Effects
from tests.shop.agents import call, post, shop_agent
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
WHY = "it refunds everybody"
REFUSED = "Not executed: the tool is switched off for now. Nothing happened."


@pytest.fixture(autouse=True)
def _asks_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leases, "DRAIN_CHECK_SECONDS", 0.0)
    yield
    leases.forget_switches()


def run_once(agent: Any) -> Run:
    """Run an agent, and check its journal."""
    return sound(Run.objects.get(pk=run_agent(agent, "do it", "s1").run_id))


def contents(run: Run) -> list[Any]:
    return [payload["content"] for payload in payloads(run, "tool_result")]


def test_runs_of_an_agent_that_is_off_wait_and_go_on(effects: Effects) -> None:
    shop_agent("off", {"tools": [call("post", text="hi")]})
    assert switch("agent", "off", "off", reason=WHY)
    assert not switch("agent", "off", "off", reason="again"), "it is off already"
    run = start_run("off", "do it", "s1")
    answer(str(run.pk))
    sweep()
    run.refresh_from_db()
    assert (run.status, run.attempts, effects.count()) == ("queued", 0, 0)
    assert "The agent 'off' is switched off by the program: it refunds everybody" in run.blocked_reason
    with pytest.raises(SwitchedOffError):
        resume_run(run.pk)
    assert run_agent("off", "do it", "s2").status == "queued"
    assert effects.count() == 0
    assert switch("agent", "off", "on")
    assert not switch("agent", "off", "on")
    sweep()
    assert set(Run.objects.values_list("status", "blocked_reason")) == {("completed", "")}
    assert effects.count() == 2


def test_a_run_that_is_driven_stops_at_its_next_boundary(effects: Effects) -> None:
    @tool
    def stop(ctx: ToolContext) -> str:
        """Switch the agent off from inside."""
        effects.record(ctx.idempotency_key)
        switch("agent", "stops", "off", reason=WHY)
        return "stopped"

    agent = shop_agent("stops", {"tools": [call("stop"), call("post", text="hi")]}, tools=[stop, post])
    run = run_once(agent)
    assert (run.status, effects.count(), contents(run)) == ("queued", 1, ["stopped"])
    switch("agent", "stops", "on")
    sweep()
    assert (sound(run).status, effects.count()) == ("completed", 2)


def test_calls_of_a_tool_that_is_off_are_refused(effects: Effects) -> None:
    agent = shop_agent("both", {"tools": [call("post", text="hi"), call("lookup", number="A1")]})
    switch("tool", "post", "off", reason=WHY)
    run = run_once(agent)
    assert (run.status, contents(run)) == ("completed", [REFUSED, "lookup done"])
    assert [line["tool"] for line in effects.lines()] == ["lookup"]
    page = browser("superuser").get(reverse("admin:agentruns_run_change", args=[run.pk])).content.decode()
    assert page.count("Not executed: refused") == 2, "in the conversation and among the steps"
    assert "Tool gave an error" not in page


def test_a_call_that_was_approved_before_is_refused_too(effects: Effects) -> None:
    run = run_once("calls-refund")
    switch("tool", "refund", "off", reason=WHY)
    approve(Approval.objects.get().pk, None)
    resume_run(run.pk)
    assert (sound(run).status, contents(run), effects.count()) == ("completed", [REFUSED], 0)
    assert not run.messages.filter(kind="tool_started").exists(), "no row says that it was entered"


def test_calls_that_are_journaled_as_started_and_wait_for_their_turn_are_refused(effects: Effects) -> None:
    is_off = threading.Event()

    @tool(safe_to_retry=True, parallel=True)
    def peek(ctx: ToolContext, n: int) -> str:
        """Look; the first one switches the tool off, and none has its turn over before that."""
        effects.record(f"n{n}")
        if n == 0:
            switch("tool", "peek", "off", reason=WHY)
            is_off.set()
        assert is_off.wait(LIMIT)
        return "seen"

    agent = shop_agent("peeks", {"tools": [call("peek", n=n) for n in range(20)]}, tools=[peek])
    run = run_once(agent)
    found = contents(run)
    assert effects.count() + found.count(REFUSED) == 20 == len(found)
    assert effects.count() <= 8, "those that were at work"
    assert run.status == "completed"


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_call_that_is_about_to_be_entered_is_not(
    is_retried: bool, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is there, its handler comes next; of one that was tried before, nobody knows what happened."""

    @tool(safe_to_retry=True)
    def look(ctx: ToolContext) -> str:
        effects.record("look")
        raise ToolDurabilityError("Who knows?")

    monkeypatch.setattr(failpoints, "_armed", None)
    failpoints.arm(f"before_tool:{1 + is_retried}", lambda: switch("tool", "look", "off", reason=WHY))
    run = run_once(shop_agent("looks", {"tools": [call("look")]}, tools=[look]))
    assert effects.count() == is_retried
    assert (run.status, contents(run)) == (("orphaned", []) if is_retried else ("completed", [REFUSED]))


def test_a_look_that_failed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a tool that is off would be taken for on, by a process that just came, until it looks again."""
    monkeypatch.setattr(leases, "DRAIN_CHECK_SECONDS", 3600.0)
    switch("tool", "post", "off", reason=WHY)

    def fail(*_args: Any) -> Any:
        raise OperationalError("the line is dead")

    with connection.execute_wrapper(fail):
        leases.why_off("default", "tool", "post")
    assert WHY in leases.why_off("default", "tool", "post")


def test_who_may_switch_and_that_the_log_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PermissionDeniedError):
        switch("tool", "post", "off", user("bob", is_staff=True), reason=WHY)
    for words in (("model", "x", "off"), ("tool", "", "off"), ("tool", "\0", "off"), ("tool", "post", "of")):
        with pytest.raises(ValueError, match="There is no such agent or tool"):
            switch(*words, reason=WHY)
    for reason in (" ", "x" * 2_001):
        with pytest.raises(ValueError, match="Give a reason of at most 2000"):
            switch("tool", "post", "off", reason=reason)
    assert switch("tool", "post", "off", user("ada", "switch"), reason=WHY)
    ((key, note),) = switched_off().items()
    assert (key, note.actor, note.reason) == (("tool", "post"), "ada", WHY)
    assert not Control.objects.sweepers().exists(), "a switch is no sweeper"
    caplog.clear()
    switch("tool", "post\nERROR all is lost\u202e", "off", reason=WHY)
    (record,) = (each for each in caplog.records if each.name == "agentruns.switches")
    assert record.getMessage().startswith("Switched tool post")
    assert "\n" not in record.getMessage() and "\u202e" not in record.getMessage()


def test_the_console_switches(effects: Effects) -> None:
    url = reverse("admin:agentruns_run_switches")
    off = {"kind": "tool", "name": "post", "state": "off", "reason": WHY}
    viewer, client = browser("viewer"), Client()
    assert (viewer.get(url).status_code, viewer.post(url, off).status_code) == (403, 403)
    assert url not in viewer.get("/admin/").content.decode()
    client.force_login(user("ada", "switch", "view_run", is_staff=True))
    assert "post" in client.get(url).content.decode()
    assert url in client.get("/admin/").content.decode(), "the front page leads there"
    assert (client.post(url, {**off, "reason": " "}).status_code, switched_off()) == (400, {})
    for name, reason in (("post", "<script>\u202e"), ("gone", WHY)):
        assert client.post(url, {**off, "name": name, "reason": reason}).status_code == 302
    assert "<strong>2</strong> agents and tools switched off" in client.get("/admin/").content.decode()
    text = client.get(url).content.decode()
    assert "&lt;script&gt;" in text and "<script>\u202e" not in text and "\u202e" not in text
    assert "gone" in text, "also what this process does not know"
    assert text.index("<strong>off") < text.index('value="off"'), "what is off comes first"
    assert client.post(url, {"kind": "tool", "name": "post", "state": "on"}).status_code == 302
    assert [*switched_off()] == [("tool", "gone")]
