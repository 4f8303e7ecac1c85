"""What a page of the console or the API costs beside few runs and beside very many."""

from __future__ import annotations

import json
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

from benchmarks.goals import spread, table, verdict
from benchmarks.processes import Child, children, database, say
from tests.servers import Postgres

FEW = 100  # runs
AT_MOST = 1.5  # times what the page costs beside few runs
ROWS = 20  # of a page, which few runs fill as well as many
KEY = "order-0000057"
# The newest hundred fill a page of each list; of those before, one in a hundred waits for a person.
NUMBERED = """
SET session_replication_role = replica;  -- no foreign key is looked up: all of them are right
CREATE FUNCTION pg_temp.id_of(at timestamptz, n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE
    RETURN (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0')
        || '70008' || lpad(to_hex(n), 15, '0'))::uuid;
CREATE TEMP TABLE numbered AS
SELECT n, at, status, session,
    pg_temp.id_of(at, n) AS id, pg_temp.id_of(to_timestamp(0), session) AS session_id,
    'user-' || session % 5 AS owner_name,
    CASE WHEN n > {runs} - 20 THEN 'retired' ELSE 'agent-' || n % 4 END AS agent
FROM (
    SELECT n, now() - n * interval '30 seconds' AS at,
        CASE WHEN n <= 100 THEN n ELSE (n + 404) / 5 END AS session,
        CASE WHEN n = 98 THEN 'paused' WHEN n = 99 THEN 'running' WHEN n <= 100 AND n % 10 < 3
                OR n % 100 = 0 THEN 'awaiting-approval'
            WHEN n <= 100 AND n % 10 < 5 OR n % 20 = 1 THEN 'failed' WHEN n % 50 = 2 THEN 'cancelled'
            ELSE 'completed' END AS status
    FROM generate_series(1, {runs}) AS n) AS series
ORDER BY n DESC;
ANALYZE numbered;
"""
WAITS = "numbered.status = 'awaiting-approval'"
CARD = {
    "id": "numbered.id",
    "run_id": "numbered.id",
    "tool_name": "'tool-' || n % 4",
    "digest": "md5(n::text) || md5(n::text)",
    "risk": "(ARRAY['low', 'normal', 'high'])[n % 3 + 1]",
    "requested_at": "at",
}


def prepare(url: str, runs: int) -> tuple[Any, dict[str, str]]:
    """Fill the tables; return a client of somebody who sees everything, and the pages by name."""
    from benchmarks.systems import ours

    ours.prepare("agentruns-postgresql", url)
    from django.conf import settings
    from django.contrib.auth import get_user_model
    from django.test import Client

    from agentruns.admin.base import ReadOnlyAdmin
    from agentruns.api import routing
    from agentruns.models import Run

    settings.ALLOWED_HOSTS = ["testserver"]
    ReadOnlyAdmin.list_per_page = routing.PAGE = ROWS
    fill(runs)
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root"))
    some = Run.objects.order_by("-updated_at")[2 * ROWS].pk
    day = Run.objects.latest("updated_at").created_at.date()
    return client, paths(some, day)


def paths(run: UUID, day: date) -> dict[str, str]:
    """Return the path of each page by its name."""
    runs, approvals, api = "/admin/agentruns/run/", "/admin/agentruns/approval/", "/agentruns"
    return {
        "dashboard": "/admin/",
        "runs": runs,
        "runs, failed": f"{runs}?status=failed",
        "runs, need a person": f"{runs}?status=person",
        "runs, stalled": f"{runs}?status=stalled",
        "runs, failed lately": f"{runs}?status=failed-lately",
        "runs, an agent": f"{runs}?agent=agent-1",
        "runs, a retired agent": f"{runs}?agent=retired",
        "runs, today": f"{runs}?started_from={day}",
        "runs, by session key": f"{runs}?q={KEY}",
        "runs, by id": f"{runs}?q={run}",
        "runs, by requester": f"{runs}?q=user-3",
        "approvals, pending": approvals,
        "approvals, mine": f"{approvals}?mine=yes",
        "approvals, all": f"{approvals}?status=all",
        "approvals, a tool": f"{approvals}?tool=tool-1",
        "approvals, by session key": f"{approvals}?q={KEY}",
        "API: runs": f"{api}/runs",
        "API: runs, failed": f"{api}/runs?status=failed",
        "API: runs, a retired agent": f"{api}/runs?agent=retired",
        "API: runs of a session": f"{api}/runs?session={KEY}",
        "API: session": f"{api}/sessions/{KEY}",
        "API: approvals, pending": f"{api}/approvals?status=pending",
    }


