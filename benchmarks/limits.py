"""What must stay small: `python -m benchmarks.limits` measures resume, memory, late steps and start-up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT
from benchmarks.report import FLAT_AT_MOST, cost_of_step, verdicts
from benchmarks.workload import Workload
from tests.servers import postgres

REPETITIONS, STEPS = 5, 1000
MESSAGES = 1000  # rows of the run that is resumed
RESUME_AT_MOST, CHECK_AT_MOST, MEMORY_AT_MOST = 3.0, 1.2, 40.0
HEAVY = ("anthropic", "celery", "ninja", "opentelemetry", "psycopg", "pydantic", "asyncio", "ssl")
IMPORTED = "import json, sys; before = {*sys.modules}; {}; print(json.dumps(sorted({*sys.modules} - before)))"
SETUP = "import django; django.setup()"

Judged = tuple[str, float, list[float]]  # what, at most, measured


def memory() -> dict[str, float]:
    """Return what this process holds and has held at most, in MB, as Linux tells it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return {name: int(size) / 1024 for name, size in re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status)}


def weigh(variant: str, url: str) -> None:
    """Do one run of many steps and print the memory it took and what its steps cost."""
    from benchmarks.systems import ours

    ours.prepare(variant, url)
    ours.run(Workload(1, 1))
    idle = memory()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    stamps = ours.run(Workload(STEPS, 1))
    late, early = cost_of_step(stamps, STEPS), cost_of_step(stamps, 10)
    print(json.dumps({"memory": memory()["VmHWM"] - idle, "growth": late / early}))


def resume(variant: str, url: str) -> None:
    """Print the ratio of rebuilding a run to reading its rows, again and again."""
    from benchmarks.systems import ours

    ours.prepare(variant, url)
    ours.run(Workload(MESSAGES // 3, 1))
    from django.db import connection

    from agentruns.journal.read import FIELDS
    from agentruns.journal.store import load
    from agentruns.models import Message, Run

    run = Run.objects.get()
    columns, table = ", ".join(FIELDS), Message._meta.db_table
    sql = f"SELECT {columns} FROM {table} WHERE session_id = %s ORDER BY seq"

    def rebuild() -> None:
        load("default", run.session_id, run.pk).messages()

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
    known = {"DJANGO_SETTINGS_MODULE": "benchmarks.settings", "BENCHMARK_PLAIN": "1" if plain else ""}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **known},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout) if done.stdout.startswith(("[", "{")) else None


def checks() -> list[float]:
    """Return the CPU time of `manage.py check` over that of a project without agentruns."""
    command = ("-m", "django", "check", "--verbosity=0")

    def seconds(*, plain: bool) -> float:
        before = os.times()
        act(*command, plain=plain)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    return [seconds(plain=False) / seconds(plain=True) for _ in range(REPETITIONS)]


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


def measure(variant: str, urls: Callable[[str], str]) -> list[Judged]:
    """Return what a variant takes, each in processes and databases of their own."""
    weighed = [
        act("-m", "benchmarks.limits", "weigh", variant, urls(f"weigh{number}"))
        for number in range(REPETITIONS)
    ]
    resumed = act("-m", "benchmarks.limits", "resume", variant, urls("resume"))
    return [
        (f"{variant}: resume {MESSAGES} messages over SELECT", RESUME_AT_MOST, resumed),
        (f"{variant}: peak MB of {STEPS} steps over idle", MEMORY_AT_MOST, [w["memory"] for w in weighed]),
        (f"{variant}: step {STEPS} over step 10", FLAT_AT_MOST, [w["growth"] for w in weighed]),
    ]


def main() -> None:
    """Measure everything and print it."""
    import psycopg

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is to stop, too
    disk = tempfile.gettempdir()
    with postgres(disk) as server, tempfile.TemporaryDirectory(prefix="agentruns-limits-") as folder:

        def database(name: str) -> str:
            with psycopg.connect(f"postgresql://postgres@/postgres?host={server.folder}") as connection:
                connection.autocommit = True
                connection.execute(f"CREATE DATABASE {name}")
            return f"postgresql://postgres@/{name}?host={server.folder}"

        judged = measure("agentruns-postgresql", database)
        judged += measure("agentruns-sqlite", lambda name: f"{folder}/{name}.sqlite3")
    judged.append(("CPU of manage.py check over Django with ninja", CHECK_AT_MOST, checks()))
    print(f"{os.cpu_count()} cores, {REPETITIONS} repetitions\n")
    print("\n".join([*verdicts(judged), *imports()]))


if __name__ == "__main__":
    {"weigh": weigh, "resume": resume}[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:] else main()
