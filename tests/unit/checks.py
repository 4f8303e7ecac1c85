"""Tools of projects that system checks look at."""

from __future__ import annotations

from typing import Any

from agentruns import tool


@tool(requires_approval=True, approvers="finance")
def wire(cents: int) -> str:
    """Wire money."""
    return "wired"


@tool(requires_approval=lambda args, ctx: True, approvers="auth.change_user")
def refund(cents: int) -> str:
    """Refund."""
    return "refunded"


def ids(found: Any) -> list[str]:
    """List the ids of messages of checks."""
    return [message.id for message in found]
