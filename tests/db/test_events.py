"""Runs that wait for an event: it comes before, during or after the wait, twice, or never."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agentruns import (
    Pending,
    ToolContext,
    approve,
    cancel_run,
    deliver_event,
    export_run,
    fork_run,
    pause_run,
    resume_run,
    run_agent,
    start_run,
    stop_waiting,
    tool,
    wait_for_event,
    wait_until,
)
from agentruns.engine.leases import Lease
from agentruns.engine.worker import advance
from agentruns.exceptions import NotDurableError, PermissionDeniedError, RunStateError
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Approval, Event, Message, Run, Session
from agentruns.models.event import EventQuerySet
from agentruns.services.data.retention import prune_ended
from agentruns.services.events import settle_due
from agentruns.services.runs import waiting
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at, expire_leases, run_until_blocked
from agentruns.utils.bounds import EVENT_LENGTH
from agentruns.utils.db import in_transaction
from tests.db.crowds import ID, multiply, plan
from tests.db.helpers import names, outcomes, payloads, run_turns, sound, the_run, user
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import TOOLS, act, call, shop_agent
from tests.shop.waits import collect

pytestmark = pytest.mark.django_db(transaction=True)

COLLECTS = {"tools": [call("collect", cents=500), call("post", text="paid")]}
PAID = {"amount": 500, "currency": "EUR"}


@tool(awaits="payment")
def delivered_meanwhile(ctx: ToolContext, ends: str) -> Any:
    """Meet the event while the handler is at work, and end in one of several ways."""
    act("delivered_meanwhile", ctx)
    key = "pi_1" if ends == "by another key" else ctx.idempotency_key
    deliver_event("payment", key, PAID)
    if ends == "with an error":
        raise ConnectionError("the line is dead")
    return "paid at once" if ends == "with a result" else Pending(key if key == "pi_1" else None)


@tool
def awaits_nothing(ctx: ToolContext) -> Pending:
    act("awaits_nothing", ctx)
    return Pending()


@tool(awaits="payment", safe_to_retry=True, parallel=True)
def poll(ctx: ToolContext, key: str) -> Pending:
    act("poll", ctx, about=key)
    return Pending(key)


@tool(awaits="payment", requires_approval=True)
def gated(ctx: ToolContext, key: str) -> Pending:
    act("gated", ctx, about=key)
    return Pending(key)


def invoiced(ctx: ToolContext, args: dict[str, Any]) -> Pending:
    return Pending(f"in_{args['cents']}")


@tool(awaits="payment", reconcile=invoiced)
def invoice(ctx: ToolContext, cents: int) -> Pending:
    act("invoice", ctx, cents=cents)
    return invoiced(ctx, {"cents": cents})


@tool(awaits="payment")
def loses_the_run(ctx: ToolContext) -> Pending:
    """Lose the run to another worker, which finds the call in doubt."""
    act("loses_the_run", ctx)
    expire_leases(ctx.run_id)
    at_once(partial(sweep, run_id=ctx.run_id))
    return Pending("pi_late")


EVERY = [
    loses_the_run,
    *TOOLS,
    collect,
    invoice,
    delivered_meanwhile,
    awaits_nothing,
    poll,
    gated,
    wait_for_event,
    wait_until,
]


def waits_for(event: str, key: str) -> dict[str, object]:
    """One call of the ready tool."""
    return {"name": "wait_for_event", "input": {"name": event, "key": key, "timeout_seconds": 60}}


def waiting_run(*turns: object, session: str = "s1", **options: Any) -> Run:
    """Run an agent until it waits for an event."""
    run = the_run(run_turns(*(turns or (COLLECTS,)), session=session, tools=EVERY, **options))
    assert (run.status, run.lease_expires_at, run.lease_owner) == ("waiting", None, "")
    return run


def overdue(run: Run) -> None:
    """Let the time of each wait of a run be over."""
    waits = Event.objects.unsettled().filter(run=run, due_at__isnull=False)
    assert waits.update(due_at=Now() - timedelta(seconds=1))


def results(run: Run) -> list[Any]:
    """List the contents of a run's results; errors about unknown outcomes as JSON."""
    contents = [row["content"] for row in payloads(run, "tool_result")]
    return [json.loads(each)["error"] if str(each).startswith('{"') else each for each in contents]


