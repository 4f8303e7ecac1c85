"""A journal that lost rows which a worker had seen committed: nothing acts twice, and people are asked."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import connection
from django.test import Client

from agentruns import (
    Agent,
    ModelReply,
    approve,
    cancel_run,
    deny,
    fork_run,
    get_run,
    resolve_orphan,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.engine.leases import Lease, claim
from agentruns.exceptions import (
    JournalConflictError,
    JournalLockedError,
    JournalUnreadableError,
    LeaseLostError,
    RunStateError,
)
from agentruns.journal import committed, timeline
from agentruns.journal.connection import separate_connection
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.journal.verify import problems
from agentruns.management.commands import resume_runs
from agentruns.models import Approval, Control, Message, Run
from agentruns.services.control import pause_run
from agentruns.services.retention import erase_session
from agentruns.services.runs import get_or_start
from agentruns.services.sweep import hold_all, sweep
from agentruns.tools import ToolContext
from agentruns.utils import clock
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run, user
from tests.db.rewinding import TOOLS, At, Copy, calls_of, resume_quietly, second_handler
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def a_copy_in_time(*turns: object, session: str = "s1", key: str = "k1") -> tuple[Any, Run]:
    """Start a run and copy the journal right after that."""
    agent = shop_agent(f"agent-{session}", *turns, tools=TOOLS)
    run = start_run(agent, "do it", session, idempotency_key=key)
    return Copy(), run


def test_a_result_is_not_built_onto_what_is_left(effects: Effects, caplog: pytest.LogCaptureFixture) -> None:
    """The start of the call is lost while its handler works, and another look at it starts nothing."""
    copy, run = a_copy_in_time({"tools": [call("acting", number=1)]})
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
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 1
    assert problems(run.session_id) == []


@pytest.mark.parametrize("verdict", ["occurred", "unknown"])
def test_a_call_whose_start_is_lost_waits_for_a_verdict(verdict: str, effects: Effects) -> None:
    """The reply that asks for two calls is left, the start of the second is lost."""
    copies: list[Copy] = []
    At.todo = lambda: copies.append(Copy())
    turn = {"tools": [call("acting", number=1), call("acting", number=2)]}
    run = start_run(shop_agent("two", turn, tools=TOOLS), "do it", "s1", idempotency_key="k")
    second_handler(lambda: copies[0].restore())
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 2)
    run_id = run.pk
    resume_quietly(run_id)
    sweep()
    assert get_run(run_id).status == "orphaned", "the first has a start and no result"
    resolve_orphan(run_id, calls_of(run_id)[0].id, "occurred", None, result="it was")
    sweep()
    assert get_run(run_id).status == "orphaned", "the start of the second may be lost"
    second = calls_of(run_id)[1].id
    with pytest.raises(RunStateError, match="it did happen"):  # its return was kept as evidence
        resolve_orphan(run_id, second, "not_occurred", None)
    resolve_orphan(run_id, second, verdict, None, result="it was, too")
    sweep()
    assert effects.count() == 2
    assert get_run(run_id).status == "completed"
    assert problems(get_run(run_id).session_id) == []


def test_reconcile_is_asked_before_a_first_attempt(effects: Effects) -> None:
    """Both charges were made; the start of the second is lost, and its key finds it."""
    copies: list[Copy] = []
    At.todo = lambda: copies.append(Copy())
    turn = {"tools": [call("charging", number=1), call("charging", number=2)]}
    run = start_run(shop_agent("charges", turn, tools=TOOLS), "do it", "s1", idempotency_key="k")
    second_handler(lambda: copies[0].restore())
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 2)
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 2
    run = get_run(run.pk)
    assert outcomes(run) == ["ok", "ok"]
    assert [payload.get("reconciled") for payload in payloads(run, "tool_result")] == [True, True]
    assert problems(run.session_id) == []


def test_reconcile_is_asked_of_a_call_that_follows_a_result(effects: Effects) -> None:
    """The start of a charge travels with the result before it: not after a loss."""
    copies: list[Copy] = []
    At.todo = lambda: copies.append(Copy())
    turn = {"tools": [call("looking", number=1), call("charging", number=2)]}
    run = start_run(shop_agent("looks", turn, tools=TOOLS), "do it", "s1", idempotency_key="k")
    second_handler(lambda: copies[0].restore())
    sweep()
    assert get_run(run.pk).status == "paused"
    assert resume_run(run.pk).status == "completed"
    assert names(effects) == ["looking", "charging", "looking"]
    assert problems(run.session_id) == []


def test_what_was_not_charged_is_charged_after_reconcile_has_said_so(effects: Effects) -> None:
    _, run = a_copy_in_time({"tools": [call("charging", number=1)]})
    hold_all()
    assert resume_run(run.pk).status == "completed"
    run = get_run(run.pk)
    assert effects.count() == 1
    verdicts = [payload["verdict"] for payload in payloads(run, "orphan_resolved")]
    assert verdicts == ["not_occurred"]
    assert problems(run.session_id) == []


def test_an_approval_from_before_the_loss_starts_nothing(effects: Effects) -> None:
    """It was given and used; the use is lost. One that a person gives afterwards counts."""
    run_turns({"tools": [call("gated", number=1)]}, session="s1", tools=TOOLS)
    run = Run.objects.get()
    approve(Approval.objects.get().pk, None)
    copy = Copy()
    At.todo = copy.restore
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 1)
    resume_quietly(run.pk)
    sweep()
    assert get_run(run.pk).status == "orphaned"
    assert effects.count() == 1
    (lost,) = calls_of(run.pk)
    client = Client()
    client.force_login(user("boss", is_staff=True, is_superuser=True))
    for page in (f"/admin/agentruns/run/{run.pk}/change/", "/admin/agentruns/run/in-doubt/"):
        answer = client.get(page, follow=True)
        assert (answer.status_code, "may have been started" in answer.content.decode()) == (200, True), page
    resolve_orphan(run.pk, lost.id, "occurred", None, result="it was")
    sweep()
    assert get_run(run.pk).status == "completed"
    assert effects.count() == 1
    assert problems(run.session_id) == []


def test_a_call_that_was_not_made_runs_after_that_verdict(effects: Effects) -> None:
    run_turns({"tools": [call("gated", number=1)]}, session="s1", tools=TOOLS)
    run = Run.objects.get()
    approve(Approval.objects.get().pk, None)
    hold_all()
    resume_quietly(run.pk)
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("orphaned", 0)
    resolve_orphan(run.pk, calls_of(run.pk)[0].id, "not_occurred", None, evidence="the shop says so")
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("completed", 1)
    assert problems(run.session_id) == []


def test_an_approval_given_after_the_loss_counts(effects: Effects) -> None:
    run_turns({"tools": [call("gated", number=1)]}, session="s1", tools=TOOLS)
    run = Run.objects.get()
    hold_all()
    card = Approval.objects.get()
    client = Client()
    client.force_login(user("boss", is_staff=True, is_superuser=True))
    page = client.get(f"/admin/agentruns/approval/{card.pk}/change/").content.decode()
    assert "the call may have been made" in page
    approve(card.pk, None)
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 1


def test_a_process_knows_a_run_that_ended_before_the_loss(effects: Effects) -> None:
    """The run ended, then the journal went back to its start: this process holds it and drives nothing."""
    copy, run = a_copy_in_time({"tools": [call("acting", number=1)]})
    sweep()
    assert get_run(run.pk).status == "completed"
    copy.restore()
    assert get_run(run.pk).status == "queued"
    sweep()
    assert get_run(run.pk).blocked_reason.startswith("journal_rewound")
    assert effects.count() == 1


def test_a_loss_that_is_told_is_not_told_again_and_a_second_one_is(effects: Effects) -> None:
    """Another process held the run; this one remembers the lost rows, too, and goes on with what is left."""
    copy, run = a_copy_in_time({"tools": [call("acting", number=1)]})
    sweep()
    copy.restore()
    hold_all()
    assert resume_run(run.pk).status == "awaiting-approval"
    assert len(payloads(run, "run_paused")) == 1
    second = Copy()
    deny(Approval.objects.get().pk, None, "it was")
    sweep()
    assert get_run(run.pk).status == "completed"
    second.restore()
    deny(Approval.objects.get().pk, None, "it was")
    sweep()
    assert get_run(run.pk).blocked_reason.startswith("journal_rewound")
    assert effects.count() == 1


def test_a_run_that_is_gone_altogether_ends_no_worker(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Copy()
    start_run(shop_agent("gone", {"tools": [call("acting", number=1)]}, tools=TOOLS), "do it", "s1")
    At.todo = copy.restore
    with caplog.at_level(logging.CRITICAL):
        sweep()
    assert (Run.objects.count(), Message.objects.count(), effects.count()) == (0, 0, 1)
    assert "is gone altogether" in caplog.text


def test_a_pruned_session_is_not_a_lost_one(effects: Effects) -> None:
    run = the_run(run_turns({"tools": [call("post", text="x")]}))
    erase_session(run.session.key)
    assert committed.last_row(run.session_id)
    with pytest.raises(JournalUnreadableError):  # and not as one to be held
        load("default", run.session_id, run.pk)


def test_an_epoch_that_was_given_twice_holds_for_one_owner(effects: Effects) -> None:
    """Each of two workers has epoch 1: what the old one does changes nothing of the new one's."""
    run = start_run(shop_agent("epochs"), "do it", "s1")
    copy = Copy()
    old = claim("default", run.pk)
    copy.restore()
    new = claim("default", run.pk)
    assert old is not None
    assert new is not None
    assert (old.epoch, new.epoch) == (1, 1)
    old.release(failed=True)
    assert get_run(run.pk).lease_owner == new.owner
    with pytest.raises(LeaseLostError):
        old.extend()
    refused = Batch(DatabaseStore().load(run.session_id, run.pk), old.epoch, owner=old.owner)
    refused.add("run_resumed", {"actor": None, "epoch": 1, "reason": "stale"})
    with pytest.raises(JournalConflictError):
        DatabaseStore().append(refused)
    new.extend()


