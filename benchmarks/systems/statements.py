"""The statements of agentruns once more, through Django's `atomic` and cursor, and nothing else.

What they take is what no change to our Python can save: Django, the driver, and a database that keeps our
indexes and triggers. The rest of our time is encoding, hashing, folding, validating and deciding.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.systems import ours
from benchmarks.workload import Workload

VARIANTS = ("statements-postgresql", "statements-sqlite", "statements-sqlite-memory")
APPENDS = ('UPDATE "agentruns_session"', "WITH s AS")  # how the first statement of an append begins
OTHERS = ("BEGIN", "SAVEPOINT", "RELEASE")  # made anew by `atomic`

Transaction = list[tuple[str, list[Any]]]

recorded: dict[str, tuple[list[Transaction], dict[Any, Any]]] = {}  # by workload, with what must be new


def prepare(variant: str, url: str) -> None:
    """Make the tables of agentruns."""
    ours.prepare(variant.replace("statements", "agentruns"), url)


def ready(workload: Workload) -> None:
    """Let agentruns do a workload, unless it has, and keep what it executed."""
    from django.db import connection

    from agentruns.models import Run

    if str(workload) in recorded:
        return
    transactions: list[Transaction] = [[]]

    def keep(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not sql.startswith(OTHERS):
            last = transactions[-1]
            if sql.startswith(APPENDS) and any(earlier.startswith(APPENDS) for earlier, _ in last):
                transactions.append([])
            transactions[-1].append((sql, list(params or ())))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(keep):
        ours.run(Workload(workload.steps, workload.calls, workload.payload))
    run = Run.objects.select_related("session").latest("pk")
    names = [run.pk, run.session_id, run.pk.hex, run.session_id.hex, run.session.key]
    recorded[str(workload)] = transactions, dict.fromkeys(names)


def run(workload: Workload) -> list[float]:
    """Execute it all again, with a run and a session of its own."""
    from django.db import connection, transaction

    from agentruns.utils.ids import uuid7

    transactions, names = recorded[str(workload)]
    new = [uuid7(), uuid7()]
    renamed = dict(zip(names, [*new, *(each.hex for each in new), f"again-{new[0]}"], strict=True))
    stamps = []
    for statements in transactions:
        with transaction.atomic(), connection.cursor() as cursor:
            for sql, params in statements:
                cursor.execute(sql, [renamed.get(each, each) for each in params])
        stamps.append(time.perf_counter())
    for step in range(workload.steps + 1):
        workload.reply(step)
    for number in range(workload.steps * workload.calls):
        workload.result(number)
    return stamps
