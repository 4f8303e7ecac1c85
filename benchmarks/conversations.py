"""Many conversations in one worker, beside DBOS: `python -m benchmarks.conversations [COUNT ...]`.

A conversation is three replies of two seconds each, with a tool call between them. What is measured: the time
from start to end over the ideal, the CPU, the memory and the connections of the one process that drives all.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.child import ROOT
from benchmarks.processes import database
from tests.servers import postgres

REPLIES, SECONDS = 3, 2.0
IDEAL = REPLIES * SECONDS
AT_MOST = {100: 1.15, 500: 1.5}  # the time over the ideal
CONNECTIONS, MEMORY = 20, 150  # MB


class Slow:
    """A model that answers after SECONDS, twice with a call and then with a text."""

    def propose(self, request: Any) -> Any:
        """Return the reply of a step."""
        from agentruns import ModelReply

        time.sleep(SECONDS)
        if request.step == REPLIES - 1:
            return ModelReply([{"type": "text", "text": "Done."}], "end_turn", model="slow")
        call = {"type": "tool_use", "id": f"call_{request.step}", "name": "look_up", "input": {"query": "1"}}
        return ModelReply([call], "tool_use", model="slow")


def ours(url: str, count: str) -> None:
    """Start the runs, say so, and be a worker until a signal comes."""
    os.environ |= {"BENCHMARK_DATABASE": url, "DJANGO_SETTINGS_MODULE": "benchmarks.settings"}
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connections

    from agentruns import Agent, start_run, tool

    call_command("migrate", verbosity=0)

    @tool(safe_to_retry=True)
    def look_up(query: str) -> str:
        return f"All about {query}."

    Agent("slow", instructions="Look things up.", tools=[look_up], model=Slow())
    for number in range(int(count)):
        start_run("slow", "Look it up.", f"slow-{number}")
    connections.close_all()
    begin(count)
    call_command("resume_runs", "--watch", "--concurrency", count)
    end()


def dbos(url: str, count: str) -> None:
    """Start the workflows at once, and wait for all."""
    from dbos import DBOS

    from benchmarks.systems.dbos import launch

    @DBOS.step()
    def reply(number: int) -> str:
        time.sleep(SECONDS)
        return f"reply {number}"

    @DBOS.step()
    def look_up(query: str) -> str:
        return f"All about {query}."

    @DBOS.workflow()
    def converse() -> str:
        for number in range(REPLIES - 1):
            reply(number)
            look_up("1")
        return reply(REPLIES - 1)

    launch(url)
    begin(count)
    handles = [DBOS.start_workflow(converse) for _ in range(int(count))]
    for handle in handles:
        handle.get_result()
    print("done", flush=True)
    threading.Event().wait()


def begin(count: str) -> None:
    """Say that the work begins, and forget what it took until now."""
    signal.signal(signal.SIGUSR1, lambda *_: end())
    used = resource.getrusage(resource.RUSAGE_SELF)
    begin.cpu = used.ru_utime + used.ru_stime  # type: ignore[attr-defined]
    print("begin", flush=True)


def end() -> None:
    """Say what this process used since `begin`."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - begin.cpu  # type: ignore[attr-defined]
    print(json.dumps({"cpu": cpu, "memory": used.ru_maxrss / 1024}), flush=True)
    os._exit(0)


def measure(system: str, url: str, count: int) -> dict[str, float]:
    """Let a system work in a process of its own; watch the database from here. Raises ImportError."""
    if system == "dbos" and find_spec("dbos") is None:
        raise ImportError(system)
    import psycopg

    finished = {
        "ours": "SELECT count(*) FROM agentruns_run WHERE status = 'completed'",
        "dbos": "SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'",
    }[system]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.conversations", system, url, str(count)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    connections = 0
    try:
        with psycopg.connect(url, autocommit=True) as link:
            while (line := child.stdout.readline()) and line != "begin\n":
                pass
            began = time.perf_counter()
            while True:
                [used] = link.execute(
                    "SELECT count(*) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                ).fetchone() or [0]
                connections = max(connections, used)
                [done] = link.execute(finished).fetchone() or [0]
                if done >= count:
                    break
                time.sleep(0.05)
            seconds = time.perf_counter() - began
        child.send_signal(signal.SIGUSR1)
        told = json.loads([line for line in child.stdout if line.startswith("{")][-1])
    finally:
        child.kill()
        child.wait()
    return {
        "over ideal": seconds / IDEAL,
        "connections": connections,
        "MB": told["memory"],
        "ms each": 1000 * told["cpu"] / count,
    }


def main(counts: list[int]) -> int:
    """Print the figures of both systems, by turns, and each goal that was missed; return the exit code."""
    missed: list[str] = []
    with postgres() as server:
        for count in counts:
            told: dict[str, dict[str, float]] = {}
            for system in ("ours", "dbos"):
                try:
                    told[system] = measure(system, database(server, f"{system}_{count}"), count)
                except ImportError:
                    print(f"{count} {system}: is not installed")
                    continue
                figures = ", ".join(f"{name} {value:.2f}" for name, value in told[system].items())
                print(f"{count} {system}: {figures}", flush=True)
            limits = {"over ideal": AT_MOST.get(count, math.inf), "connections": CONNECTIONS, "MB": MEMORY}
            if "dbos" in told:
                limits["ms each"] = told["dbos"]["ms each"]
            for name, most in limits.items():
                if told["ours"][name] > most:
                    missed.append(
                        f"{count} conversations: {name} {told['ours'][name]:.2f}, at most {most:.2f}"
                    )
    print("\n".join(missed) or "Every goal is met.")
    return bool(missed)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] in ("ours", "dbos"):
        globals()[words[0]](*words[1:])
    else:
        sys.exit(main([int(word) for word in words] or [*AT_MOST]))
