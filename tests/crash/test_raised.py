"""A real SIGKILL at each boundary around an exception of a handler; judged by the ledger outside."""

from __future__ import annotations

import pytest

from agentruns import RunResult, approve, resolve_orphan
from agentruns.models import Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.services.waiting import uncleared
from agentruns.testing import check_messages
from tests.crash import processes
from tests.crash.processes import expire_lease, run_and_die
from tests.db.helpers import outcomes, payloads, sound
from tests.effects import Effects

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]

ERROR = "ConnectionError: the line is dead"
# Where the process dies -> whether the row with the error is stored by then.
BOUNDARIES = {
    "after_tool": False,
    "before_result_commit": False,
    "after_result": True,
    "charged:before": True,  # inside reconcile
    "after_repair:2": True,  # the first is at the start of each drive
}


def take_over() -> Run:
    """Let a sweep go on with the only run, once its dead worker's lease is over."""
    run = Run.objects.get()
    expire_lease(run)
    sweep()
    return sound(run)


def die(agent: str, where: str, **environment: str) -> None:
    place = {"SHOP_KILL": where} if where.startswith("charged") else {"point": where}
    run_and_die("run", agent, "s1", **place, **environment)


@pytest.mark.parametrize("fails", ["charge:before", "charge:after"])
@pytest.mark.parametrize("where", BOUNDARIES)
def test_what_raised_is_asked_about_whoever_dies(
    where: str, fails: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process finds the row with the error: it asks, and does not enter the handler again."""
    die("calls-charge", where, SHOP_FAIL=fails)
    found = payloads(Run.objects.get(), "orphan_found")
    assert [one.get("raised") for one in found] == ([ERROR] if BOUNDARIES[where] else [])
    monkeypatch.setenv("SHOP_FAIL", fails)
    run = take_over()
    happened, entered = fails == "charge:after", len(payloads(run, "tool_started"))
    assert (run.status, effects.count()) == ("completed", int(happened))
    # Without that row it is an orphan like any other: entered again where it is known not to have happened.
    assert entered == (1 if happened or BOUNDARIES[where] else 2)
    (told,) = payloads(run, "tool_result")
    assert told["reconciled"] is True
    if happened:
        assert (told["outcome"], told["content"]) == ("ok", "charge done, says the bank")
    else:
        assert (told["outcome"], told["content"]) == ("error", f"{ERROR} Nothing happened.")
    check_messages(result_of(run.pk).messages)


# Where reconcile does not know, there is no verdict to be stored.
@pytest.mark.parametrize("where", [where for where in BOUNDARIES if where != "after_repair:2"])
def test_what_raised_and_is_not_known_waits_for_a_person(
    where: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    die("calls-charge", where, SHOP_FAIL="charge:after", SHOP_RECONCILE="unknown")
    monkeypatch.setenv("SHOP_RECONCILE", "unknown")
    run = take_over()
    assert (run.status, outcomes(run), effects.count()) == ("orphaned", [], 1)
    evidence = payloads(run, "orphan_found")[-1]["evidence"]
    assert (ERROR in evidence, "the bank does not answer" in evidence) == (BOUNDARIES[where], True)


@pytest.mark.parametrize("where", ["after_tool", "before_result_commit", "after_result"])
def test_a_failed_call_of_a_tool_that_declares_nothing_is_in_doubt_whoever_dies(
    where: str, effects: Effects
) -> None:
    die("breaks-twice", where)
    run = take_over()
    stored = where == "after_result"
    assert (run.status, effects.count()) == ("awaiting-approval" if stored else "orphaned", 1)
    if not stored:
        (call_id,) = result_of(run.pk).orphans
        resolve_orphan(run.pk, call_id, "unknown", None)
        run = take_over()
    result = result_of(run.pk)
    assert (run.status, effects.count()) == ("awaiting-approval", 1)
    (doubt,) = uncleared("default", run)
    assert doubt.call_id in result.pending[0].why


@pytest.mark.parametrize("where", ["after_decision", "before_tool"])
def test_an_approval_settles_the_doubt_once_whoever_dies(where: str, effects: Effects) -> None:
    assert processes.run("run", "breaks-twice", "s1") == 0
    run = Run.objects.get()
    card = result_of(run.pk).pending[0].pk
    if where == "after_decision":
        run_and_die("approve", str(card), point=where)
    else:
        approve(card, None)
        run_and_die("sweep", point=where)
    assert uncleared("default", run) == []
    run = take_over()
    result: RunResult = result_of(run.pk)
    if where == "after_decision":
        assert (run.status, effects.count(), len(uncleared("default", run))) == ("completed", 2, 1)
    else:  # started, and nobody knows
        assert (run.status, effects.count(), len(result.orphans)) == ("orphaned", 1, 1)
