"""Workers are killed around decisions of a standing rule: no cap is passed, and no payment is made twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentruns import activate_rule, approve, draft_rule, start_run
from agentruns.exceptions import RuleStateError
from agentruns.journal.verify import problems
from agentruns.models import Approval, ApprovalRule, RuleDecision, Run, Session
from agentruns.services.runs.control import resolve_orphan
from agentruns.services.sweep import sweep
from tests.crash.payers import one, two
from tests.crash.processes import ended, run_and_die, start
from tests.effects import Effects
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

MODULE = "tests.crash.payers"
POINTS = (
    *("before_model", "after_model", "after_reply", "before_tool", "after_tool", "before_result_commit"),
    "after_result",
)


def ruled(agent: str, most: int) -> ApprovalRule:
    """Let a rule approve payments of the agent up to a sum."""
    cap = {"of": "arguments.cents", "most": str(most), "seconds": 86400, "per": []}
    return activate_rule(draft_rule(None, name="pays", agent=agent, tool="pay", caps=[cap]).pk, None)


def paid(effects: Effects) -> Counter[str]:
    """Count the payments by the key of their call, which is the same for each attempt."""
    return Counter(line["key"] for line in effects.lines() if line.get("tool") == "pay")


def used(rule: ApprovalRule) -> int:
    return int(RuleDecision.used("default", rule, 0))


def settle() -> bool:
    """Sweep once, give the ledger's verdict on calls in doubt; return whether only cards are waited for."""
    sweep()
    for run in Run.objects.filter(status="orphaned"):
        (call_id,) = run.pending_calls[:1]
        happened = call_id in {line.get("call") for line in Effects.from_environment().lines()}
        resolve_orphan(run.pk, call_id, "occurred" if happened else "not_occurred", None)
    return not Run.objects.unfinished().exclude(status="awaiting-approval").exists()


def check(effects: Effects, rule: ApprovalRule, most: int) -> None:
    """Check that the ledger, the rule's table and the journal fit each other."""
    assert max(paid(effects).values(), default=0) <= 1, "an effect happened twice"
    by_rule = {*RuleDecision.objects.filter(released_at=None).values_list("call_id", flat=True)}
    sums = sum(line["cents"] for line in effects.lines() if line.get("call") in by_rule)
    assert sums <= used(rule) <= most
    assert not any(problems(session.pk) for session in Session.objects.all())


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("agent", [one, two], ids=lambda agent: agent.name)
def test_a_worker_is_killed_around_a_decision(agent: Any, point: str, effects: Effects) -> None:
    rule = ruled(agent.name, 7000)
    start_run(agent, "pay", "s1")
    run_and_die("work", point=point, module=MODULE)
    check(effects, rule, 7000)
    wait_for(settle, "all but people")
    check(effects, rule, 7000)
    while card := Approval.objects.pending().first():
        approve(card.pk, None)
        wait_for(settle, "all but people")
    assert {run.status for run in Run.objects.all()} == {"completed"}
    assert [*paid(effects).values()] == [1] * (1 if agent is one else 2)
    assert used(rule) == 4000, "the call that the rule approved, and no other"


def test_workers_are_killed_while_they_share_a_cap(effects: Effects) -> None:
    rule = ruled(one.name, 22_000)
    for number in range(12):
        start_run(one, "pay", f"s{number}")
    for points in (
        ("after_model:3", "after_reply:2", "after_result:2", "before_tool:2"),
        ("after_model",) * 4,
    ):
        workers = [start("work", point=point, dies=True, module=MODULE) for point in points]
        wait_for(lambda killed=workers: not all(one.process.is_alive() for one in killed), "one to die")
        for worker in workers:
            worker.close()  # which kills the others wherever they are
        check(effects, rule, 22_000)
        wait_for(settle, "all but people")
        check(effects, rule, 22_000)
        try:  # it stopped itself where a call was in doubt
            activate_rule(rule.pk, None)
        except RuleStateError:
            assert ApprovalRule.objects.get().status == "active"
        for number in range(4):
            start_run(one, "pay", f"later-{points[0]}-{number}")
    finishing = [start("sweep", module=MODULE) for _worker in range(4)]
    assert {ended(worker) for worker in finishing} == {0}
    wait_for(settle, "all but people")
    check(effects, rule, 22_000)
    assert sum(line["cents"] for line in effects.lines() if line.get("tool") == "pay") <= 22_000
    assert used(rule) == 20_000, "as many as fit"
