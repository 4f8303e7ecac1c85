"""Erasing a value: its content goes wherever it is repeated, and the journal stays what it was."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, connection, transaction

from agentruns import (
    answer,
    approve,
    ask_human,
    cancel_run,
    deny,
    erase_call,
    erase_payload,
    erase_user,
    fork_run,
    replay_run,
    run_again,
    run_agent,
    start_run,
)
from agentruns.exceptions import (
    DurableRunNotFoundError,
    JournalUnreadableError,
    PermissionDeniedError,
    RunStateError,
)
from agentruns.journal.outbox import notice_of
from agentruns.journal.verify import problems
from agentruns.models import Approval, IdempotencyRecord, Message, Notification, Run, Session, triggers
from agentruns.services import forks, retention
from agentruns.services.erasure import erase_rows, erase_whole_session
from agentruns.services.retention import erase_session
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.processes import interpret_and_die
from tests.db.helpers import GO_ON, everywhere, run_turns, user
from tests.db.racing import at_once
from tests.effects import Effects
from tests.files import fetched, row_of, stored_in
from tests.shop.agents import call, shop_agent
from tests.shop.agents import refund as refund_tool

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

WHY = "request 17 of the customer"


def intact() -> None:
    """Check every journal, and every conversation as its provider would."""
    for session in Session.objects.all():
        assert problems(session.pk) == []
    for run in Run.objects.all():
        check_messages([*result_of(run.pk).messages, GO_ON])


def tell(notice: Any) -> None:
    """Fail, so that the notification stays in the outbox."""
    raise OSError("away")


def refunded(text: str = "do it", session: str = "s1", **options: Any) -> Run:
    """Return a completed run that refunded what a person had edited, and said so."""
    turns = ({"text": "ASKING", "tools": [call("refund", cents=5071150711)]}, {"text": "SAID-IT"})
    run_turns(*turns, text=text, session=session, **options)
    approve(
        Approval.objects.get(run__session__key=session).pk,
        None,
        arguments={"cents": 6082260822},
        reason="EDITED-FOR",
    )
    sweep()
    return Run.objects.get(session__key=session)


def seq_of(run: Run, kind: str, which: int = 0) -> int:
    seqs = Message.objects.filter(run=run, kind=kind).order_by("seq").values_list("seq", flat=True)
    return list(seqs)[which]


def test_a_task_goes_with_all_that_was_made_of_it(effects: Effects) -> None:
    ada, eve = user("ada", "erase_payload"), user("eve")
    run = refunded("TASK-4711")
    assert (run.title, run.session.title) == ("TASK-4711", "TASK-4711")
    cancel_run(run_again(run.pk).pk)
    fork = fork_run(run.pk, seq_of(run, "assistant"), session="fork")
    cancel_run(fork.pk)
    again = run_again(fork.pk)
    cancel_run(again.pk)
    other = run_agent(shop_agent("other"), "TASK of somebody else", "s2", idempotency_key="s2")
    before = {row.pk: row.hash for row in Message.objects.all()}
    with pytest.raises(PermissionDeniedError, match=f"eve may not do this to run {run.pk}"):
        erase_payload(run.pk, seq_of(run, "user"), eve, WHY)
    assert "TASK-4711" in everywhere()
    run = erase_payload(run.pk, seq_of(run, "user"), ada, WHY)
    assert "TASK-4711" not in everywhere()
    titles = set(Session.objects.exclude(key="s2").values_list("title", flat=True))
    assert {run.input, run.title, *titles} == {"[erased]"}
    assert Run.objects.get(pk=again.pk).input == "[erased]"
    assert result_of(other.run_id).messages[0]["content"][0]["text"] == "TASK of somebody else"
    assert run.output == "SAID-IT"
    assert {row.pk: row.hash for row in Message.objects.filter(pk__in=before)} == before
    told = Message.objects.filter(kind="payload_erased").order_by("pk")
    assert len(told) == Message.objects.filter(content=None).count() == 4
    assert {(row.payload["actor"]["name"], row.payload["reason"]) for row in told} == {("ada", WHY)}
    intact()


def test_a_call_goes_with_its_approval_and_the_log(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.tell"]
    ada, run = user("ada"), refunded()
    approval = Approval.objects.get()
    for thing in (run, approval):
        about = ContentType.objects.get_for_model(thing)
        LogEntry.objects.create(
            user=ada, content_type=about, object_id=str(thing.pk), object_repr="of 5071150711",
            action_flag=CHANGE, change_message="Denied: EDITED-FOR",
        )  # fmt: skip
    IdempotencyRecord.objects.create(owner=ada, key="k", fingerprint="5071150711", status=200, run_id=run.pk)
    key = Session.objects.get().secret
    everything = everywhere()
    texts = ("5071150711", "6082260822", "EDITED-FOR", "ASKING")
    assert all(text in everything for text in texts)
    erase_call(run.pk, approval.call_id, None, WHY)
    left = everywhere()
    assert [text for text in ("5071150711", "6082260822", "EDITED-FOR", "ASKING") if text in left] == [
        "5071150711"
    ]
    assert LogEntry.objects.get(object_id=str(run.pk)).object_repr == "of 5071150711", "a run's says no task"
    assert LogEntry.objects.get(object_id=str(approval.pk)).object_repr == "[erased]"
    assert not IdempotencyRecord.objects.exists()
    approval.refresh_from_db()
    assert (approval.arguments, approval.title, approval.why, approval.reason, approval.same_call) == (
        {}, "[erased]", "[erased]", "[erased]", "",
    )  # fmt: skip
    assert Session.objects.get().secret != key, "or the old digests could still be tried"
    assert {notice_of("default", one).title for one in Notification.objects.all()} <= {"[erased]", ""}
    assert run.messages.get(kind="tool_result").payload["outcome"] == "ok"
    intact()


@pytest.mark.parametrize("delete", [partial(erase_session, "s1"), partial(erase_whole_session, "s1")])
def test_what_the_admins_history_quotes_goes_in_the_transaction_that_deletes_a_session(
    effects: Effects, delete: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies right after it has nothing left to do, and no ids to find it by."""
    refunded()
    approval = Approval.objects.get()
    LogEntry.objects.create(
        user=user("ada"), content_type=ContentType.objects.get_for_model(approval),
        object_id=str(approval.pk), object_repr="of 5071150711", action_flag=CHANGE, change_message="Denied",
    )  # fmt: skip
    monkeypatch.setattr(retention, "delete_files", Mock(side_effect=KeyboardInterrupt))  # after the commit
    with pytest.raises(KeyboardInterrupt):
        delete()
    assert not Session.objects.exists()
    left = LogEntry.objects.get()
    assert (left.object_repr, left.change_message, left.user.username) == ("[erased]", "[erased]", "ada")


