"""Pruning: whole ended sessions go, with all that is theirs alone; their keys stay refused."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models.functions import Now
from django.test import override_settings

from agentruns import cancel_run, fork_run, replay_run, run_again, run_agent, start_run, state_at
from agentruns.exceptions import (
    DurableRunNotFoundError,
    JournalConflictError,
    NotDurableError,
    RunStateError,
    SessionBusyError,
)
from agentruns.journal import payloads
from agentruns.journal.masking import mask_of
from agentruns.journal.verify import problems
from agentruns.models import (
    Approval,
    Definition,
    IdempotencyRecord,
    Message,
    Notification,
    PrunedKey,
    Run,
    Session,
    Tombstone,
)
from agentruns.models.tombstone import forgotten
from agentruns.services.data import retention
from agentruns.services.data.retention import Pruned, count_ended, erase_session, prune_ended, revived
from agentruns.services.runs import submit
from agentruns.services.sweep import sweep
from agentruns.services.transfer import export_run, import_run
from tests.commands.running import run as command
from tests.crash.processes import interpret_and_die
from tests.db.dying import elsewhere
from tests.db.helpers import user
from tests.db.racing import at_once
from tests.effects import Effects
from tests.files import MEGABYTE, fetch, fetch_secretly, fetched, row_of, stored_in
from tests.registry import isolated_registry
from tests.shop.agents import call, refund, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DAY = 86_400


def tell(notice: Any) -> None:
    """Tell nobody."""


def aged(session: str, days: float = 40) -> None:
    """Let nothing have happened in a session for so long."""
    at = Now() - timedelta(days=days)
    Run.objects.filter(session__key=session).update(updated_at=at)


def ended(session: str, days: float = 40, **options: Any) -> Run:
    """Make a run that ended so long ago, alone in its session."""
    agent = shop_agent(f"agent-{session}")
    result = run_agent(agent, "do it", session, idempotency_key=f"key-{session}", **options)
    aged(session, days)
    return Run.objects.get(pk=result.run_id)


def keys() -> set[str]:
    return set(Session.objects.values_list("key", flat=True))


def answer(owner: Any, run: Run, days: float) -> None:
    """Let the API have answered about a run so long ago."""
    record = IdempotencyRecord(owner=owner, key=str(run.pk), fingerprint="x", status=200, run_id=run.pk)
    record.save()
    IdempotencyRecord.objects.filter(pk=record.pk).update(created_at=Now() - timedelta(days=days))


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (path.stat().st_mtime - DAY - 1,) * 2)


def all_sound() -> bool:
    return not any(problems(session.pk) for session in Session.objects.all())


def test_nothing_is_left_but_a_tombstone(folder: Path, settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.tell"]
    ada = user("ada")
    with isolated_registry():
        run = fetched(MEGABYTE, {"tools": [call("refund", cents=5000)]}, actor=ada, tools=[fetch, refund])
        cancel_run(run.pk)
        again = run_again(run.pk, idempotency_key="once more")
        cancel_run(again.pk)
        session = Session.objects.get(key="s1")
        unfinished = start_run(shop_agent("waits"), "do it", "waits", idempotency_key="waits")
        young = ended("young", days=29.9)
    for key in ("s1", "waits"):
        aged(key)
    answer(ada, run, 41), answer(ada, young, 29)
    rows = Message.objects.filter(session=session).count()
    assert (Approval.objects.count(), len(stored_in(folder)), Definition.objects.count()) == (1, 1, 3)
    told = Notification.objects.filter(run__session=session).count()
    assert told
    due = count_ended(30)
    assert (due.sessions, due.runs, due.rows) == (1, 2, 0)

    assert prune_ended(30) == Pruned(
        sessions=1, runs=2, rows=rows, approvals=1, notifications=told, answers=1, definitions=1, files=1
    )
    assert keys() == {"waits", "young"}
    assert set(Run.objects.values_list("pk", flat=True)) == {unfinished.pk, young.pk}
    assert not Message.objects.filter(session_id=session.pk).exists()
    assert not Approval.objects.exists()
    assert not stored_in(folder) and not list(folder.iterdir())
    assert (Definition.objects.count(), IdempotencyRecord.objects.get().key) == (2, str(young.pk))
    tombstone = Tombstone.objects.get()
    assert (tombstone.pk, tombstone.key, tombstone.head) == (session.pk, "s1", session.head)
    mine, other = forgotten("s1"), forgotten("once more")
    names = {"session": forgotten("s1"), mine: str(run.pk), other: str(again.pk)}
    assert tombstone.idempotency_keys == names
    assert set(PrunedKey.objects.values_list("owner_id", "key", "run_id")) == {
        (ada.pk, mine, run.pk), (ada.pk, other, again.pk),
    }  # fmt: skip
    assert all_sound()
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        Message.objects.filter(run=young).delete()
    assert prune_ended(30) == Pruned()
    assert not revived("default")
    Session.objects.create(pk=session.pk, key="s1")
    assert [one.key for one in revived("default")] == ["s1"]
    outcome = command("verify_journal")
    assert (outcome.code, outcome.out.splitlines()[0]) == (
        1, "Session s1: was pruned and is there again: the database would let its rows be deleted.",
    )  # fmt: skip


def test_a_key_stays_refused_in_every_session() -> None:
    ada, eve = user("ada"), user("eve")
    run, nobodys = ended("hers", actor=ada), ended("nobody's")
    other = ended("other", days=0, actor=ada)
    assert prune_ended(30).sessions == 2
    why = f"belongs to run {run.pk}, which was pruned"

    def start(session: str, actor: Any, key: str = "key-hers") -> Run:
        return start_run("agent-hers", "do it", session, actor=actor, idempotency_key=key)

    for forgot in (False, True):
        for attempt in (
            lambda: start("hers", ada),
            lambda: start("a new one", ada),
            lambda: start("hers", None),  # the program does not know whose it was
            lambda: run_agent("agent-hers", "do it", "x", actor=ada, idempotency_key="key-hers"),
            lambda: fork_run(other.pk, 2, actor=ada, idempotency_key="key-hers"),
            lambda: run_again(other.pk, ada, idempotency_key="key-hers"),
        ):
            with pytest.raises(RunStateError, match=why):
                attempt()
        with pytest.raises(RunStateError, match=f"belongs to run {nobodys.pk}"):
            start("x", None, "key-nobody's")
        if not forgot:
            assert keys() == {"other"}
            erase_session("hers", forget_key=True)
            erase_session("hers", forget_key=True)
    kept = [*Tombstone.objects.values_list("key", "idempotency_keys"), *PrunedKey.objects.values_list("key")]
    assert "hers" not in str(kept)
    assert start("hers", eve).session_id != run.session_id
    assert start("x", ada, "another key").status == "queued"


def test_a_fork_goes_on_without_its_origin(folder: Path) -> None:
    """So does an imported run that shares its files."""
    with isolated_registry():
        run = fetched(tools=[fetch_secretly])
        row = row_of(run)
        fork = fork_run(run.pk, row.seq, session="fork")
        assert sweep().completed == 1
        second = fork_run(fork.pk, row.seq + 1, text="And now?", session="second")
        cancel_run(second.pk)
    aged("s1")
    assert prune_ended(30).sessions == 1
    # Its only definition is named by the rows that were copied: it says what is sensitive in them.
    assert (len(stored_in(folder)), Definition.objects.count()) == (1, 1)
    with isolated_registry():
        agent = shop_agent("fetcher-s1", tools=[fetch_secretly])
        assert all_sound()
        for one in (fork, second):
            assert state_at(one.pk, row.seq + 1).status
            assert mask_of(Run.objects.get(pk=one.pk)).arguments_of == {"fetch": ("token",)}
        assert replay_run(fork.pk).is_equal
        with pytest.raises(DurableRunNotFoundError):
            fork_run(run.pk, row.seq)
        again = run_again(fork.pk)
        assert (again.status, agent.name) == ("queued", again.agent)
        cancel_run(again.pk)
        read = payloads.of(fork.pk, row.seq, Message.objects.get(session__key="fork", seq=row.seq).payload)
        assert read is not None and len(payloads.content_of(read)) == MEGABYTE
    aged("fork")
    assert (prune_ended(30).sessions, len(stored_in(folder))) == (1, 1), "the fork of the fork has it still"
    lines = list(export_run(second.pk, true_values=True))
    with override_settings(AGENTRUNS_DATABASE="other"):
        imported = import_run(lines)
    assert (erase_session("second").files, len(stored_in(folder))) == (0, 1)
    with pytest.raises(RunStateError, match="was pruned here"):
        import_run(lines)
    assert problems(imported.session_id, "other") == []
    with override_settings(AGENTRUNS_DATABASE="other"):
        assert erase_session("second").files == 1
    assert not stored_in(folder)
    assert not Session.objects.exists()


def test_pages_limits_and_what_a_host_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PAGE", 2)
    monkeypatch.setattr("agentruns.utils.db.TRIES", 2)
    for number in range(5):
        ended(f"s{number}", days=50 - number)
        run_agent(f"agent-s{number}", "again", f"s{number}", idempotency_key=f"{number}")
        aged(f"s{number}", days=50 - number)
    with transaction.atomic(), pytest.raises(NotDurableError):
        prune_ended(30)
    with pytest.raises(ValueError, match="at least 1 day"):
        prune_ended(0)
    assert prune_ended(30, limit=1).sessions == 1
    assert keys() == {"s1", "s2", "s3", "s4"}, "the oldest first"

    def meanwhile() -> bool:
        start_run("agent-s4", "another", "s4", idempotency_key="another")
        return False

    s2 = Session.objects.get(key="s2")
    kind = "uuid" if connection.vendor == "postgresql" else "char(32)"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE host_ticket (session {kind} REFERENCES agentruns_session (id))")
        try:
            value = s2.pk if connection.vendor == "postgresql" else s2.pk.hex
            cursor.execute("INSERT INTO host_ticket VALUES (%s)", [value])
            pruned = prune_ended(30, should_stop=meanwhile)
            assert (pruned.sessions, len(pruned.refused)) == (2, 1)
            with pytest.raises(RunStateError, match="lets nobody delete"):
                erase_session("s2")
        finally:
            cursor.execute("DROP TABLE host_ticket")
    assert keys() == {"s2", "s4"}, "something happened in s4 meanwhile"
    assert all_sound()
    assert not Tombstone.objects.filter(pk=s2.pk).exists()


def test_erasing(folder: Path) -> None:
    ada = user("ada")
    run = fetched(actor=ada)
    fork = fork_run(run.pk, 2, actor=ada, session="fork")
    later = start_run("fetcher-s1", "another", "s1", actor=ada, idempotency_key="another")
    answer(ada, run, 0), answer(ada, fork, 0)
    with pytest.raises(RunStateError, match=f"unfinished run {later.pk} .queued.. Cancel it first"):
        erase_session("s1")
    assert (Tombstone.objects.count(), len(stored_in(folder))) == (0, 1)
    cancel_run(later.pk)
    orphan = folder / str(run.session_id) / "of-a-call-that-was-lost"
    orphan.write_text("x")
    pruned = erase_session("s1")
    assert (pruned.runs, pruned.answers, pruned.files, pruned.copies) == (2, 1, 2, ["fork"])
    assert not stored_in(folder)
    assert keys() == {"fork"}
    assert "do it" not in str(list(Tombstone.objects.values()))
    orphan.parent.mkdir()
    orphan.write_text("of a process that died before it deleted the file")
    assert erase_session("s1") == Pruned(files=1)
    with pytest.raises(RunStateError, match="There is no session 'unheard of'"):
        erase_session("unheard of")


def test_files_that_no_row_names(folder: Path) -> None:
    run = fetched()
    waits = start_run(shop_agent("waits"), "do it", "waits", idempotency_key="waits")
    (needed,) = stored_in(folder)
    lost = folder / str(run.session_id) / "lost"
    nobodys = folder / "01a20189-67e9-70a1-9b0c-1b07670a3b0b" / "input-1"
    young = nobodys.with_name("input-2")
    awaited = folder / str(waits.session_id) / "not-yet"
    foreign = folder / "somebody" / "else.txt"
    for path in (lost, nobodys, young, awaited, foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    make_old(needed, lost, nobodys, awaited, foreign)
    assert prune_ended(30) == Pruned(files=2)
    assert set(stored_in(folder)) == {needed, young, awaited, foreign}


PRUNE = """
import os, signal, sys, django
django.setup()
from django.conf import settings
from agentruns.models import Session
from agentruns.services.data import retention
from tests.files import alias
settings.STORAGES = {**settings.STORAGES, **alias(sys.argv[1], "tests.files.DeadlyDeletingStorage")}
settings.DATABASES.pop("other")
delete_rows = retention.delete_rows
def delete_or_die(rows):
    return os.kill(os.getpid(), signal.SIGKILL) if rows.model is Session else delete_rows(rows)
