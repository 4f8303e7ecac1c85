"""The pytest plugin: fixtures to test tools and agents, and a flush that empties the journal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Modules are imported when a fixture is used: most tests of most projects use none of them.
if TYPE_CHECKING:
    import subprocess

    from agentruns import RunResult
    from agentruns.agents.agent import Agent
    from agentruns.testing import DatabaseClock, EffectsLedger, Script
    from agentruns.testing.crash import CrashingStore


@pytest.fixture(autouse=True, scope="session")
def _agentruns_flush() -> Iterator[None]:
    """Let the flush after a transactional test empty the journal, which is append-only at all other times."""
    conf = sys.modules.get("django.conf")  # without Django there is nothing to flush
    if conf is None or not conf.settings.configured:
        yield
        return
    from agentruns.testing.database import flushable_journal

    with flushable_journal():
        yield


@pytest.fixture
def scripted_model() -> Iterator[Callable[[Agent | str, Iterable[Any]], Script]]:
    """`scripted_model(agent, turns)`: a script in place of the agent's model, until the test ends."""
    from agentruns.testing import scripted_model

    with ExitStack() as stack:

        def play(agent: Agent | str, turns: Iterable[Any]) -> Script:
            return stack.enter_context(scripted_model(agent, turns))

        yield play


@pytest.fixture
def run_until_blocked() -> Callable[..., list[RunResult]]:
    """`run_until_blocked()`: drive every run until it ends or waits; returns their results."""
    from agentruns.testing import run_until_blocked

    return run_until_blocked


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EffectsLedger:
    """The ledger of outside effects; `EffectsLedger.from_environment()` finds it, also in child processes."""
    from agentruns.testing.effects import VARIABLE, EffectsLedger

    path = tmp_path / "effects.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    return EffectsLedger(path)


@pytest.fixture
def crash_at() -> Callable[[str], AbstractContextManager[None]]:
    """`with crash_at(point): ...` ends the block as a SIGKILL there would, but spares this process."""
    from agentruns.testing import crashing_at

    return crashing_at


@pytest.fixture
def crash_after_tool_results() -> Callable[..., CrashingStore]:
    """`crash_after_tool_results(store, nth=2)`: a store that stops at the nth append of a drive."""
    from agentruns.testing import crash_after_tool_results

    return crash_after_tool_results


@pytest.fixture
def expire_leases() -> Callable[..., int]:
    """`expire_leases()`: make the leases of dead workers expire now."""
    from agentruns.testing import expire_leases

    return expire_leases


@pytest.fixture
def manage_py() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`manage_py("resume_runs", crash_at=point)`: a command in a process of its own, killed at a point."""
    from agentruns.testing import manage_py

    return manage_py


@pytest.fixture
def database_clock() -> Iterator[DatabaseClock]:
    """The time of leases, back-offs, approvals and deadlines: it stands still until `forward(minutes=5)`."""
    from agentruns.testing import frozen_clock

    with frozen_clock() as clock:
        yield clock


@pytest.fixture
def check_messages() -> Callable[[Any], None]:
    """`check_messages(messages)`: raises on anything the provider would refuse."""
    from agentruns.testing import check_messages

    return check_messages