def test_a_run_waits_without_a_process_and_the_payload_is_the_result(effects: Effects) -> None:
    run = waiting_run()
    assert (sweep().found, names(effects)) == (0, ["collect"])
    event = Event.objects.get(waits_since__isnull=False)
    assert (event.name, event.key, event.run_id, event.payload) == ("payment", "pi_500", run.pk, None)
    (wait,) = waiting.waits("default", [run])[run.pk]
    assert (wait.kind, wait.event, wait.text, wait.until) == ("event", "payment", "pi_500", event.due_at)
    assert payloads(run, "event_awaited")[0]["until"] is not None

    assert deliver_event("payment", "pi_500", PAID) == ("delivered", run.pk)
    assert Run.objects.get().status == "queued"
    assert sweep().completed == 1
    assert (outcomes(sound(run)), results(run)[0]) == (["ok", "ok"], PAID)
    assert names(effects) == ["collect", "post"], "what was asked for later has waited, too"
    assert not Event.objects.unsettled().exists()
    assert deliver_event("payment", "pi_500", {"amount": 1}) == ("duplicate", run.pk)
    assert deliver_event("payment", payloads(run, "tool_started")[0]["key"]) == ("duplicate", run.pk)
    assert results(run)[0] == PAID


def test_an_event_that_comes_before_its_wait_is_not_lost(effects: Effects) -> None:
    assert deliver_event("payment", "pi_500", PAID) == ("early", None)
    assert deliver_event("payment", "pi_500", {"amount": 1}) == ("duplicate", None)
    result = run_turns(COLLECTS, tools=EVERY)
    run = the_run(result)
    assert (result.status, results(run)[0], names(effects)) == ("completed", PAID, ["collect", "post"])
    kinds = list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))
    awaited = kinds.index("event_awaited")
    assert kinds[awaited : awaited + 3] == ["event_awaited", "event_delivered", "tool_result"]
    assert payloads(run, "event_delivered")[0]["at"]
    assert set(Event.objects.values_list("payload", flat=True)) == {None}, "the journal has it by now"


def test_an_event_of_another_scope_is_another_event() -> None:
    run = waiting_run()
    assert deliver_event("payment", "pi_500", PAID, scope="acme").status == "early"
    assert sound(run).status == "waiting"


@pytest.mark.parametrize(
    ("ends", "late"),
    [
        ("pending", []),
        ("by another key", []),
        ("with a result", ["paid at once"]),
        ("with an error", ["ConnectionError"]),
    ],
)
def test_an_event_that_comes_while_the_handler_is_at_work(
    ends: str, late: list[str], effects: Effects
) -> None:
    turn = {"tools": [call("delivered_meanwhile", ends=ends), call("post", text="x")]}
    run = the_run(run_turns(turn, tools=EVERY))
    assert (run.status, results(run)[0], names(effects)) == (
        "completed", PAID, ["delivered_meanwhile", "post"],
    )  # fmt: skip
    contents = [row["content"] for row in payloads(run, "late_result")]
    assert len(contents) == len(late) and all(map(str.startswith, contents, late))
    assert outcomes(run) == ["ok", "ok"]


def test_verification_finds_nothing_while_a_worker_has_yet_to_learn_of_an_event(
    monkeypatch: pytest.MonkeyPatch, effects: Effects
) -> None:
    """The run then waits for people by its journal, and is still the worker's by its columns."""
    delivered, found = deliver_event, list[list[str]]()

    def deliver(*given: Any) -> None:
        delivered(*given)
        found.append(problems(Session.objects.get().pk))

    monkeypatch.setitem(globals(), "deliver_event", deliver)
    asks = {"tools": [call("delivered_meanwhile", ends="waits"), call("refund", cents=5000)]}
    run = the_run(run_turns(asks, tools=EVERY))
    assert (found, run.status) == ([[]], "awaiting-approval")
    Run.objects.update(status="running")
    assert "status is 'active', the journal says 'awaiting-approval'" in problems(run.session_id)[0]
    Run.objects.update(status="awaiting-approval")
    approve(Approval.objects.get().pk, None)
    sweep()
    assert (sound(run).status, names(effects)) == ("completed", ["delivered_meanwhile", "refund"])


