"""What a project needs to test its agents without a network."""

from __future__ import annotations

from agentruns.providers.scripted import ScriptedModel
from agentruns.testing.messages import InvalidMessages, check_messages

__all__ = ["InvalidMessages", "ScriptedModel", "check_messages"]
