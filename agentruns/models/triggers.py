"""Database triggers that keep the journal append-only, on SQLite and PostgreSQL.

In a row only the erasable columns may become NULL. Rows may be deleted only from a session with a Tombstone,
and no row is ever added to such a session. A tombstone stays: at most its key is replaced by a hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

MESSAGE = "agentruns_message"
TOMBSTONE = "agentruns_tombstone"
VENDORS = ("postgresql", "sqlite")
ERASABLE = ("content", "content_salt")  # become NULL together, and nothing changes with them
FORGETTABLE = ("key",)  # of a tombstone: becomes a hash
HASH = f"sha256:{'[0-9a-f]' * 64}"

# Names are qualified, so that no temporary table and no search_path puts another table in their place.
BODIES = {
    f"{MESSAGE}_guard": f"""
DECLARE
    was jsonb; becomes jsonb; erasable text[] := '{{{",".join(ERASABLE)}}}';
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NOT EXISTS (SELECT 1 FROM @.{TOMBSTONE} WHERE session_id = NEW.session_id) THEN
            RETURN NEW;
        END IF;
    ELSIF TG_OP = 'UPDATE' THEN
        was := to_jsonb(OLD); becomes := to_jsonb(NEW);
        IF was - erasable = becomes - erasable AND was ->> '{ERASABLE[0]}' IS NOT NULL
            AND becomes ->> '{ERASABLE[0]}' IS NULL AND becomes ->> '{ERASABLE[1]}' IS NULL THEN
            RETURN NEW;
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        IF EXISTS (SELECT 1 FROM @.{TOMBSTONE} WHERE session_id = OLD.session_id) THEN
            RETURN OLD;
        END IF;
    ELSIF NOT EXISTS (SELECT 1 FROM @.{MESSAGE}) THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'The journal is append-only: % of {MESSAGE} is refused.', TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END """,
    f"{TOMBSTONE}_guard": f"""
DECLARE
    forgettable text[] := '{{{",".join(FORGETTABLE)}}}';
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF to_jsonb(OLD) = to_jsonb(NEW) OR (to_jsonb(OLD) - forgettable = to_jsonb(NEW) - forgettable
            AND OLD.key !~ '^{HASH}$'
            AND NEW.key = 'sha256:' || encode(sha256(convert_to(OLD.key, 'UTF8')), 'hex')) THEN
            RETURN NEW;
        END IF;
    ELSIF TG_OP = 'TRUNCATE' AND NOT EXISTS (SELECT 1 FROM @.{TOMBSTONE}) THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'Tombstones of the journal stay: % of {TOMBSTONE} is refused.', TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END """,
}
PINNED = "pg_catalog, pg_temp"  # the search_path of the functions
# Trigger -> its table, function, events, and these as pg_trigger.tgtype.
POSTGRESQL = {
    f"{MESSAGE}_rows": (MESSAGE, f"{MESSAGE}_guard", "INSERT OR UPDATE OR DELETE", "ROW", 31),
    f"{MESSAGE}_truncate": (MESSAGE, f"{MESSAGE}_guard", "TRUNCATE", "STATEMENT", 34),
    f"{TOMBSTONE}_rows": (TOMBSTONE, f"{TOMBSTONE}_guard", "UPDATE OR DELETE", "ROW", 27),
    f"{TOMBSTONE}_truncate": (TOMBSTONE, f"{TOMBSTONE}_guard", "TRUNCATE", "STATEMENT", 34),
}
# Trigger -> its table, event, and when it refuses; {same}: none but the columns of FREE change.
SQLITE = {
    f"{MESSAGE}_update": (
        MESSAGE, "UPDATE",
        f"NOT ({{same}} AND OLD.{ERASABLE[0]} IS NOT NULL"
        f" AND NEW.{ERASABLE[0]} IS NULL AND NEW.{ERASABLE[1]} IS NULL)",
    ),
    f"{MESSAGE}_delete": (
        MESSAGE, "DELETE", f"NOT EXISTS (SELECT 1 FROM {TOMBSTONE} WHERE session_id = OLD.session_id)",
    ),
    f"{MESSAGE}_insert": (
        MESSAGE, "INSERT", f"EXISTS (SELECT 1 FROM {TOMBSTONE} WHERE session_id = NEW.session_id)",
    ),
    # INSERT OR REPLACE deletes conflicting rows without firing a delete trigger.
    f"{MESSAGE}_replace": (
        MESSAGE, "INSERT",
        f"EXISTS (SELECT 1 FROM {MESSAGE} WHERE session_id = NEW.session_id AND seq = NEW.seq)"
        f" OR EXISTS (SELECT 1 FROM {MESSAGE} WHERE id = NEW.id)",
    ),
    f"{TOMBSTONE}_update": (
        TOMBSTONE, "UPDATE",
        f"NOT ({{same}} AND (OLD.key IS NEW.key OR OLD.key NOT GLOB '{HASH}' AND NEW.key GLOB '{HASH}'))",
    ),
    f"{TOMBSTONE}_delete": (TOMBSTONE, "DELETE", "1"),
    f"{TOMBSTONE}_replace": (
        TOMBSTONE, "INSERT", f"EXISTS (SELECT 1 FROM {TOMBSTONE} WHERE session_id = NEW.session_id)",
    ),
}  # fmt: skip
FREE = {MESSAGE: ERASABLE, TOMBSTONE: FORGETTABLE}


def install(connection: BaseDatabaseWrapper) -> None:
    """Create or recreate the triggers; do nothing on a database other than PostgreSQL and SQLite."""
    if connection.vendor not in VENDORS:
        return
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        remove(connection, functions=False)  # which other triggers may use
        if connection.vendor == "sqlite":
            for statement in _sqlite_triggers(cursor).values():
                cursor.execute(statement)
            return
        schema = _quoted(_schema(cursor))
        for name, body in BODIES.items():
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {schema}.{name}() RETURNS trigger LANGUAGE plpgsql "
                f"SET search_path = {PINNED} AS $body${body.replace('@', schema)}$body$"
            )
        for name, (table, function, events, each, _) in POSTGRESQL.items():
            cursor.execute(
                f"CREATE TRIGGER {name} BEFORE {events} ON {schema}.{table} "
                f"FOR EACH {each} EXECUTE FUNCTION {schema}.{function}()"
            )
            # Without ALWAYS, SET session_replication_role = replica would disable the trigger.
            cursor.execute(f"ALTER TABLE {schema}.{table} ENABLE ALWAYS TRIGGER {name}")


def remove(connection: BaseDatabaseWrapper, *, functions: bool = True) -> None:
    """Drop the triggers and, with `functions`, their functions: for a reversed migration and for `lifted`."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            for name in SQLITE:
                cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
        elif connection.vendor == "postgresql":
            schema = _quoted(_schema(cursor))
            for name, (table, *_) in POSTGRESQL.items():
                cursor.execute(f"DROP TRIGGER IF EXISTS {name} ON {schema}.{table}")
            for name in BODIES if functions else ():
                cursor.execute(f"DROP FUNCTION IF EXISTS {schema}.{name}")