@pytest.mark.parametrize("kind", ["assistant", "approval_requested", "approval_decided"])
def test_whichever_row_holds_the_arguments_all_that_do_go(effects: Effects, kind: str) -> None:
    run = refunded()
    erase_payload(run.pk, seq_of(run, kind), None, WHY)
    left = everywhere()
    assert "5071150711" not in left and "6082260822" not in left and "SAID-IT" in left
    intact()


@pytest.mark.parametrize("kind", ["assistant", "run_completed"])
def test_the_answer_goes_with_the_output(effects: Effects, kind: str) -> None:
    run = refunded()
    run = erase_payload(run.pk, seq_of(run, kind, -1), None, WHY)
    assert run.output == "[erased]" and "SAID-IT" not in everywhere() and "5071150711" in everywhere()
    intact()


def test_reasons_and_answers_go_from_the_results_that_repeat_them(effects: Effects) -> None:
    refund = {"tools": [call("refund", cents=5000)]}
    asks = {"tools": [call("ask_human", question="which?")]}
    run_turns(refund, refund, asks, tools=[refund_tool, ask_human])
    deny(Approval.objects.get().pk, None, reason="NOT-FOR-MUELLER")
    sweep()
    answer(Approval.objects.get(status="pending").pk, None, text="THE-ANSWER")
    sweep()
    run = Run.objects.get()
    assert everywhere().count("NOT-FOR-MUELLER") >= 4, "the same call is refused once more"
    erase_payload(run.pk, seq_of(run, "approval_decided", 0), None, WHY)
    assert "NOT-FOR-MUELLER" not in everywhere() and "THE-ANSWER" in everywhere()
    erase_payload(run.pk, seq_of(run, "tool_result", -1), None, WHY)
    assert "THE-ANSWER" not in everywhere()
    intact()


def test_a_row_alone(effects: Effects) -> None:
    run = refunded()
    for seq, error in ((seq_of(run, "tool_started"), "nothing that can be erased"), (999, "no such row")):
        with pytest.raises(RunStateError, match=error):
            erase_payload(run.pk, seq, None, WHY)
    with pytest.raises(ValueError, match="Say why"):
        erase_payload(run.pk, 2, None, " ")
    with pytest.raises(DurableRunNotFoundError):
        erase_payload("01a20189-67e9-70a1-9b0c-1b07670a3b0b", 2, None, WHY)
    assert not Message.objects.filter(content=None).exists()


