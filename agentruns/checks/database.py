"""Checks of the journal's database: it must keep acknowledged commits, and let writers queue."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage, Error, Warning
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.checks.base import check
from agentruns.models import triggers

OPTIONS = (
    "OPTIONS = {'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
    "'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL'}"
)
HANGING = "SHOW idle_in_transaction_session_timeout"
ENDED = (
    "ALTER ROLE ... SET idle_in_transaction_session_timeout = '10min'; and for connections that "
    "break without a word OPTIONS = {'keepalives': 1, 'tcp_user_timeout': 60_000}."
)
OF_A_TEST = "file:memorydb_"  # Django's name of an in-memory test database


@check(of_database=True)
def check_database(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Check that the journal's database keeps acknowledged commits, queues writers and has our triggers."""
    if connection.vendor not in ("sqlite", "postgresql"):
        text = f"The journal cannot be stored in {connection.vendor}: use SQLite or PostgreSQL."
        hint = "Point AGENTRUNS_DATABASE at a PostgreSQL or SQLite database."
        yield Error(text, hint=hint, id="agentruns.E004")
    if not connection.settings_dict.get("AUTOCOMMIT", True):
        text = "AUTOCOMMIT is off for the journal's database, so nothing would be kept."
        yield Error(text, hint="Remove AUTOCOMMIT = False.", id="agentruns.E005")
    # Each query, its values under which an acknowledged commit may be lost, and what to set instead.
    asked: dict[str, tuple[tuple[str, ...], str]] = {}
    if connection.vendor == "sqlite":
        name, mode = str(connection.settings_dict["NAME"]), _answer(connection, "PRAGMA journal_mode")
        transactions = str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode", ""))
        is_lost = connection.is_in_memory_db() and not name.startswith(OF_A_TEST)  # type: ignore[attr-defined]
        if is_lost:
            text = "The journal's database is in memory: it ends with this process, and no other can see it."
            hint = "Give the database a file: 'NAME': BASE_DIR / 'db.sqlite3'."
            yield Error(text, hint=hint, id="agentruns.E015")
        if not is_lost and transactions.upper() != "IMMEDIATE":
            text = "SQLite without IMMEDIATE transactions: writers that read first get 'database is locked'."
            yield Warning(text, hint=OPTIONS, id="agentruns.W002")
        if not is_lost and mode not in ("wal", "memory"):
            text = "SQLite without WAL: readers block the worker's commits, and commits block the readers."
            yield Warning(text, hint=OPTIONS, id="agentruns.W006")
        # With a WAL, NORMAL does not wait until the last commits are on the disk.
        fix = "PRAGMA synchronous=FULL in OPTIONS['init_command']"
        asked = {"PRAGMA synchronous": (("0", "1") if mode == "wal" else ("0",), fix)}
    elif connection.vendor == "postgresql":
        asked = {
            "SHOW fsync": (("off",), "fsync = on"),
            "SHOW synchronous_commit": (("off",), "synchronous_commit = on, or local, for this database"),
        }
    if connection.vendor == "postgresql" and _answer(connection, HANGING) == "0":
        text = "The server never ends the transaction of a process that hangs: it keeps its session locked."
        yield Warning(text, hint=ENDED, id="agentruns.W014")
    for question, (forgetful, fix) in asked.items():
        if (answer := _answer(connection, question)) in forgetful:
            name, value = question.split()[1], {"0": "off", "1": "NORMAL"}.get(answer, answer)
            text = f"{name} is {value} for the journal's database: acknowledged commits may be lost."
            yield Error(text, hint=f"Set {fix}.", id="agentruns.E006")
    # Only a warning, because `migrate` installs the triggers again.
    hint = "Find out who changed the database. `manage.py verify_journal --repair` restores our triggers."
    for text in triggers.differences(connection):
        yield Warning(text, hint=hint, id="agentruns.W017")


def _answer(connection: BaseDatabaseWrapper, question: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(question)
        return str(cursor.fetchone()[0])
