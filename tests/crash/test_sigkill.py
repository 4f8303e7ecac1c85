"""A real SIGKILL at each boundary of a run; judged by the ledger outside the database."""

from __future__ import annotations

import pytest

from agentruns import approve, resume_run, send_message, start_run
from agentruns.models import Message, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.processes import expire_lease, finish, run_and_die, start
from tests.db.helpers import GO_ON, outcomes, payloads, sound
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)

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
}


def die(tool: str, where: str, agent: str = "") -> Run:
    """Run the agent that calls `tool` in a process that is killed at a place; wait out its lease."""
    inside = where.startswith(f"{tool}:")
    place = {"SHOP_KILL": where} if inside else {"point": where}
    run_and_die("run", agent or f"calls-{tool}", "s1", **place)
    run = Run.objects.get()
    expire_lease(run)
    return run


def started(run: Run) -> int:
    return run.messages.filter(kind="tool_started").count()


@pytest.mark.parametrize(("tool", "where"), WINDOWS, ids=[f"{tool}-{at}" for tool, at in WINDOWS])
def test_one_call(tool: str, where: str, effects: Effects) -> None:
    effect_count, attempts, status = WINDOWS[tool, where]
    run = die(tool, where)
    swept = sweep()
    assert swept.found == 1
    run = sound(run)
    assert (run.status, effects.count(), started(run)) == (status, effect_count, attempts)
    assert len({line["key"] for line in effects.lines()}) <= 1, "every attempt has the same key"
    if status == "orphaned":
        assert sweep().found == 0, "a sweep never decides for a person"


def test_a_caller_surfaces_the_orphan_and_the_model_decides(effects: Effects) -> None:
    run = die("post", "post:after")
    result = resume_run(run.pk)
    assert result.status == "completed"
    assert effects.count() == 1
    (told,) = payloads(run, "tool_result")
    assert told["outcome"] == "unknown"
    assert '"kind": "tool-durability-error"' in told["content"]
    check_messages(result.messages)
    sound(run)


def test_repeating_the_same_call_goes_on_with_the_same_run(effects: Effects) -> None:
    run = die("charge", "charge:after")
    finish(start("run", "calls-charge", "s1"))
    run = sound(run)
    assert (run.status, effects.count(), Run.objects.count()) == ("completed", 1, 1)


@pytest.mark.parametrize("where", ["post:before", "post:after", "before_result_commit:2"])
def test_only_the_call_in_flight_is_in_doubt(where: str, effects: Effects) -> None:
    """Of three calls the first keeps its result, the second is the orphan, the third never started."""
    run = die("post", where, "posts-in-the-middle")
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
    run_and_die("sweep", SHOP_KILL=where)
    expire_lease(run)
    sweep()
    run = sound(run)
    assert (run.status, effects.count(), run.approvals.get().status) == ("orphaned", count, "consumed")


@pytest.mark.parametrize(
    "point", ["after_start", "before_model", "after_model", "after_reply", "before_finish"]
)
def test_between_steps_nothing_is_lost_or_repeated(point: str, effects: Effects) -> None:
    run_and_die("run", "calls-charge", "s1", point=point)
    run = Run.objects.get()
    expire_lease(run)
    assert sweep().completed == 1
    assert effects.count() == 1
    sound(run)


def test_before_start_commits_there_is_nothing(effects: Effects) -> None:
    run_and_die("run", "calls-post", "s1", point="before_start_commit")
    assert (Run.objects.count(), Message.objects.count(), effects.count()) == (0, 0, 0)


def test_a_process_that_dies_in_every_attempt_is_paused(settings: object) -> None:
    settings.AGENTRUNS_MAX_ATTEMPTS = 3  # type: ignore[attr-defined]
    for action in (("run", "calls-lookup", "s1"), ("sweep",), ("sweep",)):
        run_and_die(*action, SHOP_KILL="lookup:before")
        expire_lease(Run.objects.get())
    sweep()
    run = sound(Run.objects.get())
    assert (run.status, run.blocked_reason) == ("paused", "attempts_exhausted")
    assert resume_run(run.pk).status == "completed"


# A sender dies, or the worker of a run that is written to


def conversation(run: Run) -> list[str]:
    """List what the user said in a run's conversation, which the provider takes."""
    assert sound(run).status == "completed"
    messages = result_of(run.pk).messages
    check_messages([*messages, GO_ON])
    blocks = [block for one in messages if one["role"] == "user" for block in one["content"]]
    return [block["text"] for block in blocks if block["type"] == "text"]


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


POINTS = (
    "after_start", "before_model", "after_model", "after_reply", "before_tool", "after_result",
    "before_finish",
)  # fmt: skip


@pytest.mark.parametrize("where", POINTS)
def test_a_killed_run_goes_on_with_what_was_made_for_it(where: str) -> None:
    run_and_die("run", "made", "s1", point=where, **FIRST)
    run = Run.objects.get()
    (row,) = payloads(run, "run_started")
    assert (row["instructions"], row["tools"]) == ("first", ["lookup", "charge"])
    expire_lease(run)
    finish(start("run", "made", "s1", **LATER))
    run = sound(run)
    assert (run.status, run.output, Run.objects.count()) == ("completed", "first lookup charge", 1)


def test_one_killed_before_its_start_was_committed_is_made_anew() -> None:
    run_and_die("run", "made", "s1", point="before_start_commit", **FIRST)
    assert (Run.objects.count(), Message.objects.count()) == (0, 0)
    finish(start("run", "made", "s1", **LATER))
    assert sound(Run.objects.get()).output == "later post lookup"


def test_a_queued_run_is_driven_by_another_process() -> None:
    run_and_die("start", "made", "s1", point="after_start", **FIRST)
    finish(start("sweep", **LATER))
    assert sound(Run.objects.get()).output == "first lookup charge"
