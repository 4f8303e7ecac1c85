"""Durable agent runs for Django: every step journaled, every effect accounted for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Agent": "agentruns.agents",
    "tool": "agentruns.tools",
    "ask_human": "agentruns.tools",
    "question_to": "agentruns.tools",
    "ToolContext": "agentruns.tools",
    "Occurred": "agentruns.tools",
    "NotOccurred": "agentruns.tools",
    "Unknown": "agentruns.tools",
    "ModelRequest": "agentruns.providers.base",
    "ModelReply": "agentruns.providers.base",
    "run_agent": "agentruns.runs",
    "start_run": "agentruns.runs",
    "resume_run": "agentruns.runs",
    "list_runs": "agentruns.runs",
    "get_run": "agentruns.runs",
    "adopt_definition": "agentruns.runs",
    "cancel_run": "agentruns.runs",
    "pause_run": "agentruns.runs",
    "resolve_orphan": "agentruns.runs",
    "fork_run": "agentruns.forks",
    "run_again": "agentruns.forks",
    "replay_run": "agentruns.replay",
    "state_at": "agentruns.states",
    "export_run": "agentruns.exports",
    "approve": "agentruns.approvals",
    "deny": "agentruns.approvals",
    "answer": "agentruns.approvals",
    "extend": "agentruns.approvals",
    "RunResult": "agentruns.typing",
    "MemoryStore": "agentruns.stores",
    "DatabaseStore": "agentruns.stores",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from agentruns.agents import Agent as Agent
    from agentruns.approvals import answer as answer
    from agentruns.approvals import approve as approve
    from agentruns.approvals import deny as deny
    from agentruns.approvals import extend as extend
    from agentruns.exports import export_run as export_run
    from agentruns.forks import fork_run as fork_run
    from agentruns.forks import run_again as run_again
    from agentruns.providers.base import ModelReply as ModelReply
    from agentruns.providers.base import ModelRequest as ModelRequest
    from agentruns.replay import replay_run as replay_run
    from agentruns.runs import adopt_definition as adopt_definition
    from agentruns.runs import cancel_run as cancel_run
    from agentruns.runs import get_run as get_run
    from agentruns.runs import list_runs as list_runs
    from agentruns.runs import pause_run as pause_run
    from agentruns.runs import resolve_orphan as resolve_orphan
    from agentruns.runs import resume_run as resume_run
    from agentruns.runs import run_agent as run_agent
    from agentruns.runs import start_run as start_run
    from agentruns.states import state_at as state_at
    from agentruns.stores import DatabaseStore as DatabaseStore
    from agentruns.stores import MemoryStore as MemoryStore
    from agentruns.tools import NotOccurred as NotOccurred
    from agentruns.tools import Occurred as Occurred
    from agentruns.tools import ToolContext as ToolContext
    from agentruns.tools import Unknown as Unknown
    from agentruns.tools import ask_human as ask_human
    from agentruns.tools import question_to as question_to
    from agentruns.tools import tool as tool
    from agentruns.typing import RunResult as RunResult
else:
    # Hidden from type checkers: they would take every misspelt name for a public one.
    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
