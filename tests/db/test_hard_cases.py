"""Cases found by people who tried to break it; each broke a promise once."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.db import transaction
from django.db.models.functions import Now

from agentruns import (
    NotOccurred,
    Occurred,
    ToolContext,
    approve,
    cancel_run,
    pause_run,
    resolve_orphan,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.exceptions import ApprovalStateError, PermissionDeniedError, RunStateError
from agentruns.journal.policy import visible_runs
from agentruns.models import Message, Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.doubts import wire
from tests.db.dying import die_at
from tests.db.helpers import (
    kill,
    only_the_first_is_late,
    outcomes,
    payloads,
    run_turns,
    the_run,
    transferring,
    user,
)
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, Hanging, pause, wait_for

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def known_by_key(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
    happened = Effects.from_environment().count(ctx.idempotency_key)
    return Occurred("the bank knows it") if happened else NotOccurred()


def test_nobody_reconciles_while_the_first_attempt_may_be_at_work(effects: Effects) -> None:
    @tool(reconcile=known_by_key, timeout=3600)
    def patient(ctx: ToolContext) -> str:
        effects.record(ctx.idempotency_key)
        return "paid"

    run = die_at("before_tool", shop_agent("patient", {"tools": [call("patient")]}, tools=[patient]))
    sweep()
    run = Run.objects.get(pk=run.pk)
    assert (run.status, effects.count(), run.attempts) == ("queued", 0, 1)
    assert run.not_before is not None
    assert run.not_before - run.updated_at > timedelta(minutes=59)


def test_a_handler_that_is_still_at_work_here_is_not_run_beside_itself(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, let_go = threading.Event(), threading.Event()
    only_the_first_is_late(monkeypatch, entered.is_set)

    @tool(reconcile=known_by_key, timeout=0.2)
    def overdue(ctx: ToolContext) -> str:
        entered.set()
        assert let_go.wait(LIMIT)
        effects.record(ctx.idempotency_key)
        return "paid"

    result = run_turns({"tools": [call("overdue")]}, tools=[overdue])
    assert (result.status, effects.count()) == ("orphaned", 0)
    let_go.set()
    wait_for(Message.objects.filter(kind="late_result").exists, "what came late")
    assert effects.count() == 1
    with pytest.raises(RunStateError, match="did happen"):
        resolve_orphan(result.run_id, result.orphans[0], "not_occurred", None)


def test_a_hook_that_raises_after_the_commit_undoes_nothing() -> None:
    @tool(transactional=True)
    def write() -> str:
        Order.objects.create(number="A1", customer="Ada", total_cents=1)
        transaction.on_commit(lambda: 1 / 0)
        return "written"

    result = run_agent(shop_agent("hooked", {"tools": [call("write")]}, tools=[write]), "do it")
    assert (result.status, Order.objects.count()) == ("completed", 1)
    assert result.messages[2]["content"][0]["content"] == "written"


def test_nobody_is_not_the_owner_of_what_belongs_to_nobody() -> None:
    agent = shop_agent("secret")
    run_agent(agent, "do it", "s1", idempotency_key="k")
    sleeping = user("sleeping", is_active=False)
    for actor in (AnonymousUser(), sleeping):
        with pytest.raises(PermissionDeniedError):
            run_agent(agent, "do it", "s1", actor=actor, idempotency_key="k")
        with pytest.raises(PermissionDeniedError):
            start_run(agent, "do it", "s2", actor=actor)
    assert not visible_runs(AnonymousUser()).exists()
    assert Session.objects.count() == 1


def test_the_programs_key_is_its_own_unless_it_names_an_owner() -> None:
    ann, agent = user("ann"), shop_agent("keyed")
    hers = run_agent(agent, "do it", "hers", actor=ann, idempotency_key="k")
    nobodys = run_agent(agent, "do it", "nobodys", idempotency_key="k")
    assert hers.run_id != nobodys.run_id
    assert run_agent(agent, "do it", "hers", owner=ann, idempotency_key="k").run_id == hers.run_id
    for session in ("hers", "anywhere"):
        with pytest.raises(RunStateError, match=str(Run.objects.get(owner=None).pk)):
            start_run(agent, "do it", session, idempotency_key="k")


def test_an_edit_changes_what_the_next_person_reads() -> None:
    @tool(
        requires_approval=True, approvals=2, describe=lambda args: f"Pay {args['cents']}", sensitive=["iban"]
    )
    def pay(cents: int, iban: str) -> str:
        return "paid"

    result = run_turns({"tools": [call("pay", cents=5, iban="DE1")]}, tools=[pay], session="s2")
    ann, bob = (user(name, "decide_approval") for name in ("ann", "bob"))
    with pytest.raises(ApprovalStateError, match="mask"):
        approve(result.pending[0].pk, ann, arguments={"cents": 9, "iban": "***"})
    card = approve(result.pending[0].pk, ann, arguments={"cents": 999, "iban": "DE1"})
    assert (card.title, card.status) == ("Pay 999", "pending")
    with pytest.raises(ApprovalStateError, match="Look at it again"):
        approve(card.pk, bob, digest=result.pending[0].digest)
    assert approve(card.pk, bob, digest=card.digest).status == "approved"
    the_run(result)
    _result, card = transferring()
    approve(card.pk, None)
    with pytest.raises(ApprovalStateError, match="the program approved"):  # it alone is no quorum
        approve(card.pk, None)


UNUSABLE: list[dict[str, Any]] = [
    {"type": "text", "text": None}, {"type": "text", "text": 5}, {"type": "tool_result", "tool_use_id": "x"},
]  # fmt: skip


@pytest.mark.parametrize("block", UNUSABLE, ids=["no text", "a number", "a result"])
def test_a_reply_no_provider_takes_back_fails_the_run(block: dict[str, Any]) -> None:
    result = run_turns({"content": [block], "stop_reason": "end_turn"})
    assert result.status == "failed"
    later = run_agent(shop_agent("next"), "and now?", "s1", idempotency_key="k2")
    check_messages(later.messages)


def test_text_after_a_call_is_sent_back_before_it() -> None:
    blocks = [
        {"type": "tool_use", "id": "t1", "name": "post", "input": {"text": "x"}},
        {"type": "text", "text": "I post it."},
    ]
    result = run_turns({"content": blocks, "stop_reason": "tool_use"})
    check_messages(result.messages)
    assert payloads(the_run(result), "assistant")[0]["content"] == blocks


def test_a_pause_that_was_only_requested_is_lifted_by_resume() -> None:
    run = die_at("before_tool", shop_agent("patient", {"tools": [call("charge", cents=1)]}))
    Run.objects.update(lease_expires_at=Now() + timedelta(hours=1))  # as if its worker were live
    assert pause_run(run.pk, reason="wait for Bob").status == "running"
    kill(run)
    assert (resume_run(run.pk).status, Run.objects.get().blocked_reason) == ("completed", "")


def test_many_parallel_calls_share_few_threads_and_keep_their_own_time(settings: Any) -> None:
    settings.AGENTRUNS_MAX_ATTEMPTS = 1_000  # a slow machine may be late for the second, too
    most, hanging = [0], Hanging()

    @tool(safe_to_retry=True, parallel=True)
    def read(number: int) -> int:
        most[0] = max(most[0], sum(one.name == "agentruns-read" for one in threading.enumerate()))
        pause()
        return number

    @tool(safe_to_retry=True, parallel=True, timeout=1)
    def stuck(ctx: ToolContext) -> str:
        if ctx.attempt == 1:
            hanging.hang()
        return "free"

    turn = {"tools": [call("stuck"), *[call("read", number=n) for n in range(40)]]}
    try:
        run = the_run(run_turns(turn, tools=[read, stuck]))
    finally:
        hanging.let_go()
    assert (run.status, sorted(set(outcomes(run))), most[0] <= 8) == ("completed", ["ok"], True)
    assert not hanging.was_waited_for


def test_a_cancel_reaches_a_long_handler() -> None:
    @tool
    def long(ctx: ToolContext) -> str:
        cancel_run(ctx.run_id)
        ctx.heartbeat()
        wait_for(ctx.is_cancelled, "is_cancelled() to be true")
        return "stopped early"

    run = the_run(run_turns({"tools": [call("long")]}, tools=[long]))
    assert (run.status, outcomes(run)) == ("cancelled", ["ok"])


def test_a_verdict_is_recorded_where_the_call_is() -> None:
    """A caller without the permission does not surface the call before."""
    ann, agent = user("ann"), shop_agent("wired", {"tools": [call("wire", text="x")]}, tools=[wire])
    for _ in range(2):
        first = run_agent(agent, "do it", "s1", actor=ann, idempotency_key="k")
        assert (first.status, len(first.orphans)) == ("orphaned", 1)
    assert resume_run(first.run_id, user("boss", "resume_run")).status == "completed"
    second = run_agent(shop_agent("next"), "and now?", "s1", actor=ann, idempotency_key="k2")
    with pytest.raises(RunStateError, match="not in doubt"):
        resolve_orphan(second.run_id, first.orphans[0], "occurred", None)
    resolve_orphan(first.run_id, first.orphans[0], "occurred", None, result={"at": timedelta(seconds=5)})
    the_run(first)
