"""Durable agent runs for Django: every step journaled, every effect accounted for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "agentruns.agents.agent": ("Agent",),
    "agentruns.content": ("Text", "Image", "Document"),
    "agentruns.exceptions": ("ToolRefused",),
    "agentruns.journal.policy": ("Policy",),
    "agentruns.journal.store": ("MemoryStore", "DatabaseStore"),
    "agentruns.providers.base": ("ModelRequest", "ModelReply"),
    "agentruns.services.api_tokens": ("session_token",),
    "agentruns.services.events": ("deliver_event", "stop_waiting", "Delivery"),
    "agentruns.services.approvals.decisions": ("get_approval", "approve", "deny", "answer", "extend"),
    "agentruns.services.runs.control": (
        "adopt_definition", "cancel_run", "leave_out", "pause_run", "raise_budget", "resolve_orphan",
    ),
    "agentruns.services.backtest": ("backtest",),
    "agentruns.services.data.erasure": ("erase_call", "erase_payload", "erase_user"),
    "agentruns.services.rules": ("draft_rule", "try_rule", "activate_rule", "stop_rule", "retire_rule"),
    "agentruns.services.runs.forks": ("fork_run", "run_again"),
    "agentruns.services.history": ("replay_run", "state_at"),
    "agentruns.services.runs.messages": ("send_message",),
    "agentruns.services.runs.lifecycle": (
        "run_agent", "start_run", "resume_run", "list_runs", "get_run", "RunResult",
    ),
    "agentruns.services.transfer": ("export_run",),
    "agentruns.tools": (
        "tool", "ask_human", "question_to", "read_result", "RunContext", "ToolContext", "Occurred",
        "NotOccurred", "Unknown", "Pending", "http_refusal", "service_refusal", "wait_for_event",
        "wait_until",
    ),
    "agentruns.tools.mcp": ("mcp_tools",),
}  # fmt: skip
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from agentruns.agents.agent import Agent as Agent
    from agentruns.exceptions import ToolRefused as ToolRefused
    from agentruns.journal.policy import Policy as Policy
    from agentruns.journal.store import DatabaseStore as DatabaseStore
    from agentruns.journal.store import MemoryStore as MemoryStore
    from agentruns.providers.base import ModelReply as ModelReply
    from agentruns.providers.base import ModelRequest as ModelRequest
    from agentruns.services.api_tokens import session_token as session_token
    from agentruns.services.approvals.decisions import answer as answer
    from agentruns.services.approvals.decisions import approve as approve
    from agentruns.services.approvals.decisions import deny as deny
    from agentruns.services.approvals.decisions import extend as extend
    from agentruns.services.approvals.decisions import get_approval as get_approval
    from agentruns.services.backtest import backtest as backtest
    from agentruns.services.data.erasure import erase_call as erase_call
    from agentruns.services.data.erasure import erase_payload as erase_payload
    from agentruns.services.data.erasure import erase_user as erase_user
    from agentruns.services.events import Delivery as Delivery
    from agentruns.services.events import deliver_event as deliver_event
    from agentruns.services.events import stop_waiting as stop_waiting
    from agentruns.services.history import replay_run as replay_run
    from agentruns.services.history import state_at as state_at
    from agentruns.services.rules import activate_rule as activate_rule
    from agentruns.services.rules import draft_rule as draft_rule
    from agentruns.services.rules import retire_rule as retire_rule
    from agentruns.services.rules import stop_rule as stop_rule
    from agentruns.services.rules import try_rule as try_rule
    from agentruns.services.runs.control import adopt_definition as adopt_definition
    from agentruns.services.runs.control import cancel_run as cancel_run
    from agentruns.services.runs.control import leave_out as leave_out
    from agentruns.services.runs.control import pause_run as pause_run
    from agentruns.services.runs.control import raise_budget as raise_budget
    from agentruns.services.runs.control import resolve_orphan as resolve_orphan
    from agentruns.services.runs.forks import fork_run as fork_run
    from agentruns.services.runs.forks import run_again as run_again
    from agentruns.services.runs.lifecycle import RunResult as RunResult
    from agentruns.services.runs.lifecycle import get_run as get_run
    from agentruns.services.runs.lifecycle import list_runs as list_runs
    from agentruns.services.runs.lifecycle import resume_run as resume_run
    from agentruns.services.runs.lifecycle import run_agent as run_agent
    from agentruns.services.runs.lifecycle import start_run as start_run
    from agentruns.services.runs.messages import send_message as send_message
    from agentruns.services.transfer import export_run as export_run
    from agentruns.tools import NotOccurred as NotOccurred
    from agentruns.tools import Occurred as Occurred
    from agentruns.tools import Pending as Pending
    from agentruns.tools import RunContext as RunContext
    from agentruns.tools import ToolContext as ToolContext
    from agentruns.tools import Unknown as Unknown
    from agentruns.tools import ask_human as ask_human
    from agentruns.tools import http_refusal as http_refusal
    from agentruns.tools import question_to as question_to
    from agentruns.tools import read_result as read_result
    from agentruns.tools import service_refusal as service_refusal
    from agentruns.tools import tool as tool
    from agentruns.tools import wait_for_event as wait_for_event
    from agentruns.tools import wait_until as wait_until
    from agentruns.tools.mcp import mcp_tools as mcp_tools
else:
    # Hidden from type checkers, which would otherwise accept every misspelt name as a public one.
    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