def test_the_same_task_asked_again_has_the_same_keys(effects: Effects) -> None:
    """A restore took the run, and its client asks for it again: the outside world knows its calls."""
    for session in ("s1", None):
        effects_before = effects.count()
        agent = shop_agent(f"again-{session}", {"tools": [call("charging", number=1)]}, tools=TOOLS)
        copy, ran = Copy(), []
        for _ in range(2):
            ran.append(get_or_start(agent, "do it", session, idempotency_key=f"order-{session}")[0].pk)
            sweep()
            committed._last.clear()  # as in a process that was started since
            if len(ran) == 1:
                copy.restore()
        assert ran[0] != ran[1]
        lines = effects.lines()[effects_before:]
        assert len({line["key"] for line in lines}) == 1, session
    other = run_turns({"tools": [call("post", text="x")]}, session="other")
    assert len({line["key"] for line in effects.lines()}) == 3
    assert other.status == "completed"


def test_hold_all_marks_what_was_paused_too(effects: Effects) -> None:
    _, run = a_copy_in_time({"tools": [call("post", text="x")]})
    pause_run(run.pk)
    assert hold_all() == 1
    assert hold_all() == 0, "it is marked already"
    assert resume_run(run.pk).status == "awaiting-approval"
    assert effects.count() == 0


