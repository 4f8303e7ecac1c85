"""Several threads want the same thing at once; exactly one gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from agentruns import approve, cancel_run, deny, run_agent, start_run
from agentruns.exceptions import AgentRunsError, ApprovalStateError, RunStateError
from agentruns.journal.verify import problems
from agentruns.leases import claim
from agentruns.models import Message, Run, Session
from agentruns.sweep import sweep
from tests.db.helpers import kill, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Run the actions in threads that start together; return what each returned or raised."""
    barrier, results = threading.Barrier(len(actions)), [None] * len(actions)

    def work(index: int, action: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            results[index] = action()
        except Exception as error:
            results[index] = error
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_one_of_many_claimers_wins(effects: Effects, agents: None) -> None:
    for round_number in range(10):
        run = start_run(shop_agent("claimed"), "do it", f"s{round_number}")
        if round_number % 2:  # an expired lease is taken over by one, too
            assert claim("default", run.pk) is not None
            kill(run)
        leases = at_once(*[lambda run=run: claim("default", run.pk)] * 6)
        won = [lease for lease in leases if lease is not None]
        assert len(won) == 1, leases
        assert won[0].epoch == Run.objects.get(pk=run.pk).lease_epoch


def test_one_of_many_deciders_wins(effects: Effects, agents: None) -> None:
    for round_number in range(5):
        card = run_turns({"tools": [call("refund", cents=5000)]}, session=f"s{round_number}").pending[0]
        decisions = [
            lambda card=card: approve(card.pk, None, digest=card.digest),
            lambda card=card: deny(card.pk, None, "no"),
        ]
        results = at_once(*decisions * 3)
        refused = [result for result in results if isinstance(result, ApprovalStateError)]
        assert len(refused) == 5, results
        assert Message.objects.filter(run=card.run, kind="approval_decided").count() == 1
        assert problems(card.run.session_id) == []


def test_many_starts_with_one_key_are_one_run(effects: Effects, agents: None) -> None:
    agent = shop_agent("started")
    for session in (lambda n: "one", lambda n: f"session-{n}"):
        key = session(0)
        starts = [
            lambda n=n, key=key, session=session: start_run(agent, "do it", session(n), idempotency_key=key)
            for n in range(6)
        ]
        runs = at_once(*starts)
        assert {getattr(run, "pk", run) for run in runs} == {Run.objects.get(idempotency_key=key).pk}
    assert {session.pk for session in Session.objects.all()} >= {run.session_id for run in Run.objects.all()}


def test_many_callers_of_the_same_run_act_once(effects: Effects, agents: None) -> None:
    agent = shop_agent("called", {"tools": [call("post", text="x")]})
    results = at_once(*[lambda: run_agent(agent, "do it", "s1", idempotency_key="k")] * 5)
    assert effects.count() == 1
    assert all(isinstance(result, AgentRunsError) or result.run_id for result in results)
    run = Run.objects.get()
    assert (run.status, problems(run.session_id)) == ("completed", [])


def test_many_sweeps_at_once_act_once(effects: Effects, agents: None) -> None:
    for number in range(6):
        start_run(shop_agent(f"swept-{number}", {"tools": [call("post", text="x")]}), "do it", f"s{number}")
    results = at_once(*[sweep] * 4)
    assert not [result for result in results if isinstance(result, Exception)]
    assert effects.count() == 6
    assert set(Run.objects.values_list("status", flat=True)) == {"completed"}


def test_clicks_and_workers_never_deadlock_or_lose_a_row(effects: Effects, agents: None) -> None:
    turn = {"tools": [call("refund", cents=5000), call("search", query="x"), call("refund", cents=6000)]}
    for number in range(5):
        result = run_turns(turn, session=f"s{number}")
        run = Run.objects.get(pk=result.run_id)
        first, second = result.pending
        outcome = at_once(
            lambda first=first: approve(first.pk, None),
            lambda second=second: deny(second.pk, None, "no"),
            lambda run=run: cancel_run(run.pk),
            sweep,
            sweep,
        )
        for one in outcome:
            assert not isinstance(one, Exception) or isinstance(one, AgentRunsError), outcome
        sweep()
        run = the_run(result)
        too_late = isinstance(outcome[2], RunStateError)  # the sweeps were quicker than the cancel
        assert run.status == ("completed" if too_late else "cancelled")
    assert effects.count() <= 10
