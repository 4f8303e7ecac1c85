"""What a sweep costs beside very many runs that need nothing: it reads partial indexes and nothing else.

AGENTRUNS_LONG=1 takes a million ended runs and ten thousand that wait, and prints how much a sweep reads.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from agentruns import run_agent, start_run
from agentruns.models import Approval, Run, Session
from agentruns.services.sweep import sweep
from tests.db.crowds import ID, multiply, plan

pytestmark = pytest.mark.django_db(transaction=True)

LONG = bool(os.environ.get("AGENTRUNS_LONG"))
ENDED, WAITING, RESUMABLE = (1_000_000, 10_000, 10) if LONG else (5000, 2000, 10)


def fill() -> None:
    """Let there be very many runs that ended, and many that wait for a person, each with its card."""
    made = ID[connection.vendor].format
    run_agent("calls-refund", "do it", "waiting", idempotency_key="")
    multiply(Session, WAITING, id=made("n"), key="'waiting-' || n")
    multiply(Run, WAITING, id=made("n"), session_id=made("n"))
    multiply(Approval, WAITING, id=made("n"), run_id=made("n"))
    run_agent("calls-post", "do it", "ended")
    multiply(Run, ENDED, id=made(f"n + {WAITING}"))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def swept() -> list[dict[str, Any]]:
    """Do a sweep; return its queries."""
    with CaptureQueriesContext(connection) as queries:
        assert sweep(drives=False).found == RESUMABLE
    return queries.captured_queries


def least() -> list[dict[str, Any]]:
    """Return the queries of a sweep that need not note that it is alive, which one does every few seconds."""
    return min((swept() for _ in range(3)), key=len)


def test_a_sweep_reads_partial_indexes_however_much_there_is() -> None:
    for number in range(RESUMABLE):
        start_run("calls-post", "do it", f"s{number}", idempotency_key=f"k{number}")
    sweep(drives=False)  # the first there ever was
    before = len(least())
    alone = work(least())
    fill()
    queries = least()
    assert len(queries) == before
    beside = work(queries)
    if LONG:
        print(f"a sweep: {alone} steps or pages alone, {beside} beside {ENDED} and {WAITING} runs")
    assert beside < 3 * alone + 100
    for query in queries:
        about_many = any(table in query["sql"] for table in ('"agentruns_run"', '"agentruns_approval"'))
        if query["sql"].startswith("SELECT") and about_many:
            used = plan(query["sql"])
            assert "agentruns_runnable" in used or "agentruns_pending" in used, used
            lines = used.splitlines()
            assert not [line for line in lines if "Scan on agentruns_run" in line and "Index" not in line], (
                used
            )
            assert not [line for line in lines if "SCAN" in line and "USING INDEX" not in line], used


def work(queries: list[dict[str, Any]]) -> int:
    """Let the database answer the reads of a sweep again; return how many steps, or pages, that takes it."""
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    with connection.cursor() as cursor:
        for query in (each["sql"] for each in queries if each["sql"].startswith("SELECT")):
            if connection.vendor == "sqlite":
                connection.connection.set_progress_handler(step, 10)
                cursor.execute(query)
                cursor.fetchall()
                connection.connection.set_progress_handler(None, 0)
            else:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}")
                [(answer,)] = cursor.fetchall()
                pages = (answer if isinstance(answer, list) else json.loads(answer))[0]["Plan"]
                steps += pages["Shared Hit Blocks"] + pages["Shared Read Blocks"]
    return steps
