"""Tools: functions the model may call, with what the engine must know about their effects."""

from __future__ import annotations

from agentruns.tools.arguments import InvalidArguments
from agentruns.tools.base import Tool
from agentruns.tools.context import ToolContext
from agentruns.tools.decorator import tool
from agentruns.tools.outcomes import NotOccurred, Occurred, ToolOutput, Unknown
from agentruns.tools.questions import ask_human, question_to
from agentruns.tools.results import to_jsonable

__all__ = [
    "InvalidArguments",
    "NotOccurred",
    "Occurred",
    "Tool",
    "ToolContext",
    "ToolOutput",
    "Unknown",
    "ask_human",
    "question_to",
    "to_jsonable",
    "tool",
]