def test_a_first_commit_is_patient_where_the_time_is_asked(effects: Effects, settings: Any) -> None:
    """The server ends the thread's connection while the model writes: its reply is stored all the same."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite is asked for no time: its clock is this machine's")
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


def noted(timeline: str, replication: str) -> None:
    Control.objects.update_or_create(
        name="server", defaults={"reason": timeline, "actor": replication, "seen_at": "2026-01-01T00:00Z"}
    )


def test_a_promoted_server_lends_no_run_before_all_are_held(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    """The note says timeline 7, the server is at 1: rows may be missing that nobody here has seen."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no replicas")
    run = start_run(shop_agent("moved", {"tools": [call("post", text="x")]}), "do it", "s1")
    sweep(run_id=UUID(int=0))
    assert Control.objects.get(name="server").reason == "00000001"
    noted("00000007", "asynchronous")
    assert claim("default", run.pk) is None, "the database itself refuses"
    with caplog.at_level(logging.CRITICAL):
        sweep()
    assert "was on timeline 00000007 and is on 00000001" in caplog.text
    run = get_run(run.pk)
    assert (run.status, effects.count()) == ("paused", 0)
    assert Control.objects.get(name="server").reason == "00000001"
    found = [each for each in checks.run_checks(databases=["default"]) if each.id == "agentruns.W018"]
    assert len(found) == 1
    client = Client()
    client.force_login(user("boss", is_staff=True, is_superuser=True))
    assert "held: the database lost rows" in client.get("/admin/").content.decode()
    assert resume_run(run.pk).status == "awaiting-approval"


