"""The soak over Celery: its short form here, and with AGENTRUNS_LONG=1 that of 1,000 runs and 4 workers."""

from __future__ import annotations

import json
import os
import sys

from tests.programs import run_program

RUNS, WORKERS = ("1000", "4") if os.environ.get("AGENTRUNS_LONG") else ("8", "2")


def test_soak() -> None:
    done = run_program(sys.executable, "-m", "tests.workers.soak", RUNS, WORKERS, patience=None)
    print(done.stdout)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["runs"], told["kills"] > 1) == ({"completed": int(RUNS)}, True)
