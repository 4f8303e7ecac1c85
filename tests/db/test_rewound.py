"""A journal that lost rows which a worker had seen committed: nothing acts twice, and people are asked."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

import pytest
from django.core import checks
from django.db import connection

from agentruns import (
    Agent,
    ModelReply,
    approve,
    cancel_run,
    deny,
    exceptions as errors,
    fork_run,
    get_run,
    resolve_orphan,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.engine.leases import Lease, claim
from agentruns.journal import timeline
from agentruns.journal.batch import seen_committed
from agentruns.journal.connection import separate_connection
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Control, Message, Run
from agentruns.services.data.retention import erase_session
from agentruns.services.runs.control import pause_run
from agentruns.services.runs.submit import get_or_start
from agentruns.services.sweep import hold_all, sweep
from agentruns.tools import ToolContext
from agentruns.utils import clock
from tests.admin.people import browser
from tests.db.helpers import names, outcomes, payloads, run_turns, sound, the_run
from tests.db.rewinding import TOOLS, At, Copy, calls_of, resume_quietly, second_handler
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

on_postgresql = pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has no server")
POSTS = {"tools": [call("post", text="x")]}


def calls(*names: str) -> dict[str, Any]:
    """Build a turn that calls the tools with their number in it."""
    return {"tools": [call(name, number=number) for number, name in enumerate(names, 1)]}


def begin(*turns: object) -> Run:
    return start_run(shop_agent("agent", *turns, tools=TOOLS), "do it", "s1", idempotency_key="k1")


def a_copy_in_time(*turns: object) -> tuple[Copy, Run]:
    """Start a run and copy the journal right after that."""
    run = begin(*turns)
    return Copy(), run


def gated_run() -> Run:
    """Run until a gated call waits for a person."""
    return the_run(run_turns(calls("gated"), tools=TOOLS))


def lost_second(effects: Effects, first: str, second: str) -> Run:
    """Make a held run whose reply is left, and whose second call has acted; its start is lost."""
    copies: list[Copy] = []
    At.todo = lambda: copies.append(Copy())
    run = begin(calls(first, second))
    second_handler(lambda: copies[0].restore())
    sweep()
    run = get_run(run.pk)
    assert (run.status, effects.count()) == ("paused", 2)
    return run


def page(path: str) -> str:
    return browser("superuser").get(path, follow=True).content.decode()


def test_a_result_is_not_built_onto_what_is_left(effects: Effects, caplog: pytest.LogCaptureFixture) -> None:
    """The start of the call is lost while its handler works, and another look at it starts nothing."""
    copy, run = a_copy_in_time(calls("acting"))
    At.todo = copy.restore
    with caplog.at_level(logging.CRITICAL):
        assert sweep().errors == 0
    run = get_run(run.pk)
    assert (run.status, run.blocked_reason.partition(":")[0]) == ("paused", "journal_rewound")
    assert "acting (key " in run.blocked_reason, "the call whose start is lost is named"
    assert "journal was rewound" in caplog.text
    assert problems(run.session_id) == []
    assert [payload["restored"] for payload in payloads(run, "run_paused")] == [True]
    (late,) = payloads(run, "late_result")
    assert (late["lost"], late["content"]) == (True, "acting done"), "what its handler returned is kept"
    assert sweep().driven == 0, "nothing goes on before a person says so"
    assert effects.count() == 1
    # The model is asked again, and what it asks for is put before a person.
    assert resume_run(run.pk).status == "awaiting-approval"
    card = Approval.objects.get()
    assert "may have been called" in card.why
    deny(card.pk, None, "it was")
    assert (resume_run(run.pk).status, effects.count()) == ("completed", 1)
    assert problems(run.session_id) == []


@pytest.mark.parametrize("verdict", ["occurred", "unknown"])
def test_a_call_whose_start_is_lost_waits_for_a_verdict(verdict: str, effects: Effects) -> None:
    """The reply that asks for two calls is left, the start of the second is lost."""
    run_id = lost_second(effects, "acting", "acting").pk
    resume_quietly(run_id)
    sweep()
    assert get_run(run_id).status == "orphaned", "the first has a start and no result"
    resolve_orphan(run_id, calls_of(run_id)[0].id, "occurred", None, result="it was")
    sweep()
    assert get_run(run_id).status == "orphaned", "the start of the second may be lost"
    second = calls_of(run_id)[1].id
    with pytest.raises(errors.RunStateError, match="it did happen"):  # its return was kept as evidence
        resolve_orphan(run_id, second, "not_occurred", None)
    resolve_orphan(run_id, second, verdict, None, result="it was, too")
    sweep()
    assert (sound(get_run(run_id)).status, effects.count()) == ("completed", 2)


@pytest.mark.parametrize(
    ("first", "ends", "acted"),
    [
        ("charging", ["ok", "ok"], ["charging", "charging"]),
        ("looking", ["ok", "ok"], ["looking", "charging", "looking"]),  # the start travels with the result
        ("acting", ["unknown", "ok"], ["acting", "charging"]),  # what may be lost is not told as not run
    ],
)
def test_reconcile_is_asked_before_a_first_attempt(
    first: str, ends: list[str], acted: list[str], effects: Effects
) -> None:
    """The second call, a charge, was made; its start is lost, and its key finds it."""
    run = lost_second(effects, first, "charging")
    assert resume_run(run.pk).status == "completed"
    run = sound(run)
    assert (outcomes(run), names(effects)) == (ends, acted)
    assert payloads(run, "tool_result")[1]["reconciled"] is True


@pytest.mark.parametrize("verdict", ["occurred", "not_occurred"])
def test_an_approval_from_before_the_loss_starts_nothing(verdict: str, effects: Effects) -> None:
    """It was given, and perhaps used: then the use is lost. A verdict lets the call run, or does not."""
    run = gated_run()
    approve(Approval.objects.get().pk, None)
    if verdict == "occurred":
        At.todo = Copy().restore
        sweep()
    else:
        hold_all()
    assert get_run(run.pk).status == "paused"
    resume_quietly(run.pk)
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("orphaned", verdict == "occurred")
    for path in (f"/admin/agentruns/run/{run.pk}/change/", "/admin/agentruns/run/in-doubt/"):
        assert "may have been started" in page(path), path
    resolve_orphan(run.pk, calls_of(run.pk)[0].id, verdict, None, result="it was", evidence="the shop")
    sweep()
    assert (sound(run).status, effects.count()) == ("completed", 1)


def test_an_approval_given_after_the_loss_counts_until_a_second_one(effects: Effects) -> None:
    run = gated_run()
    assert hold_all() == 1
    card = Approval.objects.get()
    assert "the call may have been made" in page(f"/admin/agentruns/approval/{card.pk}/change/")
    approve(card.pk, None)
    copy = Copy()
    assert (resume_run(run.pk).status, effects.count()) == ("completed", 1)
    copy.restore()
    seen_committed.clear()  # as in processes that were started since
    assert hold_all() == 1
    resume_run(run.pk)
    assert (get_run(run.pk).status, effects.count()) == ("orphaned", 1)


def test_a_process_knows_a_run_that_ended_before_the_loss(effects: Effects) -> None:
    """The run ended, then the journal went back to its start: this process holds it and drives nothing."""
    copy, run = a_copy_in_time(calls("acting"))
    sweep()
    assert get_run(run.pk).status == "completed"
    copy.restore()
    assert get_run(run.pk).status == "queued"
    sweep()
    assert get_run(run.pk).blocked_reason.startswith("journal_rewound")
    assert effects.count() == 1


def test_a_loss_that_is_told_is_not_told_again_and_a_second_one_is(effects: Effects) -> None:
    """Another process held the run; this one remembers the lost rows, too, and goes on with what is left."""
    copy, run = a_copy_in_time(calls("acting"))
    sweep()
    copy.restore()
    hold_all()
    assert (resume_run(run.pk).status, len(payloads(run, "run_paused"))) == ("awaiting-approval", 1)
    second = Copy()
    deny(Approval.objects.get().pk, None, "it was")
    sweep()
    assert get_run(run.pk).status == "completed"
    second.restore()
    deny(Approval.objects.get().pk, None, "it was")
    sweep()
    assert get_run(run.pk).blocked_reason.startswith("journal_rewound")
    assert effects.count() == 1


def test_a_pruned_session_is_not_a_lost_one(effects: Effects) -> None:
    run = the_run(run_turns(POSTS))
    erase_session("s1")
    assert seen_committed.get(run.session_id)
    with pytest.raises(errors.JournalUnreadableError):  # and not as one to be held
        load("default", run.session_id, run.pk)


def test_an_epoch_that_was_given_twice_holds_for_one_owner(effects: Effects) -> None:
    """Each of two workers has epoch 1: what the old one does changes nothing of the new one's."""
    run = start_run(shop_agent("epochs"), "do it", "s1")
    copy = Copy()
    old = claim("default", run.pk)
    copy.restore()
    new = claim("default", run.pk)
    assert old is not None and new is not None and old.epoch == new.epoch == 1
    old.release(failed=True)
    assert get_run(run.pk).lease_owner == new.owner
    with pytest.raises(errors.LeaseLostError):
        old.extend()
    refused = Batch(DatabaseStore().load(run.session_id, run.pk), old.epoch, owner=old.owner)
    refused.add("run_resumed", {"actor": None, "epoch": 1, "reason": "stale"})
    with pytest.raises(errors.JournalConflictError):
        DatabaseStore().append(refused)
    new.extend()
    Lease("default", run.pk, run.session_id, new.epoch).extend()  # of older code, which names no owner


