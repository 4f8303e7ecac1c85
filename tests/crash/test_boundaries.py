"""A person clicks before and after each append of a live drive: no cell of that table loses or adds anything.

The click is made by another thread on a connection of its own, and joined, as if by another process: what it
came to is known before the drive goes on, so each cell is one order of events and no race.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from agentruns import Agent, NotOccurred, ToolContext, approve, deny, start_run, tool
from agentruns.engine.leases import Lease
from agentruns.engine.worker import advance
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.journal.store import DatabaseStore
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at
from tests.db.helpers import kill, names, outcomes, sound
from tests.db.racing import Click, decide, drive, end, nothing_lost, order
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]

WHENS = ("before", "after")
ASKED = {"cancel": "run_cancel_requested", "pause": "run_pause_requested"}
# A gated call in the middle: those after it wait for it, but for the reads.
CALLS = (
    call("post", text="one"), call("annotate", number="A1", note="seen"), call("charge", cents=700),
    call("refund", cents=5000), call("post", text="two"),
    call("search", query="x"), call("search", query="y"),
)  # fmt: skip
EVERY_KIND = [{"tools": [*CALLS]}, {"tools": [call("post", text="three")]}]


class ClickedStore(DatabaseStore):
    """The store of one drive, at whose nth append somebody clicks: before it is sent, or once committed."""

    def __init__(self, click: Click, nth: int, when: str) -> None:
        super().__init__()
        self.click, self.left, self.when = click, nth, when

    def append(self, batch: Any, **options: Any) -> None:
        self.left -= 1
        here, run_id = self.left == 0, batch.state.run.run_id
        if here and self.when == "before" and connection.in_atomic_block and connection.vendor == "sqlite":
            # The block of a transactional tool holds SQLite's one write lock, so no click can land inside it:
            # it waits, and lands as the block ends, which must not take anything from the block either.
            waiting = self.click.start(run_id)
            transaction.on_commit(waiting.join)
        elif here and self.when == "before":
            self.click.make(run_id)
        super().append(batch, **options)
        if here and self.when == "after":  # once committed: inside a block nobody else sees it before
            transaction.on_commit(lambda: self.click.make(run_id))


class UnansweredStore(ClickedStore):
    """A clicked store whose clicked append is committed without the driver being told so."""

    def append(self, batch: Any, **options: Any) -> None:
        super().append(batch, **options)
        if self.left == 0 and not connection.in_atomic_block:
            raise OperationalError("the connection broke before the acknowledgement came")


def kinds_since(run: Run, kind: str) -> list[str]:
    """List the kinds of the run's rows from its last row of one kind on."""
    kinds = list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))
    return kinds[len(kinds) - 1 - kinds[::-1].index(kind) :]


def refuses_decisions(run: Run) -> None:
    """Once cancel is requested, no card of the run can be decided any more."""
    for card in Approval.objects.filter(run=run):
        with pytest.raises(ApprovalStateError):
            approve(card.pk, None)
        with pytest.raises(ApprovalStateError):
            deny(card.pk, None, "no")


def drive_to_the_click(
    run: Run, click: Click, nth: int, when: str, clicked: type[ClickedStore] = ClickedStore
) -> Run:
    """Drive a run with a click at the nth append, counting on over an approval in the middle."""
    store = clicked(click, nth, when)
    run = drive(run, store)
    if run.status == "awaiting-approval" and not click.made:
        decide(run.pk, "approve")
        run = drive(run, store)
    return run


def honoured(click: Click, run: Run) -> Run:
    """Check what a cancel or a pause came to in the drive it was made in; return the run at its end."""
    if isinstance(click.refused, RunStateError):  # only the end of the run is too late
        assert (run.status, "has ended" in str(click.refused)) == ("completed", True)
        return run
    assert click.refused is None
    kinds = kinds_since(run, ASKED[click.word])
    assert "tool_started" not in kinds
    if click.word == "cancel":
        assert run.status == "cancelled"
        refuses_decisions(run)
        return run
    if kinds[1:] == ["assistant", "run_completed"]:  # the last reply was on its way: nothing left to hold
        return run
    assert run.status == "paused"
    assert end(run).status == "completed"
    return Run.objects.get(pk=run.pk)


@pytest.mark.parametrize(
    ("when", "clicked"),
    [("before", ClickedStore), ("after", ClickedStore), ("after", UnansweredStore)],
    ids=["before", "after", "after, and the acknowledgement is lost"],
)
@pytest.mark.parametrize("word", ["cancel", "pause"])
def test_a_request_at_each_append(
    word: str, when: str, clicked: type[ClickedStore], effects: Effects
) -> None:
    agent = shop_agent("clicked", *EVERY_KIND)
    for nth in itertools.count(1):
        order(effects)
        click = Click(word)
        run = drive_to_the_click(start_run(agent, "do it", f"s{nth}"), click, nth, when, clicked)
        if not click.made:
            assert (run.status, nth) == ("completed", 16), "there are 15 appends"
            return
        nothing_lost(honoured(click, run), effects)


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("word", ["approve", "deny"])
def test_a_decision_at_each_append(word: str, when: str, effects: Effects) -> None:
    agent = shop_agent("clicked", *EVERY_KIND)
    live, parked = 0, 0
    for nth in itertools.count(1):
        order(effects)
        click = Click(word)
        store = ClickedStore(click, nth, when)
        run = drive(start_run(agent, "do it", f"s{nth}"), store)
        if store.left > 0:
            break
        assert click.refused is None
        if not click.made:
            assert (nth, when) == (1, "before"), "before the reply is stored there is no card"
        elif click.was_live:
            live += 1
            assert run.status == "completed", "no sweep is needed while a worker is live"
        else:
            parked += 1
            assert run.status == "queued", "a decision on a parked run lets the next worker claim it"
        assert end(run).status == "completed"
        nothing_lost(run, effects)
        refunds = [line for line in effects.lines() if line["tool"] == "refund"]
        assert len(refunds) == (word == "approve" or not click.made)
        assert outcomes(run).count("denied") == (not refunds)
    assert (live, parked) == ((8, 0) if when == "before" else (8, 1))


