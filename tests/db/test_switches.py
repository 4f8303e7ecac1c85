"""The kill switch: what is off waits or is refused, at every boundary, until it is switched on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError, connection
from django.test import Client
from django.urls import reverse

from agentruns import ToolContext, approve, resume_run, run_agent, start_run, tool
from agentruns.engine import leases, tool_calls
from agentruns.engine.worker import answer
from agentruns.exceptions import PermissionDeniedError, SwitchedOffError, ToolDurabilityError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Control, Message, Run
from agentruns.services.sweep import sweep
from agentruns.services.switches import switch, switched_off
from tests.effects import Effects
from tests.shop.agents import call, post, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)
WHY = "it refunds everybody"


@pytest.fixture(autouse=True)
def _asks_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leases, "DRAIN_CHECK_SECONDS", 0.0)
    yield
    leases.forget_switches()


def contents(run_id: object) -> list[Any]:
    rows = Message.objects.filter(run_id=run_id, kind="tool_result").order_by("seq")
    return [row.payload["content"] for row in rows]


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
    result = run_agent(agent, "do it", "s1")
    assert (result.status, effects.count()) == ("queued", 1)
    assert contents(result.run_id) == ["stopped"]
    switch("agent", "stops", "on")
    sweep()
    assert (Run.objects.get().status, effects.count()) == ("completed", 2)
    assert problems(Run.objects.get().session_id) == []


def test_calls_of_a_tool_that_is_off_are_refused(effects: Effects) -> None:
    agent = shop_agent("both", {"tools": [call("post", text="hi"), call("lookup", number="A1")]})
    switch("tool", "post", "off", reason=WHY)
    result = run_agent(agent, "do it", "s1")
    assert result.status == "completed"
    assert contents(result.run_id) == [
        "Not executed: the tool is switched off for now. Nothing happened.",
        "lookup done",
    ]
    assert [line["tool"] for line in effects.lines()] == ["lookup"]
    viewer = Client()
    viewer.force_login(User.objects.create_superuser("ada"))
    page = viewer.get(reverse("admin:agentruns_run_change", args=[result.run_id])).content.decode()
    assert page.count("Not executed: refused") == 2, "in the conversation and among the steps"
    assert "Tool gave an error" not in page


def test_a_call_that_was_approved_before_is_refused_too(effects: Effects) -> None:
    run_id = run_agent("calls-refund", "do it", "s1").run_id
    switch("tool", "refund", "off", reason=WHY)
    approve(Approval.objects.get().pk, None)
    resume_run(run_id)
    assert contents(run_id) == ["Not executed: the tool is switched off for now. Nothing happened."]
    assert effects.count() == 0
    run = Run.objects.get()
    assert (run.status, problems(run.session_id)) == ("completed", [])
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
        assert is_off.wait(120)
        return "seen"

    agent = shop_agent("peeks", {"tools": [call("peek", n=n) for n in range(20)]}, tools=[peek])
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1").run_id)
    found = contents(run.pk)
    refused = found.count("Not executed: the tool is switched off for now. Nothing happened.")
    assert effects.count() + refused == 20 == len(found)
    assert effects.count() <= 8, "those that were at work"
    assert (run.status, problems(run.session_id)) == ("completed", [])


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_call_that_is_about_to_be_entered_is_not(
    is_retried: bool, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is there, its handler comes next; of one that was tried before, nobody knows what happened."""
    tries = itertools.count(1)

    @tool(safe_to_retry=True)
    def look(ctx: ToolContext) -> str:
        """Look."""
        effects.record("look")
        raise ToolDurabilityError("Who knows?")

    def reached(name: str) -> None:
        if name == "before_tool" and next(tries) == 1 + is_retried:
            switch("tool", "look", "off", reason=WHY)

    monkeypatch.setattr(tool_calls, "reached", reached)
    agent = shop_agent("looks", {"tools": [call("look")]}, tools=[look])
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1").run_id)
    assert effects.count() == is_retried
    assert run.status == ("orphaned" if is_retried else "completed")
    if not is_retried:
        assert contents(run.pk) == ["Not executed: the tool is switched off for now. Nothing happened."]
    assert problems(run.session_id) == []


def test_a_look_that_failed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a tool that is off would be taken for on, by a process that just came, until it looks again."""
    monkeypatch.setattr(leases, "DRAIN_CHECK_SECONDS", 3600.0)
    switch("tool", "post", "off", reason=WHY)

    def fail(*_args: Any) -> Any:
        raise OperationalError("the line is dead")

    with connection.execute_wrapper(fail):
        leases.why_off("default", "tool", "post")
    assert WHY in leases.why_off("default", "tool", "post")


def test_who_may_switch() -> None:
    user = User.objects.create_user("ada", is_staff=True)
    with pytest.raises(PermissionDeniedError):
        switch("tool", "post", "off", user, reason=WHY)
    for kind, name, state in (
        ("model", "x", "off"),
        ("tool", "", "off"),
        ("tool", "\0", "off"),
        ("tool", "post", "of"),
    ):
        with pytest.raises(ValueError, match="There is no such agent or tool"):
            switch(kind, name, state, reason=WHY)
    for reason in (" ", "x" * 2_001):
        with pytest.raises(ValueError, match="Give a reason of at most 2000"):
            switch("tool", "post", "off", reason=reason)
    user.user_permissions.add(Permission.objects.get(codename="switch"))
    assert switch("tool", "post", "off", User.objects.get(pk=user.pk), reason=WHY)
    assert [(key, one.actor, one.reason) for key, one in switched_off().items()] == [
        (("tool", "post"), "ada", WHY)
    ]
    assert not Control.objects.sweepers().exists(), "a switch is no sweeper"


def test_a_switch_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    switch("tool", "post\nERROR all is lost\u202e", "off", reason=WHY)
    (record,) = (each for each in caplog.records if each.name == "agentruns.switches")
    assert record.getMessage().startswith("Switched tool post")
    assert "\n" not in record.getMessage() and "\u202e" not in record.getMessage()


def test_the_console_switches(effects: Effects) -> None:
    client, url = Client(), reverse("admin:agentruns_run_switches")
    user = User.objects.create_user("ada", is_staff=True)
    client.force_login(user)
    assert client.get(url).status_code == 403
    assert url not in client.get("/admin/").content.decode()
    assert (
        client.post(url, {"kind": "tool", "name": "post", "state": "off", "reason": WHY}).status_code == 403
    )
    codenames = ["switch", "view_run"]
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    assert "post" in client.get(url).content.decode()
    assert url in client.get("/admin/").content.decode(), "the front page leads there"
    bad = client.post(url, {"kind": "tool", "name": "post", "state": "off", "reason": " "})
    assert (bad.status_code, switched_off()) == (400, {})
    hostile = "<script>\u202e"
    for name, reason in (("post", hostile), ("gone", WHY)):
        sent = {"kind": "tool", "name": name, "state": "off", "reason": reason}
        assert client.post(url, sent).status_code == 302
    assert "<strong>2</strong> agents and tools switched off" in client.get("/admin/").content.decode()
    text = client.get(url).content.decode()
    assert "&lt;script&gt;" in text and "<script>\u202e" not in text and "\u202e" not in text
    assert "gone" in text, "also what this process does not know"
    assert text.index("<strong>off") < text.index('value="off"'), "what is off comes first"
    assert client.post(url, {"kind": "tool", "name": "post", "state": "on"}).status_code == 302
    assert [*switched_off()] == [("tool", "gone")]
