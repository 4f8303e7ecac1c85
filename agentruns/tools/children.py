"""Tools that hand a task to another agent, whose run is a child of the run that calls the tool."""

from __future__ import annotations

import re
from typing import Annotated, Any, Unpack

from pydantic import Field

from agentruns.tools.base import Tool, declared
from agentruns.tools.options import ChildKeywords, Options


def child_tool(agent: str, name: str, description: str, **given: Unpack[ChildKeywords]) -> Tool[..., Any]:
    """Build the tool that starts a run of the agent with this name. Raises TypeError as `@tool` does."""
    if unknown := sorted({*given} - {*ChildKeywords.__annotations__}):
        raise TypeError(f"as_tool() of agent {agent!r} has no option {unknown[0]!r}: no handler is called.")
    name = name or re.sub("[^a-zA-Z0-9_-]", "_", agent)[:64]
    text = description or f"Hand a task to the agent {agent}, and wait for its answer."
    return declared(_hand_over, name, text, Options.of({**given, "agent": agent}), {})


def _hand_over(task: Annotated[str, Field(pattern=r"\S")]) -> str:
    """Start a run of the agent.

    Args:
        task: the whole task; the agent knows nothing of this conversation
    """
    raise RuntimeError("The engine starts the run of another agent; nothing executes the tool itself.")
