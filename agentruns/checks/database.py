"""Checks of the journal's database: it must keep what it acknowledges, and let writers queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.conf import settings
from agentruns.models import triggers

OPTIONS = (
    "OPTIONS = {'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
    "'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL'}"
)
OF_A_TEST = "file:memorydb_"  # Django's name of an in-memory test database


@register(Tags.database)
def check_database(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> Sequence[CheckMessage]:
    """Check that the journal's database keeps what it acknowledges and lets writers queue."""
    if settings.DATABASE not in (databases or ()):
        return []
    connection = connections[settings.DATABASE]
    found: list[CheckMessage] = []
    if connection.vendor not in ("sqlite", "postgresql"):
        found.append(
            Error(
                f"The journal cannot be stored in {connection.vendor}: use SQLite or PostgreSQL.",
                hint="Point AGENTRUNS_DATABASE at a PostgreSQL or SQLite database.",
                id="agentruns.E004",
            )
        )
    if not connection.settings_dict.get("AUTOCOMMIT", True):
        found.append(
            Error(
                "AUTOCOMMIT is off for the journal's database, so nothing would be kept.",
                hint="Remove AUTOCOMMIT = False.",
                id="agentruns.E005",
            )
        )
    if connection.vendor == "sqlite":
        found += _sqlite(connection)
    if connection.vendor == "postgresql":
        found += _hanging(connection)
    return [*found, *_forgetful(connection), *_unprotected(connection)]


def _unprotected(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Find triggers of the journal that are gone or others; a warning, as `migrate` installs them again."""
    hint = "Find out who changed the database. `manage.py verify_journal --repair` restores our triggers."
    return [Warning(text, hint=hint, id="agentruns.W017") for text in triggers.differences(connection)]


def _sqlite(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    name = connection.settings_dict["NAME"]
    if connection.is_in_memory_db() and not str(name).startswith(OF_A_TEST):  # type: ignore[attr-defined]
        return [
            Error(
                "The journal's database is in memory: it ends with this process, and no other can see it.",
                hint="Give the database a file: 'NAME': BASE_DIR / 'db.sqlite3'.",
                id="agentruns.E015",
            )
        ]
    found: list[CheckMessage] = []
    if str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode", "")).upper() != "IMMEDIATE":
        text = "SQLite without IMMEDIATE transactions: writers that read first get 'database is locked'."
        found.append(Warning(text, hint=OPTIONS, id="agentruns.W002"))
    if _asked(connection, "PRAGMA journal_mode") not in ("wal", "memory"):
        text = "SQLite without WAL: readers block the worker's commits, and commits block the readers."
        found.append(Warning(text, hint=OPTIONS, id="agentruns.W006"))
    return found


def _hanging(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Find a server that lets a process that hangs keep its locks for ever."""
    if _asked(connection, "SHOW idle_in_transaction_session_timeout") != "0":
        return []
    text = "The server never ends the transaction of a process that hangs: it keeps its session locked."
    fix = (
        "ALTER ROLE ... SET idle_in_transaction_session_timeout = '10min'; and for connections that break "
        "without a word OPTIONS = {'keepalives': 1, 'tcp_user_timeout': 60_000}."
    )
    return [Warning(text, hint=fix, id="agentruns.W014")]


def _forgetful(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Find server settings under which an acknowledged commit may be lost in a power cut."""
    if connection.vendor == "sqlite":
        # With a WAL, NORMAL leaves the last commits to the operating system.
        forgets = ("0", "1") if _asked(connection, "PRAGMA journal_mode") == "wal" else ("0",)
        asked = {"PRAGMA synchronous": (forgets, "PRAGMA synchronous=FULL in OPTIONS['init_command']")}
    elif connection.vendor == "postgresql":
        asked = {
            "SHOW fsync": (("off",), "fsync = on"),
            "SHOW synchronous_commit": (("off",), "synchronous_commit = on, or local, for this database"),
        }
    else:
        return []
    found: list[CheckMessage] = []
    for question, (forgets, fix) in asked.items():
        if (answer := _asked(connection, question)) in forgets:
            name, value = question.split()[1], {"0": "off", "1": "NORMAL"}.get(answer, answer)
            text = f"{name} is {value} for the journal's database: acknowledged commits may be lost."
            found.append(Error(text, hint=f"Set {fix}.", id="agentruns.E006"))
    return found


def _asked(connection: BaseDatabaseWrapper, question: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(question)
        return str(cursor.fetchone()[0])
