"""A process dies around the commit of a transactional tool: writes and result are there, or neither is."""

from __future__ import annotations

import signal

import pytest

from agentruns import approve, start_run
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.runs import result_of
from agentruns.testing import check_messages
from tests.crash.disasters import ended, forked
from tests.db.helpers import kill, outcomes
from tests.effects import Effects
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

# where the process dies -> (is the write committed with its result, was the on_commit hook run)
DEATHS = {
    "before_tool": (False, False),
    "tally:before": (False, False),
    "tally:after": (False, False),
    "before_result_commit": (False, False),
    "hook:before": (True, False),
    "after_result": (True, True),
}


def advance(run: Run, effects: Effects, at: str = "") -> int | None:
    inside = at.endswith((":before", ":after"))
    point, environment = ("", {"SHOP_KILL": at}) if inside else (at, {})
    code = ended(forked(effects, "advance", str(run.pk), point=point, environment=environment))
    assert problems(run.session_id) == []
    if code:
        kill(run)
    return code


@pytest.mark.parametrize("at", DEATHS)
def test_the_write_and_the_result_are_there_together_and_the_hook_may_be_lost(
    at: str, effects: Effects
) -> None:
    committed, hooked = DEATHS[at]
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    run = start_run("tallies", "do it", "s1")
    assert advance(run, effects, at) == -signal.SIGKILL
    assert (Order.objects.get().refunded_cents, outcomes(run)) == ((1, ["ok"]) if committed else (0, []))
    assert advance(run, effects) == 0
    run = Run.objects.get(pk=run.pk)
    assert (run.status, outcomes(run), Order.objects.get().refunded_cents) == ("completed", ["ok"], 1)
    assert effects.count("hook") == (1 if hooked or not committed else 0)
    check_messages(result_of(run.pk).messages)


def test_one_approval_serves_every_attempt_of_the_call_it_was_given_for(effects: Effects) -> None:
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    run = start_run("tallies-asked", "do it", "s1")
    assert advance(run, effects) == 0
    approve(Approval.objects.get().pk, None)
    for at in ("tally:after", "before_result_commit"):
        assert advance(run, effects, at) == -signal.SIGKILL
        assert (Order.objects.get().refunded_cents, Approval.objects.get().status) == (0, "consumed")
    assert advance(run, effects) == 0
    run = Run.objects.get(pk=run.pk)
    assert (run.status, Order.objects.get().refunded_cents, Approval.objects.count()) == ("completed", 1, 1)
    started = list(Message.objects.filter(run=run, kind="tool_started").order_by("seq"))
    card = Approval.objects.get()
    assert [(row.attempt, row.consumes) for row in started] == [(1, card.pk), (2, None), (3, None)]
    assert {row.payload["approval"] for row in started} == {str(card.pk)}
    assert len({(row.call_id, row.payload["key"], row.payload["digest"]) for row in started}) == 1
