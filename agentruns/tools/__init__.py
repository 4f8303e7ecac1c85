"""Tools: functions that the model may call, each declared with its effects."""

from agentruns.tools.base import InvalidArguments, Tool, tool
from agentruns.tools.builtin import (
    ask_human,
    child_tool,
    question_to,
    read_result,
    wait_for_event,
    wait_until,
)
from agentruns.tools.context import (
    NotOccurred,
    Occurred,
    Pending,
    RunContext,
    ToolContext,
    ToolOutput,
    Unknown,
)
from agentruns.tools.options import ChildKeywords
from agentruns.tools.refusals import http_refusal, service_refusal
from agentruns.tools.results import to_jsonable

__all__ = [
    "ChildKeywords", "InvalidArguments", "NotOccurred", "Occurred", "Pending", "RunContext", "Tool",
    "ToolContext", "ToolOutput", "Unknown", "ask_human", "child_tool", "http_refusal", "question_to",
    "read_result", "service_refusal", "to_jsonable", "tool", "wait_for_event", "wait_until",
]  # fmt: skip
