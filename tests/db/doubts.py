"""A tool that leaves its call in doubt."""

from __future__ import annotations

from agentruns import tool
from agentruns.exceptions import ToolDurabilityError
from tests.effects import Effects


@tool
def wire(text: str) -> str:
    """Send a wire that may or may not have gone out."""
    Effects.from_environment().record("wire", text=text)
    raise ToolDurabilityError("the bank's answer was lost")
