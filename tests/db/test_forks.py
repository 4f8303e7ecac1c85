"""A run done again: from a row of its journal, or from the start. The world outside is the judge."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection, connections, transaction

from agentruns import (
    approve,
    exceptions as errors,
    pause_run,
    replay_run,
    resume_run,
    run_agent,
    start_run,
    state_at,
    tool,
)
from agentruns.engine.leases import claim
from agentruns.engine.worker import advance
from agentruns.journal import copies
from agentruns.journal.read import session_rows
from agentruns.journal.store import Batch, load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Notification, Run, Session, triggers
from agentruns.services.data.repair import repair_session
from agentruns.services.history import session_at
from agentruns.services.runs.control import cancel_run, resolve_orphan
from agentruns.services.runs.forks import fork_run, run_again
from agentruns.services.runs.write import write
from agentruns.services.sweep import sweep
from agentruns.signals import run_ended
from agentruns.testing import check_messages, crashing_at, expire_leases
from tests.db.doubts import wire
from tests.db.helpers import forget_backoff, names, outcomes, payloads, run_turns, sound, the_run, user
from tests.db.stories import TURNS, seq_of, story
from tests.effects import Effects
from tests.files import MEGABYTE, fetch, report_of, said
from tests.rows import change
from tests.shop.agents import TOOLS, call, shop_agent
from tests.statements import broken_commit
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def test_at_every_row_the_fork_is_valid_and_repeats_no_effect(effects: Effects) -> None:
    run = story()
    for seq in Message.objects.filter(run=run).order_by("seq").values_list("seq", flat=True):
        fork = fork_run(run.pk, seq, text="and now?")
        state = load("default", fork.session_id, fork.pk)
        check_messages(state.conversation.messages())
        assert (fork.status, fork.origin_id, fork.origin_seq) == ("queued", run.pk, seq)
        assert (state.run.columns()["status"], fork.pending_calls) == ("active", [])
        assert problems(fork.session_id) == []
        assert not Approval.objects.filter(run=fork).exists()
    assert (effects.count(), problems(run.session_id)) == (3, [])


def test_it_goes_on_from_there_as_a_run_of_its_own(effects: Effects) -> None:
    run = story()
    cut = seq_of(run, "tool_result", 1)  # both calls of the first reply have their results
    fork = fork_run(run.pk, cut)
    sweep()
    fork.refresh_from_db()
    assert (fork.status, fork.step) == ("awaiting-approval", 1), "the script goes on with its second turn"
    assert effects.count() == 3
    approve(Approval.objects.get(run=fork).pk, None)
    sweep()
    assert sound(fork).status == "completed"
    assert [*effects.counts().values()] == [1] * 4, "a call that is asked for again has a key of its own"
    (started,) = [p for p in payloads(fork, "run_started") if "copied" not in p]
    row = Message.objects.get(run=run, seq=cut)
    assert started["origin"] == {"run": str(run.pk), "seq": cut, "hash": row.hash, "steps": 1}
    other = shop_agent("other", {"text": "never"}, {"text": "I am the other"}, tools=[])
    fork = fork_run(run.pk, cut, agent=other)
    sweep()
    fork = sound(fork)
    assert (fork.agent, fork.output, fork.definition_id) == ("other", "I am the other", other.definition_hash)


def settled(fork: Run) -> list[tuple[str, str]]:
    """List what the fork itself says of the calls that were open at its cut."""
    rows = [row for row in payloads(fork, "tool_result") if "hash" not in row["copied"]]
    return [(row["outcome"], row["content"]) for row in rows]


def test_what_was_open_is_cancelled_and_what_had_started_is_unknown(effects: Effects) -> None:
    run = the_run(run_turns(*TURNS))
    fork = fork_run(run.pk, run.messages.latest("seq").seq)
    assert settled(fork) == [("cancelled", "Not executed in this fork.")]
    shop_agent("dies", *TURNS)
    with crashing_at("after_tool:2"):
        run_agent("dies", "do it", "dies", idempotency_key="dies")
    run = Run.objects.get(session__key="dies")
    fork = fork_run(run.pk, seq_of(run, "tool_started", 1))
    assert [outcome for outcome, _ in settled(fork)] == ["unknown"]
    ((call_id, doubt),) = load("default", fork.session_id, fork.pk).in_doubt.open.items()
    assert doubt.tool_name == "post"
    assert resolve_orphan(fork.pk, call_id, "occurred", None, result="seen").pk == fork.pk
    assert load("default", fork.session_id, fork.pk).in_doubt.open == {}
    assert problems(fork.session_id) == []
    assert effects.count() == 4
    shop_agent("noting", {"tools": [call("annotate", number="A1", note="seen")]})
    with crashing_at("before_result_commit"):
        run_agent("noting", "do it", "s4", idempotency_key="s4")
    run = Run.objects.get(session__key="s4")
    fork = fork_run(run.pk, seq_of(run, "tool_started"))
    assert [outcome for outcome, _ in settled(fork)] == ["unknown"], "it may yet be committed"


def test_nothing_left_to_do_needs_a_text(folder: Path) -> None:
    run = story()
    for seq in (seq_of(run, "run_started"), seq_of(run, "run_completed")):
        with pytest.raises(errors.RunStateError, match=rf"nothing left to do at row {seq}: say in a text"):
            fork_run(run.pk, seq)
    with pytest.raises(ValueError, match="The text is empty"):
        fork_run(run.pk, seq, text=" ")
    with pytest.raises(errors.RunStateError, match=", not 99"):
        fork_run(run.pk, 99)
    assert (Run.objects.get(), Session.objects.get()) == (run, run.session), "nothing is left of a refusal"
    for text in ("And the invoice?", "and then? " * 20_000):
        fork = fork_run(run.pk, seq, text=text)
        row = fork.messages.latest("seq")
        assert (fork.input, len(str(row.payload)) < 2_000) == (text, True), "a long one is put away"
        last = session_at(fork.pk, row.seq).conversation.messages()[-1]
        assert last == {"role": "user", "content": [{"type": "text", "text": text}]}


def test_its_history_is_neither_told_again_nor_counted(settings: Any) -> None:
    shop_agent("two-steps", *TURNS[:1], max_steps=2)
    run = the_run(run_agent("two-steps", "do it", "s2", idempotency_key="s2"))
    assert (run.status, run.step) == ("completed", 2)
    settings.AGENTRUNS_NOTIFIERS = ["tests.bells.ignore"]
    run_ended.connect(listen := Mock(), weak=False)
    try:
        fork = fork_run(run.pk, seq_of(run, "run_completed"), text="more")
    finally:
        run_ended.disconnect(listen)
    assert not listen.called
    assert not Notification.objects.exists()
    assert (fork.step, fork.usage, fork.attempts, fork.output) == (0, {}, 0, None)
    assert state_at(fork.pk, fork.messages.latest("seq").seq).inherited == 2
    sweep()
    # Its steps are its own. The script has no third turn: what it says proves which turn was asked for.
    assert "asked for number 3" in sound(fork).error
    # A long history is copied in pieces.
    shop_agent("long", *[{"tools": [call("lookup", number=str(n))]} for n in range(80)], max_steps=100)
    run = the_run(run_agent("long", "do it", "s3", idempotency_key="s3"))
    last = run.messages.latest("seq").seq
    assert last > 200
    assert sound(fork_run(run.pk, last, text="more")).messages.count() == last + 2


def test_a_fork_of_a_fork_and_of_a_session_with_several_runs() -> None:
    story()
    agent = shop_agent("later", {"tools": [call("charge", cents=5)]})
    run = the_run(run_agent(agent, "more", "s1", idempotency_key="k2"))
    first = fork_run(run.pk, seq_of(run, "tool_result"))
    sweep()
    assert sound(first).status == "completed"
    for seq in (1, 7, seq_of(run, "user")):
        second = fork_run(first.pk, seq, text="go on")
        check_messages(load("default", second.session_id, second.pk).conversation.messages())
        assert problems(second.session_id) == []
    sweep()
    assert {fork.status for fork in Run.objects.filter(origin=first)} == {"completed"}
    times = [p["copied"]["at"] for p in payloads(second, "user") if "copied" in p]
    rows = [row for row in session_rows("default", run.session_id) if row.kind == "user"]
    assert times[: len(rows)] == [row.created_at.isoformat() for row in rows]


def test_who_may_and_whose_it_is_and_the_same_key_is_the_same_fork() -> None:
    ann, bob = user("ann"), user("bob")
    staff = user("staff", "fork_run", "view_run")
    run = start_run(shop_agent("asked"), "do it", "ann-1", actor=ann)
    sweep()
    last = run.messages.latest("seq").seq
    for error, refused in (
        (errors.PermissionDeniedError, lambda: fork_run(run.pk, last, text="x", actor=bob)),
        (
            errors.DurableRunNotFoundError,
            lambda: fork_run(run.pk, last, text="x", actor=user("blind", "fork_run")),
        ),
        (errors.PermissionDeniedError, lambda: run_again(run.pk, bob)),
    ):
        with pytest.raises(error, match="fork_run" if error is errors.PermissionDeniedError else "no run"):
            refused()
    for actor, owner in ((ann, ann), (staff, staff), (None, ann)):
        assert fork_run(run.pk, last, text="x", actor=actor).owner_id == owner.pk
    again = run_again(run.pk, staff)
    assert (again.owner_id, again.session_id) == (ann.pk, run.session_id)
    assert payloads(again, "run_started")[0]["actor"]["name"] == "staff"
    fork = fork_run(run.pk, last, text="x", idempotency_key="once")
    assert fork_run(run.pk, last, text="x", idempotency_key="once").pk == fork.pk
    with pytest.raises(errors.RunStateError, match="'once' belongs to run"):
        fork_run(run.pk, last - 1, text="x", idempotency_key="once")
    for other in ({"text": "y"}, {"text": "x", "agent": shop_agent("other")}):
        with pytest.raises(errors.RunStateError, match="with another agent, text or context"):
            fork_run(run.pk, last, idempotency_key="once", **other)  # type: ignore[arg-type]
    with pytest.raises(errors.SessionBusyError, match="There is a session 'ann-1' already"):
        fork_run(run.pk, last, text="x", session="ann-1")
    assert fork_run(run.pk, last, text="x", session="mine").session.key == "mine"
    assert Run.objects.filter(origin=run).count() == 6, "with the one that was run again"


def test_a_fork_of_a_cancelled_run_is_not_cancelled_and_has_the_task_before_its_cut() -> None:
    run = cancel_run(str(run_turns(*TURNS).run_id), None, reason="no more")
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="go on")
    lease = claim("default", fork.pk)
    assert lease is not None
    lease.release(delay=3600)
    fork.refresh_from_db()
    assert fork.not_before is not None, (
        "a request to cancel, which is only copied here, would have cleared it"
    )
    forget_backoff(fork)
    sweep()
    assert sound(fork).status == "completed"
    later = the_run(run_agent(shop_agent("later"), "more", "s1", idempotency_key="k2"))
    assert fork_run(later.pk, seq_of(later, "user")).input == "more"
    fork = fork_run(later.pk, seq_of(later, "run_started"))
    assert fork.input == "do it", "what was asked last before the cut"
    assert fork_run(fork.pk, seq_of(fork, "tool_result", 2)).input == "do it"


def test_a_history_that_was_altered_shows() -> None:
    run = story()
    fork = fork_run(run.pk, seq_of(run, "run_completed"), text="more")
    seq = seq_of(run, "tool_result")
    row = Message.objects.get(run=run, seq=seq)
    with triggers.lifted(connection):
        change(row, content="forged")
        assert problems(run.session_id) == [f"Session s1: seq {seq} (tool_result) was altered."]
        there, origin = f"Session {fork.session.key}: seq {seq} (tool_result)", f"row {seq} of run {run.pk}"
        assert problems(fork.session_id) == [f"{there} is not what {origin} says."]
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE {Message._meta.db_table} SET content = 'torn' WHERE id = %s", [row.pk])
        assert f"is not what row {seq} of run" in problems(fork.session_id)[0]
        Message.objects.filter(pk=row.pk).update(content=row.content, hash="0" * 64)
        assert "whose hash is another now" in problems(fork.session_id)[0]
    assert list(copies.altered("default", [])) == []


def test_rows_of_newer_code_and_evidence_that_came_late_are_copied() -> None:
    run = story()

    def evidence(run: Run, batch: Batch) -> None:
        said = {"content": "done", "is_error": False, "outcome": "ok"}
        (first, *_rest) = Message.objects.filter(run=run, kind="tool_started")
        batch.add("late_result", said, call_id=first.call_id, tool_name="lookup", attempt=1)
        batch.add("ballot", {"v": 2, "votes": [{"copied": True}]}, call_id=first.call_id)

    run = write(run.pk, evidence, closed=True)
    again = the_run(run_agent(shop_agent("later"), "more", "s1", idempotency_key="k2"))
    for origin, seq in ((run, seq_of(run, "ballot")), (again, seq_of(again, "user"))):
        fork = fork_run(origin.pk, seq, text="go on")
        fork = fork_run(fork.pk, fork.messages.latest("seq").seq)
        assert payloads(fork, "ballot")[0]["votes"] == [{"copied": True}]
        check_messages(load("default", fork.session_id, fork.pk).conversation.messages())
        assert repair_session("default", fork.session_id) == ([], [])
    sweep()
    assert sound(fork).status == "completed"
    assert replay_run(fork.pk).is_equal


# The origin has gone on since the cut: what it did is not done a second time without a person


POST = {"tools": [call("post", text="hello")]}


def believing(request: Any) -> Any:
    """Do again what is said not to have been done, as a model does."""
    done = "Not executed" not in said(request) and "not known" not in said(request)
    return {"text": "done"} if done else POST


def asked(turn: Any, *turns: Any, **options: Any) -> Run:
    """Run an agent that says these turns, or after the first one believes what it is told."""
    agent = shop_agent("shop", turn, *(turns or [believing]), **options)
    return Run.objects.get(pk=run_agent(agent, "do it", "s1", idempotency_key="k").run_id)


def results_of(fork: Run) -> list[tuple[str, str]]:
    sound(fork)
    return [(row["outcome"], str(row["content"])) for row in payloads(fork, "tool_result")]


def test_what_the_origin_has_executed_since_is_not_told_as_not_executed(effects: Effects) -> None:
    run = sound(asked(POST))
    assert names(effects) == ["post"]
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert sweep().completed == 1
    assert (results_of(fork), names(effects)) == ([("ok", "post done")], ["post"])
    (copied,) = payloads(fork, "tool_result")
    row = Message.objects.get(run=run, kind="tool_result")
    assert (copied["copied"]["run"], copied["copied"]["seq"]) == (str(run.pk), row.seq)
    with triggers.lifted(connection):
        change(row, content="forged")
    assert f"is not what row {row.seq} of run {run.pk} says" in problems(fork.session_id)[0]


def test_a_result_in_a_file_comes_along(folder: Any, effects: Effects) -> None:
    read: list[str] = []

    def reads(request: Any) -> Any:
        read.append(said(request))
        return {"text": "read"}

    run = sound(asked({"tools": [call("fetch", size=MEGABYTE)]}, reads, tools=[fetch]))
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert sweep().completed == 1
    assert read == [report_of(MEGABYTE)] * 2
    assert (results_of(fork)[0][0], names(effects)) == ("ok", ["fetch"])


def test_what_the_origin_has_started_since_is_in_doubt(effects: Effects) -> None:
    with crashing_at("after_tool"):
        asked(POST)
    run = Run.objects.get()
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    sweep()
    assert [outcome for outcome, _ in results_of(fork)] == ["unknown"]
    assert (fork.status, names(effects)) == ("awaiting-approval", ["post"])
    expire_leases()
    sweep()
    run.refresh_from_db()
    assert (run.status, names(effects)) == ("orphaned", ["post"])


def test_what_the_origin_executes_later_is_seen_before_the_same_tool_runs(effects: Effects) -> None:
    """The fork is made while the call waits; the origin goes on before the fork's model asks again."""
    origin = asked({"tools": [call("refund", cents=5000), call("post", text="hello")]})
    fork = fork_run(origin.pk, seq_of(origin, "assistant"))
    assert results_of(fork) == [("cancelled", "Not executed in this fork.")] * 2
    approve(Approval.objects.get().pk, None)
    assert advance(Run.objects.get(pk=origin.pk), "default")
    assert names(effects) == ["refund", "post"]
    sweep()
    fork.refresh_from_db()
    assert (fork.status, names(effects)) == ("awaiting-approval", ["refund", "post"])
    card = Approval.objects.get(run=fork)
    assert f"of run {origin.pk}" in card.why
    assert "its origin has executed it since" in card.why
    approve(card.pk, None)
    sweep()
    assert (results_of(fork)[-1][0], names(effects)) == ("ok", ["refund", "post", "post"]), "a person said so"