def test_a_decision_comes_just_before_a_worker_leaves_the_run_that_an_event_moved(
    monkeypatch: pytest.MonkeyPatch, effects: Effects
) -> None:
    release = Lease.release

    def late(lease: Lease, **given: Any) -> bool:
        if Approval.objects.pending().exists():
            at_once(lambda: approve(Approval.objects.get().pk, None))
        return release(lease, **given)

    monkeypatch.setattr(Lease, "release", late)
    asks = {"tools": [call("delivered_meanwhile", ends="waits"), call("refund", cents=5000)]}
    run = the_run(run_turns(asks, tools=EVERY))
    assert (run.status, names(effects)) == ("completed", ["delivered_meanwhile", "refund"])


def test_a_wait_that_times_out_is_unknown_and_what_comes_then_is_late(effects: Effects) -> None:
    run = waiting_run({"tools": [call("collect", cents=500), call("post", text="paid")]})
    assert settle_due() == 0
    overdue(run)
    swept = sweep()
    assert (swept.settled, swept.completed) == (1, 1)
    assert (outcomes(sound(run)), names(effects)) == (["unknown", "cancelled"], ["collect"])
    assert "the event that brings its result has not come" in results(run)[0]
    assert deliver_event("payment", "pi_500", PAID) == ("late", run.pk)
    assert deliver_event("payment", "pi_500", PAID) == ("duplicate", run.pk)
    (late,) = payloads(sound(run), "late_result")
    assert (late["content"], outcomes(run)) == (PAID, ["unknown", "cancelled"])


def test_after_a_time_out_the_next_call_of_the_tool_asks_a_person() -> None:
    run = waiting_run(
        {"tools": [call("collect", cents=500)]}, {"tools": [call("collect", cents=600)]}, session="s2"
    )
    overdue(run)
    sweep()
    assert sound(run).status == "awaiting-approval"