def test_the_same_task_asked_again_has_the_same_keys(effects: Effects) -> None:
    """A restore took the run, and its client asks for it again: the outside world knows its calls."""
    for session in ("s1", None):
        effects_before = effects.count()
        agent = shop_agent(f"again-{session}", calls("charging"), tools=TOOLS)
        copy, ran = Copy(), []
        for _ in range(2):
            ran.append(get_or_start(agent, "do it", session, idempotency_key=f"order-{session}").pk)
            sweep()
            seen_committed.clear()  # as in a process that was started since
            if len(ran) == 1:
                copy.restore()
        assert ran[0] != ran[1]
        lines = effects.lines()[effects_before:]
        assert len({line["key"] for line in lines}) == 1, session
    assert run_turns(POSTS, session="other").status == "completed"
    assert len({line["key"] for line in effects.lines()}) == 3


@pytest.mark.parametrize(("tool", "ends"), [("acting", "awaiting-approval"), ("charging", "completed")])
def test_hold_all_marks_what_was_paused_too(tool: str, ends: str, effects: Effects) -> None:
    """What was not charged is charged once reconcile has said so; a person decides on another call."""
    run = begin(calls(tool))
    pause_run(run.pk)
    assert hold_all() == 1
    assert hold_all() == 0, "it is marked already"
    assert (resume_run(run.pk).status, effects.count()) == (ends, tool == "charging")
    verdicts = [each["verdict"] for each in payloads(sound(get_run(run.pk)), "orphan_resolved")]
    assert verdicts == ["not_occurred"] * (tool == "charging")


