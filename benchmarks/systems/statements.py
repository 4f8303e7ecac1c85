"""The statements of agentruns once more, through the drivers' own cursors, and nothing else.

What they take is what no change to our Python can save: the driver, and a database that keeps our indexes and
triggers. The rest of our time is encoding, hashing, folding, validating and deciding.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from functools import partial
from typing import Any
from unittest import mock
from uuid import UUID

from benchmarks.systems import ours
from benchmarks.workload import Workload

VARIANTS = ("statements-postgresql", "statements-sqlite", "statements-sqlite-memory")

Statement = tuple[str, Any, dict[str, Any]]  # text, parameters, options of the driver


class Tape:
    """What is executed while it runs, by transaction; a statement by itself is one, too."""

    def __init__(self) -> None:
        self.runs, self.transactions = False, list[list[Statement]]()

    def note(self, *statement: Any, begins: bool) -> None:
        """Keep a statement; `begins`: no transaction was open before it."""
        if self.runs:
            if begins:
                self.transactions.append([])
            if not statement[0].startswith(("BEGIN", "COMMIT")):
                self.transactions[-1].append(statement)


tape = Tape()
# By workload: the transactions, how many of them precede each reply, and what must be new.
recorded: dict[str, tuple[list[list[Statement]], list[int], list[Any]]] = {}
is_sqlite = False


class Watched(Workload):
    """One that notes how many transactions precede each reply."""

    def __init__(self, steps: int, calls: int) -> None:
        super().__init__(steps, calls)
        self.marks: list[int] = []

    def reply(self, step: int) -> tuple[str, list[tuple[str, str]]]:
        """Return what the workload says."""
        self.marks.append(len(tape.transactions))
        return super().reply(step)


class Cursor(sqlite3.Cursor):
    """One that notes what it executes; Django's own comes before it."""

    def execute(self, sql: str, params: Any = (), /) -> Cursor:
        """Execute a statement."""
        tape.note(sql, params, {}, begins=not self.connection.in_transaction)
        return super().execute(sql, params)


class Connection(sqlite3.Connection):
    """One whose cursors note what they execute."""

    def cursor(self, factory: Any = None) -> Any:
        """Return a cursor."""
        return super().cursor(Cursor if factory is None else type("Noting", (factory, Cursor), {}))

    def execute(self, sql: str, params: Any = (), /) -> Any:
        """Execute a statement through a cursor that notes it."""
        return self.cursor().execute(sql, params)


def prepare(variant: str, url: str) -> None:
    """Make the tables of agentruns."""
    global is_sqlite
    is_sqlite = "sqlite" in variant
    sqlite3.dbapi2.connect = partial(sqlite3.connect, factory=Connection)  # as Django calls it
    ours.prepare(variant.replace("statements", "agentruns"), url)


def ready(workload: Workload) -> None:
    """Let agentruns do a workload, unless it has, and keep what the driver executed."""
    import psycopg
    from django.db.models import Count

    from agentruns.models import Run

    if str(workload) in recorded:
        return
    execute = psycopg.Cursor.execute

    def noting(cursor: Any, query: Any, params: Any = None, **options: Any) -> Any:
        idle = cursor.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        tape.note(query, params, options, begins=idle)
        return execute(cursor, query, params, **options)

    tape.runs, tape.transactions, watched = True, [], Watched(workload.steps, workload.calls)
    with mock.patch.object(psycopg.Cursor, "execute", noting):
        ours.run(watched)
    tape.runs = False
    run = Run.objects.select_related("session").latest("pk")
    names = [run.pk, run.session_id, str(run.pk), str(run.session_id), run.pk.hex, run.session_id.hex]
    recorded[str(workload)] = tape.transactions, watched.marks, [*names, run.session.key]
    again(workload)
    counted = Run.objects.order_by("-pk").annotate(rows=Count("messages")).values_list("rows", flat=True)
    if len({*counted[:2]}) != 1:
        raise RuntimeError(f"Not every append of {workload} was recorded: the runs have {counted[:2]} rows.")


def run(workload: Workload) -> list[float]:
    """Execute it all again, and do what the workload counts."""
    stamps = again(workload)
    for step in range(workload.steps + 1):
        workload.reply(step)
    for number in range(workload.steps * workload.calls):
        workload.result(number)
    return stamps


def again(workload: Workload) -> list[float]:
    """Execute what was recorded, with a run and a session of its own; return its stamps."""
    from django.db import connection

    from agentruns.utils.ids import uuid7

    transactions, marks, names = recorded[str(workload)]
    new = [uuid7(), uuid7()]
    renamed = dict(zip(names, [*new, *map(str, new), *(e.hex for e in new), f"again-{new[0]}"], strict=True))

    def fresh(value: Any) -> Any:
        return renamed.get(value, value) if isinstance(value, str | UUID) else value

    connection.ensure_connection()
    raw, ends = connection.connection, []
    with closing(sqlite3.Cursor(raw) if is_sqlite else raw.cursor()) as cursor:
        for statements in transactions:
            if len(statements) > 1:
                cursor.execute("BEGIN IMMEDIATE" if is_sqlite else "BEGIN")
            for sql, params, options in statements:
                cursor.execute(sql, [fresh(each) for each in params or ()], **options)
            if len(statements) > 1:
                cursor.execute("COMMIT")
            ends.append(time.perf_counter())
    return [*(ends[mark - 1] for mark in marks), ends[-1]]
