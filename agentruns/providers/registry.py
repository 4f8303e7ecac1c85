"""Find the model object behind a name."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentruns.providers.base import Model
from agentruns.providers.names import options_of


def resolve(model: Model | str) -> Model:
    """Return the object to ask; a name has one, and one client, in a process."""
    return _made(model, repr(options_of(model))) if isinstance(model, str) else model


@cache
def _made(name: str, options: str) -> Model:  # which a test may change
    return make(**options_of(name))


def make(provider: str, model: str, **options: Any) -> Model:
    """Return a model of a provider."""
    if provider == "anthropic":
        from agentruns.providers.anthropic import AnthropicModel

        return AnthropicModel(model, **options)
    from agentruns.providers.openai import OpenAIModel

    return OpenAIModel(model, provider=provider, **options)