def test_a_fork_of_a_fork_at_what_both_have_copied(effects: Effects) -> None:
    origin = asked({"tools": [call("refund", cents=5000)]})
    first = fork_run(origin.pk, seq_of(origin, "assistant"))
    cut = seq_of(origin, "assistant")
    second = fork_run(first.pk, first.messages.latest("seq").seq, text="go on")
    approve(Approval.objects.get().pk, None)
    assert advance(Run.objects.get(pk=origin.pk), "default")
    third = fork_run(first.pk, cut)
    assert results_of(third) == [("ok", "refund done")]
    assert results_of(second) == [("cancelled", "Not executed in this fork.")]
    assert names(effects) == ["refund"]
    (call_id,) = Approval.objects.values_list("call_id", flat=True)
    assert load("default", second.session_id, second.pk).open_elsewhere == {"refund": {call_id: origin.pk}}
    run = cancel_run(run_agent("shop", "do it", "s2", idempotency_key="k2").run_id, None)
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert results_of(fork) == [("cancelled", "Not executed in this fork.")]
    assert "open_in" not in payloads(fork, "tool_result")[0], "it never can be: it was never started"


def test_what_the_origin_executes_between_the_gate_and_the_start(effects: Effects) -> None:
    origin: list[Run] = []

    @tool(safe_to_retry=True)
    def dally() -> str:
        """Let the origin go on meanwhile."""
        if origin:
            resume_run(origin.pop().pk)
        return "dallied"

    def hold(request: Any) -> Any:
        pause_run(request.run_id, None)
        return POST

    ask = {"tools": [call("dally"), call("post", text="hello again")]}
    held = asked(hold, ask, POST, tools=[*TOOLS, dally])
    assert (held.status, effects.count()) == ("paused", 0)
    fork = fork_run(held.pk, seq_of(held, "assistant"))
    origin.append(held)
    assert advance(Run.objects.get(pk=fork.pk), "default")
    told = results_of(fork)
    assert [outcome for outcome, _ in told] == ["cancelled", "ok", "error"]
    assert "its origin has executed it since" in told[-1][1]
    assert fork.status == "awaiting-approval"
    mine = {started["key"] for started in payloads(fork, "tool_started")}
    assert not mine & {line["key"] for line in effects.lines() if line["tool"] == "post"}


