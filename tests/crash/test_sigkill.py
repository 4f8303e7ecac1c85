"""A real SIGKILL at each boundary of a run, a fallback and an exception; judged by the ledger outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentruns import (
    approve,
    cancel_run,
    leave_out,
    pause_run,
    resolve_orphan,
    resume_run,
    send_message,
    start_run,
)
from agentruns.journal.conversation import PROGRAM, PROGRAM_ENDS
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.runs.waiting import uncleared
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash import child  # noqa: F401 - its agents, for this process as well
from tests.crash.processes import die, expire_lease, finish, run_and_die, start, start_held
from tests.db.helpers import GO_ON, outcomes, payloads, sound
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)

BETWEEN = ("after_start", "before_model", "after_model", "before_finish")
# (tool, where the process dies) -> (effects, attempts started, where the sweep leaves the run)
#
# "before_tool" is the boundary between the committed tool_started and the handler; "after_tool" the one
# between the handler's return and its result; the others are inside the handler.
WINDOWS = {
    ("post", "before_tool"): (0, 1, "orphaned"),
    ("post", "post:before"): (0, 1, "orphaned"),
    ("post", "post:after"): (1, 1, "orphaned"),
    ("post", "after_tool"): (1, 1, "orphaned"),
    ("post", "before_result_commit"): (1, 1, "orphaned"),
    ("post", "after_result"): (1, 1, "completed"),
    ("lookup", "before_tool"): (1, 2, "completed"),
    ("lookup", "lookup:after"): (2, 2, "completed"),
    ("search", "search:after"): (2, 2, "completed"),
    ("charge", "charge:before"): (1, 2, "completed"),
    ("charge", "charge:after"): (1, 1, "completed"),
    ("charge", "before_result_commit"): (1, 1, "completed"),
    ("charge", "after_reply"): (1, 2, "completed"),
    **{("charge", between): (1, 1, "completed") for between in BETWEEN},
}


def started(run: Run) -> int:
    return run.messages.filter(kind="tool_started").count()


@pytest.mark.parametrize(("tool", "where"), WINDOWS, ids=[f"{tool}-{at}" for tool, at in WINDOWS])
def test_one_call(tool: str, where: str, effects: Effects) -> None:
    effect_count, attempts, status = WINDOWS[tool, where]
    run = die("run", f"calls-{tool}", "s1", at=where)
    swept = sweep()
    assert swept.found == 1
    run = sound(run)
    assert (run.status, effects.count(), started(run)) == (status, effect_count, attempts)
    assert len({line["key"] for line in effects.lines()}) <= 1, "every attempt has the same key"
    if status == "orphaned":
        assert sweep().found == 0, "a sweep never decides for a person"


@pytest.mark.parametrize("where", ["after_result", "before_model:2", "before_model:3"])
def test_a_conversation_that_the_provider_refuses(where: str, effects: Effects) -> None:
    run = die("run", "minding", "s1", at=where)
    assert (sweep().found, sound(run).status, effects.count()) == (1, "paused", 1)
    assert run.messages.filter(kind="left_out").count() == 1, "one automatic attempt, and never another"
    letter = run.messages.get(kind="tool_result")
    leave_out(run.pk, letter.seq)
    assert (sweep().found, sound(run).status, effects.count()) == (1, "completed", 1)


def test_a_caller_surfaces_the_orphan_and_the_model_decides(effects: Effects) -> None:
    run = die("run", "calls-post", "s1", at="post:after")
    result = resume_run(run.pk)
    assert result.status == "completed"
    assert effects.count() == 1
    (told,) = payloads(run, "tool_result")
    assert told["outcome"] == "unknown"
    assert '"kind": "tool-durability-error"' in told["content"]
    check_messages(result.messages)
    sound(run)


def test_repeating_the_same_call_goes_on_with_the_same_run(effects: Effects) -> None:
    run = die("run", "calls-charge", "s1", at="charge:after")
    finish(start("run", "calls-charge", "s1"))
    run = sound(run)
    assert (run.status, effects.count(), Run.objects.count()) == ("completed", 1, 1)


@pytest.mark.parametrize("where", ["post:before", "post:after", "before_result_commit:2"])
def test_only_the_call_in_flight_is_in_doubt(where: str, effects: Effects) -> None:
    """Of three calls the first keeps its result, the second is the orphan, the third never started."""
    run = die("run", "posts-in-the-middle", "s1", at=where)
    sweep()
    run = sound(run)
    assert run.status == "orphaned"
    assert [line["tool"] for line in effects.lines()] == ["lookup"] + ["post"] * (where != "post:before")
    result = resume_run(run.pk)
    assert result.status == "completed"
    assert outcomes(run) == ["ok", "unknown", "cancelled"]
    assert "charge" not in {line["tool"] for line in effects.lines()}
    check_messages(result.messages)


def test_after_a_decision_the_sweep_executes_it(effects: Effects) -> None:
    finish(start("run", "calls-refund", "s1"))
    run = Run.objects.get()
    assert run.status == "awaiting-approval"
    run_and_die("approve", str(run.approvals.get().pk), point="after_decision")
    assert effects.count() == 0
    assert sweep().completed == 1
    assert effects.count() == 1
    assert sound(run).approvals.get().status == "consumed"


@pytest.mark.parametrize(("where", "count"), [("refund:before", 0), ("refund:after", 1)])
def test_an_approved_call_that_dies_is_not_approved_twice(where: str, count: int, effects: Effects) -> None:
    finish(start("run", "calls-refund", "s1"))
    run = Run.objects.get()
    approve(run.approvals.get().pk, None)
    die("sweep", at=where)
    sweep()
    run = sound(run)
    assert (run.status, effects.count(), run.approvals.get().status) == ("orphaned", count, "consumed")


def test_a_process_that_dies_in_every_attempt_is_paused(settings: object) -> None:
    settings.AGENTRUNS_MAX_ATTEMPTS = 3  # type: ignore[attr-defined]
    for action in (("run", "calls-lookup", "s1"), ("sweep",), ("sweep",)):
        die(*action, at="lookup:before")
    sweep()
    run = sound(Run.objects.get())
    assert (run.status, run.blocked_reason) == ("paused", "attempts_exhausted")
    assert resume_run(run.pk).status == "completed"


# A sender dies, or the worker of a run that is written to


def conversation(run: Run) -> list[str]:
    """List what was said to the model in a conversation, which the provider takes, without marks."""
    assert sound(run).status == "completed"
    messages = result_of(run.pk).messages
    check_messages([*messages, GO_ON])
    blocks = [block for one in messages if one["role"] == "user" for block in one["content"]]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return [text for text in texts if text not in (PROGRAM, PROGRAM_ENDS)]


@pytest.mark.parametrize(("point", "there"), [("before_start_commit", 0), ("after_start", 1)])
@pytest.mark.parametrize("opened", [True, False])
def test_a_sender_that_dies(point: str, there: int, opened: bool) -> None:
    if opened:
        start_run("calls-lookup", "do it", "s1")
    run_and_die("send", "s1", "and this", "calls-lookup", point=point)
    sweep()
    runs = list(Run.objects.all())
    assert len(runs) == (opened or there)
    for run in runs:
        assert conversation(run) == ["do it"] * opened + ["and this"] * there


@pytest.mark.parametrize(
    "point", ["after_model", "after_reply", "after_tool", "after_result", "before_finish"]
)
def test_a_worker_that_dies(point: str) -> None:
    run_and_die("run", "calls-lookup", "s1", point=point)
    run = send_message("s1", "and this")
    expire_lease(run)
    sweep()
    assert conversation(run) == ["do it", "and this"]


# What was made for a run by the process that started it

FIRST = {"SHOP_SAYS": "first", "SHOP_TOOL": "charge"}
LATER = {"SHOP_SAYS": "later", "SHOP_TOOL": "post"}


def test_a_run_killed_before_its_start_leaves_nothing_and_is_made_anew() -> None:
    run_and_die("run", "made", "s1", point="before_start_commit", **FIRST)
    assert (Run.objects.count(), Message.objects.count()) == (0, 0)
    finish(start("run", "made", "s1", **LATER))
    assert sound(Run.objects.get()).output == "later post lookup"


@pytest.mark.parametrize("where", ["after_start", "before_tool", "before_finish"])
def test_a_killed_run_goes_on_with_what_was_made_for_it(where: str) -> None:
    run = die("run", "made", "s1", at=where, **FIRST)
    (row,) = payloads(run, "run_started")
    assert (row["instructions"], row["tools"]) == ("first", ["lookup", "charge"])
    finish(start("run", "made", "s1", **LATER))
    run = sound(run)
    assert (run.status, run.output, Run.objects.count()) == ("completed", "first lookup charge", 1)


# A fallback of an overloaded model

# where the process dies at its first step -> replies that were paid and lost with it
PLACES = {
    **{"first:before": 0, "first:after": 0, "second:before": 0, "second:after": 1},
    **{"before_model": 0, "after_model": 1, "after_reply": 0, "before_finish": 1, "after_finish": 0},
}
KILLS = [(where, "nothing") for where in PLACES]
KILLS += [(where, then) for where in ("second:before", "second:after") for then in ("cancel", "pause")]
ASKS: dict[str, Callable[[Run], object]] = {
    "nothing": lambda run: None,
    "cancel": lambda run: cancel_run(run.pk),
    "pause": lambda run: pause_run(run.pk),
}


def accounts(run: Run, effects: Effects, lost: int) -> None:
    """Check that each reply that can be known counts once, and that its row says who gave it."""
    replies, failures = payloads(run, "assistant"), payloads(run, "model_failed")
    assert effects.count("second") == len(replies) + lost
    assert {row["fallback"] for row in [*replies, *failures]} <= {"second"}
    assert run.step == len(replies)
    assert run.usage.get("input_tokens", 0) == 100 * len(replies) + len(failures)
    assert problems(run.session_id) == []


@pytest.mark.parametrize(("where", "then"), KILLS)
def test_no_reply_of_a_fallback_counts_twice_when_its_process_is_killed(
    where: str, then: str, effects: Effects
) -> None:
    run = die("run", "falls-back", "s1", at=where)
    ASKS[then](run)
    finish(start("sweep"))
    run.refresh_from_db()
    accounts(run, effects, PLACES[where])
    if then == "pause":
        assert run.status == "paused"
        assert resume_run(run.pk).status == "completed"
        run.refresh_from_db()
        accounts(run, effects, PLACES[where])
    assert run.status == ("cancelled" if then == "cancel" else "completed")
    assert sum(line.get("tool") == "charge" for line in effects.lines()) == (then != "cancel")


@pytest.mark.parametrize("then", ["cancel", "pause"])
@pytest.mark.parametrize(("where", "paid"), [("first:before", 0), ("second:before", 1)])
def test_who_asks_for_a_stop_gets_it_before_the_fallback_or_after_its_reply(
    where: str, paid: int, then: str, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    worker, run = start_held("falls-back", where, effects, gate)
    ASKS[then](run)
    gate.unlink()
    finish(worker)
    run.refresh_from_db()
    assert (run.status, effects.count("second")) == ({"cancel": "cancelled", "pause": "paused"}[then], paid)
    accounts(run, effects, 0)


# An exception of a handler

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


@pytest.mark.one_database
@pytest.mark.parametrize("fails", ["charge:before", "charge:after"])
@pytest.mark.parametrize("where", BOUNDARIES)
def test_what_raised_is_asked_about_whoever_dies(
    where: str, fails: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process finds the row with the error: it asks, and does not enter the handler again."""
    die("run", "calls-charge", "s1", at=where, SHOP_FAIL=fails)
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
@pytest.mark.one_database
@pytest.mark.parametrize("where", [where for where in BOUNDARIES if where != "after_repair:2"])
def test_what_raised_and_is_not_known_waits_for_a_person(
    where: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    die("run", "calls-charge", "s1", at=where, SHOP_FAIL="charge:after", SHOP_RECONCILE="unknown")
    monkeypatch.setenv("SHOP_RECONCILE", "unknown")
    run = take_over()
    assert (run.status, outcomes(run), effects.count()) == ("orphaned", [], 1)
    evidence = payloads(run, "orphan_found")[-1]["evidence"]
    assert (ERROR in evidence, "the bank does not answer" in evidence) == (BOUNDARIES[where], True)


@pytest.mark.one_database
@pytest.mark.parametrize("where", ["after_tool", "before_result_commit", "after_result"])
def test_a_failed_call_of_a_tool_that_declares_nothing_is_in_doubt_whoever_dies(
    where: str, effects: Effects
) -> None:
    die("run", "breaks-twice", "s1", at=where)
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


@pytest.mark.one_database
@pytest.mark.parametrize("where", ["after_decision", "before_tool"])
def test_an_approval_settles_the_doubt_once_whoever_dies(where: str, effects: Effects) -> None:
    finish(start("run", "breaks-twice", "s1"))
    run = Run.objects.get()
    card = result_of(run.pk).pending[0].pk
    if where == "after_decision":
        run_and_die("approve", str(card), point=where)
    else:
        approve(card, None)
        run_and_die("sweep", point=where)
    assert uncleared("default", run) == []
    run = take_over()
    result = result_of(run.pk)
    if where == "after_decision":
        assert (run.status, effects.count(), len(uncleared("default", run))) == ("completed", 2, 1)
    else:  # started, and nobody knows
        assert (run.status, effects.count(), len(result.orphans)) == ("orphaned", 1, 1)
