"""The tool `ask_human`: a question for a person, which waits as an approval and is never executed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from agentruns.tools.base import Tool, declared
from agentruns.tools.card import one_line
from agentruns.tools.options import Options, Risk


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
