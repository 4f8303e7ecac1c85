"""A strict stand-in for the Messages API on 127.0.0.1, for tests of what speaks to it."""

from __future__ import annotations

from agentruns.testing.fake_anthropic.calls import Call
from agentruns.testing.fake_anthropic.faults import Fault
from agentruns.testing.fake_anthropic.server import FakeAnthropic

__all__ = ["Call", "FakeAnthropic", "Fault"]