def test_a_server_whose_log_is_shorter_than_it_was_has_every_run_held(effects: Effects) -> None:
    """A snapshot of the server was restored: its timeline is the same, and its notes are, too."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no position")
    sweep()
    run = start_run(shop_agent("back", {"tools": [call("post", text="x")]}), "do it", "s1")
    committed.take_position("default", 2**62)
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 0)
    assert resume_run(run.pk).status == "awaiting-approval"
    assert sweep().found == 0, "it is told once"
    assert get_run(run.pk).status == "awaiting-approval"


def test_a_thread_that_asks_later_does_not_make_the_log_look_shorter(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no position")
    ask = timeline.server

    def overtaken(alias: str) -> timeline.Server | None:
        server = ask(alias)
        assert server is not None
        committed.take_position(alias, server.position + 2**20)  # by the thread that asked a moment later
        return server

    sweep()
    monkeypatch.setattr(timeline, "server", overtaken)
    run = start_run(shop_agent("two", {"tools": [call("post", text="x")]}), "do it", "s1")
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("completed", 1)


def test_a_promoted_synchronous_replica_has_lost_nothing(effects: Effects) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no replicas")
    run = start_run(shop_agent("sync", {"tools": [call("post", text="x")]}), "do it", "s1")
    noted("00000007", "synchronous")
    assert sweep().completed == 1
    assert (get_run(run.pk).status, effects.count()) == ("completed", 1)


def test_a_watching_worker_outlives_any_error_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def failing(**options: Any) -> Any:
        seen.append(1)
        if len(seen) == 1:
            raise KeyError("a call that is not in the journal any more")
        monkeypatch.setattr(resume_runs.Stop, "__call__", lambda stop: True)
        return resume_runs.Swept()

    monkeypatch.setattr(resume_runs, "sweep", failing)
    call_command("resume_runs", "--watch")
    assert len(seen) == 2


def test_a_lease_of_older_code_is_compared_by_its_epoch(effects: Effects) -> None:
    run = start_run(shop_agent("plain"), "do it", "s1")
    taken = claim("default", run.pk)
    assert taken is not None
    Lease("default", run.pk, run.session_id, taken.epoch).extend()


def lost_second(*, first: str, second: str, effects: Effects) -> Run:
    """Make a held run whose reply is left, and whose second call has acted; its start is lost."""
    copies: list[Copy] = []
    At.todo = lambda: copies.append(Copy())
    turn = {"tools": [call(first, number=1), call(second, number=2)]}
    run = start_run(shop_agent("second", turn, tools=TOOLS), "do it", "s1", idempotency_key="k")
    second_handler(lambda: copies[0].restore())
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 2)
    return get_run(run.pk)


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

    run = start_run(shop_agent("p", {"tools": [call("pays", number=1)]}, tools=[pays]), "do it", "s1")
    with pytest.raises(KeyboardInterrupt):
        sweep()
    sweep()
    resolve_orphan(run.pk, calls_of(run.pk)[0].id, "not_occurred", None)
    copy = Copy()
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("completed", 1)
    copy.restore()
    committed.forget()
    assert hold_all() == 1
    resume_run(run.pk)
    assert effects.count() == 1
    assert outcomes(run) == ["unknown"]


def test_a_second_loss_is_marked_as_well(effects: Effects) -> None:
    run_turns({"tools": [call("gated", number=1)]}, session="s1", tools=TOOLS)
    run = Run.objects.get()
    assert hold_all() == 1
    approve(Approval.objects.get().pk, None)
    copy = Copy()
    assert resume_run(run.pk).status == "completed"
    copy.restore()
    committed.forget()  # as in processes that were started since
    assert hold_all() == 1
    resume_run(run.pk)
    assert (get_run(run.pk).status, effects.count()) == ("orphaned", 1)


def test_a_run_that_is_gone_does_not_free_the_one_before_it(effects: Effects) -> None:
    first = shop_agent("first", {"tools": [call("acting", number=1)]}, tools=TOOLS)
    run = start_run(first, "do it", "s1", idempotency_key="k")
    copy = Copy()
    sweep()
    second = shop_agent("second", {"tools": [call("looking", number=2)]}, tools=TOOLS)
    start_run(second, "more", "s1", idempotency_key="k2")
    At.todo = copy.restore
    sweep()
    sweep()
    assert get_run(run.pk).blocked_reason.startswith("journal_rewound")
    assert names(effects) == ["acting", "looking"]


def test_a_call_that_may_be_lost_is_not_told_as_not_run(effects: Effects) -> None:
    """Who resumes has the first call told as unknown; the second is asked about, and was made."""
    run = lost_second(first="acting", second="charging", effects=effects)
    assert resume_run(run.pk).status == "completed"
    assert outcomes(run) == ["unknown", "ok"]
    assert effects.count() == 2


def test_a_lost_call_that_was_not_made_does_not_run_after_an_unknown_one(effects: Effects) -> None:
    """As any later call of the reply: the model decides anew, knowing that the first is in doubt."""

    def die() -> None:
        raise KeyboardInterrupt

    At.todo = die
    turn = {"tools": [call("acting", number=1), call("charging", number=2)]}
    run = start_run(shop_agent("both", turn, tools=TOOLS), "do it", "s1", idempotency_key="k")
    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert (hold_all(), names(effects)) == (1, ["acting"])
    assert resume_run(run.pk).status == "completed"
    assert (outcomes(run), names(effects)) == (["unknown", "cancelled"], ["acting"])
    assert problems(run.session_id) == []


def test_a_run_that_is_cancelled_after_a_loss_leaves_a_doubt(effects: Effects) -> None:
    run = lost_second(first="looking", second="acting", effects=effects)
    cancel_run(run.pk)
    assert outcomes(run)[-1] == "unknown"
    after = shop_agent("after", {"tools": [call("acting", number=2)]}, tools=TOOLS)
    start_run(after, "go on please", "s1", idempotency_key="k2")
    sweep()
    assert Approval.objects.get(run__agent="after").status == "pending"
    assert names(effects).count("acting") == 1


def test_a_fork_of_a_held_run_takes_no_call_for_new(effects: Effects) -> None:
    run = lost_second(first="looking", second="acting", effects=effects)
    turn = {"tools": [call("acting", number=2)]}
    again = shop_agent("again", turn, turn, tools=TOOLS)  # its first reply is its origin's
    last = Message.objects.filter(run=run).latest("seq").seq
    fork = fork_run(run.pk, last, agent=again)
    sweep()
    assert get_run(fork.pk).status == "awaiting-approval"
    assert names(effects).count("acting") == 1


def test_a_run_that_is_locked_is_held_before_the_server_is_noted(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is held no process may claim it: the note of the server is the gate."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no replicas")
    run = start_run(shop_agent("locked", {"tools": [call("post", text="x")]}), "do it", "s1")
    noted("00000007", "asynchronous")
    other = separate_connection("default")
    assert other is not None
    with other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM agentruns_session FOR UPDATE")
        with pytest.raises(JournalLockedError):
            sweep()
        cursor.execute("ROLLBACK")
    other.close()
    assert (Control.objects.get(name="server").reason, effects.count()) == ("00000007", 0)
    sweep()
    assert (get_run(run.pk).status, effects.count()) == ("paused", 0)