@on_postgresql  # SQLite is asked for no time: its clock is this machine's
def test_a_first_commit_is_patient_where_the_time_is_asked(effects: Effects, settings: Any) -> None:
    """The server ends the thread's connection while the model writes: its reply is stored all the same."""
    settings.AGENTRUNS_LEASE_SECONDS = 20
    asked: list[Any] = []

    class Breaking:
        def propose(self, request: Any) -> ModelReply:
            asked.append(request)
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                pid = cursor.fetchone()[0]
            other = separate_connection("default")
            assert other is not None
            with other.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            other.close()
            clock._readings.clear()
            return ModelReply([{"type": "text", "text": "written once"}], "end_turn")

    agent = Agent("patient", instructions="x", model=Breaking(), tools=(), starters="anyone")
    result = run_agent(agent, "do it", "s1", idempotency_key="k")
    assert (result.status, result.output, len(asked)) == ("completed", "written once", 1)


@on_postgresql
def test_a_promoted_server_lends_no_run_before_all_are_held(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    """The note says timeline 7, the server is at 1: rows may be missing that nobody here has seen."""
    run = begin(POSTS)
    sweep(run_id=UUID(int=0))
    assert Control.objects.get(name="server").reason == "00000001"
    was = {"reason": "00000007", "actor": "asynchronous", "seen_at": "2026-01-01T00:00Z"}
    Control.objects.update_or_create(name="server", defaults=was)
    assert claim("default", run.pk) is None, "the database itself refuses"
    other = separate_connection("default")
    assert other is not None
    with other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM agentruns_session FOR UPDATE")
        with pytest.raises(errors.JournalLockedError):
            sweep()
        cursor.execute("ROLLBACK")
    other.close()
    assert Control.objects.get(name="server").reason == "00000007", "until all are held it is the gate"
    with caplog.at_level(logging.CRITICAL):
        sweep()
    assert "was on timeline 00000007 and is on 00000001" in caplog.text
    run = get_run(run.pk)
    assert (run.status, effects.count()) == ("paused", 0)
    assert Control.objects.get(name="server").reason == "00000001"
    assert [each.id for each in checks.run_checks(databases=["default"])].count("agentruns.W018") == 1
    assert "held: the database lost rows" in page("/admin/")
    assert resume_run(run.pk).status == "awaiting-approval"


@on_postgresql
def test_a_server_whose_log_is_shorter_than_it_was_has_every_run_held(effects: Effects) -> None:
    """A snapshot of the server was restored: its timeline is the same, and its notes are, too.

    A synchronous replica that was promoted has lost nothing.
    """
    run = begin(POSTS)
    was = {"reason": "00000007", "actor": "synchronous", "seen_at": "2026-01-01T00:00Z"}
    Control.objects.update_or_create(name="server", defaults=was)
    assert (sweep().completed, get_run(run.pk).status, effects.count()) == (1, "completed", 1)
    run = start_run("agent", "more", "s2", idempotency_key="k2")
    timeline.positions["default"] = 2**62
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 1)
    assert resume_run(run.pk).status == "awaiting-approval"
    assert sweep().found == 0, "it is told once"
    assert get_run(run.pk).status == "awaiting-approval"


