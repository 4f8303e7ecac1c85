"""What the database itself refuses, and what `verify_journal` says of ways around it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import IntegrityError, connection, transaction

from agentruns.journal.store import Batch, DatabaseStore, project, write_rows
from agentruns.journal.verify import check
from agentruns.models import Message, PrunedKey, Run, Tombstone, triggers
from agentruns.services.data.retention import erase_session
from agentruns.services.sweep import sweep
from tests.commands.running import run as command
from tests.db.helpers import run_turns, the_run, user
from tests.effects import Effects
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

on_sqlite = pytest.mark.skipif("connection.vendor != 'sqlite'", reason="PostgreSQL's are another test")
on_postgresql = pytest.mark.skipif("connection.vendor != 'postgresql'", reason="only PostgreSQL has these")


@pytest.fixture
def run() -> Run:
    return the_run(run_turns({"tools": [call("post", text="hi")]}))


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    triggers.install(connection)


def execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


@contextmanager
def refusal() -> Iterator[None]:
    with pytest.raises(IntegrityError, match="is refused"), transaction.atomic():
        yield


def refused(*statements: str) -> None:
    with refusal():
        execute(*statements)


@contextmanager
def made(statement: str, undo: str) -> Iterator[None]:
    execute(statement)
    try:
        yield
    finally:
        execute(undo)


def wrong() -> list[str]:
    outcome = command("verify_journal")
    *lines, _ = outcome.out.splitlines()
    assert outcome.code == (1 if lines else 0)
    return lines


def copied() -> str:
    """Build a statement that stores the first row once more."""
    columns = [field.column for field in Message._meta.concrete_fields]
    names = ", ".join(name for name in columns if name not in ("id", "seq"))
    rows = "FROM agentruns_message WHERE seq = 1"
    return f"INSERT INTO agentruns_message (seq, {names}) SELECT 99, {names} {rows}"


def test_a_tombstone_allows_no_forged_rows_and_stays(run: Run) -> None:
    Tombstone.objects.create(session_id=run.session_id, key="s1", head="")
    refused(copied())
    execute("DELETE FROM agentruns_message WHERE seq > 3")
    refused(copied())
    refused("DELETE FROM agentruns_tombstone")
    refused("UPDATE agentruns_tombstone SET head = 'x'")
    refused(f"UPDATE agentruns_tombstone SET head = 'x', key = 'sha256:{'0' * 64}'")
    refused("UPDATE agentruns_tombstone SET key = 'another'")
    refused("UPDATE agentruns_tombstone SET idempotency_keys = '{\"k\":1}'")
    if connection.vendor == "sqlite":
        refused("INSERT OR REPLACE INTO agentruns_tombstone SELECT * FROM agentruns_tombstone")
    else:
        refused("TRUNCATE agentruns_tombstone CASCADE")
    assert "Session s1: was pruned and is there again" in wrong()[-1]
    assert (Tombstone.objects.count(), Message.objects.count()) == (1, 3)


def test_the_keys_of_a_tombstone_are_forgotten_once() -> None:
    run_turns()
    erase_session("s1", forget_key=True)
    forgotten = Tombstone.objects.get()
    assert forgotten.key.startswith("sha256:")
    erase_session("s1", forget_key=True)
    assert Tombstone.objects.get().key == forgotten.key
    refused(f"UPDATE agentruns_tombstone SET key = 'sha256:{'1' * 64}'")
    assert wrong() == []


def test_a_temporary_table_hides_no_tombstone(run: Run) -> None:
    make = "CREATE TEMPORARY TABLE agentruns_tombstone AS SELECT session_id, id AS key FROM agentruns_message"
    schema = "temp" if connection.vendor == "sqlite" else "pg_temp"
    with made(make, f"DROP TABLE {schema}.agentruns_tombstone"):
        refused("DELETE FROM agentruns_message")
        (found,) = triggers.differences(connection)
        assert found.startswith("A temporary table")
        assert "agentruns_tombstone" in found
    assert triggers.differences(connection) == []


@on_postgresql
def test_replicas_are_no_way_around(run: Run) -> None:
    replica = "SET LOCAL session_replication_role = replica"
    refused(replica, "UPDATE agentruns_message SET kind = 'user'")
    refused(replica, "DELETE FROM agentruns_message")
    Tombstone.objects.create(session_id=run.session_id, key="s1", head="")
    refused(replica, copied())
    refused(replica, "DELETE FROM agentruns_tombstone")


ROWS, ON = "agentruns_message_rows", "ON agentruns_message"
GUARD = "public.agentruns_message_guard()"
WAYS = {
    "disabled": f"ALTER TABLE agentruns_message DISABLE TRIGGER {ROWS}",
    "for replicas": f"ALTER TABLE agentruns_message ENABLE REPLICA TRIGGER {ROWS}",
    "not for replicas": f"ALTER TABLE agentruns_message ENABLE TRIGGER {ROWS}",
    "another function": f"CREATE OR REPLACE FUNCTION {GUARD} RETURNS trigger LANGUAGE plpgsql"
    " AS 'BEGIN RETURN NEW; END'",
    "another search path": f"ALTER FUNCTION {GUARD} SET search_path = public",
    "its maker's rights": f"ALTER FUNCTION {GUARD} SECURITY DEFINER",
    "a condition": f"DROP TRIGGER {ROWS} {ON};; CREATE TRIGGER {ROWS} BEFORE INSERT {ON}"
    f" FOR EACH ROW WHEN (false) EXECUTE FUNCTION {GUARD}",
}


@on_postgresql
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("way", WAYS)
def test_a_trigger_that_is_another_is_named_and_restored(way: str) -> None:
    assert_found_and_restored(WAYS[way], ROWS)


def assert_found_and_restored(statements: str, name: str) -> None:
    execute(*statements.split(";; "))
    assert wrong()[0].startswith(f"Trigger {name} of the journal is not the one that this version installs")
    assert "agentruns.W017" in [message.id for message in run_checks(databases=["default"])]
    assert command("verify_journal", "--repair").code == 0
    assert (wrong(), triggers.differences(connection)) == ([], [])


ONE = "agentruns_message_update"


@on_sqlite
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("where", ["agentruns_message WHEN 0", "agentruns_run"])
def test_a_trigger_of_sqlite_that_is_another_is_named_and_restored(where: str) -> None:
    another = f"CREATE TRIGGER {ONE} BEFORE UPDATE ON {where} BEGIN SELECT 1; END"
    assert_found_and_restored(f"DROP TRIGGER {ONE};; {another}", ONE)


NOTHING = "LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
FOREIGN: dict[str, tuple[str, str, str]] = {
    "rule": (
        "CREATE RULE quiet AS ON UPDATE TO agentruns_message DO INSTEAD NOTHING",
        "DROP RULE quiet ON agentruns_message",
        "Rule quiet on agentruns_message is not ours.",
    ),
    "child": (
        "CREATE TABLE hidden () INHERITS (agentruns_message)",
        "DROP TABLE hidden",
        "hidden is a child of agentruns_message: its rows are read, and unprotected.",
    ),
    "trigger": (
        f"CREATE FUNCTION swallow() RETURNS trigger {NOTHING};"
        " CREATE TRIGGER swallow BEFORE INSERT ON agentruns_run FOR EACH ROW EXECUTE FUNCTION swallow()",
        "DROP FUNCTION swallow CASCADE",
        "Trigger swallow on a table of the journal is not ours.",
    ),
    "constraints": (
        "ALTER TABLE agentruns_approval DISABLE TRIGGER ALL",
        "ALTER TABLE agentruns_approval ENABLE TRIGGER ALL",
        "Foreign keys of agentruns_approval are not enforced: ",
    ),
}


@on_postgresql
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_ours_is_named_and_left_alone(kind: str) -> None:
    make, undo, said = FOREIGN[kind]
    with made(make, undo):
        assert wrong()[0].startswith(said)
        assert command("verify_journal", "--repair").code == 1
    assert wrong() == []


@on_sqlite
def test_a_foreign_trigger_of_sqlite() -> None:
    make = "CREATE TRIGGER swallow AFTER INSERT ON agentruns_run BEGIN SELECT 1; END"
    with made(make, "DROP TRIGGER swallow"):
        assert wrong() == ["Trigger swallow on a table of the journal is not ours."]
    with made(make.replace("CREATE", "CREATE TEMPORARY"), "DROP TRIGGER swallow"):
        assert wrong() == ["A temporary trigger swallow hides or changes agentruns_run."]


@on_postgresql
def test_another_schema_and_any_search_path(run: Run) -> None:
    path = "SET search_path = "
    execute('CREATE SCHEMA "Ten""ant"')
    try:
        for table in (triggers.MESSAGE, triggers.TOMBSTONE):
            execute(f'CREATE TABLE "Ten""ant".{table} (LIKE public.{table} INCLUDING ALL)')
            execute(f'INSERT INTO "Ten""ant".{table} SELECT * FROM public.{table}')
        execute(f'{path}"Ten""ant", public')
        assert triggers.differences(connection)
        triggers.install(connection)
        assert triggers.differences(connection) == []
        execute(f"{path}pg_temp")
        refused('DELETE FROM "Ten""ant".agentruns_message')
        refused("DELETE FROM public.agentruns_message")
    finally:
        execute(f"{path}DEFAULT", 'DROP SCHEMA "Ten""ant" CASCADE')
    assert wrong() == []


def test_rows_without_their_session_are_found(run: Run) -> None:
    off, on = "PRAGMA foreign_keys = OFF", "PRAGMA foreign_keys = ON"
    if connection.vendor == "postgresql":
        off, on = (f"SET session_replication_role = {role}" for role in ("replica", "DEFAULT"))
    with made(off, on):
        execute("DELETE FROM agentruns_session")
    assert wrong() == [f"Session {run.session_id}: has rows in the journal, and is gone itself."]


def test_the_keys_of_a_pruned_session_are_not_freed_unseen() -> None:
    run = the_run(run_turns(text="pay"))
    erase_session("s1")
    assert wrong() == []
    PrunedKey.objects.all().delete()
    freed = f"was pruned, and the idempotency key of its run {run.pk} is not refused any more."
    assert wrong() == [f"Session s1: {freed}"]
    # PostgreSQL's trigger wants the true hash; SQLite's takes any.
    digest = hashlib.sha256(b"s1").hexdigest() if connection.vendor == "postgresql" else "0" * 64
    refused(f"UPDATE agentruns_tombstone SET key = 'sha256:{digest}', idempotency_keys = '{{}}'")
    execute(f"UPDATE agentruns_tombstone SET key = 'sha256:{digest}'")
    *replaced, last = wrong()
    assert last.endswith(freed)
    another = f"Session sha256:{digest}: was pruned, and its tombstone has another key since."
    assert replaced == ([another] if connection.vendor == "sqlite" else [])


@on_postgresql
@pytest.mark.parametrize("table", ["agentruns_tombstone", "agentruns_message", "agentruns_session"])
def test_row_security_is_named(table: str) -> None:
    with made(
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY", f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"
    ):
        assert triggers.differences(connection) == [f"Row security may hide rows of {table}."]
    assert wrong() == []


def test_a_decision_that_sql_appends_as_the_application_would_is_believed(effects: Effects) -> None:
    """No owner's right is needed, only those of the application's role: SECURITY.md says so."""
    result = run_turns({"tools": [call("refund", cents=5000)]})
    (card,) = result.pending
    run, store = Run.objects.get(), DatabaseStore("default")  # its statements are what a forger's would be
    state = store.load(run.session_id, run.pk)
    batch = Batch(state)
    boss = {"id": str(user("boss", "decide_approval").pk), "name": "boss"}
    payload = {"verb": "approve", "digest": card.digest, "actor": boss, "channel": "console"}
    batch.add("approval_decided", payload, call=state.run.calls[card.call_id])
    write_rows(connection, batch)
    due = {"status", "approved_count", "decided_at", "decided_by_id", "decided_by_name"}
    assert {problem.column for problem in check(run.session_id)} == due
    project("default", batch)
    assert wrong() == []
    sweep()
    assert effects.lines()


def test_migrate_leaves_triggers_alone_that_are_right() -> None:
    """Making them anew waits for every transaction that uses the journal."""
    before = oids()
    triggers.install_on_migrate(using="default")
    assert oids() == before


def oids() -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT rowid FROM sqlite_master WHERE type = 'trigger'"
            if connection.vendor == "sqlite"
            else "SELECT oid FROM pg_trigger WHERE NOT tgisinternal"
        )
        return cursor.fetchall()


def test_content_is_erased_with_its_salt_and_nothing_else(run: Run) -> None:
    row = Message.objects.filter(run=run, kind="user")
    for changes in (
        {"content": None},
        {"content_salt": None},
        {"content": {}, "content_salt": None},
        {"content": None, "content_salt": None, "facts": {}},
        {"content": None, "content_salt": None, "content_hash": "0" * 64},
        {"content": None, "content_salt": None, "created_at": run.created_at + timedelta(seconds=1)},
    ):
        with refusal():
            row.update(**changes)
    assert row.update(content=None, content_salt=None) == 1
    with refusal():
        row.update(content={"content": []}, content_salt="00" * 16)
    assert row.values_list("content", "content_salt").get() == (None, None)
