"""Servers of the tests, declared and locked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentruns.tools import Tool, mcp as declared
from agentruns.tools.mcp import client
from tests.effects import Effects
from tests.mcp.servers import HOSTILE, Declare, lock


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(declared, "_servers", {})
    yield
    client.close()


@pytest.fixture
def hostile(tmp_path: Path, effects: Effects) -> Declare:
    """`hostile(ERA="modern", requires_approval=False)` gives the tools of the hostile server."""

    def declare(over: Callable[..., Any] | None = None, **options: Any) -> list[Tool]:
        environment = {"LEDGER": str(effects.path), "CHANGED": str(tmp_path / "changed")}
        environment |= {each: options.pop(each) for each in [*options] if each.isupper()}
        options = {"requires_approval": False, "name": "h", **options}
        file = tmp_path / f"{options['name']}.json"
        if over is not None:
            return lock(over(environment), file=file, **options)
        return lock([sys.executable, HOSTILE], file=file, env=environment, **options)

    return declare


@pytest.fixture
def over_http(hostile: Declare) -> Iterator[Declare]:
    """The same over HTTP."""
    with ExitStack() as stack:

        def url(environment: dict[str, str]) -> str:
            command, env = [sys.executable, HOSTILE, "http"], {**os.environ, **environment}
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            return f"http://user:secret@127.0.0.1:{int(process.stdout.readline())}/mcp?token=secret"

        yield partial(hostile, url)
