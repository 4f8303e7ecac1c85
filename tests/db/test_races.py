"""Several threads want the same thing at once; exactly one gets it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError

from agentruns import ToolContext, approve, cancel_run, deny, run_agent, start_run, tool
from agentruns.engine.driver import Driver
from agentruns.engine.leases import Lease
from agentruns.engine.worker import advance
from agentruns.exceptions import AgentRunsError, SessionBusyError
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.utils import failpoints
from tests.db import races
from tests.db.dying import elsewhere
from tests.db.helpers import outcomes
from tests.db.racing import (
    CLICKS,
    LEVELS,
    LIMIT,
    Click,
    at_once,
    deadlocks,
    drive,
    end,
    isolation,
    nothing_lost,
    order,
)
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.settings import BRIEF, DATABASE
from tests.shop.agents import TOOLS, act, call, shop_agent
from tests.statements import statement_wrapper
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

ONE_CARD = {"tools": [call("refund", cents=5000), call("search", query="x")]}
# SQLite has one writer at a time: there the hunt is for what gets lost, there is no deadlock to find.
# In `make test` there are two rounds for each of the six moments at which somebody cancels.
ROUNDS = 8 if DATABASE == "sqlite" else 12 if BRIEF else 25
ENDS = {"approve": "ok", "deny": "denied"}
TWO_CARDS = {"tools": [call("refund", cents=5000), call("search", query="x"), call("refund", cents=6000)]}


@pytest.mark.parametrize("race", races.ALL, ids=lambda race: race.__name__)
def test_of_many_at_once_one_wins(race: Callable[[Effects], None], effects: Effects) -> None:
    race(effects)


def test_many_callers_of_the_same_run_act_once(effects: Effects) -> None:
    agent = shop_agent("called", {"tools": [call("post", text="x")]})
    results = at_once(*[lambda: run_agent(agent, "do it", "s1", idempotency_key="k")] * 5)
    assert effects.count() == 1
    assert all(isinstance(result, AgentRunsError) or result.run_id for result in results)
    run = Run.objects.get()
    assert (run.status, problems(run.session_id)) == ("completed", [])


class ParkingStore(DatabaseStore):
    """The store of one drive, at each of whose attempts to park somebody decides just before it is sent."""

    def __init__(self, *clicks: str) -> None:
        super().__init__()
        self.clicks = [Click(word) for word in clicks]

    def append(self, batch: Any, **options: Any) -> None:
        if batch.state.run.status == "awaiting-approval" and self.clicks:
            click = self.clicks.pop(0)
            click.make(batch.state.run.run_id)
            assert (click.made, click.was_live, click.refused) == (True, True, None)
        super().append(batch, **options)


ORDERS = (
    "approve",
    "deny",
    "approve/deny",
    "deny/approve",
    "approve the last/approve",
    "deny the last/approve",
)


@pytest.mark.parametrize("words", [words.split("/") for words in ORDERS], ids=ORDERS)
def test_a_decision_just_before_the_parking_goes_on_in_that_drive(words: list[str], effects: Effects) -> None:
    order(effects)
    store = ParkingStore(*words)
    agent = shop_agent("parked", [ONE_CARD, TWO_CARDS][len(words) - 1])
    run = drive(start_run(agent, "do it", "s1"), store)
    assert (run.status, store.clicks, sweep().found) == ("completed", [], 0)
    nothing_lost(run, effects)
    assert sorted(outcomes(run)) == sorted(["ok", *(ENDS[word.split()[0]] for word in words)])


@pytest.mark.parametrize("word", ["approve", "deny"])
def test_one_of_two_decisions_just_before_the_parking_waits_for_the_other(
    word: str, effects: Effects
) -> None:
    agent = shop_agent("parked", TWO_CARDS)
    # The first of two cards is settled already; the last waits for the first.
    for click, settled in ((word, ["ok", ENDS[word]]), (f"{word} the last", ["ok"])):
        order(effects)
        run = drive(start_run(agent, "do it", click), ParkingStore(click))
        assert (run.status, run.lease_expires_at, sweep().found) == ("awaiting-approval", None, 0)
        assert (outcomes(run), end(run).status) == (settled, "completed")
        nothing_lost(run, effects)


def decide_on(run: Run, word: str, number: int) -> None:
    card = Approval.objects.filter(run=run).order_by("id")[number]
    approve(card.pk, None) if word == "approve" else deny(card.pk, None, "no")


def extend_as_long_as_it_lives(run: Run) -> None:
    """Extend the lease as its worker does before it enters a handler."""
    for _ in range(30):
        epoch = Run.objects.values_list("lease_epoch", flat=True).get(pk=run.pk)
        Lease("default", run.pk, run.session_id, epoch).extend()


def work_on(run: Run) -> None:
    """Sweep until the run ends or waits, and let no drive fail behind a log line."""
    for _ in range(10):
        assert sweep().errors == 0
        if Run.objects.get(pk=run.pk).status != "queued":
            return


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[2]])
def test_no_deadlock_when_everybody_acts_at_once(level: str, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.02
    with isolation(level):
        before = deadlocks()
        for number in range(ROUNDS):
            order(effects)
            everybody_at_once(number, effects)
        assert deadlocks() == before


def everybody_at_once(number: int, effects: Effects) -> None:
    """Let all of them begin inside the first handler: the worker is live, and two cards are pending."""
    met = threading.Barrier(7)

    @tool
    def meet(ctx: ToolContext) -> str:
        """Meet the others."""
        met.wait(LIMIT)
        return act("meet", ctx)

    def after_meeting(action: Callable[[], Any]) -> Callable[[], Any]:
        def act_then() -> Any:
            met.wait(LIMIT)
            return action()

        return act_then

    def cancel() -> None:
        time.sleep(0.01 * (number % 6))  # waits: so that not every round ends before it began
        cancel_run(run.pk)

    tools = [call("meet"), call("annotate", number="A1", note="seen"), *TWO_CARDS["tools"]]
    agent = shop_agent(f"hunted-{number}", {"tools": tools}, tools=[*TOOLS, meet])
    run = start_run(agent, "do it", f"s{number}")
    clicks = [partial(decide_on, run, word, card) for word in ("approve", "deny") for card in (0, 1)]
    others: list[Callable[[], Any]] = [*clicks, partial(extend_as_long_as_it_lives, run), cancel]
    results = at_once(partial(work_on, run), *[after_meeting(action) for action in others])
    for one in results:
        assert not isinstance(one, Exception) or isinstance(one, AgentRunsError), results
    sweep()
    assert end(run).status == ("cancelled" if results[-1] is None else "completed")
    nothing_lost(run, effects)
    assert effects.count() <= 4


@pytest.mark.parametrize("level", LEVELS)
def test_whole_drives_at_any_isolation_level(level: str, effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.02
    note = call("annotate", number="A1", note="seen")
    turn = {"tools": [call("post", text="x"), note, call("refund", cents=5000), call("search", query="x")]}
    with isolation(level):
        before = deadlocks()
        for number in range(8):
            order(effects)
            agent = shop_agent(f"strict-{number}", turn, {"tools": [note, call("charge", cents=700)]})
            run = start_run(agent, "do it", f"s{number}")
            with isolated_registry():  # both sweeps say of this one that nobody serves it
                start_run(shop_agent("retired"), "do it", f"retired-{number}")

            def click(word: str, run: Run = run) -> bool:
                wait_for(lambda: Approval.objects.filter(run=run).exists(), "the card")
                return CLICKS[word](run.pk)

            clicks = [partial(click, word) for word in ("approve", "deny", *["pause"] * (number % 2))]
            results = at_once(partial(work_on, run), partial(work_on, run), *clicks)
            for one in results:
                assert not isinstance(one, Exception) or isinstance(one, AgentRunsError), results
            assert end(run).status == "completed"
            nothing_lost(run, effects)
            assert Message.objects.filter(run=run, kind="approval_decided").count() == 1
            assert sorted(set(outcomes(run))) in (["denied", "ok"], ["ok"])
            assert effects.count() == 3 + ("denied" not in outcomes(run))
        assert deadlocks() == before


class BusyOnce:
    """An execute wrapper that lets the first statement of one kind fail as a lost race does."""

    def __init__(self, *words: str) -> None:
        self.words, self.failed = words, False

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if not self.failed and all(word in sql for word in self.words):
            self.failed = True
            raise OperationalError("could not serialize access due to concurrent update")
        return execute(sql, params, many, context)


@pytest.mark.skipif(DATABASE == "sqlite", reason="SQLite has one writer: nobody comes between")
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "open"])
def test_a_start_that_looked_without_a_lock_stores_nothing_beside_another(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between the look at the session that is there and the statement."""
    run_agent(shop_agent("before"), "do it", "s1")
    start = run_agent if ends else start_run
    monkeypatch.setattr(failpoints, "_armed", None)
    failpoints.arm(
        "before_start_commit:2", lambda: elsewhere(lambda: start(shop_agent("quick"), "mine", "s1"))
    )
    if ends:
        assert run_agent(shop_agent("late"), "do it", "s1").status == "completed"
    else:
        with pytest.raises(SessionBusyError, match="another agent"):
            run_agent(shop_agent("late"), "do it", "s1")
    runs = Run.objects.order_by("created_at")
    assert [run.agent for run in runs] == ["before", "quick", "late"][: 2 + ends]
    assert problems(runs[0].session_id) == []


