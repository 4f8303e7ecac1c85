"""Idempotency keys: one per effect, the same for each attempt of a call."""

from __future__ import annotations

import pytest

from agentruns import ToolContext, resume_run, tool
from agentruns.journal.fold import fold
from agentruns.journal.read import run_rows
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.db.dying import die_at
from tests.db.helpers import outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_every_effect_has_a_key_of_its_own_that_the_journal_knows(effects: Effects) -> None:
    turn = {"tools": [call("post", text="a"), call("post", text="a"), call("charge", cents=5)]}
    run = the_run(run_turns(turn, turn))
    keys = [line["key"] for line in effects.lines()]
    assert (len(keys), len(set(keys))) == (6, 6)
    assert keys == [row["key"] for row in payloads(run, "tool_started")]


def test_whoever_derives_the_key_gets_the_same(effects: Effects) -> None:
    """It follows from the run, the step, the place in the reply, the tool and its arguments."""
    turn = {"tools": [call("post", text="a"), call("refund", cents=5000)]}
    run = the_run(run_turns(turn))
    (key,) = [line["key"] for line in effects.lines()]
    for _ in range(2):
        calls = list(fold(run.pk, run_rows("default", run.pk)).calls.values())
        assert calls[0].idempotency_key(run.pk) == key
    run_turns(turn, session="s2")
    assert len({line["key"] for line in effects.lines()}) == 2, "another run is another key"


@tool(safe_to_retry=True)
def read(ctx: ToolContext) -> str:
    """Read something."""
    Effects.from_environment().record(ctx.idempotency_key)
    return "read"


@pytest.mark.parametrize("point", ["before_tool", "after_tool", "before_result_commit"])
def test_a_second_attempt_has_the_first_ones_key(point: str, effects: Effects) -> None:
    run = die_at(point, shop_agent("reader", {"tools": [call("read")]}, tools=[read]))
    assert sweep().completed == 1
    started = payloads(run, "tool_started")
    assert (len(started), len({row["key"] for row in started})) == (2, 1)
    assert {line["key"] for line in effects.lines()} == {started[0]["key"]}


@pytest.mark.parametrize(
    ("point", "acted", "effects_after", "status"),
    [
        ("before_tool", "the bank says no", 1, "completed"),
        ("after_tool", "the bank says yes", 1, "completed"),
        ("before_tool", "the bank does not know", 0, "orphaned"),
        ("after_tool", "the bank does not know", 1, "orphaned"),
    ],
)
def test_the_outside_world_is_asked_by_key_and_nothing_is_repeated_blindly(
    point: str,
    acted: str,
    effects_after: int,
    status: str,
    effects: Effects,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = die_at(point, shop_agent("charger", {"tools": [call("charge", cents=500)]}))
    if acted == "the bank does not know":
        monkeypatch.setenv("SHOP_RECONCILE", "unknown")
    sweep()
    run = Run.objects.get(pk=run.pk)
    assert (run.status, effects.count()) == (status, effects_after)
    if status == "completed":
        assert outcomes(run) == ["ok"]
        return
    resume_run(run.pk)
    assert (outcomes(run), effects.count()) == (["unknown"], effects_after)
    assert Message.objects.filter(run=run, kind="tool_started").count() == 1