if sys.argv[2] == "rows":
    retention.delete_rows = delete_or_die
retention.prune_ended(30)
"""


def test_killed_in_the_middle_it_goes_on(folder: Path) -> None:
    fetched()
    aged("s1")
    rows = Message.objects.count()
    interpret_and_die("-c", PRUNE, str(folder), "rows")
    # All but the last statement are done, and nothing is committed.
    assert (Message.objects.count(), Tombstone.objects.count()) == (rows, 0)
    assert all_sound()
    interpret_and_die("-c", PRUNE, str(folder), "files")
    assert (Message.objects.count(), Tombstone.objects.count()) == (0, 1)
    (left,) = stored_in(folder)
    assert prune_ended(30) == Pruned(), "too young to be sure of"
    make_old(left)
    assert prune_ended(30) == Pruned(files=1)
    assert not stored_in(folder)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite: nobody prunes while another writes")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("moment", ["begin_run", "unfinished_run", "load", "lock_session"])
def test_a_session_pruned_while_a_run_begins_in_it(
    moment: str, large: bool, folder: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is looked for, once it is found, before the statement; and before it is locked."""
    settings.AGENTRUNS_PAYLOAD_INLINE_MAX = 2_000
    ended("s1")
    gone, act = [Session.objects.get().pk], getattr(submit, moment)

    def pruned_before(*args: Any, **options: Any) -> Any:
        if Session.objects.filter(pk__in=gone).exists():
            elsewhere(lambda: erase_session("s1"))
        return act(*args, **options)

    monkeypatch.setattr(submit, moment, pruned_before)
    if moment == "lock_session":  # on the way that is taken where the one without a lock has failed
        begin_run = submit.begin_run

        def begin_locked(*args: Any, **options: Any) -> Any:
            if connection.get_autocommit():
                raise JournalConflictError("as if another run was faster")
            return begin_run(*args, **options)

        monkeypatch.setattr(submit, "begin_run", begin_locked)
    agent = shop_agent("worker", {"text": "done"})
    text = "more " * (1_000 if large else 1)
    if large:
        with pytest.raises(SessionBusyError, match="pruned just now; try again"):
            run_agent(agent, text, "s1")
    run = run_agent(agent, text, "s1")
    assert run.status == "completed"
    assert Session.objects.get().pk not in gone
    assert all_sound()


def test_beside_workers(effects: Effects) -> None:
    old = [f"s{number}" for number in range(6)]
    for key in old:
        ended(key)
    agent = shop_agent("worker", {"tools": [call("post", text="x")]})

    def go_on() -> None:
        for key in old[::2]:
            run_agent(agent, "more", key, idempotency_key=f"more-{key}")

    def begin() -> None:
        for number in range(3):
            run_agent(agent, "new", f"new-{number}", idempotency_key=f"new-{number}")

    pruned, *others = at_once(lambda: prune_ended(30), go_on, begin)
    assert (pruned.refused, others) == ([], [None, None])
    assert keys() == {*old[::2], *(f"new-{number}" for number in range(3))}
    assert set(Run.objects.values_list("status", flat=True)) == {"completed"}
    assert Run.objects.filter(agent="worker").count() == effects.count() == 6
    assert Tombstone.objects.count() == pruned.sessions
    assert all_sound()
