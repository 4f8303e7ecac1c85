"""Database triggers that keep the journal append-only, on SQLite and PostgreSQL.

They never allow UPDATE, allow DELETE only for a session with a Tombstone, and TRUNCATE (PostgreSQL) only
of an empty table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

MESSAGE = "agentruns_message"
TOMBSTONE = "agentruns_tombstone"
NAMES = {
    "postgresql": ("agentruns_no_update", "agentruns_no_delete", "agentruns_no_truncate"),
    "sqlite": ("agentruns_no_update", "agentruns_no_delete", "agentruns_no_replace"),
}

POSTGRESQL = f"""
CREATE OR REPLACE FUNCTION agentruns_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF EXISTS (SELECT 1 FROM {TOMBSTONE} WHERE session_id = OLD.session_id) THEN
            RETURN OLD;
        END IF;
    ELSIF TG_OP = 'TRUNCATE' THEN
        IF NOT EXISTS (SELECT 1 FROM {MESSAGE}) THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION 'The journal is append-only: % of {MESSAGE} is refused.', TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
DROP TRIGGER IF EXISTS agentruns_no_update ON {MESSAGE};
DROP TRIGGER IF EXISTS agentruns_no_delete ON {MESSAGE};
DROP TRIGGER IF EXISTS agentruns_no_truncate ON {MESSAGE};
CREATE TRIGGER agentruns_no_update BEFORE UPDATE ON {MESSAGE}
    FOR EACH ROW EXECUTE FUNCTION agentruns_refuse();
CREATE TRIGGER agentruns_no_delete BEFORE DELETE ON {MESSAGE}
    FOR EACH ROW EXECUTE FUNCTION agentruns_refuse();
CREATE TRIGGER agentruns_no_truncate BEFORE TRUNCATE ON {MESSAGE}
    FOR EACH STATEMENT EXECUTE FUNCTION agentruns_refuse();
"""

SQLITE = (
    f"""CREATE TRIGGER IF NOT EXISTS agentruns_no_update BEFORE UPDATE ON {MESSAGE} BEGIN
        SELECT RAISE(ABORT, 'The journal is append-only: UPDATE of {MESSAGE} is refused.'); END""",
    f"""CREATE TRIGGER IF NOT EXISTS agentruns_no_delete BEFORE DELETE ON {MESSAGE}
        WHEN NOT EXISTS (SELECT 1 FROM {TOMBSTONE} WHERE session_id = OLD.session_id) BEGIN
        SELECT RAISE(ABORT, 'The journal is append-only: DELETE of {MESSAGE} is refused.'); END""",
    # INSERT OR REPLACE deletes conflicting rows without firing a delete trigger.
    f"""CREATE TRIGGER IF NOT EXISTS agentruns_no_replace BEFORE INSERT ON {MESSAGE}
        WHEN EXISTS (SELECT 1 FROM {MESSAGE} WHERE session_id = NEW.session_id AND seq = NEW.seq)
        OR EXISTS (SELECT 1 FROM {MESSAGE} WHERE id = NEW.id) BEGIN
        SELECT RAISE(ABORT, 'The journal is append-only: REPLACE in {MESSAGE} is refused.'); END""",
)


def install(connection: BaseDatabaseWrapper) -> None:
    """Create the triggers, or recreate them."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(POSTGRESQL)
        elif connection.vendor == "sqlite":
            for statement in SQLITE:
                cursor.execute(statement)


def remove(connection: BaseDatabaseWrapper) -> None:
    """Drop the triggers, for a reversed migration and for `lifted`."""
    with connection.cursor() as cursor:
        for name in NAMES.get(connection.vendor, ()):
            on = f" ON {MESSAGE}" if connection.vendor == "postgresql" else ""
            cursor.execute(f"DROP TRIGGER IF EXISTS {name}{on}")


def installed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether every trigger is in place."""
    postgres = connection.vendor == "postgresql"
    sql = (
        f"SELECT tgname FROM pg_trigger WHERE tgrelid = '{MESSAGE}'::regclass AND tgenabled <> 'D'"
        if postgres
        else f"SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = '{MESSAGE}'"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql)
        found = {name for (name,) in cursor.fetchall()}
    return found >= set(NAMES[connection.vendor])


@contextmanager
def lifted(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Allow every change inside the block: only for emptying a test database."""
    present = MESSAGE in connection.introspection.table_names()
    if present:
        remove(connection)
    try:
        yield
    finally:
        if present:
            install(connection)


def install_on_migrate(using: str = DEFAULT_DB_ALIAS, **kwargs: Any) -> None:
    """Restore the triggers after `migrate` and `flush`, which may have rebuilt the table."""
    connection = connections[using]
    from agentruns.models import Message

    if router.allow_migrate_model(using, Message) and MESSAGE in connection.introspection.table_names():
        install(connection)
