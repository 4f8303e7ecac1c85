"""What a crowd costs: `python -m benchmarks.crowd` measures very many runs, listeners and workers.

What is compared is measured in turn, on one PostgreSQL: pages of the console and the API beside few runs and
beside very many, listeners and none (`benchmarks.listeners`), agentruns and raw SQL in so many processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from uuid import UUID

from benchmarks import listeners
from benchmarks.child import ROOT
from benchmarks.report import spread, table, verdict
from benchmarks.workload import Workload
from tests import scratch
from tests.servers import Postgres, postgres

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
STEPS, CALLS = 10, 2
VARIANTS = ("raw-postgresql", "agentruns-postgresql")


class Size(NamedTuple):
    """How much is measured."""

    runs: int
    pages: int  # repetitions
    listeners: int
    listening: float  # seconds
    rows: int
    workers: tuple[int, ...]
    working: float  # seconds
    shifts: int


FULL = Size(1_000_000, 7, 200, 20.0, 2, (1, 2, 4, 8), 2.0, 3)
QUICK = Size(10_000, 3, 20, 6.0, 1, (1, 2), 1.5, 2)


class Child:
    """This module in a process of its own: a line of JSON for a line of JSON."""

    def __init__(self, action: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.crowd", action, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: Any) -> Any:
        """Return the answer to a question."""
        self.begin(question)
        return self.answer()

    def begin(self, question: Any) -> None:
        """Ask and do not wait."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended.")
        return json.loads(line)


