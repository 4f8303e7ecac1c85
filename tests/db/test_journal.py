"""The journal: append-only, fenced, chained, and the same on every database."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from agentruns import ToolContext, cancel_run, run_agent, start_run, tool
from agentruns.exceptions import JournalConflictError
from agentruns.journal.connection import own_alias, own_connection
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session, Tombstone, triggers
from tests.db.dying import elsewhere
from tests.db.helpers import payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def run() -> Run:
    return the_run(run_turns({"tools": [call("post", text="hi")]}))


def test_the_database_refuses_to_change_the_journal(run: Run) -> None:
    """No SQL of its own does, such as TRUNCATE on PostgreSQL and INSERT OR REPLACE on SQLite."""
    rows = Message.objects.filter(run=run)
    before = list(rows.values_list("hash", flat=True))
    columns = ", ".join(field.column for field in Message._meta.concrete_fields if field.column != "facts")
    sql = {
        "postgresql": "TRUNCATE agentruns_message",
        "sqlite": f"INSERT OR REPLACE INTO agentruns_message ({columns}, facts)"
        f" SELECT {columns}, '{{}}' FROM agentruns_message WHERE seq = 2",
    }[connection.vendor]
    for change in (
        partial(rows.update, kind="user"),
        partial(rows.filter(seq=3).update, content={}),
        partial(rows._raw_delete, "default"),
        lambda: connection.cursor().execute(sql),
    ):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            change()
        assert list(rows.values_list("hash", flat=True)) == before


def test_a_tombstone_lets_one_session_be_deleted(run: Run) -> None:
    other = the_run(run_turns(session="s2"))
    Tombstone.objects.create(session_id=run.session_id, key="s1", head="")
    with transaction.atomic():
        Message.objects.filter(session_id=run.session_id)._raw_delete("default")
    assert Message.objects.filter(run=other).exists()
    with pytest.raises(DatabaseError), transaction.atomic():
        Message.objects.filter(run=other)._raw_delete("default")


def test_the_triggers_are_installed_again_after_migrate(run: Run) -> None:
    triggers.remove(connection)
    assert triggers.differences(connection)
    triggers.install_on_migrate(using="default")
    assert not triggers.differences(connection)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda rows: rows.filter(seq=2).update(content={"content": []}), "seq 2 (user) was altered"),
        (lambda rows: rows.filter(seq=4).update(tool_name="refund"), "seq 4 (tool_started) was altered"),
        (lambda rows: rows.filter(seq=7)._raw_delete("default"), "its head is seq 7, the journal ends at 6"),
        (lambda rows: rows.filter(seq=3)._raw_delete("default"), "seq 3 is missing"),
    ],
)
def test_a_change_made_with_the_triggers_dropped_is_found(run: Run, change: object, found: str) -> None:
    with triggers.lifted(connection):
        change(Message.objects.filter(run=run))  # type: ignore[operator]
    assert found in problems(run.session_id)[0]


def test_a_changed_column_is_found(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(output="something else")
    assert "output is 'something else', the journal says 'all done'" in problems(run.session_id)[0]


def pausing(run: Run, reason: str = "stop", **options: Any) -> Batch:
    """Build a batch that asks a run to pause, on what is stored by now."""
    batch = Batch(load("default", run.session_id, run.pk), **options)
    batch.add("run_pause_requested", {"reason": reason})
    return batch


def append(batch: Batch, *, own: bool = False) -> None:
    """Store a batch in a transaction of Django's, or by the driver on the journal's own connection."""
    with own_connection("default") if own else nullcontext():
        DatabaseStore().append(batch, durable=own)
        assert not own or own_alias("default") != "default"


# On PostgreSQL that is one statement: what it has written by the time it fails is committed.
own_commit = pytest.mark.parametrize("own", [False, True])


@own_commit
def test_a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing(own: bool) -> None:
    run = start_run(shop_agent("stale"), "do it", "s1")
    first, stale = pausing(run), pausing(run)
    append(first, own=own)
    with pytest.raises(JournalConflictError):
        append(stale, own=own)
    session = Session.objects.get()
    assert (session.next_seq, Message.objects.count(), problems(session.pk)) == (4, 3, [])


@own_commit
def test_an_engine_row_of_another_epoch_is_refused(own: bool) -> None:
    """A refused append leaves a connection for the next one."""
    run = start_run(shop_agent("fenced"), "do it", "s1", idempotency_key="k")
    Run.objects.update(lease_epoch=7)
    before = [Session.objects.values().get(), Run.objects.values().get()]
    with own_connection("default") if own else nullcontext():
        with pytest.raises(JournalConflictError):
            DatabaseStore().append(pausing(run, epoch=6), durable=own)
        assert [Session.objects.values().get(), Run.objects.values().get()] == before
        assert Message.objects.count() == 2
        DatabaseStore().append(pausing(run), durable=own)
    assert (Message.objects.count(), problems(run.session_id)) == (3, [])


def test_a_wrapper_of_the_host_hears_of_what_is_written_on_the_shared_connection() -> None:
    batch = pausing(start_run(shop_agent("heard"), "do it", "s1"))
    heard: list[str] = []

    def hear(execute: Any, sql: str, *about: Any) -> Any:
        heard.append(sql)
        return execute(sql, *about)

    with connection.execute_wrapper(hear):
        DatabaseStore().append(batch, durable=True)
    assert sum('INTO "agentruns_message"' in sql for sql in heard) == 1


def test_a_writer_that_has_seen_another_history_of_the_same_length_is_refused(effects: Effects) -> None:
    """As after a backup is restored, where what was lost has been written again, otherwise."""
    run = start_run(shop_agent("restored"), "do it", "s1")
    backup = Session.objects.values("next_seq", "head").get()
    append(pausing(run, "lost"))
    stale = pausing(run, "knows of the lost row")
    with triggers.lifted(connection):
        Message.objects.filter(seq__gte=backup["next_seq"]).delete()
        Session.objects.update(**backup)
    append(pausing(run, "written again"))
    with pytest.raises(JournalConflictError):
        append(stale)
    assert (Message.objects.count(), problems(run.session_id)) == (3, [])


@own_commit
def test_a_service_that_does_not_look_adds_nothing_to_a_run_that_has_ended(run: Run, own: bool) -> None:
    rows = Message.objects.count()
    with pytest.raises(JournalConflictError):
        append(pausing(run, "it has ended"), own=own)
    assert (Message.objects.count(), problems(run.session_id)) == (rows, [])


ODD = ["\x00", "\ud800", "\x10", "\x100000", "a\u202eb", "𝄞", "\\u0010", "'; DROP TABLE", "\x10NaN"]


def test_odd_text_survives_on_every_database() -> None:
    texts = [{"type": "text", "text": odd} for odd in ODD]
    uses = [
        {"type": "tool_use", "id": f"t{number}", "name": "post", "input": {"text": odd}}
        for number, odd in enumerate(ODD)
    ]
    turn = {"content": [*texts, *uses], "stop_reason": "tool_use"}
    run = the_run(run_turns(turn, {"text": ODD[0]}, text=f"say {' '.join(ODD)}"))
    started = Message.objects.filter(run=run, kind="tool_started").order_by("seq")
    reply = payloads(run, "assistant")[0]
    assert reply["content"] == turn["content"]
    assert [one["arguments"]["text"] for one in reply["calls"]] == ODD
    assert [one["id"] for one in reply["calls"]] == [row.call_id for row in started]
    assert (run.input, run.output) == (f"say {' '.join(ODD)}", ODD[0])
    with connection.cursor() as cursor:
        cursor.execute("SELECT facts || content FROM agentruns_message")
        assert all("\x00" not in text for (text,) in cursor.fetchall())


def test_the_intent_and_the_start_are_committed_before_the_handler() -> None:
    seen: list[Any] = []

    @tool
    def look(ctx: ToolContext) -> str:
        """Look at the journal as another process would, while this handler is at work."""
        rows = elsewhere(lambda: list(Message.objects.order_by("seq").values_list("kind", "facts")))
        seen.append(([kind for kind, _facts in rows], rows[-1][1]["key"] == ctx.idempotency_key))
        return "seen"

    run_turns({"tools": [call("look")]}, tools=[look])
    assert seen == [(["run_started", "user", "assistant", "tool_started"], True)]


@pytest.mark.parametrize(("kind", "acted"), [("assistant", 0), ("tool_started", 0), ("tool_result", 1)])
def test_a_write_that_fails_for_good_stops_the_run_aloud(kind: str, acted: int, effects: Effects) -> None:
    class Refusing(DatabaseStore):
        def append(self, batch: Batch, **options: Any) -> None:
            if any(row.kind == kind for row in batch.rows):
                raise RuntimeError("the database says no")
            super().append(batch, **options)

    agent = shop_agent("refused", {"tools": [call("post", text="hi")]})
    with pytest.raises(RuntimeError, match="the database says no"):
        run_agent(agent, "do it", "s1", store=Refusing())
    assert effects.count() == acted
    assert Run.objects.get().status not in Run.ENDED


def test_a_started_run_is_returned_as_it_is_stored(django_user_model: Any) -> None:
    """Nobody reads it back, also not in a session that has rows of an earlier run."""
    agent, owner = shop_agent("stored"), django_user_model.objects.create_user("ann")
    for number in range(2):
        run = start_run(agent, f"Task {number}\x00", session="s1", actor=owner, idempotency_key=f"k{number}")
        stored = Run.objects.select_related("session").get(pk=run.pk)
        for mine, other in ((run, stored), (run.session, stored.session)):
            for field in other._meta.concrete_fields:
                assert repr(getattr(mine, field.attname)) == repr(getattr(other, field.attname))
        cancel_run(run.pk, owner)
