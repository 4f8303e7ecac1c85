"""A real SIGKILL at each boundary around a tool call; judged by the ledger outside the database."""

from __future__ import annotations

import pytest

from agentruns import approve, resume_run
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.kills import finish, run_and_die
from tests.crash.processes import expire_lease
from tests.db.helpers import sound
from tests.effects import Effects
from tests.shop.models import Order

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
    ("annotate", "before_tool"): (0, 2, "completed"),
    ("annotate", "annotate:after"): (0, 2, "completed"),
    ("annotate", "before_result_commit"): (0, 2, "completed"),
    ("annotate", "after_result"): (0, 1, "completed"),
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
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    run = die(tool, where)
    swept = sweep()
    assert swept.found == 1
    run = sound(run)
    assert (run.status, effects.count(), started(run)) == (status, effect_count, attempts)
    assert len({line["key"] for line in effects.lines()}) <= 1, "every attempt has the same key"
    if tool == "annotate":
        assert Order.objects.get().note == "seen"
    if status == "orphaned":
        assert sweep().found == 0, "a sweep never decides for a person"


def test_a_caller_surfaces_the_orphan_and_the_model_decides(effects: Effects) -> None:
    run = die("post", "post:after")
    result = resume_run(run.pk)
    assert result.status == "completed"
    assert effects.count() == 1
    row = Message.objects.get(run=run, kind="tool_result")
    assert row.payload["outcome"] == "unknown"
    assert '"kind": "tool-durability-error"' in row.payload["content"]
    check_messages(result.messages)
    sound(run)


def test_repeating_the_same_call_goes_on_with_the_same_run(effects: Effects) -> None:
    run = die("charge", "charge:after")
    finish("run", "calls-charge", "s1")
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
    outcomes = Message.objects.filter(run=run, kind="tool_result").order_by("seq")
    assert [one.payload["outcome"] for one in outcomes] == ["ok", "unknown", "cancelled"]
    assert "charge" not in {line["tool"] for line in effects.lines()}
    check_messages(result.messages)


def test_after_a_decision_the_sweep_executes_it(effects: Effects) -> None:
    finish("run", "calls-refund", "s1")
    run = Run.objects.get()
    assert run.status == "awaiting-approval"
    run_and_die("approve", str(run.approvals.get().pk), point="after_decision")
    assert effects.count() == 0
    assert sweep().completed == 1
    assert effects.count() == 1
    assert sound(run).approvals.get().status == "consumed"


@pytest.mark.parametrize(("where", "count"), [("refund:before", 0), ("refund:after", 1)])
def test_an_approved_call_that_dies_is_not_approved_twice(where: str, count: int, effects: Effects) -> None:
    finish("run", "calls-refund", "s1")
    run = Run.objects.get()
    approve(run.approvals.get().pk, None)
    run_and_die("sweep", SHOP_KILL=where)
    expire_lease(run)
    sweep()
    run = sound(run)
    assert (run.status, effects.count(), run.approvals.get().status) == ("orphaned", count, "consumed")


@pytest.mark.parametrize("point", ["before_model", "after_model", "after_reply", "before_finish"])
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


def test_after_start_the_run_is_there(effects: Effects) -> None:
    run_and_die("run", "calls-charge", "s1", point="after_start")
    run = Run.objects.get()
    expire_lease(run)
    assert sweep().completed == 1
    assert effects.count() == 1


def test_a_process_that_dies_in_every_attempt_is_paused(settings: object) -> None:
    settings.AGENTRUNS_MAX_ATTEMPTS = 3  # type: ignore[attr-defined]
    run_and_die("run", "calls-lookup", "s1", SHOP_KILL="lookup:before")
    run = Run.objects.get()
    expire_lease(run)
    run_and_die("sweep", SHOP_KILL="lookup:before")
    expire_lease(run)
    run_and_die("sweep", SHOP_KILL="lookup:before")
    expire_lease(run)
    sweep()
    run = sound(run)
    assert (run.status, run.blocked_reason) == ("paused", "attempts_exhausted")
    assert resume_run(run.pk).status == "completed"
