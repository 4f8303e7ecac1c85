"""What must stay small: `python -m benchmarks.limits` measures resume, start-up, reaction, memory and space.

`python -m benchmarks.limits check` measures start-up alone; the goals among it are a part of `make bench`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import ROOT
from benchmarks.goals import CHECK, LIMITS, LOAD, PEAK, REACTION, spread, verdicts
from benchmarks.processes import database
from benchmarks.workload import Workload
from tests.servers import postgres

REPETITIONS, STEPS = 5, 1000
MESSAGES = 1000  # rows of the run that is resumed
REACTIONS = 10
VARIANTS = {"PostgreSQL": "agentruns-postgresql", "SQLite": "agentruns-sqlite"}
HEAVY = ("anthropic", "celery", "ninja", "opentelemetry", "psycopg", "pydantic", "asyncio", "ssl")
IMPORTED = "import json, sys; before = {*sys.modules}; {}; print(json.dumps(sorted({*sys.modules} - before)))"
SETUP = "import django; django.setup()"


def memory() -> dict[str, float]:
    """Return what this process holds and has held at most, in MB, as Linux tells it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return {name: int(size) / 1024 for name, size in re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status)}


def weigh(variant: str, url: str) -> None:
    """Do one run of many steps; print the MB it took over the idle process, and the KB a step left behind."""
    from benchmarks.systems import ours

    ours.prepare(variant, url)
    ours.run(Workload(1, 1))
    idle = memory()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    ours.run(Workload(STEPS, 1))
    from django.db import connection

    from agentruns.models import Message

    peak, rows, size = memory()["VmHWM"] - idle, Message.objects.count(), 0
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_total_relation_size('agentruns_message')")
            [size] = cursor.fetchone()
    print(json.dumps({"peak": peak, "rows": rows / STEPS, "size": size / 1024 / STEPS}))


def resume(variant: str, url: str) -> None:
    """Print the ratio of rebuilding a run to reading its rows, again and again."""
    from benchmarks.systems import ours

    ours.prepare(variant, url)
    ours.run(Workload(MESSAGES // 3, 1))
    from django.db import connection

    from agentruns.journal.read import COLUMNS
    from agentruns.journal.store import load
    from agentruns.models import Message, Run

    run = Run.objects.get()
    columns, table = ", ".join(COLUMNS), Message._meta.db_table
    sql = f"SELECT {columns} FROM {table} WHERE session_id = %s ORDER BY seq"

    def rebuild() -> None:
        load("default", run.session_id, run.pk)

    def select() -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql, [run.session_id if connection.vendor == "postgresql" else run.session_id.hex])
            if len(cursor.fetchall()) < MESSAGES:
                raise RuntimeError("The SELECT found too few rows.")

    pairs = [(took(rebuild), took(select)) for _ in range(3 * REPETITIONS + 1)]
    print(json.dumps([mine / bare for mine, bare in pairs[1:]]))


def took(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def act(*command: str, plain: bool = False) -> Any:
    """Run Python with the benchmark's settings and return the JSON it prints."""
    known = {
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "BENCHMARK_PLAIN": "1" if plain else "",
        "PYTHONDONTWRITEBYTECODE": "",  # as an installed package has it
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **known},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout) if done.stdout.startswith(("[", "{")) else None


def declare(variant: str, url: str) -> Any:
    """Return an agent whose only tool waits for a person, and prints when it is entered."""
    from benchmarks.systems import ours

    ours.prepare(variant, url)
    from agentruns import Agent, tool
    from agentruns.testing import ScriptedModel

    @tool(requires_approval=True)
    def refund() -> str:
        """Refund it."""
        print("entered", time.perf_counter(), flush=True)
        return "refunded"

    model = ScriptedModel([{"tools": [{"name": "refund", "input": {}}]}, {"text": "Done."}])
    return Agent("gated", instructions="Refund it.", tools=[refund], model=model)


def watch(variant: str, url: str) -> None:
    """Be the worker: without a broker, as it is by default."""
    declare(variant, url)
    from django.core.management import call_command

    call_command("resume_runs", watch=True)


def react(variant: str, url: str) -> None:
    """Print the ms from each approval to its handler, which a process of its own enters."""
    agent = declare(variant, url)
    from agentruns import approve, start_run
    from agentruns.models import Approval

    command = [sys.executable, "-m", "benchmarks.limits", "watch", variant, url]
    found = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for number in range(REACTIONS + 1):
            run = start_run(agent, "Refund it.", f"react-{number}")
            while (card := Approval.objects.filter(run=run).first()) is None:
                time.sleep(0.01)
            time.sleep(random.uniform(0.2, 1.2))  # the worker looks seldom after a while
            began = time.perf_counter()
            approve(card.pk, None)
            said = next(line for line in worker.stdout if line.startswith("entered"))
            found.append(1000 * (float(said.split()[1]) - began))
        worker.terminate()
    print(json.dumps(found[1:]))


def check() -> list[float]:
    """Return the CPU time of `manage.py check` over that of a project without agentruns."""
    command = ("-m", "django", "check", "--verbosity=0")

    def seconds(*, plain: bool) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        act(*command, plain=plain)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return [seconds(plain=False) / seconds(plain=True) for _ in range(REPETITIONS + 1)][1:]


def imports() -> list[str]:
    """Return lines about what starting imports."""
    plain = set(act("-c", IMPORTED.replace("{}", SETUP, 1), plain=True))
    lines = []
    for what, code, known in (
        ("import agentruns", "import agentruns", set()),
        ("django.setup() with agentruns, beyond one without", SETUP, plain),
    ):
        found = set(act("-c", IMPORTED.replace("{}", code, 1))) - known
        heavy = [name for name in HEAVY if name in found]
        lines.append(f"{what}: {len(found)} modules; of the heavy ones: {', '.join(heavy) or 'none'}")
    return lines


def found(place: Callable[[str], str]) -> dict[str, list[float]]:
    """Return what is measured by the names of the goals; `place` makes a database for a variant."""
    told = {}
    for name, variant in VARIANTS.items():

        def measure(action: str, variant: str = variant) -> Any:
            return act("-m", "benchmarks.limits", action, variant, place(variant))

        weighed = [measure("weigh") for _ in range(REPETITIONS)]
        told[f"{LOAD}, {name}"], told[f"{REACTION}, {name}"] = measure("resume"), measure("react")
        told[f"{PEAK}, {name}"] = [each["peak"] for each in weighed]
        if weighed[0]["size"]:
            told |= {"rows a step": [weighed[0]["rows"]], "KB a step": [weighed[0]["size"]]}
    return {**told, CHECK: check()}


def main() -> None:
    """Measure everything and print it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is to stop, too
    disk, numbers = tempfile.gettempdir(), itertools.count()
    with postgres(disk) as server, tempfile.TemporaryDirectory(prefix="agentruns-limits-") as folder:

        def place(variant: str) -> str:
            name = f"{variant}-{next(numbers)}"
            return database(server, name) if "postgresql" in variant else f"{folder}/{name}.sqlite3"

        told = found(place)
    print(f"{os.cpu_count()} cores, {REPETITIONS} repetitions\n")
    print("\n".join([*verdicts((what, at_most, told[what]) for what, at_most in LIMITS.items()), *imports()]))
    for what in told.keys() - LIMITS.keys():
        print(f"{what}: {median(told[what]):.2f}")


if __name__ == "__main__":
    parts = {"weigh": weigh, "resume": resume, "watch": watch, "react": react}
    parts |= {"check": lambda: print(spread(check()))}
    parts[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:] else main()