def test_nothing_else_of_a_row_can_be_changed(effects: Effects) -> None:
    run = refunded()
    rows = Message.objects.filter(run=run, seq=2)
    for change in (
        {"content": {}},
        {"content": None},
        {"content": None, "content_salt": None, "seq": 77},
        {"kind": "x"},
    ):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            rows.update(**change)
    erase_payload(run.pk, 2, None, WHY)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        rows.update(content={"content": []}, content_salt="ab" * 16)
    intact()


def test_what_was_erased_is_not_done_again(effects: Effects) -> None:
    run = refunded("TASK-4711")
    replay_run(run.pk)
    erase_payload(run.pk, seq_of(run, "user"), None, WHY)
    with pytest.raises(RunStateError, match=rf"Run {run.pk} cannot be replayed: rows .* were erased: 2"):
        replay_run(run.pk)
    with pytest.raises(RunStateError, match=r"task of run .* was erased .row 2.. Start a run"):
        run_again(run.pk)
    with pytest.raises(RunStateError, match="was erased"):
        fork_run(run.pk, 3)
    fork = fork_run(run.pk, 3, text="go on without it")
    assert Message.objects.get(run=fork, seq=2).payload["copied"]["erased"] is True
    cancel_run(fork.pk)
    sent = run_agent(shop_agent("next"), "and now?", "s1", idempotency_key="next")
    assert sent.messages[0]["content"][0]["text"] == "[erased]"
    intact()


def test_erased_in_a_fork_it_is_gone_from_the_origin(effects: Effects) -> None:
    run = refunded("TASK-4711")
    fork = fork_run(run.pk, seq_of(run, "tool_result"), session="fork")
    further = fork_run(fork.pk, 3, session="further")
    with pytest.raises(RunStateError, match=rf"Run ({fork.pk}|{further.pk}) .queued. reads"):
        erase_payload(run.pk, 2, None, WHY)
    assert not Message.objects.filter(content=None).exists()
    cancel_run(fork.pk), cancel_run(further.pk)
    erase_payload(further.pk, seq_of(further, "user"), None, WHY)
    assert "TASK-4711" not in everywhere()
    assert Message.objects.filter(content=None).count() == 3
    intact()


@pytest.mark.parametrize("erased_in", ["a", "c", "d"])
def test_a_fork_of_a_pruned_fork_is_reached(erased_in: str) -> None:
    run = run_turns(text="TASK-4711", session="a")
    child = fork_run(run.run_id, 2, session="b")
    sweep()
    for name in "cd":
        fork_run(child.pk, 2, session=name)
        sweep()
    other = run_turns(text="TASK-4711", session="other")
    assert erase_session("b").copies == ["a", "c", "d"]
    erase_payload(Run.objects.get(session__key=erased_in).pk, 2, None, WHY)
    rows = Message.objects.select_related("session")
    assert {row.session.key for row in rows if "TASK-4711" in str(row.payload)} == {"other"}
    assert [one.pk for one in Run.objects.filter(input="TASK-4711")] == [UUID(other.run_id)]
    intact()
    assert erase_session("c").copies == ["a", "d"]
    assert erase_session("other").copies == []


def test_a_file_goes_after_the_commit(folder: Path) -> None:
    run = fetched()
    fork = fork_run(run.pk, seq_of(run, "tool_result"), session="fork")
    cancel_run(fork.pk)
    assert len(stored_in(folder)) == 1
    with transaction.atomic():
        erase_payload(run.pk, row_of(run).seq, None, WHY)
        assert len(stored_in(folder)) == 1
        transaction.set_rollback(True)
    assert len(stored_in(folder)) == 1 and row_of(run).content is not None
    found = erase_rows(run.pk, None, WHY, seq=row_of(run).seq)
    assert (found.files, stored_in(folder)) == (1, [])
    intact()


ERASE = """
import os, signal, sys, django
django.setup()
from django.conf import settings
from agentruns import erase_payload
from agentruns.services import erasure
from tests.files import alias
settings.STORAGES = {**settings.STORAGES, **alias(sys.argv[1], "tests.files.DeadlyDeletingStorage")}
settings.DATABASES.pop("other")
if sys.argv[2] == "rows":
    erasure.clear_admin_log = lambda *about: os.kill(os.getpid(), signal.SIGKILL)
erase_payload(sys.argv[3], int(sys.argv[4]), None, "asked for")
"""


