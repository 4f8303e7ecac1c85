"""Whatever Django and the drivers let user code do to the connection of its thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from django.db import connection, connections, transaction

from tests.shop.models import Order


def autocommit_off() -> None:
    """Leave autocommit off."""
    transaction.set_autocommit(False)


def open_block() -> None:
    """Enter a block and never leave it."""
    transaction.atomic().__enter__()


def raw_begin() -> None:
    """Begin a transaction that Django knows nothing of, and write in it."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
    Order.objects.create(number="left-open", customer="Eve", total_cents=1)


def failed_transaction() -> None:
    """Leave a transaction in which a statement failed."""
    transaction.set_autocommit(False)
    with suppress(Exception), connection.cursor() as cursor:
        cursor.execute("SELECT * FROM no_such_table")


def locks_kept() -> None:
    """Keep the row locks of every run and session in a transaction left open."""
    transaction.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute('UPDATE "agentruns_run" SET step = step')
        cursor.execute('UPDATE "agentruns_session" SET next_seq = next_seq')


def closed() -> None:
    """Close the connection."""
    connection.close()


def closed_by_the_driver() -> None:
    """Close the connection behind Django's back."""
    connection.ensure_connection()
    connection.connection.close()


def all_closed() -> None:
    """Close every connection that Django knows."""
    connections.close_all()


def not_synchronous() -> None:
    """Let commits be acknowledged before they are on the disk."""
    off = {"postgresql": "SET synchronous_commit TO OFF", "sqlite": "PRAGMA synchronous = OFF"}
    with connection.cursor() as cursor:
        cursor.execute(off[connection.vendor])


def other_schema() -> None:
    """Look for tables where none of ours are."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET search_path TO pg_temp")


def read_only() -> None:
    """Let the connection refuse each write."""
    read = {"postgresql": "SET default_transaction_read_only TO on", "sqlite": "PRAGMA query_only = ON"}
    with connection.cursor() as cursor:
        cursor.execute(read[connection.vendor])


def no_time() -> None:
    """Give statements a millisecond, and locks no time at all."""
    none = {"postgresql": "SET statement_timeout TO 1", "sqlite": "PRAGMA busy_timeout = 0"}
    with connection.cursor() as cursor:
        cursor.execute(none[connection.vendor])


def statements_refused() -> None:
    """Install a wrapper that refuses every statement of the thread."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no statement today")

    connection.execute_wrappers.append(refuse)


HOSTILITIES: dict[str, Callable[[], None]] = {
    hostility.__name__: hostility
    for hostility in (
        autocommit_off, open_block, raw_begin, failed_transaction, locks_kept, closed, closed_by_the_driver,
        all_closed, not_synchronous, other_schema, read_only, no_time, statements_refused,
    )
}  # fmt: skip


def clean() -> None:
    """Give the thread a connection as new, after a test."""
    connection.execute_wrappers.clear()
    connection.in_atomic_block = False
    connection.atomic_blocks, connection.savepoint_ids, connection.run_on_commit = [], [], []
    connection.needs_rollback = connection.closed_in_transaction = False
    connection.close()
