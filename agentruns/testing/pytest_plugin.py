"""The pytest plugin: fixtures to test tools and agents, and a flush that may empty the journal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Fixtures import modules at their first use, because most tests of most projects use none of them.
if TYPE_CHECKING:
    from agentruns.agents.agent import Agent
    from agentruns.testing import DatabaseClock, EffectsLedger, Script


@pytest.fixture(autouse=True, scope="session")
def _agentruns_flush() -> Iterator[None]:
    """Let the flush after a transactional test empty the journal, which is otherwise append-only."""
    conf = sys.modules.get("django.conf")  # without Django there is nothing to flush
    if conf is None or not conf.settings.configured:
        yield
        return
    from agentruns.testing.database import flushable_journal

    with flushable_journal():
        yield


@pytest.fixture(autouse=True)
def _agentruns_memory() -> Iterator[None]:
    """Forget, after each test, the last rows and log positions that this process saw committed.

    Without this, an older copy of the database, which the next test may load, would look like lost rows.
    """
    yield
    if batch := sys.modules.get("agentruns.journal.batch"):
        batch.seen_committed.clear()
    if timeline := sys.modules.get("agentruns.journal.timeline"):
        timeline.positions.clear()


@pytest.fixture
def scripted_model() -> Iterator[Callable[[Agent | str, Iterable[Any]], Script]]:
    """`scripted_model(agent, turns)`: replace the agent's model by a script until the test ends."""
    from agentruns.testing import scripted_model

    with ExitStack() as stack:
        yield lambda agent, turns: stack.enter_context(scripted_model(agent, turns))


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EffectsLedger:
    """The test's ledger of effects; `EffectsLedger.from_environment()` opens it, in child processes too."""
    from agentruns.testing.effects import VARIABLE, EffectsLedger

    path = tmp_path / "effects.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    return EffectsLedger(path)


@pytest.fixture
def database_clock() -> Iterator[DatabaseClock]:
    """The time of leases, back-offs, approvals and deadlines, frozen until `forward(minutes=5)` moves it."""
    from agentruns.testing import frozen_clock

    with frozen_clock() as clock:
        yield clock


def _function(name: str, text: str, *, of: str = "") -> Callable[[], Callable[..., Any]]:
    """Build the fixture `name`, which returns a function of `agentruns.testing`.

    The function's name is `of`, or `name` if `of` is "". `text` is the fixture's docstring.
    """

    def function() -> Any:
        return getattr(import_module("agentruns.testing"), of or name)

    function.__doc__ = text
    return pytest.fixture(function, name=name)


_run_until_blocked = _function(
    "run_until_blocked",
    "`run_until_blocked()`: drive every run until it ends or waits; returns their results.",
)
_crash_at = _function(
    "crash_at",
    "`with crash_at(point): ...` ends the block as a SIGKILL there would, but spares this process.",
    of="crashing_at",
)
_crash_after_tool_results = _function(
    "crash_after_tool_results",
    "`crash_after_tool_results(store, nth=2)`: a store that stops at the nth append of a drive.",
)
_expire_leases = _function("expire_leases", "`expire_leases()`: make the leases of dead workers expire now.")
_manage_py = _function(
    "manage_py",
    '`manage_py("resume_runs", crash_at=point)`: a command in a process of its own, killed at a point.',
)
_check_messages = _function(
    "check_messages", "`check_messages(messages)`: raises on anything the provider would refuse."
)
