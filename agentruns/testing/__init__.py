"""What a project needs to test its agents without a network."""

from __future__ import annotations

from agentruns.providers.scripted import ScriptedModel
from agentruns.testing.crash import Crash, crash_after_tool_results, crash_at
from agentruns.testing.messages import InvalidMessages, check_messages

__all__ = [
    "Crash",
    "InvalidMessages",
    "ScriptedModel",
    "check_messages",
    "crash_after_tool_results",
    "crash_at",
]
