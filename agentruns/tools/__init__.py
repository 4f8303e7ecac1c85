"""Tools: functions the model may call, declared with the effects they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentruns.tools.base import InvalidArguments, Tool
from agentruns.tools.context import NotOccurred, Occurred, RunContext, ToolContext, ToolOutput, Unknown
from agentruns.tools.decorator import tool
from agentruns.tools.refusals import http_refusal
from agentruns.tools.results import to_jsonable

__all__ = [
    "InvalidArguments",
    "NotOccurred",
    "Occurred",
    "RunContext",
    "Tool",
    "ToolContext",
    "ToolOutput",
    "Unknown",
    "ask_human",
    "http_refusal",
    "question_to",
    "to_jsonable",
    "tool",
]

if TYPE_CHECKING:
    from agentruns.tools.questions import ask_human as ask_human
    from agentruns.tools.questions import question_to as question_to
else:

    def __getattr__(name: str) -> Any:
        """Import what asks people when it is asked for: making a tool takes a tenth of a project's start."""
        if name not in ("ask_human", "question_to"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from agentruns.tools import questions

        return getattr(questions, name)
