"""A worker is killed at each boundary of a held call, and what was approved changes: nothing else is done."""

from __future__ import annotations

import pytest

from agentruns import approve, start_run
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run
from agentruns.services.runs.control import resolve_orphan
from agentruns.services.sweep import sweep
from tests.crash.holders import inside, outside
from tests.crash.processes import run_and_die
from tests.db.helpers import payloads
from tests.db.holders import change
from tests.effects import Effects
from tests.shop.models import Order
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

MODULE = "tests.crash.holders"
# Up to the end of the start, and up to the end of the call.
BEFORE = ("holds:before", "holds:after", "before_void")
WITHIN = ("before_tool", "after_tool", "before_result_commit")
AFTER = ("after_result", "before_model", "after_model", "before_finish")


def wait_for_card(run: Run) -> Approval:
    """Sweep until a run waits for a person; read its card."""

    def waits() -> bool:
        sweep()
        return Approval.objects.pending().filter(run=run).exists()

    wait_for(waits, "the card")
    return Approval.objects.get()


def asked(agent: str) -> Approval:
    Order.objects.create(number="A1", customer="Ada", total_cents=2000, note="paid")
    return wait_for_card(start_run(agent, "pay it", "s1"))


def die(place: str, action: str = "sweep", *words: str) -> None:
    at = {"SHOP_KILL": place} if place.startswith("holds") else {"point": place}
    run_and_die(action, *words, module=MODULE, **at)


def go_on(card: Approval, effects: Effects) -> list[int]:
    """Let people decide and say what became of calls until the run ends; list the totals they approved."""
    approved = list[int]()

    def is_done() -> bool:
        sweep()
        run = Run.objects.get()
        if run.status == "orphaned":
            verdict = "occurred" if effects.count() else "not_occurred"
            resolve_orphan(run.pk, run.pending_calls[0], verdict, None)
        for again in Approval.objects.pending():
            approved.append(again.holds["total"])
            approve(again.pk, None, digest=again.digest)
        return run.status == "completed"

    wait_for(is_done, "the end")
    assert problems(card.run.session_id) == []
    card.refresh_from_db()
    assert card.status == "consumed"
    return approved


@pytest.mark.parametrize("place", [*BEFORE, *WITHIN, *AFTER])
def test_a_transactional_call_pays_once_and_only_what_was_approved(place: str, effects: Effects) -> None:
    card = asked(inside.name)
    approve(card.pk, None, digest=card.digest)
    if place == "before_void":
        change(total_cents=4000)
    die(place)
    change(total_cents=9000)
    approved = go_on(card, effects)
    order = Order.objects.get()
    paid = 2000 if place in AFTER else 9000
    assert approved == ([] if place in AFTER else [9000])
    assert (order.refunded_cents, order.customer) == (paid, f"paid {paid}")


@pytest.mark.parametrize("change_at", ["before", "after"])
def test_the_voiding_of_a_rolled_back_start_is_killed(change_at: str, effects: Effects) -> None:
    """The start has used the approval up; the next worker finds what has changed, or has not after all."""
    card = asked(inside.name)
    approve(card.pk, None, digest=card.digest)
    run_and_die("sweep", module=MODULE, point="before_tool")
    change(total_cents=9000)
    wait_for(lambda: Run.objects.runnable().exists(), "the lease to expire")
    run_and_die("sweep", module=MODULE, point="before_void")
    if change_at == "after":
        change(total_cents=2000)
    approved = go_on(card, effects)
    assert approved == ([9000] if change_at == "before" else [])
    assert Order.objects.get().refunded_cents == (9000 if change_at == "before" else 2000)
    assert len(payloads(card.run, "tool_started")) == (4 if change_at == "before" else 3)


@pytest.mark.parametrize("place", [*BEFORE, "after_tool", "before_result_commit", *AFTER])
def test_a_call_acts_once_on_what_was_approved(place: str, effects: Effects) -> None:
    card = asked(outside.name)
    approve(card.pk, None, digest=card.digest)
    if place == "before_void":
        change(total_cents=4000)
    die(place)
    change(total_cents=9000)
    approved = go_on(card, effects)
    paid = 9000 if place in BEFORE else 2000
    assert [line["total"] for line in effects.lines()] == [paid]
    assert approved == ([9000] if place in BEFORE else [])


def test_a_call_that_did_not_happen_runs_again_by_its_approval(effects: Effects) -> None:
    """The window that the docs name: its first start was as approved, and a person says: not yet done."""
    card = asked(outside.name)
    approve(card.pk, None, digest=card.digest)
    die("before_tool")
    change(total_cents=9000)
    assert go_on(card, effects) == []
    assert [line["total"] for line in effects.lines()] == [9000]


def test_the_process_of_the_decision_is_killed(effects: Effects) -> None:
    card = asked(outside.name)
    die("after_decision", "approve", str(card.pk))
    change(total_cents=9000)
    assert go_on(card, effects) == [9000]
    assert [line["total"] for line in effects.lines()] == [9000]