def differences(connection: BaseDatabaseWrapper) -> list[str]:
    """Describe each difference from the protection that `install` gives in a sentence; [] if there is none.

    Compares the definitions of the triggers. Also lists triggers that are not ours, rules, child tables, row
    security, and temporary tables that hide one of ours.
    """
    if connection.vendor not in VENDORS:
        return []
    ours = sorted(model._meta.db_table for model in apps.get_app_config("agentruns").get_models())
    existing, wrong = dict[str, Any](), list[str]()
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            due: dict[str, Any] = {**_sqlite_triggers(cursor)}
            cursor.execute(
                "SELECT type, name, tbl_name, sql, 0 FROM main.sqlite_master WHERE type = 'trigger'"
                " UNION ALL SELECT type, name, tbl_name, sql, 1 FROM sqlite_temp_master"
            )
            for kind, name, table, sql, temporary in cursor.fetchall():
                if table in ours and temporary:
                    wrong.append(f"A temporary {kind} {name} hides or changes {table}.")
                elif table in ours:
                    existing[name] = sql
        else:
            schema, due = _schema(cursor), {}
            if schema is None:
                return []
            for name, (table, function, _, _, kind) in POSTGRESQL.items():
                body, pinned = BODIES[function].replace("@", _quoted(schema)), [f"search_path={PINNED}"]
                due[name] = (table, kind, "A", True, schema, function, body, "plpgsql", False, pinned)
            cursor.execute(_FOUND_TRIGGERS, [schema, ours])
            for name, internal, *definition in cursor.fetchall():
                if not internal:
                    existing[name] = tuple(definition)
                elif definition[2] == "D":
                    wrong.append(f"Foreign keys of {definition[0]} are not enforced: {name} is disabled.")
        for name, definition in due.items():
            if name not in existing:
                wrong.append(f"Trigger {name} of the journal is missing: its rows could be changed.")
            elif existing[name] != definition:
                wrong.append(f"Trigger {name} of the journal is not the one that this version installs.")
        for name in sorted({*existing} - {*due}):
            wrong.append(f"Trigger {name} on a table of the journal is not ours.")
        if connection.vendor == "postgresql":
            cursor.execute(_WAYS_AROUND, [schema, ours, ours])
            wrong += [text for (text,) in cursor.fetchall()]
    return wrong


