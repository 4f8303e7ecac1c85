"""A run done again: from a row of its journal, or from the start. The world outside is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection

from agentruns import approve, replay_run, run_agent, start_run, state_at
from agentruns.engine.leases import claim
from agentruns.exceptions import (
    DurableRunNotFoundError,
    PermissionDeniedError,
    RunStateError,
    SessionBusyError,
)
from agentruns.journal import copies
from agentruns.journal.read import session_rows
from agentruns.journal.store import Batch, load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Notification, Run, Session, triggers
from agentruns.services.control import cancel_run, resolve_orphan
from agentruns.services.forks import fork_run, run_again
from agentruns.services.history import session_at
from agentruns.services.repair import repair_session
from agentruns.services.sweep import sweep
from agentruns.services.write import write
from agentruns.signals import run_ended
from agentruns.testing import check_messages, crashing_at
from tests.db.helpers import payloads, run_turns, sound, the_run, user
from tests.db.stories import TURNS, seq_of, story
from tests.effects import Effects
from tests.rows import change
from tests.shop.agents import call, shop_agent

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
    (call_id,) = load("default", fork.session_id, fork.pk).doubts["post"]
    assert resolve_orphan(fork.pk, call_id, "occurred", None, result="seen").pk == fork.pk
    assert load("default", fork.session_id, fork.pk).doubts["post"] == {}
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
        with pytest.raises(RunStateError, match=rf"nothing left to do at row {seq}: say in a text"):
            fork_run(run.pk, seq)
    with pytest.raises(ValueError, match="The text is empty"):
        fork_run(run.pk, seq, text=" ")
    with pytest.raises(RunStateError, match=", not 99"):
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
    listen = Mock()
    run_ended.connect(listen)
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


def test_who_may_and_whose_it_is() -> None:
    ann, bob = user("ann"), user("bob")
    staff = user("staff", "fork_run", "view_run")
    agent = shop_agent("asked")
    run = start_run(agent, "do it", "ann-1", actor=ann)
    sweep()
    last = run.messages.latest("seq").seq
    with pytest.raises(PermissionDeniedError, match="fork_run"):
        fork_run(run.pk, last, text="x", actor=bob)
    with pytest.raises(DurableRunNotFoundError):  # a fork of one's own can be read
        fork_run(run.pk, last, text="x", actor=user("blind", "fork_run"))
    with pytest.raises(PermissionDeniedError, match="fork_run"):
        run_again(run.pk, bob)
    assert fork_run(run.pk, last, text="x", actor=ann).owner_id == ann.pk
    assert fork_run(run.pk, last, text="x", actor=staff).owner_id == staff.pk
    assert fork_run(run.pk, last, text="x").owner_id == ann.pk
    again = run_again(run.pk, staff)
    assert (again.owner_id, again.session_id) == (ann.pk, run.session_id)
    assert payloads(again, "run_started")[0]["actor"]["name"] == "staff"


def test_the_same_key_is_the_same_fork() -> None:
    run = story()
    last = seq_of(run, "run_completed")
    fork = fork_run(run.pk, last, text="x", idempotency_key="once")
    assert fork_run(run.pk, last, text="x", idempotency_key="once").pk == fork.pk
    with pytest.raises(RunStateError, match="'once' belongs to run"):
        fork_run(run.pk, last - 1, text="x", idempotency_key="once")
    for other in ({"text": "y"}, {"text": "x", "agent": shop_agent("other")}):
        with pytest.raises(RunStateError, match="with another agent, text or context"):
            fork_run(run.pk, last, idempotency_key="once", **other)  # type: ignore[arg-type]
    with pytest.raises(SessionBusyError, match="There is a session 's1' already"):
        fork_run(run.pk, last, text="x", session="s1")
    assert fork_run(run.pk, last, text="x", session="mine").session.key == "mine"
    assert Run.objects.filter(origin=run).count() == 2


def test_a_fork_of_a_cancelled_run_is_not_cancelled_and_has_the_task_before_its_cut() -> None:
    run = cancel_run(str(run_turns(*TURNS).run_id), None, reason="no more")
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="go on")
    lease = claim("default", fork.pk)
    assert lease is not None
    assert not lease.is_cancel_requested()
    lease.release()
    sweep()
    assert sound(fork).status == "completed"
    later = the_run(run_agent(shop_agent("later"), "more", "s1", idempotency_key="k2"))
    assert fork_run(later.pk, seq_of(later, "user")).input == "more"
    fork = fork_run(later.pk, seq_of(later, "run_started"))
    assert fork.input == "do it", "what was asked last before the cut"
    assert fork_run(fork.pk, seq_of(fork, "tool_result", 2)).input == "do it"


def test_a_long_history_is_copied_in_pieces() -> None:
    shop_agent("long", *[{"tools": [call("lookup", number=str(n))]} for n in range(80)], max_steps=100)
    run = the_run(run_agent("long", "do it", "s3", idempotency_key="s3"))
    last = run.messages.latest("seq").seq
    assert last > 200
    fork = fork_run(run.pk, last, text="more")
    assert problems(fork.session_id) == []
    assert fork.messages.count() == last + 2


def test_a_history_that_was_altered_shows() -> None:
    run = story()
    fork = fork_run(run.pk, seq_of(run, "run_completed"), text="more")
    seq = seq_of(run, "tool_result")
    with triggers.lifted(connection):
        row = Message.objects.get(run=run, seq=seq)
        change(row, content="forged")
    assert problems(run.session_id) == [f"Session s1: seq {seq} (tool_result) was altered."]
    assert problems(fork.session_id) == [
        f"Session {fork.session.key}: seq {seq} (tool_result) is not what row {seq} of run {run.pk} says."
    ]
    with triggers.lifted(connection), connection.cursor() as cursor:
        cursor.execute(f"UPDATE {Message._meta.db_table} SET content = 'torn' WHERE id = %s", [row.pk])
    assert f"is not what row {seq} of run" in problems(fork.session_id)[0]
    with triggers.lifted(connection):
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
