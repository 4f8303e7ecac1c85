"""Runs that wait for an event, as the commands tell of them."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from agentruns import Pending, start_run, tool
from agentruns.models import Run
from agentruns.testing import crashing_at, expire_leases
from tests.commands.running import run
from tests.db.families import hand_over
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool(awaits="payment", sensitive=["iban"])
def charge(order: str, iban: str) -> Pending:
    """Ask the customer to pay."""
    return Pending(f"pi_{order}-{iban}", timedelta(days=3))


def test_the_commands_say_for_which_event_a_run_waits_and_mask_its_key() -> None:
    shop_agent("till", {"tools": [call("charge", order="1", iban="DE02-secret")]}, tools=[charge])
    begun = run("run_agent", "till", "charge", "--session", "s1")
    waiting = Run.objects.get()
    assert (begun.code, waiting.status) == (4, "waiting")
    assert "Waits for payment pi_1-*** since " in begun.out
    told = {
        name: run(name, *given).out
        for name, given in {"list_runs": [], "show_run": [str(waiting.pk)]}.items()
    }
    assert "payment pi_1-*** since " in told["list_runs"]
    assert "waits for     payment pi_1-*** since " in told["show_run"]
    assert "event_awaited" in told["show_run"]
    listed, shown = (
        json.loads(run(name, *given, "--json").out)
        for name, given in (("list_runs", []), ("show_run", [str(waiting.pk)]))
    )
    for record in (listed, shown):
        (wait,) = record["waits_for"]
        assert (wait["tool"], wait["name"], wait["key"]) == ("charge", "payment", "pi_1-***")
        assert wait["since"] < wait["until"]
    assert "1 run waits for an event." in run("resume_runs").out
    for text in (begun.out, *told.values(), json.dumps(shown)):
        assert "DE02-secret" not in text


def test_the_commands_say_for_which_run_a_run_waits() -> None:
    hand_over()
    begun = run("run_agent", "boss", "do it", "--session", "s1")
    (child,) = Run.objects.exclude(parent=None)
    said = f"run {child.pk}, which a call of scout started, since "
    assert (begun.code, f"Waits for {said}" in begun.out) == (4, True)
    assert f"waits for     {said}" in run("show_run", str(child.parent_id)).out


def test_the_list_says_which_verdict_and_which_decision_a_run_waits_for() -> None:
    agents = [shop_agent("dies", {"tools": [call("post", text="hi")]})]
    agents += [shop_agent("gated", {"tools": [call("refund", cents=5000), call("refund", cents=6000)]})]
    start_run(agents[0], "go", "s1")
    with crashing_at("after_tool"):
        run("resume_runs")
    start_run(agents[1], "go", "s2")
    expire_leases()
    run("resume_runs")
    whys = {line.split()[1]: line for line in run("list_runs").out.splitlines()}
    assert whys["orphaned"].endswith("  Waits for a verdict on post")
    assert whys["awaiting-approval"].endswith("  Waits for a decision on refund")
    with CaptureQueriesContext(connection) as before:
        run("list_runs")
    for number in range(3):
        start_run(agents[1], "go", f"more-{number}")
    run("resume_runs")
    with CaptureQueriesContext(connection) as after:
        assert run("list_runs").out.count("a decision on refund") == 4
    assert len(after) == len(before)
    assert [record["waits_for"] for record in run("list_runs", "--json").lines] == [[]] * 5


def test_a_child_names_its_parent() -> None:
    boss = start_run(hand_over(), "do it", "s1")
    run("resume_runs", "--limit=1")
    (child,) = boss.children.all()
    assert "agent boss says: look around" in run("show_run", str(child.pk)).out
    assert f"parent        {boss.pk}\n" in run("show_run", str(child.pk)).out
    told = {str(each.pk): run("show_run", str(each.pk), "--json").lines[0] for each in (boss, child)}
    assert [told[str(each.pk)]["parent"] for each in (boss, child)] == [None, str(boss.pk)]


def test_one_call_of_the_command_goes_down_a_family_and_up_again() -> None:
    leaf = shop_agent("leaf0")
    for number in range(1, 6):
        turn = {"tools": [call(leaf.name, task="go down")]}
        leaf = shop_agent(f"leaf{number}", turn, tools=[leaf.as_tool()])
    top = start_run(leaf, "go", "deep")
    limited = run("resume_runs", "--limit=1").out
    assert limited == "found 1, driven 1, waiting 1\n1 run can go on now.\n"
    assert run("resume_runs").out == "found 10, driven 10, completed 6, waiting 4\n"
    top.refresh_from_db()
    assert (top.status, Run.objects.exclude(status="completed").count()) == ("completed", 0)


def test_the_command_says_what_can_still_go_on_after_as_many_sweeps_as_a_family_is_deep() -> None:
    turns = [{"tools": [call("scout", task=f"part {number}")]} for number in range(6)]
    boss = start_run(hand_over(*turns), "do it", "s1")
    counts, left = run("resume_runs").out.splitlines()
    assert (counts, left) == ("found 11, driven 11, completed 5, waiting 6", "1 run can go on now.")
    assert run("resume_runs", "--json").lines[0]["ready"] == 0
    boss.refresh_from_db()
    assert boss.status == "completed"
