"""Parts of a benchmark in processes of their own, and a database for each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.child import ROOT
from tests.servers import Postgres


class Child:
    """An action of `benchmarks.crowd` in a process of its own: a line of JSON for a line of JSON."""

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


def database(server: Postgres, name: str) -> str:
    """Make a database; return where it is."""
    import psycopg

    with psycopg.connect(f"postgresql://postgres@/postgres?host={server.folder}", autocommit=True) as link:
        link.execute(f'CREATE DATABASE "{name}"')
    return f"postgresql://postgres@/{name}?host={server.folder}"
