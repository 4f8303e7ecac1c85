"""`check_runs` says before a deploy which runs the new code cannot continue; `adopt_runs` lets them adopt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from agentruns import Agent, approve, cancel_run, pause_run, run_agent, start_run, tool
from agentruns.agents.agent import _registry
from agentruns.engine.leases import claim
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from tests.commands.running import run
from tests.db.helpers import sound, user
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call, refund, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

REFUND = {"tools": [call("refund", cents=5000)]}


@tool(name="refund", requires_approval=True)
def noted(cents: int, note: str = "") -> str:
    return "done"


CHANGED = [noted if each is refund else each for each in TOOLS]


@pytest.fixture(autouse=True)
def _registry_of_its_own() -> Iterator[None]:
    with isolated_registry():
        yield


def agent(name: str, **options: Any) -> Agent:
    return shop_agent(name, REFUND, **options)


def deploy() -> None:
    """Runs in every unfinished status, and then code in which most of their agents are others."""
    for key in ("a1", "a2"):
        run_agent(agent("changed"), "refund it", key, idempotency_key=key)
    start_run(agent("changed"), "refund it", "a3")
    pause_run(start_run(agent("newer"), "refund it", "b1").pk)
    claim("default", start_run(agent("fewer"), "refund it", "c1").pk)
    start_run(agent("gone"), "refund it", "d1")
    start_run(agent("same"), "refund it", "e1")
    cancel_run(start_run(agent("gone"), "refund it", "d2").pk)
    _registry.clear()
    agent("changed", tools=CHANGED)
    agent("newer", version="2", max_steps=7)
    agent("fewer", tools=[each for each in TOOLS if each is not refund])
    agent("same")


LISTED = {
    "changed": (
        {"awaiting-approval": 2, "queued": 1},
        "version 1 differs in tools.refund.description, tools.ref",
    ),
    "fewer": ({"running": 1}, "version 1 differs in tools.refund (removed)"),
    "gone": ({"queued": 1}, "There is no agent 'gone' in this process."),
    "newer": ({"paused": 1}, "version 2 differs in max_steps, version"),
}


def test_it_lists_the_runs_by_definition_with_the_reason_and_changes_nothing() -> None:
    """The queries do not grow with the runs: one, and one for each definition."""
    assert (run("check_runs").code, run("check_runs", "--json").lines) == (0, [])
    assert run("check_runs").out == "This code can continue every unfinished run.\n"
    deploy()
    with CaptureQueriesContext(connection) as captured:
        outcome = run("check_runs", "--json")
    assert (outcome.code, len(captured)) == (1, 1 + 3)
    assert all(each["sql"].startswith("SELECT") for each in captured)
    for line in outcome.lines:
        runs, reason = LISTED[line["agent"]]
        assert (line["runs"], line["reason"][: len(reason)]) == (runs, reason)
        assert {each.definition_id for each in Run.objects.filter(agent=line["agent"])} == {
            line["definition"]
        }
    adopts = [(line["agent"], line["adopts"]) for line in outcome.lines]
    assert adopts == [("changed", "1"), ("fewer", "1"), ("gone", None), ("newer", "2")]
    shown = run("check_runs").out.splitlines()
    assert shown[-1].startswith("Runs that this code cannot continue: 6. Serve the old definition beside")
    assert "changed version 1 (" in shown[0] and "): 2 awaiting-approval, 1 queued. version 1 dif" in shown[0]


def test_they_adopt_at_once_each_by_itself() -> None:
    deploy()
    for card in Approval.objects.all():
        approve(card.pk, None, digest=card.digest)
    live = Run.objects.get(session__key="a3")
    claim("default", live.pk)
    outcome = run("adopt_runs", "changed", "--reason=a note", "--json")
    assert outcome.code == 1
    adopted = {line["run"]: line["adopted"] for line in outcome.lines}
    assert adopted == {str(each.pk): each != live for each in Run.objects.filter(agent="changed")}
    assert "live in another process; pause it first" in outcome.lines[-1]["why"]
    rows = Message.objects.filter(kind="run_adopted")
    assert [(row.payload["actor"]["name"], row.payload["reason"]) for row in rows] == [
        ("adopt_runs", "a note")
    ] * 2
    swept = sweep()
    assert (swept.completed, swept.waiting) == (2, 1), "and that of the agent that is the same"
    lacking = run("adopt_runs", "newer", "--definition=0000", "--reason=x")
    assert (lacking.code, lacking.out) == (0, "Adopted: 0. Not adopted: 0.\n")


def test_who_adopts_needs_the_permission() -> None:
    deploy()
    user("reader", "view_run"), user("lead", "view_run", "adopt_definition")
    outcome = run("adopt_runs", "newer", "--user=reader", "--reason=x")
    assert (outcome.code, "Adopted: 0. Not adopted: 1." in outcome.out) == (1, True)
    assert not Message.objects.filter(kind="run_adopted").exists()
    outcome = run("adopt_runs", "newer", "--user=lead", "--reason=x")
    (paused,) = Run.objects.filter(agent="newer")
    assert (outcome.code, sound(paused).version, paused.status) == (0, "2", "paused")
    assert outcome.out.startswith(f"Run {paused.pk}: adopted\n")
    assert run("adopt_runs", "newer", "--user=nobody", "--reason=x").code == 2
