"""The same run on each system, killed between an effect and its record, and recovered as documented.

A process is killed by SIGKILL right after it charged a card, before the system can store that, and another
one recovers the run on the same machine, with the same code. All of them use PostgreSQL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from agentruns.testing.effects import VARIABLE, EffectsLedger
from benchmarks.kill_comparison import world
from tests.servers import Postgres, postgres

ROOT = Path(__file__).parents[2]
FOOTNOTE = """
Each process was killed by SIGKILL between the charge and its record, with one charge in the ledger.
The person who is asked has read the ledger and says that it happened; it is this program that says it.
The ledger takes every charge: where the key is the same, a bank that honours keys would have charged once.
"""


@dataclass(frozen=True)
class System:
    """A row of the table; `key` is what the system offers a tool as an idempotency key."""

    name: str
    module: str
    package: str
    key: str


SYSTEMS = (
    System("agentruns", "ours", "agentruns", "idempotency key of the call"),
    System("agentruns, reconcile", "ours", "agentruns", "idempotency key of the call"),
    System("DBOS", "dbos", "dbos", "workflow id and step id"),
    System("Absurd", "absurd", "absurd-sdk", "task id and step name"),
    System("LangGraph", "langgraph", "langgraph", "the model's tool call id"),
)


def process(system: System, action: str, url: str, ledger: Path) -> tuple[int, dict[str, Any]]:
    """Do one half in a process of its own; return its exit status and what it said."""
    environment = {**os.environ, VARIABLE: str(ledger), world.DIES: "1" if action == "start" else ""}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kill_comparison.child", system.module, action, system.name, url],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{system.name}, {action}: {done.stderr[-2000:]}")
    return done.returncode, json.loads(done.stdout or "{}")


def compare(system: System, url: str, ledger: Path) -> list[str]:
    """Kill and recover one system; return its row of the table."""
    status, said = process(system, "start", url, ledger)
    if "missing" in said:
        return [system.name, f"missing: {said['missing']}"]
    effects = EffectsLedger(ledger)
    if status != -signal.SIGKILL or effects.counts() != {"find_order": 1, "charge_card": 1}:
        raise RuntimeError(f"{system.name} was not killed right after the charge: {effects.counts()}")
    status, outcome = process(system, "recover", url, ledger)
    if status:
        raise RuntimeError(f"{system.name} was killed while it recovered.")
    if effects.count("find_order") != 1 or effects.count("send_receipt") != 1:
        raise RuntimeError(f"{system.name} did not take the other steps once: {effects.counts()}")
    keys = [line["idempotency_key"] for line in effects.lines() if line["key"] == "charge_card"]
    key = system.key + ("" if len(keys) == 1 else ": the same" if len(set(keys)) == 1 else ": another")
    return [f"{system.name} {version(system.package)}", str(len(keys)), *outcome.values(), key]


def database(server: Postgres, number: int) -> str:
    """Return the URL of a new database."""
    name = f"kill_{number}"
    with psycopg.connect(host=str(server.folder), user="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql:///{name}?host={server.folder}&user=postgres"


def main() -> None:
    """Print the table."""
    rows = [["", "charges", "went on", "its record of the charge", "ended", "key offered to the tool"]]
    with postgres() as server, tempfile.TemporaryDirectory() as folder:
        for number, system in enumerate(SYSTEMS):
            rows.append(compare(system, database(server, number), Path(folder) / f"{number}.jsonl"))
    present = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in present) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)).rstrip())
    print(FOOTNOTE)


if __name__ == "__main__":
    main()