def test_a_wait_is_over_only_by_the_databases_clock_in_its_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the sweep saw before: the last look counts, and its row count."""
    run, due, looks = waiting_run(), EventQuerySet.due, itertools.count()

    def premature(rows: EventQuerySet) -> EventQuerySet:
        return rows.unsettled().exclude(waits_since=None) if next(looks) < 2 else due(rows)

    monkeypatch.setattr(EventQuerySet, "due", premature)
    assert settle_due() == 0
    assert (sound(run).status, outcomes(run)) == ("waiting", [])


def test_only_the_ready_tools_time_out_as_results() -> None:
    at = (timezone.now() + timedelta(days=1)).isoformat()
    turn = {
        "tools": [
            waits_for("door", "1"),
            call("wait_until", at=at),
            call("post", text="x"),
        ]
    }
    run = waiting_run(turn)
    assert Event.objects.unsettled().count() == 2, "they wait side by side"
    overdue(run)
    sweep()
    assert outcomes(sound(run)) == ["ok", "ok", "ok"]
    contents = sorted(results(run)[:2], key=str)
    assert contents[1] == {"timed_out": True}
    assert list(contents[0]) == ["now"]
    assert run.status == "completed"


def test_a_model_waits_for_an_event(effects: Effects) -> None:
    run = waiting_run({"tools": [waits_for("door", "1")]})
    assert deliver_event("door", "1").status == "delivered"
    sweep()
    assert (sound(run).status, results(run)) == ("completed", [None])
    own = run_turns(
        {"tools": [waits_for("agentruns.time", "1")]},
        session="own",
        tools=EVERY,
    )
    assert "choose another name" in results(the_run(own))[0]


def test_a_wait_until_a_time_that_is_over_ends_with_the_next_sweep() -> None:
    run = waiting_run({"tools": [call("wait_until", at="2020-01-01T00:00:00Z")]})
    assert sweep().completed == 1
    assert list(results(sound(run))[0]) == ["now"]


def test_the_clock_of_a_test_moves_to_the_end_of_a_wait() -> None:
    at = (timezone.now() + timedelta(days=30)).isoformat()
    run = start_run(shop_agent("later", {"tools": [call("wait_until", at=at)]}, tools=EVERY), "x", "s1")
    assert run_until_blocked(run)[0].status == "waiting"
    assert run_until_blocked(run, fast_forward=True)[0].status == "completed"


@pytest.mark.parametrize("tool_name", ["collect", "wait_for_event"])
def test_one_waiter_each(tool_name: str, effects: Effects) -> None:
    waiting_run()
    calls = {
        "collect": call("collect", cents=500),
        "wait_for_event": waits_for("payment", "pi_500"),
    }
    second = the_run(
        run_turns({"tools": [calls[tool_name], call("post", text="x")]}, session="s2", tools=EVERY)
    )
    text = results(second)[0]
    assert "another call waits, or has waited, for the event 'payment' with the key 'pi_500'" in text
    if tool_name == "collect":  # its handler has run, so something may have happened
        assert outcomes(second) == ["unknown", "cancelled"]
        assert "Whether it took effect is not known" in text
    else:
        assert outcomes(second) == ["error", "ok"]
    assert deliver_event("payment", "pi_500", PAID).run_id == Run.objects.exclude(pk=second.pk).get().pk


@pytest.mark.parametrize("at", ["after_tool", "before_result_commit", "after_result"])
@pytest.mark.parametrize("settled_by", ["delivery before the sweep", "delivery after it", "early delivery"])
def test_a_process_dies_between_the_handler_and_what_it_stores(
    at: str, settled_by: str, effects: Effects
) -> None:
    if settled_by == "early delivery":
        deliver_event("payment", "pi_500", PAID)
    turn = {"tools": [call("collect", cents=500), call("lookup", number="A1")]}
    run = start_run(shop_agent("dies", turn, tools=EVERY), "x", "s1")
    with crashing_at(at):
        sweep(run_id=run.pk)
    key = payloads(run, "tool_started")[0]["key"]
    if settled_by == "delivery after it":
        expire_leases()
        sweep()
        assert sound(run).status == ("waiting" if at == "after_result" else "orphaned")
    if at == "after_result" and settled_by == "early delivery":
        pass  # both were stored at once
    else:
        assert deliver_event("payment", key, PAID) == ("delivered", run.pk)
    expire_leases()
    sweep()
    run = sound(run)
    assert (run.status, outcomes(run), results(run)[0]) == ("completed", ["ok", "ok"], PAID)
    assert names(effects) == ["collect", "lookup"]
    assert not Event.objects.unsettled().filter(run__isnull=False).exists()


def test_a_call_that_is_safe_to_retry_waits_after_its_second_attempt(effects: Effects) -> None:
    run = start_run(shop_agent("again", {"tools": [call("poll", key="k")]}, tools=EVERY), "x", "s1")
    with crashing_at("before_result_commit"):
        sweep()
    expire_leases()
    sweep()
    assert (sound(run).status, effects.count()) == ("waiting", 2)
    assert deliver_event("payment", "k", PAID).status == "delivered"
    sweep()
    assert sound(run).status == "completed"


def test_reconcile_may_say_that_the_event_is_still_to_come(effects: Effects) -> None:
    turn = {"tools": [call("invoice", cents=7), call("lookup", number="A1")]}
    run = start_run(shop_agent("asks", turn, tools=EVERY), "x", "s1")
    with crashing_at("after_tool"):
        sweep()
    expire_leases()
    sweep()
    assert (sound(run).status, names(effects)) == ("waiting", ["invoice"])
    assert payloads(run, "orphan_resolved")[0]["verdict"] == "occurred"
    assert deliver_event("payment", "in_7", PAID) == ("delivered", run.pk)
    sweep()
    assert (sound(run).status, results(run)[0], names(effects)) == ("completed", PAID, ["invoice", "lookup"])


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_worker_that_lost_the_run_still_says_what_to_wait_for(comes: str, effects: Effects) -> None:
    if comes == "before":
        deliver_event("payment", "pi_late", PAID)
    run = start_run(shop_agent("loses", {"tools": [call("loses_the_run")]}, tools=EVERY), "x", "s1")
    sweep(run_id=run.pk)
    assert payloads(sound(run), "late_result")[0]["pending"] == "pi_late"
    if comes == "after":
        assert run.status == "orphaned"
        assert deliver_event("payment", "pi_late", PAID) == ("delivered", run.pk)
    sweep()
    assert (sound(run).status, results(run), effects.count()) == ("completed", [PAID], 1)


def test_what_is_stored_for_a_call_is_settled_by_the_sweep() -> None:
    """As where the delivery could not lock the run, or where a restored run starts a call again."""
    run = waiting_run()
    stored = Event.objects.filter(waits_since__isnull=False)
    stored.update(delivered_at=Now(), payload=PAID, due_at=Now(), actor={"id": "7", "name": "bank"})
    assert deliver_event("payment", "pi_500", {"amount": 1}).status == "duplicate"
    assert sweep().settled == 1
    assert (sound(run).status, results(run)[0]) == ("completed", PAID)
    (delivered,) = payloads(run, "event_delivered")
    assert (delivered["actor"], "at" in delivered) == ({"id": "7", "name": "bank"}, True)


def test_a_wait_that_its_journal_does_not_have_stays_due_for_no_sweep() -> None:
    run = waiting_run()
    cancel_run(run.pk)
    Event.objects.update(settled_at=None, due_at=Now())
    settle_due()
    assert not Event.objects.unsettled().exists()
    assert sound(run).status == "cancelled"


def test_a_cancelled_run_ends_its_waits() -> None:
    at = (timezone.now() + timedelta(days=1)).isoformat()
    turn = {"tools": [call("wait_until", at=at), call("poll", key="k")]}
    run = waiting_run(turn)
    cancel_run(run.pk)
    assert outcomes(sound(run)) == ["cancelled", "unknown"]
    assert deliver_event("payment", "k", PAID) == ("late", run.pk)
    assert not Event.objects.unsettled().exists()


def test_verification_misses_the_event_of_a_wait() -> None:
    run = waiting_run()
    Event.objects.exclude(waits_since=None).update(key="pi_501")
    assert "is not the one that the journal waits for" in problems(run.session_id)[0]
    Event.objects.all().delete()
    assert "is not the one that the journal waits for" in problems(run.session_id)[0]


def test_a_person_ends_a_wait() -> None:
    run = waiting_run()
    (call_id,) = {event.call_id for event in Event.objects.filter(run=run)}
    with pytest.raises(PermissionDeniedError):
        stop_waiting(run.pk, call_id, user("ada"))
    stop_waiting(run.pk, call_id, user("bob", "resolve_orphan"))
    assert payloads(run, "tool_result")[0]["actor"]["name"] == "bob"
    sweep()
    assert outcomes(sound(run)) == ["unknown", "cancelled"]
    with pytest.raises(RunStateError, match="does not wait"):
        stop_waiting(run.pk, call_id, None)


def test_pending_of_a_tool_that_awaits_nothing_is_an_error() -> None:
    run = the_run(run_turns({"tools": [call("awaits_nothing")]}, tools=EVERY))
    assert (run.status, outcomes(run)) == ("completed", ["error"])
    assert "declare @tool(awaits=...)" in results(run)[0]


def test_what_a_wait_cannot_be() -> None:
    def given() -> None: ...

    with pytest.raises(TypeError, match="contradict"):
        tool(awaits="payment", transactional=True)(given)
    with pytest.raises(TypeError, match="agentruns delivers"):
        tool(awaits="agentruns.time")(given)
    with pytest.raises(TypeError, match="name of an event"):
        tool(awaits=" ")(given)
    for wrong in (
        {"key": ""},
        {"key": "x" * 201},
        {"timeout": timedelta()},
        {"timeout": timedelta(days=4000)},
    ):
        with pytest.raises(ValueError, match="Pending"):
            Pending(**wrong)  # type: ignore[arg-type]
    for wrong in ({"key": 7}, {"timeout": 7}):
        with pytest.raises(TypeError, match="Pending"):
            Pending(**wrong)  # type: ignore[arg-type]
    with pytest.raises(NotDurableError, match="wait for events"):
        run_agent(shop_agent("stateless", COLLECTS, tools=EVERY), "x")
    for name, key in (("", "k"), ("payment", ""), ("agentruns.child", "k"), ("pay\nment", "k")):
        with pytest.raises(ValueError, match="event"):
            deliver_event(name, key)
    with pytest.raises(ValueError, match="characters"):
        deliver_event("payment", "k", "x" * (EVENT_LENGTH + 1))
    assert not Event.objects.exists()


def test_who_may_deliver() -> None:
    with pytest.raises(PermissionDeniedError):
        deliver_event("payment", "k", actor=user("ada"))
    with pytest.raises(PermissionDeniedError):
        deliver_event("payment", "k", actor=AnonymousUser())
    run = waiting_run()
    assert deliver_event("payment", "pi_500", actor=user("bank", "deliver_event")).status == "delivered"
    assert payloads(run, "event_delivered")[0]["actor"]["name"] == "bank"


def test_a_person_and_an_event_are_waited_for_in_turn(effects: Effects) -> None:
    run = the_run(run_turns({"tools": [call("gated", key="k"), call("refund", cents=5000)]}, tools=EVERY))
    first, second = Approval.objects.pending().order_by("requested_at", "pk")
    cards = {card.tool_name: card for card in (first, second)}
    approve(cards["gated"].pk, None)
    sweep()
    assert sound(run).status == "awaiting-approval", "a person can decide meanwhile"
    approve(cards["refund"].pk, None)
    assert (sound(run).status, names(effects)) == ("waiting", ["gated"])
    deliver_event("payment", "k", PAID)
    sweep()
    assert (sound(run).status, names(effects)) == ("completed", ["gated", "refund"])


def test_reads_do_not_wait(effects: Effects) -> None:
    run = waiting_run(
        {"tools": [call("collect", cents=1), call("search", query="x"), call("post", text="y")]}
    )
    assert names(effects) == ["collect", "search"]
    overdue(run)
    sweep()
    assert outcomes(sound(run)) == ["ok", "unknown", "cancelled"]


def test_resume_leaves_a_wait_alone_and_a_pause_keeps_it(effects: Effects) -> None:
    run = waiting_run()
    assert resume_run(run.pk).status == "waiting"
    pause_run(run.pk)
    assert sound(run).status == "paused"
    assert deliver_event("payment", "pi_500", PAID).status == "delivered"
    assert sound(run).status == "paused"
    assert resume_run(run.pk).status == "completed"
    assert (outcomes(sound(run)), names(effects)) == (["ok", "ok"], ["collect", "post"])


def test_a_paused_run_that_still_waits_goes_back_to_its_wait() -> None:
    run = waiting_run()
    pause_run(run.pk)
    assert resume_run(run.pk).status == "waiting"
    assert sound(run).lease_expires_at is None
    assert deliver_event("payment", "pi_500", PAID).status == "delivered"
    sweep()
    assert outcomes(sound(run)) == ["ok", "ok"]


def test_a_wait_does_not_count_towards_the_deadline() -> None:
    run = waiting_run(deadline=timedelta(seconds=600))
    with pytest.MonkeyPatch.context() as patch:
        real = timezone.now()
        patch.setattr("agentruns.journal.batch.journal_clock.now", lambda alias: real + timedelta(days=2))
        deliver_event("payment", "pi_500", PAID)
        sweep()
    assert sound(run).status == "completed"


def test_a_fork_of_a_waiting_run_waits_for_nothing() -> None:
    run = waiting_run({"tools": [call("collect", cents=500), call("wait_until", at="2090-01-01T00:00:00Z")]})
    seq = Message.objects.filter(run=run).order_by("-seq").values_list("seq", flat=True)[0]
    fork = fork_run(run.pk, seq)
    assert not Event.objects.filter(run=fork).exists()
    assert "unknown" in outcomes(fork)
    sweep()
    assert (sound(fork).status, sound(run).status) == ("completed", "waiting")
    assert deliver_event("payment", "pi_500", PAID) == ("delivered", run.pk)


def test_a_waiting_run_can_be_exported_and_its_events_go_with_it() -> None:
    run = waiting_run()
    assert "event_awaited" in json.dumps(list(export_run(run.pk)))
    cancel_run(run.pk)
    Run.objects.update(updated_at=F("updated_at") - timedelta(days=9))
    prune_ended(1)
    assert not Session.objects.exists()
    assert not Event.objects.exists()
    assert deliver_event("payment", "pi_500", PAID).status == "early"


def test_an_event_for_which_nobody_waits_is_kept_for_some_days(settings: Any) -> None:
    settings.AGENTRUNS_EVENT_DAYS = 2
    deliver_event("payment", "pi_1", PAID)
    left = Event.objects.get().due_at - timezone.now()
    assert timedelta(days=1, hours=23) < left < timedelta(days=2, hours=1)
    sweep()
    Event.objects.update(due_at=Now() - timedelta(seconds=1))
    sweep()
    assert not Event.objects.exists()


@pytest.mark.parametrize("state", ["waiting", "not yet"])
def test_of_twenty_deliveries_at_once_one_wins(state: str) -> None:
    for number in range(3):
        key = f"pi_{number}"
        run = waiting_run({"tools": [call("poll", key=key)]}, session=key) if state == "waiting" else None
        found = at_once(*[partial(deliver_event, "payment", key, {"by": each}) for each in range(20)])
        first = "delivered" if run else "early"
        assert sorted(each.status for each in found) == sorted([first, *["duplicate"] * 19]), found
        winner = next(index for index, each in enumerate(found) if each.status == first)
        if run is None:
            run = the_run(run_turns({"tools": [call("poll", key=key)]}, session=key, tools=EVERY))
        sweep()
        assert (sound(run).status, results(run)) == ("completed", [{"by": winner}])


def test_a_delivery_and_a_wait_that_begin_together_find_each_other() -> None:
    for number in range(8):
        key, name = f"pi_{number}", f"meets-{number}"
        run = start_run(shop_agent(name, {"tools": [call("poll", key=key)]}, tools=EVERY), "x", name)
        found = at_once(partial(deliver_event, "payment", key, PAID), partial(sweep, run_id=run.pk))
        assert found[0].status in ("early", "delivered"), found
        sweep()
        assert (sound(run).status, results(run)) == ("completed", [PAID]), found


def test_a_call_that_begins_to_wait_between_the_look_and_the_insert_gets_the_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Run] = []

    def too_late(alias: str, action: Any) -> Any:
        if not started:
            monkeypatch.setattr("agentruns.services.events.in_transaction", in_transaction)
            started.append(waiting_run())
        return in_transaction(alias, action)

    monkeypatch.setattr("agentruns.services.events.in_transaction", too_late)
    assert deliver_event("payment", "pi_500", PAID) == ("delivered", started[0].pk)


class DeliveringStore(DatabaseStore):
    """Delivers an event, and keeps it from the writer until the first try to store a wait for it."""

    def append(self, batch: Any, **options: Any) -> None:
        if batch.rows[-1].kind == "event_awaited":
            assert deliver_event("payment", "pi_500", PAID).status in ("early", "duplicate")
        super().append(batch, **options)


def test_an_event_that_comes_between_the_look_and_the_append_is_found(effects: Effects) -> None:
    run = start_run(shop_agent("just", COLLECTS, tools=EVERY), "x", "s1")
    assert advance(run, "default", store=DeliveringStore())
    assert (sound(run).status, results(run)[0]) == ("completed", PAID)
    assert names(effects) == ["collect", "post"]


def test_a_delivery_at_the_very_moment_of_the_time_out() -> None:
    for number in range(8):
        run = waiting_run({"tools": [call("collect", cents=number)]}, session=f"s{number}")
        overdue(run)
        deliver = partial(deliver_event, "payment", f"pi_{number}", PAID)
        found = at_once(deliver, settle_due, deliver)
        statuses = sorted(each.status for each in (found[0], found[2]))
        sweep()
        won = outcomes(sound(run)) == ["ok"]
        assert statuses == ["delivered" if won else "duplicate", "duplicate" if won else "late"], found
        assert len(payloads(run, "tool_result")) == 1


def test_ten_thousand_waiting_runs_cost_an_idle_sweep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A slow machine stamps no sweep twice, and asks once for the switches.
    monkeypatch.setattr("agentruns.services.sweep.STAMPED", 600)
    monkeypatch.setattr("agentruns.engine.leases.DRAIN_CHECK_SECONDS", 600)
    waiting_run({"tools": [call("collect", cents=500)]})
    sweep()
    with CaptureQueriesContext(
        connection,
    ) as one:
        sweep()
    number = f"{ID[connection.vendor].format('n')}"
    key = "'k' || n"
    multiply(Session, 10_000, id=number, key=key)
    multiply(Run, 10_000, id=number, session_id=number, idempotency_key="''")
    Event.objects.filter(waits_since=None).delete()
    multiply(Event, 10_000, id=number, run_id=number, key=key)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    with CaptureQueriesContext(connection) as many:
        sweep()
    assert len(many) == len(one)
    (look,) = [each["sql"] for each in many if "agentruns_event" in each["sql"]]
    assert "agentruns_event_due" in plan(look)
    assert not Event.objects.due().exists()
