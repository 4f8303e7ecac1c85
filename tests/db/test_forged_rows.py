"""Rows that only a forger writes, with every hash right: found by what stands before them, never obeyed."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from agentruns import approve, fork_run, leave_out
from agentruns.engine.gate import call_digest
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.journal.verify import History, check, problems
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.utils.ids import uuid7
from tests.db.helpers import outcomes, run_turns, the_run
from tests.effects import Effects
from tests.rows import change as change_row, forge, row_of, sealed
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def finished() -> Run:
    """A completed run: an approved refund, then a post that asked nobody."""
    run = the_run(run_turns({"tools": [call("refund", cents=5000)]}, {"tools": [call("post", text="hi")]}))
    approve(Approval.objects.get().pk, None)
    sweep()
    return Run.objects.get(pk=run.pk)


@pytest.fixture
def another(finished: Run) -> UUID:
    """An approval that waits in another session."""
    run_turns({"tools": [call("refund", cents=7000)]}, session="s2")
    return Approval.objects.exclude(run=finished).get().pk


def told(run: Run) -> str:
    """Find the one thing that is wrong with a run's session."""
    (problem,) = check(run.session_id)
    return str(problem)


def said_of_one_more(run: Run, kind: str, payload: Any = (), **changes: Any) -> str:
    """Check one more row like the first of its kind, at the end of the journal."""
    history = History(run.session)
    assert history.read("default") is None
    row = row_of(Message.objects.filter(run=run, kind=kind).earliest("seq"))
    payload = {**row.payload, **dict(payload)}
    row = row._replace(payload=payload, seq=history.seq + 1, prev_hash=history.head, **changes)
    return str(history.add(*sealed(run.session_id, row)))


def test_a_row_that_leaves_out_a_later_one(finished: Run) -> None:
    leave_out(finished.pk, 2)
    assert "leaves out row 999, which came later" in said_of_one_more(finished, "left_out", {"seq": 999})


def test_one_more_row_that_nothing_before_it_accounts_for(finished: Run) -> None:
    done = Message.objects.get(kind="tool_result", tool_name="post").call_id
    asks = {"call_id": done, "payload": {"approval": str(uuid7())}}
    copied = {"payload": {"copied": {"run": str(uuid7()), "seq": 2, "hash": "0" * 64}}}
    for kind, changes, said in (
        ("approval_requested", asks, f"asks for an approval of call {done}, which has a result."),
        ("approval_decided", {"call_id": done}, f"decides on call {done}, for which no approval was asked."),
        ("user", copied, "is copied from another run after its own run had started."),
    ):
        assert said_of_one_more(finished, kind, **changes).endswith(said)


def test_a_gated_call_whose_card_was_taken_out(finished: Run) -> None:
    """Without the card's rows nothing says that somebody approved what ran."""

    def forget(rows: Any) -> None:
        rows.filter(consumes__isnull=False).update(consumes=None)
        rows.filter(kind__in=["approval_requested", "approval_decided"]).update(kind="note")

    forge(finished.session_id, forget)
    assert "which the gate did not let through" in told(finished)


@pytest.mark.parametrize("name", ["post", "refund"])
def test_an_approval_spent_on_a_call_that_is_not_its_own(finished: Run, another: UUID, name: str) -> None:
    started = {"kind": "tool_started", "tool_name": name}
    forge(finished.session_id, lambda rows: rows.filter(**started).update(consumes=another))
    assert f"consumes approval {another}, which is not of call" in told(finished)


def test_a_copy_that_spends_an_approval(finished: Run, another: UUID) -> None:
    """What a fork has from its origin is history: it may use up nothing."""
    last = finished.messages.latest("seq").seq
    fork = fork_run(finished.pk, last, text="and then?")
    assert problems(fork.session_id) == []
    copied = fork.messages.filter(kind="tool_started").earliest("seq")
    forge(fork.session_id, lambda rows: rows.filter(pk=copied.pk).update(consumes=another))
    assert told(fork).endswith("is copied from another run and consumes an approval.")


def test_a_card_that_shows_other_arguments_than_its_call_lets_nothing_run(effects: Effects) -> None:
    """A person approves what the card shows: what the call would do is not that."""
    result = run_turns({"tools": [call("refund", cents=9000)]})
    secret = Run.objects.get().session.secret
    harmless = {"arguments": {"cents": 1}, "digest": call_digest(secret, "refund", {"cents": 1})}

    def change(rows: Any) -> None:
        change_row(rows.get(kind="approval_requested"), **harmless)

    forge(Run.objects.get().session_id, change)
    Approval.objects.update(**harmless)
    (card,) = result.pending
    approve(card.pk, None, digest=harmless["digest"])
    sweep()
    run = Run.objects.get()
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"], 0)


def test_arguments_that_are_altered_after_the_approval_let_nothing_run(effects: Effects) -> None:
    (card,) = run_turns({"tools": [call("refund", cents=9000)]}).pending
    approve(card.pk, None, digest=card.digest)

    def change(rows: Any) -> None:
        row = rows.get(kind="assistant")
        change_row(row, calls=[{**row.payload["calls"][0], "arguments": {"cents": 90000}}])

    forge(card.run.session_id, change)
    sweep()
    run = Run.objects.get()
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"], 0)


def test_an_approval_that_was_used_lets_nothing_run_that_has_not_started(effects: Effects) -> None:
    """A start that is none, as its attempt says, has used the approval up."""
    result = run_turns({"tools": [call("refund", cents=5000)]})
    (card,) = result.pending
    approve(card.pk, None, digest=card.digest)
    batch = Batch(load("default", Run.objects.get().session_id, card.run_id))
    (asked,) = batch.state.run.open_calls()
    start = {"key": "k", "digest": asked.digest, "declares": "nothing", "timeout": None}
    batch.add("tool_started", start, call=asked, attempt=0, consumes=card.pk)
    DatabaseStore().append(batch)
    sweep()
    run = Run.objects.get()
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"], 0)