def fill(runs: int) -> None:
    """Multiply a run that waits for a person and one that ended."""
    from django.db import connection

    from agentruns import Agent, run_agent, tool
    from agentruns.models import Approval, Message, Run, Session
    from agentruns.testing import ScriptedModel

    @tool(requires_approval=True)
    def refund(order: str) -> str:
        """Refund an order."""
        return order

    asks = {"text": "I will refund it.", "tools": [{"name": "refund", "input": {"order": "1004"}}]}
    model = ScriptedModel([asks, {"text": "done"}])
    gated = Agent("gated", instructions="Refund it.", tools=[refund], model=model)
    open_ended = Agent("open", instructions="Say it.", tools=[], model=ScriptedModel([{"text": "done"}]))
    waiting = run_agent(gated, "Please refund order 1004.", "template-1").run_id
    ended = run_agent(open_ended, "Please say what you did.", "template-2").run_id
    card = Approval.objects.get(run_id=waiting).pk
    with connection.cursor() as cursor:
        cursor.execute(NUMBERED.format(runs=runs))
    sessions = "(SELECT DISTINCT session, session_id, owner_name FROM numbered)"
    session = {"id": "session_id", "key": "'order-' || lpad(session::text, 7, '0')"}
    copy(Session, "key = 'template-1'", sessions, owner_name="numbered.owner_name", **session)
    run = {
        **{name: f"numbered.{name}" for name in ("id", "session_id", "status", "agent", "owner_name")},
        "created_at": "at",
        "updated_at": "at + interval '10 seconds'",
    }
    for template, which in ((waiting, WAITS), (ended, f"NOT {WAITS}")):
        copy(Run, f"id = '{template}'", f"(SELECT * FROM numbered WHERE {which})", **run)
    row = {"session_id": "numbered.session_id", "run_id": "numbered.id"}
    copy(Message, f"run_id = '{waiting}'", f"(SELECT * FROM numbered WHERE {WAITS})", **row)
    copy(Approval, f"id = '{card}'", f"(SELECT * FROM numbered WHERE {WAITS})", **CARD)
    decided = {"status": "'consumed'", "decided_at": "at + interval '5 minutes'", "decided_by_name": "'ann'"}
    some = "(SELECT * FROM numbered WHERE status = 'completed' AND n % 10 = 6)"
    copy(Approval, f"id = '{card}'", some, **CARD, **decided)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
        # So that what the database computes is computed by the backend whose CPU is measured.
        cursor.execute("SET max_parallel_workers_per_gather = 0; RESET session_replication_role")


def copy(model: Any, template: str, numbered: str, **columns: str) -> None:
    """Insert the rows that `template` names once for each numbered one, but for some columns."""
    from django.db import connection, models

    fields = [each for each in model._meta.concrete_fields if not isinstance(each, models.BigAutoField)]
    names = ", ".join(f'"{each.column}"' for each in fields)
    values = ", ".join(columns.get(each.column, f'template."{each.column}"') for each in fields)
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({names}) SELECT {values} FROM {numbered} AS numbered,"
            f" (SELECT * FROM {table} WHERE {template}) AS template"
        )


def cost(client: Any, path: str, *, count: bool = False) -> dict[str, Any]:
    """Ask for a page; return its wall time and its CPU, client and database, or how many queries it takes."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    if count:
        with CaptureQueriesContext(connection) as queries:
            get(client, path)
        return {"queries": len(queries)}
    backend = Path(f"/proc/{connection.connection.info.backend_pid}/schedstat")

    def spent() -> float:
        return time.process_time() + int(backend.read_text().split()[0]) / 1e9

    before, began = spent(), time.perf_counter()
    get(client, path)
    return {"seconds": time.perf_counter() - began, "cpu": spent() - before}


def get(client: Any, path: str) -> None:
    response = client.get(path)
    if response.status_code != 200:
        raise RuntimeError(f"{path}: {response.status_code}")


def show(url: str, runs: str) -> None:
    """Say where the pages are beside so many runs; answer what each asked for takes."""
    client, pages = prepare(url, int(runs))
    say(pages)
    for line in sys.stdin:
        say(cost(client, **json.loads(line)))


def pages(server: Postgres, runs: int, repetitions: int) -> list[str]:
    """Return what each page takes beside few runs and beside many, asked for in turn."""
    sizes, rows = (FEW, runs), []
    with children() as shown:
        for count in sizes:
            shown.append(Child("show", database(server, f"runs{count}"), str(count)))
        known = [child.answer() for child in shown]
        for name in known[0]:
            asked = [(child, paths[name]) for child, paths in zip(shown, known, strict=True)]
            counts = [child.ask({"path": path, "count": True})["queries"] for child, path in asked]
            taken = [[child.ask({"path": path}) for child, path in asked] for _ in range(repetitions)]
            rows.append(compared(name, counts, taken))
    head = ["", "queries", *(f"ms, {count:,} runs" for count in sizes), "wall, ratio", "CPU, ratio", ""]
    title = f"Pages of {ROWS} rows; the target is {AT_MOST} x the CPU of client and database"
    return [title, "", *table(head, rows)]


def compared(name: str, counts: list[int], taken: list[list[dict[str, Any]]]) -> list[str]:
    """Return a line about one page: its queries, its times, and many runs over few."""
    wall, cpu = ([many[kind] / few[kind] for few, many in taken] for kind in ("seconds", "cpu"))
    milliseconds = [f"{median(pair[at]['seconds'] for pair in taken) * 1000:.1f}" for at in (0, 1)]
    same = counts[0] == counts[1]
    told = f"{counts[0]}" if same else f"{counts[0]} and {counts[1]}"
    return [name, told, *milliseconds, spread(wall), spread(cpu), verdict(cpu, AT_MOST) if same else "missed"]
