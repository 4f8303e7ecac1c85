"""A strict stand-in for the Messages API on 127.0.0.1, for tests of what speaks to it."""

from __future__ import annotations

from tests.fake_anthropic.server import FakeAnthropic

__all__ = ["FakeAnthropic"]
