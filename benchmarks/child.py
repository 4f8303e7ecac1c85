"""One system in a process of its own: `python -m benchmarks.child VARIANT URL`, and the handle on it.

A JSON line {"steps", "calls"} on its input is one run, answered by {"seconds", "cpu", "stamps"}; with
"until", a time of `perf_counter`, it is run after run, answered by {"done", "steps", "cpu"}. The first line
it says is {"ready": ...}, or {"missing": ...} where a package is not installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.systems import modules
from benchmarks.workload import Workload

ROOT = Path(__file__).parents[1]


class Missing(Exception):
    """A package of a system is not installed."""


class Child:
    """A system that waits for runs, and sleeps between them: its pollers take nothing from the others."""

    def __init__(self, variant: str, url: str, log: Path) -> None:
        self.variant, self.log = variant, log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.child", variant, url],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            said = self._answer()
            if "missing" in said:
                raise Missing(said["missing"])
        except BaseException:
            self.stop()
            raise
        self.process.send_signal(signal.SIGSTOP)

    def run(self, steps: int, calls: int) -> dict[str, Any]:
        """Let the system do one run and return its answer; raises RuntimeError with the end of its log."""
        self.begin(steps=steps, calls=calls)
        return self.answer()

    def begin(self, **work: float) -> None:
        """Let the system work and do not wait."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        print(json.dumps(work), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Return what the work took, and let the system sleep again."""
        try:
            return self._answer()
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.variant} ended:\n{self.log.read_text(errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.variant}: {answer['error']}")
        return answer


def measure(system: Any, steps: int, calls: int) -> dict[str, Any]:
    """Do one run, and check that it did everything once."""
    workload = Workload(steps, calls)
    if hasattr(system, "ready"):
        system.ready(workload)
    gc.collect()
    cpu, began = time.process_time(), time.perf_counter()
    stamps = system.run(workload)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    workload.check()
    return {"seconds": seconds, "cpu": cpu, "stamps": [round(stamp - began, 7) for stamp in stamps]}


def toil(system: Any, steps: int, calls: int, until: float) -> dict[str, Any]:
    """Do run after run; return the steps done in time, and the CPU of all."""
    cpu, done, runs = time.process_time(), 0, 0
    while time.perf_counter() < until:
        workload = Workload(steps, calls)
        stamps = system.run(workload)
        workload.check()
        done += sum(stamp <= until for stamp in stamps[1:-1])  # each reply but the first ends a step
        runs += 1
    return {"done": done, "steps": runs * steps, "cpu": time.process_time() - cpu}


def main(variant: str, url: str) -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers)

    try:
        system = importlib.import_module(modules()[variant])
    except ImportError as error:
        say({"missing": error.name or str(error)})
        return
    system.prepare(variant, url)
    say({"ready": variant})
    for line in sys.stdin:
        try:
            work = json.loads(line)
            say(toil(system, **work) if "until" in work else measure(system, **work))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