@contextmanager
def lifted(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Allow every change inside the block: only for emptying a test database."""
    present = is_present(connection)
    if present:
        remove(connection)
    try:
        yield
    finally:
        if present:
            install(connection)


def is_present(connection: BaseDatabaseWrapper) -> bool:
    """Check whether the database has the journal's tables."""
    return {MESSAGE, TOMBSTONE} <= {*connection.introspection.table_names()}


def install_on_migrate(using: str = DEFAULT_DB_ALIAS, **kwargs: Any) -> None:
    """Restore the triggers after `migrate` or `flush`, which may drop them; store the database's name."""
    connection = connections[using]
    from agentruns.models import Control, Message

    if not router.allow_migrate_model(using, Message) or not is_present(connection):
        return
    # Only if they differ, because creating them waits for every transaction that uses the journal.
    if differences(connection):
        install(connection)
    if Control._meta.db_table in connection.introspection.table_names():
        Control.objects.using(using).identity()


def _sqlite_triggers(cursor: Any) -> dict[str, str]:
    """Build the CREATE statement of each SQLite trigger from its table's columns; {} without the tables."""
    cursor.execute(
        "SELECT t.name, c.name FROM main.sqlite_master t, pragma_table_info(t.name, 'main') c"
        " WHERE t.type = 'table' AND t.name IN (%s, %s)",
        [MESSAGE, TOMBSTONE],
    )
    columns, made = cursor.fetchall(), {}
    for name, (table, event, condition) in SQLITE.items():
        mine = [column for of, column in columns if of == table]
        rest = [f'OLD."{column}" IS NEW."{column}"' for column in mine if column not in FREE[table]]
        made[name] = (
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} "
            f"WHEN {condition.format(same=' AND '.join(rest))} BEGIN SELECT RAISE(ABORT, "
            f"'The journal is append-only: {name.rpartition('_')[2].upper()} of {table} is refused.'); END"
        )
    return made if columns else {}


_OURS = """WITH ours AS (SELECT c.oid, c.relname, c.relkind, c.relrowsecurity FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = ANY(%s))
"""
_FOUND_TRIGGERS = f"""{_OURS}
SELECT t.tgname, t.tgisinternal, ours.relname, t.tgtype, t.tgenabled, t.tgqual IS NULL,
    n.nspname, p.proname, p.prosrc, l.lanname, p.prosecdef, p.proconfig
FROM pg_catalog.pg_trigger t JOIN ours ON ours.oid = t.tgrelid
JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
JOIN pg_catalog.pg_language l ON l.oid = p.prolang"""
_WAYS_AROUND = f"""{_OURS}
SELECT 'Rule ' || r.rulename || ' on ' || relname || ' is not ours.'
FROM pg_catalog.pg_rewrite r JOIN ours ON ours.oid = r.ev_class WHERE relkind IN ('r', 'p')
UNION ALL SELECT inhrelid::pg_catalog.regclass || ' is a child of ' || relname
    || ': its rows are read, and unprotected.' FROM pg_catalog.pg_inherits JOIN ours ON ours.oid = inhparent
UNION ALL SELECT relname || ' is not a plain table.' FROM ours WHERE relkind NOT IN ('r', 'i')
UNION ALL SELECT 'Row security may hide rows of ' || relname || '.' FROM ours WHERE relrowsecurity
UNION ALL SELECT 'A temporary table hides ' || relname || '.'
FROM pg_catalog.pg_class WHERE relpersistence = 't' AND relname = ANY(%s)"""


def _schema(cursor: Any) -> str | None:
    """Find the schema of the journal's tables, ignoring temporary tables; None if there are no tables."""
    cursor.execute(
        "SELECT n.nspname"
        " FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY s (name, place)"
        " JOIN pg_catalog.pg_namespace n ON n.nspname = s.name JOIN pg_catalog.pg_class c"
        " ON c.relnamespace = n.oid AND c.relname = %s AND c.relpersistence <> 't' ORDER BY place LIMIT 1",
        [MESSAGE],
    )
    found = cursor.fetchone()
    return str(found[0]) if found else None


def _quoted(name: str | None) -> str:
    return '"' + str(name).replace('"', '""') + '"'