@on_postgresql
def test_a_thread_that_asks_later_does_not_make_the_log_look_shorter(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = timeline.server

    def overtaken(alias: str) -> timeline.Server | None:
        server = ask(alias)
        assert server is not None
        timeline.positions[alias] = server.position + 2**20  # by the thread that asked a moment later
        return server

    sweep()
    monkeypatch.setattr(timeline, "server", overtaken)
    run = begin(POSTS)
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("completed", 1)


def test_an_earlier_verdict_says_nothing_of_an_attempt_that_is_lost(effects: Effects) -> None:
    """The first attempt did not happen. The second did, and its rows are lost: the verdict is left."""
    died: list[int] = []

    @tool
    def pays(ctx: ToolContext, number: int) -> str:
        """Die, and pay when it is called again."""
        if not died:
            died.append(number)
            raise KeyboardInterrupt
        return act("pays", ctx, number=number)

    run = start_run(shop_agent("p", calls("pays"), tools=[pays]), "do it", "s1")
    with pytest.raises(KeyboardInterrupt):
        sweep()
    sweep()
    resolve_orphan(run.pk, calls_of(run.pk)[0].id, "not_occurred", None)
    copy = Copy()
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("completed", 1)
    copy.restore()
    seen_committed.clear()
    assert hold_all() == 1
    resume_run(run.pk)
    assert (effects.count(), outcomes(run)) == (1, ["unknown"])


def test_a_run_that_is_gone_altogether_ends_no_worker_and_frees_none_before_it(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = Copy()
    copy, run = a_copy_in_time(calls("acting"))
    sweep()
    second = shop_agent("second", {"tools": [call("looking", number=2)]}, tools=TOOLS)
    start_run(second, "more", "s1", idempotency_key="k2")
    At.todo = copy.restore
    with caplog.at_level(logging.CRITICAL):
        sweep()
    sweep()
    assert get_run(run.pk).blocked_reason.startswith("journal_rewound")
    assert names(effects) == ["acting", "looking"]
    nothing.restore()
    At.todo = nothing.restore
    begin(calls("acting"))
    with caplog.at_level(logging.CRITICAL):
        sweep()
    assert (Run.objects.count(), Message.objects.count(), effects.count()) == (0, 0, 3)
    assert "is gone altogether" in caplog.text


def test_a_lost_call_that_was_not_made_does_not_run_after_an_unknown_one(effects: Effects) -> None:
    """As any later call of the reply: the model decides anew, knowing that the first is in doubt."""

    def die() -> None:
        raise KeyboardInterrupt

    At.todo = die
    turn = {"tools": [call("acting", number=1), call("charging", number=2)]}
    run = start_run(shop_agent("both", turn, tools=TOOLS), "do it", "s1", idempotency_key="k")
    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert (hold_all(), names(effects), resume_run(run.pk).status) == (1, ["acting"], "completed")
    assert (outcomes(run), names(effects)) == (["unknown", "cancelled"], ["acting"])
    assert problems(run.session_id) == []


@pytest.mark.parametrize("way", ["the next run", "a fork"])
def test_what_follows_a_loss_takes_no_call_for_new(way: str, effects: Effects) -> None:
    """Cancelled, the held run leaves a doubt; a fork of it has the call of its origin."""
    run = lost_second(effects, "looking", "acting")
    turn = {"tools": [call("acting", number=2)]}
    after = shop_agent("after", turn, turn, tools=TOOLS)  # the first reply of a fork is its origin's
    if way == "a fork":
        later = fork_run(run.pk, Message.objects.filter(run=run).latest("seq").seq, agent=after)
    else:
        cancel_run(run.pk)
        assert outcomes(run)[-1] == "unknown"
        later = start_run(after, "go on please", "s1", idempotency_key="k2")
    sweep()
    assert (get_run(later.pk).status, names(effects).count("acting")) == ("awaiting-approval", 1)