@contextlib.contextmanager
def children() -> Iterator[list[Child]]:
    """End those that are put into the list."""
    started: list[Child] = []
    try:
        yield started
    finally:
        for child in started:
            child.process.kill()
            child.process.wait()


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def prepare(url: str, runs: int) -> tuple[Any, dict[str, str]]:
    """Fill the tables; return a client of somebody who sees everything, and the pages by name."""
    from benchmarks.systems import ours

    ours.prepare("agentruns-postgresql", url)
    from django.conf import settings
    from django.contrib.auth import get_user_model
    from django.test import Client

    from agentruns.admin.readonly import ReadOnlyAdmin
    from agentruns.api import pagination
    from agentruns.models import Run

    settings.ALLOWED_HOSTS = ["testserver"]
    ReadOnlyAdmin.list_per_page = pagination.PAGE = ROWS
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
    session = {"id": "session_id", "key": "'order-' || lpad(session::text, 7, '0')"}
    copy(Session, "key = 'template-1'", "(SELECT DISTINCT session, session_id FROM numbered)", **session)
    run = {
        **{name: f"numbered.{name}" for name in ("id", "session_id", "status", "agent")},
        "owner_name": "'user-' || n % 5",
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


def pages(server: Postgres, size: Size) -> list[str]:
    """Return what each page takes beside few runs and beside many, asked for in turn."""
    sizes, rows = (FEW, size.runs), []
    with children() as shown:
        for runs in sizes:
            shown.append(Child("show", database(server, f"runs{runs}"), str(runs)))
        known = [child.answer() for child in shown]
        for name in known[0]:
            asked = [(child, paths[name]) for child, paths in zip(shown, known, strict=True)]
            counts = [child.ask({"path": path, "count": True})["queries"] for child, path in asked]
            taken = [[child.ask({"path": path}) for child, path in asked] for _ in range(size.pages)]
            rows.append(compared(name, counts, taken))
    head = ["", "queries", *(f"ms, {runs:,} runs" for runs in sizes), "wall, ratio", "CPU, ratio", ""]
    title = f"Pages of {ROWS} rows; the target is {AT_MOST} x the CPU of client and database"
    return [title, "", *table(head, rows)]


def compared(name: str, counts: list[int], taken: list[list[dict[str, Any]]]) -> list[str]:
    """Return a line about one page: its queries, its times, and many runs over few."""
    wall, cpu = ([many[kind] / few[kind] for few, many in taken] for kind in ("seconds", "cpu"))
    milliseconds = [f"{median(pair[at]['seconds'] for pair in taken) * 1000:.1f}" for at in (0, 1)]
    same = counts[0] == counts[1]
    told = f"{counts[0]}" if same else f"{counts[0]} and {counts[1]}"
    return [name, told, *milliseconds, spread(wall), spread(cpu), verdict(cpu, AT_MOST) if same else "missed"]


def listening(server: Postgres, size: Size) -> list[str]:
    """Return what idle listeners cost a server, and how soon all of them have a row."""
    url, path = database(server, "listeners"), server.folder / "http"
    with children() as started:
        started.append(Child("serve", url, str(path)))
        told = started[0].answer()
        gauge = listeners.Gauge(server, started[0].process.pid, "listeners")
        guests = listeners.Guests(str(path), **told)
        return asyncio.run(listeners.listened(guests, gauge, size.listeners, size.listening, size.rows))


def drive(variant: str, url: str, is_first: str) -> None:
    """Do runs for as many seconds as each line of the input says; answer what was done."""
    from benchmarks.systems import ours, raw

    system: Any = raw if variant == "raw-postgresql" else ours
    if system is raw and not is_first:
        raw.database = raw.Postgresql(url)
    else:
        system.prepare(variant, url)
    system.run(Workload(STEPS, CALLS))
    say("ready")
    for line in sys.stdin:
        began, cpu, runs = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < json.loads(line):
            workload = Workload(STEPS, CALLS)
            system.run(workload)
            workload.check()
            runs += 1
        cpu = time.process_time() - cpu
        say({"steps": runs * STEPS, "seconds": time.perf_counter() - began, "cpu": cpu})


def workers(server: Postgres, size: Size) -> list[str]:
    """Return how many steps a second so many processes do, in turn with raw SQL and with agentruns."""
    with children() as started:
        teams: list[list[Child]] = []
        for variant in VARIANTS:
            url = database(server, variant)
            teams.append([])
            for number in range(max(size.workers)):
                started.append(Child("drive", variant, url, "" if number else "first"))
                teams[-1].append(started[-1])
                if not number:
                    started[-1].answer()  # the tables are there
        for worker in teams[0][1:] + teams[1][1:]:
            worker.answer()
        rows = []
        for count in size.workers:
            shifts = [[shift(team[:count], size.working) for team in teams] for _ in range(size.shifts)]
            rates, cpus = ([[each[at] for each in pair] for pair in shifts] for at in (0, 1))
            told = [f"{median(each):.0f}" for each in zip(*rates, strict=True)]
            told.append(spread(mine / limit for limit, mine in rates))
            told += [f"{median(each) * 1000:.2f}" for each in zip(*cpus, strict=True)]
            rows.append([str(count), *told])
    head = ["processes", "raw steps/s", "our steps/s", "ours over raw", "raw CPU ms", "our CPU ms"]
    title = f"W({STEPS}, {CALLS}) with raw SQL and with agentruns; CPU is the clients', of one step"
    return [title, "", *table(head, rows)]


def shift(team: list[Child], seconds: float) -> tuple[float, float]:
    """Return the steps a second of all together, and the CPU seconds of a step."""
    for worker in team:
        worker.begin(seconds)
    done = [worker.answer() for worker in team]
    steps = sum(each["steps"] for each in done)
    return sum(each["steps"] / each["seconds"] for each in done), sum(each["cpu"] for each in done) / steps


def database(server: Postgres, name: str) -> str:
    """Make a database; return where it is."""
    import psycopg

    with psycopg.connect(f"postgresql://postgres@/postgres?host={server.folder}", autocommit=True) as link:
        link.execute(f'CREATE DATABASE "{name}"')
    return f"postgresql://postgres@/{name}?host={server.folder}"


def main() -> None:
    """Measure everything and print it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is to stop, too
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10,000 runs, 20 listeners, 2 processes")
    size = QUICK if parser.parse_args().quick else FULL
    with postgres() as server:
        place = "in memory" if server.folder.is_relative_to(scratch.MEMORY) else "on a disk"
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; PostgreSQL's data {place}\n")
        for measure in (pages, listening, workers):
            print("\n".join(measure(server, size)), flush=True)


if __name__ == "__main__":
    actions = {"show": show, "serve": listeners.serve, "drive": drive}
    with contextlib.suppress(KeyboardInterrupt):
        actions[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in actions else main()