def test_a_lost_race_for_the_lease_row_costs_no_call(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its `tool_started` and its handler a call would be in doubt for nothing."""
    order(effects)
    run = start_run(shop_agent("busy", {"tools": [call("post", text="x")]}), "do it", "s1")
    busy, hold_lease = BusyOnce('UPDATE "agentruns_run" SET "lease_expires_at"'), Driver.hold_lease

    def hold_late(driver: Driver) -> None:
        assert driver.lease is not None
        driver.lease.deadline = 0.0  # so it has to be extended
        hold_lease(driver)

    monkeypatch.setattr(Driver, "hold_lease", hold_late)
    with statement_wrapper(busy):
        assert sweep().errors == 0
    run = Run.objects.get(pk=run.pk)
    assert (busy.failed, run.status, outcomes(run)) == (True, "completed", ["ok"])
    nothing_lost(run, effects)


def test_a_lost_race_at_the_release_is_no_failed_drive() -> None:
    run = start_run(shop_agent("busy"), "do it", "s1")
    busy = BusyOnce('UPDATE "agentruns_run"', '"updated_at" =')
    with statement_wrapper(busy):
        assert advance(run, "default", should_stop=lambda: True)
    run = Run.objects.get(pk=run.pk)
    assert (busy.failed, run.status, run.attempts) == (True, "queued", 0)


def test_runs_awaited_together_are_driven_together() -> None:
    together = threading.Barrier(2, timeout=LIMIT)

    @tool(safe_to_retry=True)
    def meet() -> str:
        """Wait for the other run."""
        together.wait()
        return "met"

    one, two = (shop_agent(name, {"tools": [call("meet")]}, tools=[meet]) for name in ("one", "two"))

    async def both() -> list[Any]:
        return [*await asyncio.gather(one.arun("go", "s1"), two.arun("go", "s2"))]

    assert [result.status for result in asyncio.run(both())] == ["completed", "completed"]
    assert not together.broken
