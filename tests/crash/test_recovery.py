"""Recovery itself dies, at each repair, again and again: the same rules apply to what it left behind."""

from __future__ import annotations

import itertools
import signal
from typing import Any, NamedTuple

import pytest

from agentruns import Agent, approve, resolve_orphan, resume_run, start_run
from agentruns.engine.leases import claim
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages
from tests.crash.disasters import forked
from tests.crash.processes import ended
from tests.db.helpers import forget_backoff, kill, outcomes, payloads
from tests.effects import Effects
from tests.shop.models import Order
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


class Orphan(NamedTuple):
    """A call whose process died: its agent, where, what the outside answers, and how its run ends."""

    agent: str
    where: str
    answer: str = ""
    ends: str = "completed"
    outcome: str = "ok"


ORPHANS = {
    "safe_to_retry": Orphan("calls-lookup", "lookup:after"),
    "occurred": Orphan("ships", "ship:after"),
    "not_occurred": Orphan("ships", "ship:before"),
    "unknown": Orphan("ships", "ship:after", "unknown", "orphaned", "unknown"),
    "raises": Orphan("ships", "ship:after", "raises", "orphaned", "unknown"),
    "times_out": Orphan("ships-soon", "ship:after", "hangs", "orphaned", "unknown"),
    "transactional": Orphan("tallies", "tally:after"),
    "held": Orphan("calls-post", "post:after", "", "orphaned", "unknown"),
    "surfaced": Orphan("surfaces", "post:after", outcome="unknown"),
}

# Where a recovery dies; a test below goes through the moments just before each of its commits.
# "after_repair" is right after orphan_found, "after_repair:2" after the reconciler's verdict; "ask:*" is
# inside the reconciler, the others inside the handler that is entered again or just before it.
PLACES = {
    "safe_to_retry": "after_repair before_tool lookup:after",
    "occurred": "ask:after after_repair:2",
    "not_occurred": "ask:after after_repair:2 before_tool ship:after",
    "unknown": "after_repair ask:after",
    "raises": "ask:before",
    "times_out": "ask:before",
    "transactional": "before_tool tally:after",
    "held": "after_repair",
    "surfaced": "after_repair",
}


def recover(run: Run, effects: Effects, *, at: str = "", action: str = "advance", **env: str) -> int | None:
    """Let another process take the run over, and die at a place; return how it ended."""
    if Run.objects.get(pk=run.pk).lease_expires_at is not None:
        kill(run)  # its worker is dead indeed; only the wait is cut short
    if action == "advance":
        wait_for(Run.objects.runnable().filter(pk=run.pk).exists, "the run to be free")
    place = {"SHOP_KILL": at} if at.endswith((":before", ":after")) else {"point": at}
    code = ended(forked(effects, action, str(run.pk), **place, **env))
    assert problems(run.session_id) == []
    return code


def die(orphan: Orphan, effects: Effects) -> Run:
    """Start the run and let its first process die where the orphan says."""
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    run = start_run(orphan.agent, "do it", "s1")
    assert recover(run, effects, at=orphan.where) == -signal.SIGKILL
    return run


def is_free(run: Run) -> bool:
    """Whether a worker may take the run, now or later: it neither ended nor waits for a person."""
    return Run.objects.get(pk=run.pk).status in ("queued", "running")


def ends_well(orphan: Orphan, run: Run, effects: Effects) -> None:
    """Check what a healthy recovery makes of the run, that a person can end it, and what happened outside."""
    while is_free(run):
        assert recover(run, effects) == 0
    run = Run.objects.get(pk=run.pk)
    assert run.status == orphan.ends, run.blocked_reason
    if run.status == "orphaned":
        assert sweep().found == 0, "a sweep never decides for a person"
        assert resume_run(run.pk).status == "completed"
    assert problems(run.session_id) == []
    check_messages(result_of(run.pk).messages)
    assert outcomes(run) == [orphan.outcome]
    lines = [line for line in effects.lines() if line["tool"] != "hook"]
    assert len({line["key"] for line in lines}) == (orphan.agent != "tallies"), "every attempt has one key"
    if orphan.agent == "tallies":
        assert Order.objects.get().refunded_cents == 1
    elif orphan.agent != "calls-lookup":
        assert len(lines) == 1, "at most once, and not lost"