def test_killed_it_leaves_all_or_nothing_and_is_finished_by_another(folder: Path) -> None:
    run = fetched()
    seq = row_of(run).seq
    interpret_and_die("-c", ERASE, str(folder), "rows", str(run.pk), str(seq))
    assert row_of(run).content is not None and not Message.objects.filter(kind="payload_erased").exists()
    interpret_and_die("-c", ERASE, str(folder), "files", str(run.pk), str(seq))
    assert row_of(run).content is None and len(stored_in(folder)) == 1
    intact()
    erase_payload(run.pk, seq, None, WHY)
    assert stored_in(folder) == []
    assert Message.objects.filter(kind="payload_erased").count() == 1
    intact()


def test_a_user_is_erased_but_for_what_goes_on(effects: Effects) -> None:
    ada, eve = user("ada"), user("eve")
    run_agent(shop_agent("one"), "ADA-ONE", "one", idempotency_key="1", actor=ada)
    run_agent(shop_agent("two"), "ADA-TWO", "two", idempotency_key="2", actor=ada)
    run_agent(shop_agent("hers"), "EVES", "hers", idempotency_key="3", actor=eve)
    waiting = start_run("two", "ADA-MORE", "two", idempotency_key="4", actor=ada)
    would = erase_user(ada, None, WHY, dry_run=True)
    assert (len(would.rows), would.sessions, len(would.refused)) == (3, 1, 1) and "ADA-ONE" in everywhere()
    found = erase_user(ada, None, WHY)
    assert (found.rows, found.refused) == (would.rows, would.refused)
    assert found.refused[0].startswith(f"Session 'two': Run {waiting.pk} (queued) reads")
    left = everywhere()
    assert "ADA-ONE" not in left and "ADA-TWO" in left and "EVES" in left
    cancel_run(waiting.pk)
    erase_user(ada, None, WHY)
    assert "ADA-" not in everywhere() and "EVES" in everywhere()
    assert erase_user(ada, None, WHY).rows == []
    assert "backups" in str(found.record()["not_reached"])
    intact()


def test_a_damaged_journal_is_not_erased_from(effects: Effects) -> None:
    run = refunded()
    with triggers.lifted(connection):
        Message.objects.filter(run=run, seq=3).update(tool_name="other")
    with pytest.raises(JournalUnreadableError, match=r"seq 3 .assistant. was altered.*Nothing was erased"):
        erase_payload(run.pk, 2, None, WHY)
    assert Message.objects.filter(content=None).count() == 0


def test_beside_a_fork_of_the_same_rows(effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork has read its rows when they are erased, and takes up that they are."""
    run = refunded("TASK-4711")
    read = forks.rows_until

    def read_then_erased(alias: str, origin: Run, at: int) -> Any:
        rows = read(alias, origin, at)
        if not Message.objects.filter(content=None).exists():
            erase_payload(run.pk, 2, None, WHY)
        return rows

    monkeypatch.setattr(forks, "rows_until", read_then_erased)
    fork = fork_run(run.pk, 4, text="go on")
    assert "TASK-4711" not in everywhere()
    cancel_run(fork.pk)
    intact()


@pytest.mark.parametrize("make", [run_again, lambda key: fork_run(key, 2)], ids=["again", "fork"])
def test_a_context_erased_meanwhile_is_not_written_again(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    result = run_agent(shop_agent("shop"), "x", "s1", context={"customer": "CONTEXT-4711"})
    agent_of = forks.agent_again

    def read_then_erased(origin: Run) -> Any:
        erase_payload(origin.pk, 1, None, WHY)
        return agent_of(origin)

    monkeypatch.setattr(forks, "agent_again", read_then_erased)
    assert make(result.run_id).context == {}
    assert "CONTEXT-4711" not in everywhere()
    intact()


def test_at_once_with_starts_forks_and_another_erasure(effects: Effects) -> None:
    for number in range(4):
        session = f"s{number}"
        run = refunded("TASK-4711", session)
        outcomes = at_once(
            lambda run=run: erase_payload(run.pk, 2, None, WHY),
            lambda run=run: erase_payload(run.pk, 2, None, WHY),
            lambda run=run: fork_run(run.pk, 4, session=f"fork-{run.session.key}"),
            lambda run=run: run_again(run.pk),
        )
        assert all(isinstance(one, Run | RunStateError) for one in outcomes), outcomes
        for unfinished in Run.objects.unfinished():
            cancel_run(unfinished.pk)
        erase_payload(run.pk, 2, None, WHY)
        assert "TASK-4711" not in everywhere()
        assert Message.objects.filter(run=run, kind="payload_erased").count() == 1
        intact()
