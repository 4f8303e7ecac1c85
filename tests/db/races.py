"""Races that end the same at every isolation level."""

from __future__ import annotations

from functools import partial

from agentruns import approve, deny, start_run
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.services.sweep import sweep
from tests.db.helpers import run_turns
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import call, shop_agent


def one_of_many_deciders_wins(effects: Effects) -> None:
    """Let six threads decide on one card: one decision is kept."""
    for round_number in range(5):
        card = run_turns({"tools": [call("refund", cents=5000)]}, session=f"s{round_number}").pending[0]
        decisions = [partial(approve, card.pk, None, digest=card.digest), partial(deny, card.pk, None, "no")]
        results = at_once(*decisions * 3)
        refused = [result for result in results if isinstance(result, ApprovalStateError)]
        assert len(refused) == 5, results
        assert Message.objects.filter(run=card.run, kind="approval_decided").count() == 1
        assert problems(card.run.session_id) == []


def many_starts_with_one_key_are_one_run(effects: Effects) -> None:
    """Let six threads start with one key: they get one run, or a refusal in another session."""
    agent = shop_agent("started")
    runs = at_once(*[partial(start_run, agent, "do it", "one", idempotency_key="k1")] * 6)
    assert {getattr(run, "pk", run) for run in runs} == {Run.objects.get(idempotency_key="k1").pk}
    runs = at_once(
        *[partial(start_run, agent, "do it", f"session-{n}", idempotency_key="k2") for n in range(6)]
    )
    run = Run.objects.get(idempotency_key="k2")
    refused = [one for one in runs if one != run]
    assert len(refused) == 5
    assert all(isinstance(one, RunStateError) and f"belongs to run {run.pk}" in str(one) for one in refused)
    assert {session.pk for session in Session.objects.all()} == {run.session_id for run in Run.objects.all()}


def many_sweeps_at_once_act_once(effects: Effects) -> None:
    """Let four threads sweep: each of six runs acts once."""
    for number in range(6):
        start_run(shop_agent(f"swept-{number}", {"tools": [call("post", text="x")]}), "do it", f"s{number}")
    results = at_once(*[sweep] * 4)
    assert not [result for result in results if isinstance(result, Exception)]
    assert effects.count() == 6
    assert set(Run.objects.values_list("status", flat=True)) == {"completed"}


ALL = (one_of_many_deciders_wins, many_starts_with_one_key_are_one_run, many_sweeps_at_once_act_once)
