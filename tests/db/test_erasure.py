"""Erasing a value: its content goes wherever it is repeated, and the journal stays what it was."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connection, transaction
from django.db.models.functions import Now

from agentruns import (
    answer,
    approve,
    ask_human,
    deny,
    exceptions as errors,
    replay_run,
    run_agent,
    send_message,
    start_run,
)
from agentruns.journal import events
from agentruns.journal.outbox import notice_of
from agentruns.journal.read import session_rows
from agentruns.journal.verify import problems
from agentruns.models import Approval, Draft, IdempotencyRecord, Message, Notification, Run, Session, triggers
from agentruns.models.tombstone import keyed
from agentruns.services.data import retention
from agentruns.services.data.erasure import (
    erase_call,
    erase_payload,
    erase_rows,
    erase_user,
    erase_whole_session,
)
from agentruns.services.data.retention import erase_session
from agentruns.services.runs import forks
from agentruns.services.runs.control import cancel_run
from agentruns.services.runs.forks import fork_run, run_again
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.runs.write import write
from agentruns.services.sweep import sweep
from agentruns.services.transfer import export_run, import_run
from agentruns.testing import check_messages
from agentruns.utils import json as canonical
from tests.api.http import Api
from tests.commands.running import run as command
from tests.crash.processes import interpret_and_die
from tests.db.exports import exported, forget_everything, verified
from tests.db.helpers import GO_ON, everywhere, run_turns, user
from tests.db.racing import at_once
from tests.db.stories import seq_of
from tests.files import fetched, row_of, stored_in
from tests.rows import erase
from tests.shop.agents import call, refund as refund_tool, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

WHY = "request 17 of the customer"
NUMBERS = ("5071150711", "6082260822")  # that the model and a person wanted refunded


def intact() -> None:
    """Check every journal, and every conversation as its provider would."""
    for session in Session.objects.all():
        assert problems(session.pk) == []
    for run in Run.objects.all():
        check_messages([*result_of(run.pk).messages, GO_ON])


def tell(notice: Any) -> None:
    """Fail, so that the notification stays in the outbox."""
    raise OSError("away")


def logged(about: Any, person: Any) -> None:
    """Add an entry to the admin's history that quotes a call's arguments and a reason."""
    LogEntry.objects.create(
        user=person, content_type=ContentType.objects.get_for_model(about), object_id=str(about.pk),
        object_repr="of 5071150711", action_flag=CHANGE, change_message="Denied: EDITED-FOR",
    )  # fmt: skip


def refunded(text: str = "do it", session: str = "s1", **options: Any) -> Run:
    """Complete a run that refunds what a person edited, and says so."""
    turns = ({"text": "ASKING", "tools": [call("refund", cents=5071150711)]}, {"text": "SAID-IT"})
    run_turns(*turns, text=text, session=session, **options)
    card = Approval.objects.get(run__session__key=session)
    approve(card.pk, None, arguments={"cents": 6082260822}, reason="EDITED-FOR")
    sweep()
    return Run.objects.get(session__key=session)


def test_a_task_goes_with_all_that_was_made_of_it() -> None:
    ada, eve = user("ada", "erase_payload"), user("eve")
    run = refunded("TASK-4711")
    assert (run.title, run.session.title) == ("TASK-4711", "TASK-4711")
    cancel_run(run_again(run.pk).pk)
    fork = fork_run(run.pk, seq_of(run, "assistant"), session="fork")
    cancel_run(fork.pk)
    again = cancel_run(run_again(fork.pk).pk)
    other = run_agent(shop_agent("other"), "TASK of somebody else", "s2", idempotency_key="s2")
    before = {row.pk: row.hash for row in Message.objects.all()}
    with pytest.raises(errors.PermissionDeniedError, match=f"eve may not do this to run {run.pk}"):
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


def test_a_call_goes_with_its_approval_and_the_log(settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.tell"]
    ada, run = user("ada"), refunded()
    approval = Approval.objects.get()
    logged(run, ada), logged(approval, ada)
    IdempotencyRecord.objects.create(owner=ada, key="k", fingerprint="5071150711", status=200, run_id=run.pk)
    key = Session.objects.get().secret
    everything, texts = everywhere(), (*NUMBERS, "EDITED-FOR", "ASKING")
    assert all(text in everything for text in texts)
    erase_call(run.pk, approval.call_id, None, WHY)
    left = everywhere()
    assert [text for text in texts if text in left] == ["5071150711"]
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
def test_what_the_admins_history_quotes_goes_in_the_transaction_that_deletes_a_session(delete: Any) -> None:
    """Whoever dies right after it has nothing left to do, and no ids to find it by."""
    refunded()
    logged(Approval.objects.get(), user("ada"))
    with (
        patch.object(retention, "delete_files", side_effect=KeyboardInterrupt),  # after the commit
        pytest.raises(KeyboardInterrupt),
    ):
        delete()
    assert not Session.objects.exists()
    left = LogEntry.objects.get()
    assert (left.object_repr, left.change_message, left.user.username) == ("[erased]", "[erased]", "ada")


@pytest.mark.parametrize(
    ("kind", "which", "goes"),
    [
        *((kind, 0, {*NUMBERS}) for kind in ("assistant", "approval_requested", "approval_decided")),
        *((kind, -1, {"SAID-IT"}) for kind in ("assistant", "run_completed")),
    ],
)
def test_whichever_row_holds_a_value_all_that_do_go(kind: str, which: int, goes: set[str]) -> None:
    run = refunded()
    run = erase_payload(run.pk, seq_of(run, kind, which), None, WHY)
    left = everywhere()
    assert {word for word in (*NUMBERS, "SAID-IT") if word not in left} == goes
    assert run.output == ("[erased]" if goes == {"SAID-IT"} else "SAID-IT")
    intact()


def test_reasons_and_answers_go_from_the_results_that_repeat_them() -> None:
    refund = {"tools": [call("refund", cents=5000)]}
    asks = {"tools": [call("ask_human", question="which?")]}
    run_turns(refund, refund, asks, tools=[refund_tool, ask_human])
    deny(Approval.objects.get().pk, None, reason="NOT-FOR-MUELLER")
    sweep()
    answer(Approval.objects.get(status="pending").pk, None, text="THE-ANSWER")
    sweep()
    run = Run.objects.get()
    assert everywhere().count("NOT-FOR-MUELLER") >= 4, "the same call is refused once more"
    for run_id, seq, why, error, match in (
        (run.pk, seq_of(run, "run_completed") + 900, WHY, errors.RunStateError, "no such row"),
        (run.pk, 2, " ", ValueError, "Say why"),
        ("01a20189-67e9-70a1-9b0c-1b07670a3b0b", 2, WHY, errors.DurableRunNotFoundError, "no run"),
    ):
        with pytest.raises(error, match=match):
            erase_payload(run_id, seq, None, why)
    assert not Message.objects.filter(content=None).exists()
    erase_payload(run.pk, seq_of(run, "approval_decided", 0), None, WHY)
    assert "NOT-FOR-MUELLER" not in everywhere() and "THE-ANSWER" in everywhere()
    erase_payload(run.pk, seq_of(run, "tool_result", -1), None, WHY)
    assert "THE-ANSWER" not in everywhere()
    intact()


def test_what_was_erased_is_not_done_again() -> None:
    run = refunded("TASK-4711")
    with pytest.raises(errors.RunStateError, match="nothing that can be erased"):
        erase_payload(run.pk, seq_of(run, "tool_started"), None, WHY)
    erase_payload(run.pk, seq_of(run, "user"), None, WHY)
    for again, match in (
        (lambda: replay_run(run.pk), rf"Run {run.pk} cannot be replayed: rows .* were erased: 2"),
        (lambda: run_again(run.pk), r"task of run .* was erased .row 2.. Start a run"),
        (lambda: fork_run(run.pk, 3), "was erased"),
    ):
        with pytest.raises(errors.RunStateError, match=match):
            again()
    fork = fork_run(run.pk, 3, text="go on without it")
    assert Message.objects.get(run=fork, seq=2).payload["copied"]["erased"] is True
    cancel_run(fork.pk)
    sent = run_agent(shop_agent("next"), "and now?", "s1", idempotency_key="next")
    assert sent.messages[0]["content"][0]["text"] == "[erased]"
    intact()


def test_erased_in_a_fork_it_is_gone_from_the_origin() -> None:
    run = refunded("TASK-4711")
    fork = fork_run(run.pk, seq_of(run, "tool_result"), session="fork")
    further = fork_run(fork.pk, 3, session="further")
    with pytest.raises(errors.RunStateError, match=rf"Run ({fork.pk}|{further.pk}) .queued. reads"):
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
    assert (erase_session("c").copies, erase_session("other").copies) == (["a", "d"], [])


def test_a_file_goes_after_the_commit(folder: Path) -> None:
    run = fetched()
    cancel_run(fork_run(run.pk, seq_of(run, "tool_result"), session="fork").pk)
    with transaction.atomic():
        erase_payload(run.pk, row_of(run).seq, None, WHY)
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
from agentruns.services.data import erasure
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
    erase_payload(run.pk, seq, None, WHY)
    assert stored_in(folder) == []
    assert Message.objects.filter(kind="payload_erased").count() == 1
    intact()


def test_a_user_is_erased_but_for_what_goes_on() -> None:
    ada, eve = user("ada"), user("eve")
    run_agent(shop_agent("one"), "ADA-ONE", "one", idempotency_key="1", actor=ada)
    run_agent(shop_agent("two"), "ADA-TWO", "two", idempotency_key="2", actor=ada)
    run_agent(shop_agent("hers"), "EVES", "hers", idempotency_key="3", actor=eve)
    waiting = start_run("two", "ADA-MORE", "two", idempotency_key="4", actor=ada)
    would = erase_user(ada, None, WHY, dry_run=True)
    assert (len(would.rows), would.sessions, len(would.refused)) == (4, 1, 1) and "ADA-ONE" in everywhere()
    found = erase_user(ada, None, WHY)
    assert (found.rows, found.refused) == (would.rows, would.refused)
    assert found.refused[0].startswith(f"Session 'two': Run {waiting.pk} (queued) reads")
    left = everywhere()
    assert "ADA-ONE" not in left and "ADA-TWO" in left and "EVES" in left
    cancel_run(waiting.pk)
    erase_user(ada, None, WHY)
    assert "ADA-" not in everywhere() and "EVES" in everywhere()
    assert erase_user(ada, None, WHY).rows == []
    assert all(word in str(found.record()["not_reached"]) for word in ("backups", "keys of sessions"))
    intact()


def test_the_names_of_people_go_with_their_sessions() -> None:
    ada, eve, staff = user("ada-lovelace"), user("eve"), user("staff", is_superuser=True)
    done = run_agent(
        shop_agent("one", {"tools": [call("refund", cents=5000)]}), "ADAS-TASK", "one", actor=ada
    )
    deny(done.pending[0].pk, staff, "no")
    cancel_run(done.run_id, ada)
    run_agent(shop_agent("hers"), "EVES", "hers", actor=eve)
    mine, others = fork_run(done.run_id, 2, actor=ada), fork_run(done.run_id, 2, actor=staff)
    would = erase_user(ada, staff, WHY, dry_run=True, people=True)
    assert (would.sessions, len(would.refused)) == (0, 2) and "reads what is" in would.refused[0]
    for fork in (mine, others):
        cancel_run(fork.pk)
    with pytest.raises(ValueError, match="Say why"):
        erase_user(ada, staff, "", people=True)
    assert erase_user(ada, eve, WHY, people=True).sessions == 0  # without the permission
    assert erase_user(ada, staff, WHY, people=True, dry_run=True).sessions == 2
    found = erase_user(ada, staff, WHY, people=True)
    assert (found.sessions, found.refused) == (2, [f"Session {others.session.key!r} has copies of its rows."])
    assert "ADAS-TASK" not in everywhere() and "ada-lovelace" in everywhere()
    erase_whole_session(others.session.key)
    type(ada).objects.filter(pk=ada.pk).update(username="renamed")
    assert "ada-lovelace" not in everywhere() and "EVES" in everywhere()
    intact()


def test_the_key_of_a_request_goes_and_still_stands_for_its_task(settings: Any) -> None:
    ada, keys = user("ada"), ("ada@example.org run", "ada@example.org message")
    agent = shop_agent("shop", {"text": "ok"})
    waiting = start_run(agent, "pay", "s1", idempotency_key=keys[0], actor=ada)
    send_message("s1", "more", idempotency_key=keys[1], actor=ada)
    sweep()
    Draft.objects.create(run=waiting, watched_until=Now(), text="ada@example.org wrote")
    fork_run(waiting.pk, 3, text="go on")
    for unfinished in Run.objects.unfinished():
        cancel_run(unfinished.pk)
    assert "ada@example.org" in everywhere()
    erase_user(ada, None, WHY)
    assert "ada@example.org" not in everywhere()
    run, rows = Run.objects.get(pk=waiting.pk), Message.objects.count()
    assert (run.idempotency_key, Draft.objects.count()) == (keyed(keys[0]), 0)
    erased = [row.payload for row in session_rows("default", run.session_id) if "key_hash" in row.payload]
    assert [row["key_hash"] for row in erased] == [keyed(key) for key in keys]
    hashed = str(list(map(keyed, keys)) + [canonical.sha256(key) for key in keys])
    shown = [str(line) for line in export_run(run.pk)] + [command("show_run", str(run.pk), "--json").out]
    assert not [word for word in re.findall(r"[0-9a-f]{64}", hashed) if word in "".join(shown)]
    _status, seen = Api(user("staff", is_superuser=True)).get(f"/runs/{run.pk}")
    assert seen["idempotency_key"] == "[erased]"
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "rotated since"
    for _round in range(2):
        with pytest.raises(errors.RunStateError, match=f"belongs to run {run.pk}"):
            start_run(agent, "pay", "s1", idempotency_key=keys[0], actor=ada)
        if not Session.objects.filter(pk=run.session_id).exists():
            break
        assert send_message("s1", "anything", idempotency_key=keys[1], actor=ada).pk == run.pk
        assert Message.objects.count() == rows
        intact()
        erase_session("s1")


@pytest.mark.parametrize(
    ("name", "make", "seq"),
    [
        ("rows_until", lambda key: fork_run(key, 4, text="go on"), 2),
        ("agent_again", run_again, 1),
        ("agent_again", lambda key: fork_run(key, 2), 1),
    ],
    ids=["rows", "again", "fork"],
)
def test_what_is_erased_while_it_is_copied_is_not_written_again(
    monkeypatch: pytest.MonkeyPatch, name: str, make: Any, seq: int
) -> None:
    """The task or the context was read when it is erased; the fork takes up that it is."""
    run_agent(shop_agent("shop"), "TASK-4711", "s1", context={"customer": "CONTEXT-4711"})
    run = Run.objects.get()
    read, goes = getattr(forks, name), {1: "CONTEXT-4711", 2: "TASK-4711"}[seq]

    def read_then_erased(*about: Any) -> Any:
        found = read(*about)
        if not Message.objects.filter(content=None).exists():
            erase_payload(run.pk, seq, None, WHY)
        return found

    monkeypatch.setattr(forks, name, read_then_erased)
    made = make(run.pk)
    assert (goes in everywhere(), made.context) == (False, {} if seq == 1 else run.context)
    cancel_run(made.pk)
    intact()


def test_at_once_with_starts_forks_and_another_erasure() -> None:
    for number in range(4):
        session = f"s{number}"
        run = refunded("TASK-4711", session)
        outcomes = at_once(
            lambda run=run: erase_payload(run.pk, 2, None, WHY),
            lambda run=run: erase_payload(run.pk, 2, None, WHY),
            lambda run=run: fork_run(run.pk, 4, session=f"fork-{run.session.key}"),
            lambda run=run: run_again(run.pk),
        )
        assert all(isinstance(one, Run | errors.RunStateError) for one in outcomes), outcomes
        for unfinished in Run.objects.unfinished():
            cancel_run(unfinished.pk)
        erase_payload(run.pk, 2, None, WHY)
        assert "TASK-4711" not in everywhere()
        assert Message.objects.filter(run=run, kind="payload_erased").count() == 1
        intact()


# Rows whose content is gone: verified, shown, exported, imported, forked; and what no row accounts for


def say_so(run: Run, *seqs: int) -> None:
    """Write the rows that say who erased what."""

    def change(_run: Run, batch: Any) -> None:
        for seq in seqs:
            batch.add(events.PAYLOAD_ERASED, {"seq": seq, "actor": None, "reason": WHY})

    write(run.pk, change, closed=True)


def test_content_that_is_gone_without_a_word_is_found() -> None:
    run = refunded()
    seq = seq_of(run, "tool_result")
    erase(seq, run=run)
    gone = f"Session s1: seq {seq} (tool_result) its content is gone and no row says that it was erased."
    assert problems(run.session_id) == [gone]
    say_so(run, seq + 1)
    assert problems(run.session_id) == [gone], "a row says so of another"
    say_so(run, seq)
    assert problems(run.session_id) == []
    last = run.messages.latest("seq").seq
    say_so(run, last + 2, 1)
    erase(last + 2, run=run)
    assert "no row says that it was erased" in problems(run.session_id)[0], "one said it before it was gone"


def test_a_part_that_is_not_what_the_chain_committed_to_was_altered() -> None:
    run = refunded()
    row = run.messages.filter(seq=3)
    as_it_was = row.values("facts", "facts_salt", "content", "content_salt", "content_hash").get()
    for change in (
        {"content": None},
        {"content_salt": None},
        {"content_salt": "ab" * 16},
        {"content_hash": "ab" * 32},
        {"facts_salt": "ab" * 16},
        {"content": None, "content_salt": None, "content_hash": "ab" * 32},
        {"facts": {"v": 1}},
        {"content": {}},
    ):
        with triggers.lifted(connection):
            row.update(**change)
            assert problems(run.session_id) == ["Session s1: seq 3 (assistant) was altered."], change
            with pytest.raises(
                errors.JournalUnreadableError, match=r"seq 3 .assistant. was altered.*Nothing was er"
            ):
                erase_payload(run.pk, 2, None, WHY)
            row.update(**as_it_was)
    assert (problems(run.session_id), run.messages.filter(content=None).count()) == ([], 0)


def test_everything_can_be_erased_and_all_that_reads_goes_on(tmp_path: Path) -> None:
    run = refunded("TASK-4711")
    for row in run.messages.exclude(content=None):
        if row.content:
            erase_payload(run.pk, row.seq, None, WHY)
    run.refresh_from_db()
    assert (run.status, run.output, run.step) == ("completed", "[erased]", 2)
    assert Approval.objects.get().arguments == {}
    left = everywhere()
    assert [word for word in ("TASK-4711", "ASKING", "SAID-IT", "EDITED-FOR", *NUMBERS) if word in left] == []
    intact()
    api = Api(user("staff", is_superuser=True))
    status, page = api.get(f"/runs/{run.pk}/messages", limit=100)
    assert (status, len(page["items"])) == (200, run.messages.count())
    assert api.get(f"/runs/{run.pk}")[0] == 200
    shown = command("show_run", str(run.pk))
    assert (shown.code, f"row 3: {WHY}" in shown.out) == (0, True)
    _task, reply, result, *_rest = result_of(run.pk).messages
    (used,) = [block for block in reply["content"] if block["type"] == "tool_use"]
    assert (used["name"], used["input"]) == ("refund", {}), "the provider needs its calls"
    (answered,) = result["content"]
    assert (answered["tool_use_id"], answered["content"]) == (used["id"], "[erased]")
    lines = exported(run, tmp_path / "run.jsonl", true_values=True)
    assert "TASK-4711" not in json.dumps([line for line in lines if "seq" in line])
    code, said = verified(tmp_path / "run.jsonl")
    assert (code, said.splitlines()[-1]) == (0, "intact")
    forget_everything()
    run = import_run(lines)
    assert problems(run.session_id) == []
    assert list(export_run(run.pk, true_values=True))[1:-1] == lines[1:-1]


def test_a_fork_of_erased_rows_says_that_they_were_erased() -> None:
    run = refunded()
    seq = seq_of(run, "user")
    before = fork_run(run.pk, run.messages.latest("seq").seq, text="before")
    erase(seq, run=run)
    say_so(run, seq)
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="and now?")
    assert (problems(before.session_id), problems(fork.session_id)) == ([], [])
    copied = fork.messages.get(seq=seq)
    assert (copied.content, copied.content_salt, copied.payload["copied"]["erased"]) == (None, None, True)
    with triggers.lifted(connection):
        before.messages.filter(seq=seq + 1).update(content=None, content_salt=None)
    assert "no row says that it was erased" in problems(before.session_id)[0]
