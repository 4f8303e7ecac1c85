"""What one machine carries: `python -m benchmarks.capacity` prints steps a second and what a step leaves.

Workers are processes, the model is a script that answers at once, each reply and each result has 1 KB:
what is left is the journal. PostgreSQL runs on the same machine, with fsync.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.servers import postgres

STEPS, RUNS, REPEATS = 50, 24, 3
ROOT = Path(__file__).parents[1]
CHILD = "import sys; from benchmarks import capacity; capacity.main(sys.argv[1:])"


def work(share: str, shares: str) -> None:
    """Drive every nth run to its end, when all have been started and the gate is open."""
    from agentruns.engine.worker import advance
    from agentruns.models import Run

    runs = list(Run.objects.runnable().order_by("created_at"))[int(share) :: int(shares)]
    print("ready", flush=True)
    sys.stdin.readline()
    for run in runs:
        advance(run, "default")


def prepare(number: str) -> None:
    """Make the tables and start the runs of one measurement."""
    from django.core.management import call_command

    from agentruns import start_run

    call_command("migrate", verbosity=0)
    for each in range(RUNS):
        start_run("capacity", "do it", f"capacity-{number}-{each}", idempotency_key=f"{number}-{each}")


def weigh() -> None:
    """Print what the journal holds: steps, rows, and bytes with their indexes."""
    from django.db import connection

    from agentruns.models import Message, Run

    steps = Message.objects.filter(kind="assistant").count() - Run.objects.count()  # without the last replies
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_total_relation_size('agentruns_message'), pg_total_relation_size('agentruns_run')"
        )
        messages, runs = cursor.fetchone()
    rows = Message.objects.count()
    print(f"{steps} steps, {rows} rows: {rows / steps:.2f} rows and {messages / steps / 1024:.1f} KB a step")
    print(f"a run besides its steps: {runs / Run.objects.count() / 1024:.1f} KB")


def main(arguments: list[str]) -> None:
    """Do one action in a process of its own."""
    import django

    django.setup()
    from agentruns import Agent, tool
    from agentruns.testing import ScriptedModel

    @tool
    def note(text: str) -> str:
        """Return 1 KB."""
        return text

    turn = {"text": "y" * 400, "tools": [{"name": "note", "input": {"text": "x" * 1000}}]}
    turns = [turn] * STEPS + [{"text": "done"}]
    Agent("capacity", instructions="Note it.", tools=[note], model=ScriptedModel(turns), max_steps=STEPS + 1)
    action, *rest = arguments
    {"work": work, "prepare": prepare, "weigh": weigh}[action](*rest)


def act(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def measure(environment: dict[str, str], workers: int, number: int) -> float:
    """Return how many steps a second so many workers take."""
    act(environment, "prepare", str(number))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, "work", str(share), str(workers)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in range(workers)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda child: child.communicate("\n"), children))
    seconds = time.perf_counter() - began
    assert all(child.returncode == 0 for child in children)
    return RUNS * STEPS / seconds


def bench() -> None:
    """Measure and print."""
    with postgres(tempfile.gettempdir()) as server:
        environment = {
            **os.environ,
            **server.environment,
            "AGENTRUNS_TEST_DB_NAME": "postgres",
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }
        found: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for repeat in range(REPEATS):
            for (
                workers,
                rates,
            ) in found.items():  # in turn, so that a slow moment of the machine is everybody's
                rates.append(measure(environment, workers, repeat * 10 + workers))
        print(f"{os.cpu_count()} cores, {RUNS} runs of {STEPS} steps, the middle of {REPEATS}")
        for workers, rates in found.items():
            print(f"{workers} workers: {sorted(rates)[REPEATS // 2]:.0f} steps a second")
        print(act(environment, "weigh"), end="")


if __name__ == "__main__":
    bench()
