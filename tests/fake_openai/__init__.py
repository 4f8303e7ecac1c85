"""A strict stand-in for OpenAI's APIs on 127.0.0.1, for tests of what speaks to them."""

from __future__ import annotations

from tests.fake_openai.server import FakeOpenAI

__all__ = ["FakeOpenAI"]