@pytest.mark.one_database
@pytest.mark.parametrize(("name", "place"), [(name, at) for name in PLACES for at in PLACES[name].split()])
def test_recoveries_that_die_at_one_place_in_a_row(
    name: str, place: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = ORPHANS[name]
    monkeypatch.setenv("DISASTER_ANSWER", orphan.answer)
    run = die(orphan, effects)
    codes: list[int | None] = []
    while is_free(run) and codes.count(-signal.SIGKILL) < 2:
        codes.append(recover(run, effects, at=place))  # a tool's time may have to be over first
    assert -signal.SIGKILL in codes
    ends_well(orphan, run, effects)


@pytest.mark.one_database
@pytest.mark.parametrize("name", ORPHANS)
def test_recoveries_that_die_before_their_first_commit_then_before_their_second_and_so_on(
    name: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = ORPHANS[name]
    monkeypatch.setenv("DISASTER_ANSWER", orphan.answer)
    run, deaths = die(orphan, effects), 0
    for nth in itertools.count(1):
        if not is_free(run):
            break
        deaths += recover(run, effects, DISASTER_COMMIT=str(nth), DISASTER_ATTEMPTS="50") != 0
    assert deaths >= 2, "before the claim and before the first repair at least"
    ends_well(orphan, run, effects)


def test_a_resume_that_dies_has_either_told_the_model_or_changed_nothing(effects: Effects) -> None:
    run = die(ORPHANS["held"], effects)
    assert recover(run, effects) == 0
    for nth in itertools.count(1):
        if Run.objects.get(pk=run.pk).is_ended:
            break
        held = Run.objects.get(pk=run.pk).status == "orphaned"
        action = "resume" if held else "advance"
        assert recover(run, effects, action=action, DISASTER_COMMIT=str(nth)) in (0, -signal.SIGKILL)
    run = Run.objects.get(pk=run.pk)
    assert (run.status, effects.count(), outcomes(run)) == ("completed", 1, ["unknown"])
    assert len(payloads(run, "orphan_found")) == 1


@pytest.mark.one_database
@pytest.mark.parametrize("at", ["before_tool", "post:before", "post:after"])
def test_what_a_verdict_lets_run_again_and_dies_is_in_doubt_again(at: str, effects: Effects) -> None:
    run = die(Orphan("calls-post", "post:before"), effects)
    for _ in range(2):
        assert recover(run, effects) == 0
        (call_id,) = result_of(run.pk).orphans
        resolve_orphan(run.pk, call_id, "not_occurred", None, evidence="nothing is in the channel")
        assert recover(run, effects, at=at) == -signal.SIGKILL
    assert recover(run, effects) == 0
    run = Run.objects.get(pk=run.pk)
    assert (run.status, len(payloads(run, "tool_started"))) == ("orphaned", 3)
    assert effects.count() == (2 if at == "post:after" else 0), "once for each verdict that it did not happen"
    assert len({line["key"] for line in effects.lines()}) <= 1


@pytest.mark.parametrize("agent", ["exits", "kills-itself"])
def test_a_tool_that_ends_its_process_every_time_is_paused_and_resume_counts_anew(
    agent: str, effects: Effects
) -> None:
    run = start_run(agent, "do it", "s1")
    for rounds in (1, 2):
        while is_free(run):
            assert recover(run, effects) in ((0, 3) if agent == "exits" else (0, -signal.SIGKILL))
        run = Run.objects.get(pk=run.pk)
        assert (run.status, run.blocked_reason, run.attempts) == ("paused", "attempts_exhausted", 5)
        assert effects.count() == 5 * rounds
        assert sweep().found == 0
        assert resume_run(run.pk, drive=False).status == "queued"
        assert Run.objects.get(pk=run.pk).attempts == 0
    assert recover(run, effects, DISASTER_CURED="1") == 0
    run = Run.objects.get(pk=run.pk)
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["ok"], 11)
    assert len({line["key"] for line in effects.lines()}) == 1


def test_four_deaths_and_twenty_backoffs_are_four_attempts() -> None:
    busy = [ProviderError("overloaded", disposition="retry", type="overloaded_error", status=529)] * 20

    def propose(request: Any) -> dict[str, str]:
        if busy:
            raise busy.pop()
        return {"text": "there"}

    run = start_run(Agent("busy", instructions="Try.", model=ScriptedModel([propose])), "do it", "s1")
    for _ in range(4):  # a process takes the lease and dies before it does anything
        assert claim("default", run.pk) is not None
        kill(run)
    while busy:
        sweep()
        assert Run.objects.get(pk=run.pk).attempts == 4
        forget_backoff(run)
    assert sweep().completed == 1


# where the process dies -> (is the write committed with its result, was the on_commit hook run)
DEATHS = {
    "before_tool": (False, False),
    "tally:before": (False, False),
    "tally:after": (False, False),
    "before_result_commit": (False, False),
    "hook:before": (True, False),
    "after_result": (True, True),
}


@pytest.mark.parametrize("at", DEATHS)
def test_the_write_and_the_result_are_there_together_and_the_hook_may_be_lost(
    at: str, effects: Effects
) -> None:
    committed, hooked = DEATHS[at]
    run = die(Orphan("tallies", at), effects)
    assert (Order.objects.get().refunded_cents, outcomes(run)) == ((1, ["ok"]) if committed else (0, []))
    assert recover(run, effects) == 0
    run = Run.objects.get(pk=run.pk)
    assert (run.status, outcomes(run), Order.objects.get().refunded_cents) == ("completed", ["ok"], 1)
    assert effects.count("hook") == (1 if hooked or not committed else 0)
    check_messages(result_of(run.pk).messages)


def test_one_approval_serves_every_attempt_of_the_call_it_was_given_for(effects: Effects) -> None:
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    run = start_run("tallies-asked", "do it", "s1")
    assert recover(run, effects) == 0
    approve(Approval.objects.get().pk, None)
    for at in ("tally:after", "before_result_commit"):
        assert recover(run, effects, at=at) == -signal.SIGKILL
        assert (Order.objects.get().refunded_cents, Approval.objects.get().status) == (0, "consumed")
    assert recover(run, effects) == 0
    run = Run.objects.get(pk=run.pk)
    assert (run.status, Order.objects.get().refunded_cents, Approval.objects.count()) == ("completed", 1, 1)
    started = list(Message.objects.filter(run=run, kind="tool_started").order_by("seq"))
    card = Approval.objects.get()
    assert [(row.attempt, row.consumes) for row in started] == [(1, card.pk), (2, None), (3, None)]
    assert {row.payload["approval"] for row in started} == {str(card.pk)}
    assert len({(row.call_id, row.payload["key"], row.payload["digest"]) for row in started}) == 1