def test_a_doubt_that_was_told_to_the_origins_model_is_told_to_the_forks(effects: Effects) -> None:
    ask = {"tools": [call("wire", text="x")]}
    run = asked(ask, lambda request: ask, tools=[wire], on_orphan="surface")
    assert (outcomes(run), run.status) == (["unknown"], "awaiting-approval")
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert advance(Run.objects.get(pk=fork.pk), "default")
    assert [outcome for outcome, _ in results_of(fork)] == ["unknown"]
    assert (fork.status, effects.count()) == ("awaiting-approval", 1)


def test_two_at_once_with_the_same_key_inside_their_callers_transactions() -> None:
    run = story()
    last, ready = seq_of(run, "run_completed"), threading.Barrier(2)

    def fork() -> Any:
        ready.wait(LIMIT)
        try:
            with transaction.atomic():
                made = fork_run(run.pk, last, text="x", idempotency_key="once")
                return made.pk, Run.objects.filter(origin=run).count()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        both = [future.result() for future in [threads.submit(fork) for _ in range(2)]]
    made = Run.objects.get(origin=run)
    assert both == [(made.pk, 1)] * 2
    assert problems(made.session_id) == []
    assert Session.objects.count() == 2


def test_a_fork_joins_the_callers_transaction_and_is_made_once_if_its_acknowledgement_is_lost() -> None:
    run = story()
    last = seq_of(run, "run_completed")
    with transaction.atomic():
        fork_run(run.pk, last, text="x")
        transaction.set_rollback(True)
    assert Run.objects.get() == run
    with broken_commit(1, went_through=True):
        fork = fork_run(run.pk, last, text="x")
    assert Run.objects.get(origin=run) == fork
