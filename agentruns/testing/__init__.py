"""Helpers to test tools and agents: scripted models, a clock, crashes and a ledger of effects."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imported at first use, because every pytest with agentruns installed loads the pytest plugin.
_MODULES = {
    "agentruns.providers.scripted": ("ScriptedModel",),
    "agentruns.testing.crash": ("Crash", "crash_after_tool_results", "crash_at", "crashing_at", "manage_py"),
    "agentruns.testing.database": ("DatabaseClock", "JournalFlushMixin", "frozen_clock"),
    "agentruns.testing.effects": ("EffectsLedger",),
    "agentruns.testing.runs": ("StillRunning", "expire_leases", "run_until_blocked"),
    "agentruns.testing.script": ("InvalidMessages", "Script", "check_messages", "scripted_model"),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from agentruns.providers.scripted import ScriptedModel as ScriptedModel
    from agentruns.testing.crash import Crash as Crash
    from agentruns.testing.crash import crash_after_tool_results as crash_after_tool_results
    from agentruns.testing.crash import crash_at as crash_at
    from agentruns.testing.crash import crashing_at as crashing_at
    from agentruns.testing.crash import manage_py as manage_py
    from agentruns.testing.database import DatabaseClock as DatabaseClock
    from agentruns.testing.database import JournalFlushMixin as JournalFlushMixin
    from agentruns.testing.database import frozen_clock as frozen_clock
    from agentruns.testing.effects import EffectsLedger as EffectsLedger
    from agentruns.testing.runs import StillRunning as StillRunning
    from agentruns.testing.runs import expire_leases as expire_leases
    from agentruns.testing.runs import run_until_blocked as run_until_blocked
    from agentruns.testing.script import InvalidMessages as InvalidMessages
    from agentruns.testing.script import Script as Script
    from agentruns.testing.script import check_messages as check_messages
    from agentruns.testing.script import scripted_model as scripted_model
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
