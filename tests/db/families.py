"""Runs with child runs: an agent that hands tasks to another, and workers until nothing is left to do."""

from __future__ import annotations

from typing import Any

from agentruns import Agent, start_run
from agentruns.journal.verify import problems
from agentruns.models import Event, Message, Run
from agentruns.models.event import CHILD
from agentruns.services.sweep import sweep
from tests.shop.agents import TOOLS, call, shop_agent

HAND_OVER = {"tools": [call("scout", task="look around")]}


def hand_over(*turns: object, to: list[object] | None = None, tool: dict[str, Any] | None = None) -> Agent:
    """Make the agent "boss", whose model says `turns`, and the agent "scout", whose model says `to`."""
    scout = shop_agent("scout", *(to or []))
    return shop_agent("boss", *(turns or [HAND_OVER]), tools=[scout.as_tool(**(tool or {})), *TOOLS])


def begin(boss: Agent, session: str = "s1", **options: Any) -> Run:
    """Start a run of an agent and drive it until it waits or ends."""
    run = start_run(boss, "do it", session, **options)
    sweep(run_id=run.pk)
    run.refresh_from_db()
    return run


def work() -> None:
    """Sweep until there is nothing to do."""
    for _round in range(50):
        swept = sweep()
        if not swept.driven and not swept.settled:
            return
    raise AssertionError("there is always something to do")


def children(run: Run) -> list[Run]:
    """List the child runs of a run, oldest first."""
    return list(Run.objects.filter(parent=run).order_by("created_at", "pk"))


def whole() -> list[Run]:
    """Check every journal, and that nobody waits for what has happened; list all runs, oldest first."""
    runs = list(Run.objects.order_by("created_at", "pk"))
    for run in runs:
        assert problems(run.session_id) == []
        awaited = Message.objects.own().filter(run=run, kind="event_awaited")
        started = sum(row.payload["name"] == CHILD for row in awaited)
        assert len(children(run)) == started, "each call has one child run, and each child run one call"
    ended = [run.pk for run in runs if run.is_ended]
    assert not Event.objects.unsettled().filter(run__in=ended).exists()
    return runs
