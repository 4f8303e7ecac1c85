"""Ready-made tools: questions to people, waits, reading on in a result, and tasks for other agents."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Unpack

from pydantic import AwareDatetime, Field

from agentruns.conf import settings
from agentruns.exceptions import ToolRefused
from agentruns.tools.base import Tool, declared
from agentruns.tools.card import one_line
from agentruns.tools.context import LONGEST_WAIT, Pending, ToolContext
from agentruns.tools.excerpts import READER, boundary
from agentruns.tools.options import ChildKeywords, Options, Risk
from agentruns.utils.bounds import NAME_LENGTH, OWN_EVENTS

PAGE = 20_000  # characters of a result that `read_result` returns
TIMER = f"{OWN_EVENTS}time"  # name of the event that `wait_until` waits for; nobody delivers it
TASK = f"{OWN_EVENTS}task"  # of the event that a task of an MCP server has ended; its key has both names

Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH)]


def question_to(
    approvers: str | None = None,
    *,
    name: str = "ask_human",
    expires_in: timedelta | None = None,
    risk: Risk = "normal",
) -> Tool[..., Any]:
    """Build a tool that asks a person a question; the answer becomes the call's result.

    `approvers` names the permission or group of those who may answer, as in `@tool`. An agent may have
    several such tools, each under its own name. Raises TypeError as `@tool` does.
    """
    options = Options(
        requires_approval=True,
        approvers=approvers,
        expires_in=expires_in,
        risk=risk,
        describe=lambda arguments: one_line(str(arguments["question"])),
        safe_to_retry=True,  # nothing can happen twice
        only_answers=True,
    )
    return declared(_ask, name, None, options, {})


def choices_of(arguments: dict[str, Any]) -> list[str]:
    """List the answers from which a person may choose; an empty list if the question offers none."""
    choices = arguments.get("choices")
    return [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []


def takes_text(arguments: dict[str, Any]) -> bool:
    """Check whether a question accepts a free text; always true if the question offers no choices.

    Also true for a question recorded before `free_text` existed, because every such question accepted a text.
    """
    return not choices_of(arguments) or bool(arguments.get("free_text", True))


def _ask(question: str, choices: list[str] | None = None, free_text: bool = False) -> str:
    """Ask a person and wait for the answer, however long it takes.

    Use it when you need a decision or a fact that only a person has. One question at a time.

    Args:
        question: the whole question, with what the person needs to know to answer it
        choices: the answers to choose from, if there are few
        free_text: true if the person may write another answer than one of the choices
    """
    raise RuntimeError("A question is answered by a person; nothing executes it.")


ask_human = question_to()


def _read(
    ctx: ToolContext,
    result: str,
    offset: Annotated[int, Field(ge=0)] = 0,
    length: Annotated[int, Field(ge=1, le=PAGE)] = PAGE,
) -> str:
    """Read on in the result of an earlier call, if characters of the result were left out.

    Args:
        result: the id of the result, as the note in the result says
        offset: the number of characters to skip
        length: the number of characters to read
    """
    try:
        text = ctx._result(result)
    except LookupError as error:
        raise ToolRefused(str(error)) from None
    if offset >= len(text):
        raise ToolRefused(f"Result {result!r} has {len(text)} characters; offset must be smaller.")
    room = (settings.RESULT_SENT_MAX or PAGE) - 200  # for the line about the page
    last = min(offset + length, offset + room, len(text))
    end = at if (at := boundary(text, last, -1)) > offset else last
    more = f"; go on with offset={end}" if end < len(text) else ""
    return text[offset:end] + f"\n\n[characters {offset} to {end} of {len(text)}{more}]"


read_result = declared(_read, READER, None, Options(safe_to_retry=True), {})


def _wait_for_event(
    name: Name,
    key: Name,
    timeout_seconds: Annotated[int, Field(ge=1, le=int(LONGEST_WAIT.total_seconds()))],
) -> Pending:
    """Wait until an event of the outside world is delivered. The result is what came with the event.

    If the time is over first, the result is {"timed_out": true}.

    Args:
        name: the kind of event, such as "delivery"
        key: which one of them, such as the number of an order
        timeout_seconds: how long to wait at most
    """
    if name.startswith(OWN_EVENTS):
        raise ToolRefused(f"{name!r} is no event to wait for: choose another name.")
    return Pending(key, timedelta(seconds=timeout_seconds), _name=name)


def _wait_until(ctx: ToolContext, at: AwareDatetime) -> Pending:
    """Wait until a time, and go on then. The result is the time at which the wait ended.

    Args:
        at: the time with its offset, such as "2027-03-01T09:00:00+01:00"
    """
    return Pending(_name=TIMER, _until=at)


WAITS = Options(safe_to_retry=True, parallel=True, only_waits=True)  # nothing can happen twice
wait_for_event = declared(_wait_for_event, "wait_for_event", None, WAITS, {})
wait_until = declared(_wait_until, "wait_until", None, WAITS, {})


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
