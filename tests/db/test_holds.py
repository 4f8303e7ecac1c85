"""An approval holds until the effect: what an approver relied on is read again before the call runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, connections
from django.test import Client

from agentruns import ToolContext, approve, deny, fork_run, run_agent, start_run
from agentruns.agents.agent import _registry
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.masking import mask_of
from agentruns.journal.read import run_rows, stored_rows
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import History, problems
from agentruns.models import Approval, Message, Run
from agentruns.services.approvals.decisions import answer, extend, get_approval
from agentruns.services.data.erasure import erase_payload
from agentruns.services.runs.control import adopt_definition, cancel_run
from agentruns.services.runs.forks import effects as effects_of
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at
from agentruns.utils import failpoints
from agentruns.utils.ids import uuid7
from tests.api.http import Api
from tests.db.deferrals import HEARD, SAID, desk
from tests.db.dying import elsewhere
from tests.db.helpers import everywhere, forget_backoff, kill, outcomes, payloads, run_turns, sound, user
from tests.db.holders import Holds, change, of_locked_order, of_order, pay_here, paying, transacting
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import sealed
from tests.shop.agents import act, call, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

PAY = {"tools": [call("pay", number="A1")]}


@pytest.fixture
def order() -> Order:
    return Order.objects.create(number="A1", customer="Ada", total_cents=2000, note="paid")


@pytest.fixture
def registry(order: Order) -> Iterator[None]:
    with isolated_registry():
        yield


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", None)


def asked(its: Any, *turns: Any, **options: Any) -> Approval:
    """Run an agent until its call waits for people."""
    return run_turns(*(turns or [PAY]), tools=[its], **options).pending[0]


def again(card: Approval) -> Approval:
    """Read a card that waits again, and check its run and its journal."""
    card.refresh_from_db()
    assert (card.status, card.approved_count, card.decided_at) == ("pending", 0, None)
    assert sound(card.run).status == "awaiting-approval"
    return card


def done(card: Approval) -> Run:
    """Sweep once, in which the run of a card ends; check its journal."""
    assert sweep().completed == 1
    card.refresh_from_db()
    assert card.status == "consumed"
    return sound(card.run)


def test_a_call_runs_once_as_long_as_its_approval_holds(order: Order, effects: Effects) -> None:
    card = asked(paying())
    (row,) = payloads(card.run, "approval_requested")
    assert card.holds == row["holds"] == {"status": "paid", "total": 2000}
    assert card.digest != row["digest"] == Message.objects.get(kind="assistant").payload["calls"][0]["digest"]
    approve(card.pk, None, digest=card.digest)
    run = done(card)
    assert [line["total"] for line in effects.lines()] == [2000]
    assert (outcomes(run), payloads(run, "approval_voided")) == (["ok"], [])


@pytest.mark.parametrize("its", [paying, transacting], ids=["outside", "transactional"])
def test_what_has_changed_since_the_approval_is_asked_again(its: Any, order: Order, effects: Effects) -> None:
    card = asked(its(expires_in=timedelta(hours=1)))
    before, digest = card.expires_at, card.digest
    approve(card.pk, None, digest=digest)
    change(note="refunded")
    assert sweep().waiting == 1
    assert (again(card).holds, effects.count()) == ({"status": "refunded", "total": 2000}, 0)
    said = "status was 'paid' when this was approved, and is 'refunded' now."
    assert card.why == f"{said} pay requires approval."
    (row,) = payloads(card.run, "approval_voided")
    assert (row["why"], row["holds"], row["voided"]) == (said, card.holds, [""])
    assert "renews" not in row and payloads(card.run, "tool_started") == []
    assert before is not None and card.expires_at is not None
    assert before < card.expires_at < before + timedelta(hours=1), "as long as at first"
    approve(card.pk, None, digest=card.digest)
    done(card)
    order.refresh_from_db()
    assert effects.count() + order.refunded_cents // 2000 == 1


def test_a_value_that_goes_back_and_forth_piles_up_nothing(order: Order, effects: Effects) -> None:
    card = asked(paying(expires_in=timedelta(hours=1)))
    first = card.digest
    extend(card.pk, None, timedelta(days=1), digest=first)
    for note in ("refunded", "paid", "refunded", "paid"):
        approve(card.pk, None, digest=again(card).digest)
        change(note=note)
        sweep()
    assert again(card).why.count("status was") == 1
    assert card.digest == first, "the first page shows the very same"
    assert card.expires_at is not None and card.expires_at - card.requested_at < timedelta(minutes=90)
    approve(card.pk, None, digest=first)
    done(card)
    assert effects.count() == 1


def test_a_change_before_the_decision_is_found_at_the_start(order: Order, effects: Effects) -> None:
    card = asked(paying())
    change(total_cents=9000)
    assert again(card).holds["total"] == 2000, "the card shows what it was when the agent asked"
    approve(card.pk, None, digest=card.digest)
    sweep()
    assert (again(card).holds["total"], effects.count()) == (9000, 0)
    assert card.why.startswith("total was 2000 when this was approved, and is 9000 now.")


@pytest.mark.parametrize("sends", [True, False])
def test_a_page_with_an_old_value_decides_nothing(sends: bool, order: Order, effects: Effects) -> None:
    card = asked(paying(expires_in=timedelta(hours=1)))
    old = {"digest": card.digest} if sends else {}
    approve(card.pk, None)
    change(note="refunded")
    sweep()
    verbs: list[Callable[[], Any]] = [
        lambda: approve(card.pk, None, **old),
        lambda: approve(card.pk, None, arguments={"number": "A1"}, **old),
        lambda: deny(card.pk, None, "no", **old),
        lambda: answer(card.pk, None, "done by hand", **old),
        lambda: extend(card.pk, None, timedelta(hours=1), **old),
    ]
    for verb in verbs:
        with pytest.raises(ApprovalStateError, match=r"relies on has changed since you looked"):
            verb()
    assert again(card).approved_count == 0
    deny(card.pk, None, "it was refunded", digest=card.digest)
    assert (sweep().completed, outcomes(sound(card.run)), effects.count()) == (1, ["denied"], 0)


def unreadable(arguments: dict[str, Any], ctx: ToolContext) -> Any:
    raise LookupError("no such order")


FAILING: dict[str, Holds] = {
    "raises": unreadable,
    "forgets to return": lambda arguments, ctx: None,
    "returns what is no JSON": lambda arguments, ctx: {"order": object()},
}


@pytest.mark.parametrize("fails", FAILING)
def test_what_cannot_be_read_lets_nothing_run(fails: str, order: Order, effects: Effects) -> None:
    reads: list[Holds] = [of_order]
    card = asked(paying(lambda arguments, ctx: reads[-1](arguments, ctx)))
    approve(card.pk, None, digest=card.digest)
    reads.append(FAILING[fails])
    for _each in range(2):
        sweep()
        assert (again(card).holds, effects.count()) == (None, 0)
        assert card.why == "What its approval relies on could not be read. pay requires approval."
        approve(card.pk, None, digest=card.digest)
    reads.append(of_order)
    sweep()
    assert again(card).holds == {"status": "paid", "total": 2000}
    assert card.why == "What pay relies on was not known when this was approved. pay requires approval."
    approve(card.pk, None, digest=card.digest)
    done(card)
    assert effects.count() == 1


def test_a_value_that_cannot_be_read_for_the_card_is_asked_about_once_more(
    order: Order, effects: Effects
) -> None:
    reads: list[Holds] = [unreadable]
    card = asked(paying(lambda arguments, ctx: reads[-1](arguments, ctx)))
    assert (card.holds, card.why) == (
        None, "What its approval relies on could not be read. pay requires approval."
    )  # fmt: skip
    approve(card.pk, None, digest=card.digest)
    reads.append(of_order)
    sweep()
    assert (again(card).holds, effects.count()) == ({"status": "paid", "total": 2000}, 0)


def test_an_async_function_holds_too(order: Order, effects: Effects) -> None:
    async def of_order_async(arguments: dict[str, Any], ctx: ToolContext) -> Any:
        found = await Order.objects.aget(number=arguments["number"])
        return [found.note]

    card = asked(paying(of_order_async))
    approve(card.pk, None, digest=card.digest)
    change(note="refunded")
    sweep()
    assert (again(card).holds, effects.count()) == (["refunded"], 0)
    assert card.why.startswith("the value[0] was 'paid'")


def test_two_people_rely_on_one_value(order: Order, effects: Effects) -> None:
    card = asked(paying(approvals=2))
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    approve(card.pk, ann, digest=card.digest)
    change(total_cents=1)
    approve(card.pk, bob, digest=card.digest)
    sweep()
    assert (again(card).holds["total"], effects.count()) == (1, 0)
    assert payloads(card.run, "approval_voided")[0]["voided"] == [str(ann.pk), str(bob.pk)]


def test_the_values_of_edited_arguments_are_read_anew(order: Order, effects: Effects) -> None:
    Order.objects.create(number="B2", customer="Bob", total_cents=5, note="new")
    card = asked(paying())
    card = approve(card.pk, None, digest=card.digest, arguments={"number": "B2"})
    assert card.holds == {"status": "new", "total": 5}
    assert payloads(card.run, "approval_decided")[0]["holds"] == card.holds
    elsewhere(lambda: Order.objects.filter(number="B2").update(total_cents=6))
    sweep()
    assert (again(card).holds, effects.count()) == ({"status": "new", "total": 6}, 0)
    approve(card.pk, None, digest=card.digest)
    done(card)
    assert [line["total"] for line in effects.lines()] == [6]


def test_an_edit_whose_value_takes_too_long_is_asked_about_at_the_start(
    order: Order, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = asked(paying())
    monkeypatch.setattr("agentruns.services.approvals.decisions.in_time", lambda ask: None)
    card = approve(card.pk, None, digest=card.digest, arguments={"number": "A1"})
    assert (card.status, card.holds) == ("approved", None)
    sweep()
    assert (again(card).holds, effects.count()) == ({"status": "paid", "total": 2000}, 0)


def test_parallel_calls_are_compared_one_by_one(order: Order, effects: Effects) -> None:
    Order.objects.create(number="B2", customer="Bob", total_cents=5, note="new")
    turn = {"tools": [call("pay", number="A1"), call("pay", number="B2")]}
    run_turns(turn, tools=[paying(parallel=True, safe_to_retry=True)])
    for card in Approval.objects.all():
        approve(card.pk, None, digest=card.digest)
    change(note="refunded")
    sweep()
    assert [line["total"] for line in effects.lines()] == [5]
    approve(again(Approval.objects.pending().get()).pk, None, digest=Approval.objects.pending().get().digest)
    assert (sweep().completed, effects.count()) == (1, 2)


def test_a_deferred_call_holds_in_its_own_run(order: Order, effects: Effects) -> None:
    agent = desk(PAY, SAID, HEARD, tools=[paying(deferred=True)])
    start_run(agent, "pay it", "s0")
    sweep()
    approve(Approval.objects.get().pk, None)
    sweep()
    assert (effects.count(), Message.objects.filter(kind="approval_voided").count()) == (1, 0)
    start_run(agent, "pay it", "s1")
    sweep()
    card = Approval.objects.pending().get()
    assert card.holds == {"status": "paid", "total": 2000}
    approve(card.pk, None, digest=card.digest)
    change(note="refunded")
    sweep()
    assert (again(card).holds["status"], effects.count()) == ("refunded", 1)
    approve(card.pk, None, digest=card.digest)
    sweep()
    card.refresh_from_db()
    assert (card.status, effects.count(), sound(card.run).status) == ("consumed", 2, "completed")


def test_a_child_run_holds_until_it_starts(registry: None, effects: Effects) -> None:
    clerk = shop_agent("clerk", tools=[paying()])
    held: Holds = lambda arguments, ctx: Order.objects.get(number="A1").note  # noqa: E731
    its = clerk.as_tool(name="ask_clerk", requires_approval=True, holds=held)
    card = asked(its, {"tools": [call("ask_clerk", task="pay")]})
    approve(card.pk, None, digest=card.digest)
    change(note="refunded")
    sweep()
    assert (again(card).holds, Run.objects.count()) == ("refunded", 1)
    assert card.why.startswith("the value was 'paid' when this was approved, and is 'refunded' now.")
    approve(card.pk, None, digest=card.digest)
    sweep()
    assert Run.objects.filter(parent=card.run).exists()


@pytest.mark.parametrize("since", ["got holds", "lost holds"])
def test_an_adopted_tool_that_holds_otherwise_is_asked_again(
    since: str, registry: None, effects: Effects
) -> None:
    tools = [paying(None), paying()]
    before, after = tools if since == "got holds" else reversed(tools)
    card = run_agent(shop_agent("payer", PAY, tools=[before]), "pay it", "s1").pending[0]
    approve(card.pk, None, digest=card.digest)
    _registry.clear()
    shop_agent("payer", PAY, tools=[after])
    adopt_definition(card.run_id)
    sweep()
    assert effects.count() == 0
    assert again(card).holds == (of_order({"number": "A1"}, None) if since == "got holds" else None)  # type: ignore[arg-type]
    approve(card.pk, None, digest=card.digest)
    done(card)
    assert effects.count() == 1


def test_an_adopted_stricter_gate_asks_with_the_value_of_now(registry: None, effects: Effects) -> None:
    """One card asks about both: more people, and another value."""
    card = run_agent(shop_agent("payer", PAY, tools=[paying()]), "pay it", "s1").pending[0]
    approve(card.pk, None, digest=card.digest)
    change(note="refunded")
    _registry.clear()
    shop_agent("payer", PAY, tools=[paying(approvals=2)])
    adopt_definition(card.run_id)
    sweep()
    assert (again(card).holds["status"], card.required) == ("refunded", 2)
    with pytest.raises(ApprovalStateError, match="relies on has changed"):
        approve(card.pk, user("ann", "decide_approval"))
    for name in ("bob", "cyd"):
        approve(card.pk, user(name, "decide_approval"), digest=card.digest)
    done(card)
    assert effects.count() == 1


def test_another_attempt_of_a_started_call_asks_nobody(order: Order, effects: Effects) -> None:
    """Its effect may have happened, so another value may be its own work."""
    card = asked(paying(safe_to_retry=True))
    approve(card.pk, None, digest=card.digest)
    with crashing_at("after_tool"):
        sweep()
    kill(card.run)
    change(note="refunded")
    run = done(card)
    assert (outcomes(run), effects.count(), payloads(run, "approval_voided")) == (["ok"], 2, [])


# --- transactional tools ---


def test_a_change_after_the_start_of_a_transactional_call_rolls_it_back(
    order: Order, effects: Effects
) -> None:
    card = asked(transacting())
    approve(card.pk, None, digest=card.digest)
    failpoints.arm("before_tool", lambda: change(total_cents=9000))
    assert sweep().waiting == 1
    assert again(card).holds == {"status": "paid", "total": 9000}
    order.refresh_from_db()
    browser = Client()
    browser.force_login(user("root", is_staff=True, is_superuser=True))
    for page in (f"approval/{card.pk}", f"run/{card.run_id}"):
        text = browser.get(f"/admin/agentruns/{page}/change/").content.decode()
        assert "is 9000 now" in text and "is at work" not in text
    (start,), (row,) = payloads(card.run, "tool_started"), payloads(card.run, "approval_voided")
    assert (order.refunded_cents, outcomes(card.run)) == (0, [])
    assert row["renews"] not in ("", start["approval"])
    assert DatabaseStore().load(card.run.session_id, card.run_id).run.acted == frozenset(), "it did nothing"
    approve(card.pk, None, digest=card.digest)
    run = done(card)
    order.refresh_from_db()
    assert (order.refunded_cents, order.customer, outcomes(run)) == (9000, "paid 9000", ["ok"])
    rows = Message.objects.filter(run=run, kind="tool_started").order_by("seq")
    assert [(each.attempt, str(each.consumes)) for each in rows] == [(1, str(card.pk)), (2, row["renews"])]


def test_a_transactional_call_that_waits_again_may_be_denied_edited_or_cancelled(
    order: Order, effects: Effects
) -> None:
    Order.objects.create(number="B2", customer="Bob", total_cents=5, note="new")
    runs = {}
    for number, name in enumerate(("deny", "edit", "cancel", "fork")):
        card = asked(transacting(), session=name)
        approve(card.pk, None, digest=card.digest)
        failpoints.arm("before_tool", partial(change, total_cents=number))
        sweep()
        runs[name] = again(card)
    fork = fork_run(
        runs["fork"].run_id, Message.objects.filter(run=runs["fork"].run).latest("seq").seq, text="go on"
    )
    assert effects_of("default", runs["fork"].run) == []
    assert (outcomes(fork), payloads(fork, "tool_result")[0]["open_in"]) == (
        ["cancelled"], str(runs["fork"].run_id)
    )  # fmt: skip
    deny(runs["deny"].pk, None, "no", digest=runs["deny"].digest)
    approve(runs["edit"].pk, None, digest=runs["edit"].digest, arguments={"number": "B2"})
    cancel_run(runs["cancel"].run_id)
    sweep()
    ends = {name: (outcomes(sound(card.run)), card.run.status) for name, card in runs.items()}
    assert ends["deny"] == (["denied"], "completed")
    assert ends["edit"] == (["ok"], "completed")
    assert ends["cancel"] == (["cancelled"], "cancelled")
    paid = {each.number: each.refunded_cents for each in Order.objects.all()}
    assert paid == {"A1": 0, "B2": 5}
    keys = [row["key"] for row in payloads(runs["edit"].run, "tool_started")]
    assert len({*keys}) == 2, "other arguments have another key"


def test_what_fails_inside_the_transaction_rolls_it_back(order: Order, effects: Effects) -> None:
    reads: list[Holds] = [of_locked_order]

    def broken(arguments: dict[str, Any], ctx: ToolContext) -> Any:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT no_such_column FROM shop_order")

    card = asked(transacting(lambda arguments, ctx: reads[-1](arguments, ctx)))
    approve(card.pk, None, digest=card.digest)
    failpoints.arm("before_tool", lambda: reads.append(broken))
    sweep()
    assert again(card).why.startswith("What its approval relies on could not be read.")
    reads.append(of_locked_order)
    approve(card.pk, None, digest=card.digest)
    sweep()
    approve(again(card).pk, None, digest=card.digest)
    done(card)
    order.refresh_from_db()
    assert order.refunded_cents == 2000


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer: nothing conflicts")
def test_a_conflict_while_the_value_is_read_enters_again(order: Order, effects: Effects) -> None:
    reads = list[int]()

    def conflicting(arguments: dict[str, Any], ctx: ToolContext) -> Any:
        reads.append(1)
        if len(reads) == 3:
            with connections["default"].cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$")
        return of_locked_order(arguments, ctx)

    card = asked(transacting(conflicting))
    approve(card.pk, None, digest=card.digest)
    run = done(card)
    assert (outcomes(run), payloads(run, "approval_voided"), len(reads)) == (["ok"], [], 4)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server that ends a connection")
def test_a_connection_that_is_lost_while_the_value_is_read_asks_nobody(
    order: Order, effects: Effects
) -> None:
    reads = list[int]()

    def losing(arguments: dict[str, Any], ctx: ToolContext) -> Any:
        reads.append(1)
        if len(reads) == 3:
            with connections["default"].cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return of_locked_order(arguments, ctx)

    card = asked(transacting(losing))
    approve(card.pk, None, digest=card.digest)
    sweep()
    kill(card.run)
    forget_backoff(card.run)
    run = done(card)
    assert (outcomes(run), payloads(run, "approval_voided")) == (["ok"], [])


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks no row")
def test_what_the_function_has_locked_stays_locked_for_the_handler(order: Order, effects: Effects) -> None:
    refused = list[str]()

    def change_soon() -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("SET lock_timeout = '50ms'")
            try:
                cursor.execute("UPDATE shop_order SET total_cents = 9000")
            except OperationalError as error:
                refused.append(str(error))

    def pay_late(ctx: ToolContext, number: str) -> str:
        """Pay while somebody changes the order."""
        elsewhere(change_soon)
        return pay_here(ctx, number)

    card = asked(paying(of_locked_order, pay_late, transactional=True))
    approve(card.pk, None, digest=card.digest)
    done(card)
    order.refresh_from_db()
    assert (order.refunded_cents, len(refused)) == (2000, 1)


def test_a_gate_that_is_stricter_since_a_call_was_rolled_back_is_asked(
    registry: None, effects: Effects
) -> None:
    card = run_agent(shop_agent("payer", PAY, tools=[transacting()]), "pay it", "s1").pending[0]
    approve(card.pk, None, digest=card.digest)
    failpoints.arm("before_tool", lambda: change(total_cents=9000))
    sweep()
    _registry.clear()
    shop_agent("payer", PAY, tools=[transacting(approvals=2)])
    adopt_definition(card.run_id)
    approve(card.pk, None, digest=again(card).digest)
    sweep()
    order = Order.objects.get()
    assert (again(card).required, order.refunded_cents) == (2, 0)
    for name in ("bob", "cyd"):
        approve(card.pk, user(name, "decide_approval"), digest=card.digest)
    done(card)


def test_a_forged_row_gives_no_approval_back(order: Order, effects: Effects) -> None:
    """Not that of a start whose effect may have happened, nor an approval that is not used."""
    card = asked(paying())
    approve(card.pk, None, digest=card.digest)
    run = done(card)
    row = {"approval": str(card.pk), "voided": [""], "why": "so", "renews": str(uuid7())}
    for last, status in (("tool_started", "consumed"), ("approval_decided", "approved")):
        history, rows = History(run.session), Message.objects.filter(session=run.session)
        for each, parts in stored_rows(rows):
            history.add(each, parts)
            if each.kind == last:
                break
        made = each._replace(kind="approval_voided", payload=row, seq=each.seq + 1, consumes=None)
        made = made._replace(prev_hash=history.head)
        assert f"voids approval {card.pk}, which is {status}." in str(
            history.add(*sealed(run.session_id, made))
        )


POINTS = (
    "before_tool", "after_tool", "before_result_commit", "after_result", "before_void", "before_model",
    "before_finish",
)  # fmt: skip


# Without a lock, a change after the comparison is a later one, as docs/howto/holds.md says.
RACES = [(True, point) for point in POINTS]
RACES += [(False, point) for point in POINTS if point not in ("after_tool", "before_result_commit")]


@pytest.mark.parametrize(("is_locked", "point"), RACES)
def test_no_racing_change_gets_through_to_a_transactional_handler(
    is_locked: bool, point: str, order: Order, effects: Effects
) -> None:
    """A change waits for the lock, or is found; without a lock it may come after the comparison."""
    card = asked(transacting(of_locked_order if is_locked else of_order))
    approve(card.pk, None, digest=card.digest)
    threads = list[threading.Thread]()

    def race() -> None:
        def work() -> None:
            try:
                Order.objects.filter(number="A1").update(total_cents=9000, note="late")
            finally:
                connections.close_all()

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        # Inside the transaction it cannot end before the commit.
        if point in ("before_tool", "before_void", "after_result", "before_model", "before_finish"):
            threads[-1].join(LIMIT)

    if point == "before_void":
        change(note="refunded")
    failpoints.arm(point, race)
    approved = ["paid 2000"]
    for _each in range(4):
        sweep()
        card.refresh_from_db()
        if card.status != "pending":
            break
        approved.append(f"{card.holds['status']} {card.holds['total']}")
        approve(card.pk, None, digest=card.digest)
    assert threads, "the point is reached"
    threads[0].join(LIMIT)
    assert (sound(card.run).status, card.status) == ("completed", "consumed")
    order.refresh_from_db()
    assert order.customer == approved[-1], "paid is what was approved last"
    assert order.customer != "Ada" and order.refunded_cents in (2000, 9000)


# --- who sees what ---


def secretive(arguments: dict[str, Any], ctx: ToolContext) -> Any:
    order = Order.objects.get(number="A1")
    return {"account": f"{order.note} account", "said": f"to {arguments['account']}", "total": 1}


def pay_account(ctx: ToolContext, account: str) -> str:
    """Pay to an account."""
    return act("pay", ctx)


def test_sensitive_arguments_are_masked_in_what_is_held(
    order: Order, effects: Effects, capsys: pytest.CaptureFixture[str]
) -> None:
    its = paying(secretive, pay_account, sensitive=["account"])
    card = asked(its, {"tools": [call("pay", account="DE89370400440532013000")]})
    ann = user("ann", "decide_approval", "view_run", "view_approval")
    seen = {"account": "***", "said": "to ***", "total": 1}
    assert get_approval(card.pk, ann).approval.holds == seen
    approve(card.pk, None, digest=card.digest)
    change(note="other")
    sweep()
    assert again(card).why.startswith("account was *** when this was approved, and is *** now.")
    assert get_approval(card.pk, ann).approval.holds == seen
    browser = Client()
    browser.force_login(user("root", is_staff=True, is_superuser=True))
    page = browser.get(f"/admin/agentruns/approval/{card.pk}/change/").content.decode()
    assert "Holds:" in page and "DE8937" not in page and "other account" not in page
    call_command("show_run", str(card.run_id))
    said = capsys.readouterr().out
    assert "Holds:" in said and "DE8937" not in said and "account =" in said and "other account" not in said
    mask = mask_of(card.run)
    rows = [mask.row(row).payload for row in run_rows("default", card.run_id)]
    assert [row["holds"] for row in rows if "holds" in row] == [seen, seen]


def test_what_is_held_is_shown_to_whom_the_reason_is(
    order: Order, effects: Effects, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, staff = user("owner"), user("staff", "decide_approval", "view_run", "view_approval")
    agent = shop_agent("payer-of-an-owner", PAY, tools=[paying()])
    (card,) = run_agent(agent, "pay it", "s1", actor=owner).pending
    value, digest = {"status": "paid", "total": 2000}, card.digest
    for who, seen, text in ((owner, None, ""), (staff, value, "status = paid, total = 2000")):
        assert get_approval(card.pk, who).approval.holds == seen
        api = Api(who)
        for found in (api.get(f"/approvals/{card.pk}")[1], *api.every("/approvals")):
            assert (found["holds"], found["shown"]["holds"], found["digest"]) == (seen, text, digest)
    call_command("show_run", str(card.run_id))
    said = capsys.readouterr().out
    assert said.count("Holds: status = paid, total = 2000") == 2 and f"digest {digest[:12]}" in said


def test_the_console_shows_what_is_held_and_takes_no_old_page(order: Order, effects: Effects) -> None:
    root = user("root", is_staff=True, is_superuser=True)
    browser, card = Client(), asked(paying())
    browser.force_login(root)
    url = f"/admin/agentruns/approval/{card.pk}"
    page = browser.get(f"{url}/change/").content.decode()
    assert "Holds:" in page and "status = paid, total = 2000" in page
    old = {"digest": card.digest, "reason": ""}
    approve(card.pk, None, digest=card.digest)
    change(note="refunded")
    sweep()
    again(card)
    answer = browser.post(f"{url}/approve/", old)
    assert (answer.status_code, again(card).approved_count) == (409, 0)
    text = answer.content.decode()
    assert "It has changed since you looked. This is what it asks now." in text
    assert "status = refunded" in text and card.digest in text
    in_bulk = {"action": "approve_selected", "_selected_action": str(card.pk)}
    page = browser.post("/admin/agentruns/approval/", in_bulk).content.decode()
    assert "status = refunded" in page and f'name="digest-{card.pk}" value="{card.digest}"' in page
    sent = {**in_bulk, "confirmed": "1", f"digest-{card.pk}": old["digest"], "reason": ""}
    assert "relies on has changed" in browser.post("/admin/agentruns/approval/", sent).content.decode()
    assert again(card).approved_count == 0
    browser.post("/admin/agentruns/approval/", {**sent, f"digest-{card.pk}": card.digest})
    done(card)
    assert effects.count() == 1


def test_what_is_held_is_erased_with_the_call(order: Order, effects: Effects) -> None:
    card = asked(paying())
    approve(card.pk, None, digest=card.digest)
    change(note="Mrs Doe complained")
    sweep()
    approve(again(card).pk, None, digest=card.digest)
    run = done(card)
    Order.objects.all().delete()
    asks = Message.objects.get(run=run, kind="approval_requested")
    erase_payload(run.pk, asks.seq, None, "asked to")
    card.refresh_from_db()
    assert (card.holds, "Mrs Doe" in everywhere()) == (None, False)
    assert problems(run.session_id) == []
