"""What a project needs to test its tools and agents: no network, no sleeping, no guessing what happened."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Loaded when used: the pytest plugin comes with every pytest of every project that has agentruns installed.
_PUBLIC = {
    "Crash": "agentruns.testing.crash",
    "DatabaseClock": "agentruns.testing.clock",
    "EffectsLedger": "agentruns.testing.effects",
    "InvalidMessages": "agentruns.testing.messages",
    "JournalFlushMixin": "agentruns.testing.flush",
    "Script": "agentruns.testing.script",
    "ScriptedModel": "agentruns.providers.scripted",
    "StillRunning": "agentruns.testing.runs",
    "check_messages": "agentruns.testing.messages",
    "crash_after_tool_results": "agentruns.testing.crash",
    "crash_at": "agentruns.testing.crash",
    "crashing_at": "agentruns.testing.crash",
    "expire_leases": "agentruns.testing.runs",
    "frozen_clock": "agentruns.testing.clock",
    "manage_py": "agentruns.testing.child",
    "run_until_blocked": "agentruns.testing.runs",
    "scripted_model": "agentruns.testing.script",
}

__all__ = [*_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from agentruns.providers.scripted import ScriptedModel as ScriptedModel
    from agentruns.testing.child import manage_py as manage_py
    from agentruns.testing.clock import DatabaseClock as DatabaseClock
    from agentruns.testing.clock import frozen_clock as frozen_clock
    from agentruns.testing.crash import Crash as Crash
    from agentruns.testing.crash import crash_after_tool_results as crash_after_tool_results
    from agentruns.testing.crash import crash_at as crash_at
    from agentruns.testing.crash import crashing_at as crashing_at
    from agentruns.testing.effects import EffectsLedger as EffectsLedger
    from agentruns.testing.flush import JournalFlushMixin as JournalFlushMixin
    from agentruns.testing.messages import InvalidMessages as InvalidMessages
    from agentruns.testing.messages import check_messages as check_messages
    from agentruns.testing.runs import StillRunning as StillRunning
    from agentruns.testing.runs import expire_leases as expire_leases
    from agentruns.testing.runs import run_until_blocked as run_until_blocked
    from agentruns.testing.script import Script as Script
    from agentruns.testing.script import scripted_model as scripted_model
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