def died_in(agent: Agent, session: str, point: str, effects: Effects) -> Run:
    """Let the worker of a run die in its first call; the run may be taken over then."""
    order(effects)
    run = start_run(agent, "do it", session)
    with crashing_at(point):
        advance(run, "default")
    kill(run)
    return run


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("word", ["cancel", "pause", "approve", "deny"])
@pytest.mark.parametrize(
    ("first", "point"),
    [
        (call("charge", cents=700), "after_tool"),  # reconcile says that it happened
        (call("lookup", number="A1"), "before_tool"),  # runs again
    ],
)
def test_a_click_at_each_append_of_a_takeover(
    first: Any, point: str, word: str, when: str, effects: Effects
) -> None:
    agent = shop_agent("taken-over", {"tools": [first, call("refund", cents=5000)]})
    for nth in itertools.count(1):
        run = died_in(agent, f"s{nth}", point, effects)
        click = Click(word)
        run = drive_to_the_click(run, click, nth, when)
        if not click.made:
            assert (run.status, nth > 2) == ("completed", True)
            return
        if word in ASKED:
            nothing_lost(honoured(click, run), effects, doubtful=(first["name"],))
            continue
        assert click.refused is None
        assert run.status == ("completed" if click.was_live else "queued")
        assert end(run).status == "completed"
        nothing_lost(run, effects, doubtful=(first["name"],))
        assert "unknown" not in outcomes(run)
        assert names(effects) == [first["name"], *["refund"] * (word == "approve")]


@tool(reconcile=lambda ctx, args: NotOccurred(), timeout=3600)
def patient(ctx: ToolContext) -> str:
    """Pay, which may take an hour."""
    return "paid"


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("waits_for", ["the provider", "the end of a dead attempt"])
def test_a_cancel_is_not_put_off(waits_for: str, when: str, effects: Effects) -> None:
    def busy(request: Any) -> None:
        raise ProviderError("busy", disposition="retry", type="busy", retry_after=600.0)

    if waits_for == "the provider":
        run = start_run(shop_agent("busy", busy), "do it", "s1")
    else:
        agent = shop_agent("patient", {"tools": [call("patient")]}, tools=[patient])
        run = died_in(agent, "s1", "before_tool", effects)
    click = Click("cancel")
    drive(run, ClickedStore(click, 1, when))
    sweep()
    run = sound(run)
    assert (click.refused, run.status) == (None, "cancelled"), f"not before {run.not_before}"
    assert (outcomes(run), effects.lines()) == ([] if waits_for == "the provider" else ["unknown"], [])


def test_a_lone_card_is_first_seen_when_its_run_is_parked(effects: Effects) -> None:
    """There is no time at which it could be decided while a worker is about to go to sleep over it."""
    order(effects)
    run = start_run(shop_agent("lone", {"tools": [call("refund", cents=5000)]}), "do it", "s1")
    early, at_once = Click("approve"), Click("approve")
    store = ClickedStore(early, 1, "before")
    drive(run, store)
    assert not early.made
    at_once.make(run.pk)
    assert (at_once.made, at_once.was_live, at_once.refused) == (True, False, None)
    assert (Run.objects.get(pk=run.pk).status, sweep().completed) == ("queued", 1)
    nothing_lost(Run.objects.get(pk=run.pk), effects)


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("word", ["approve", "deny", "cancel", "pause"])
def test_a_click_around_the_release_of_a_draining_worker_is_the_next_ones(
    word: str, when: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(effects)
    turn = {"tools": [call("refund", cents=5000), call("search", query="x")]}
    run = start_run(shop_agent("drained", turn), "do it", "s1")
    click, release = Click(word), Lease.release

    def release_and_click(lease: Lease, **how: Any) -> None:
        if when == "before":
            click.make(lease.run_id)
        release(lease, **how)
        if when == "after":
            click.make(lease.run_id)

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "release", release_and_click)
        assert advance(run, "default", should_stop=lambda: Approval.objects.exists())
    assert (click.made, click.refused, click.was_live) == (True, None, when == "before")
    assert not effects.lines()
    sweep()
    run = Run.objects.get(pk=run.pk)
    assert run.status == {"cancel": "cancelled", "pause": "paused"}.get(word, "completed")
    assert end(run).status == ("cancelled" if word == "cancel" else "completed")
    nothing_lost(run, effects)
