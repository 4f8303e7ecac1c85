"""Find the model object behind a name."""

from __future__ import annotations

from typing import Any

from agentruns.providers.base import Model
from agentruns.providers.names import options_of

_made: dict[str, Model] = {}


def resolve(model: Model | str) -> Model:
    """Return the object to ask; a name has one, and one client, in a process."""
    if not isinstance(model, str):
        return model
    options = options_of(model)
    key = repr(options)  # a setting may change, as in a test
    if key not in _made:
        _made[key] = make(**options)
    return _made[key]


def make(provider: str, model: str, **options: Any) -> Model:
    """Return a model of a provider."""
    if provider == "anthropic":
        from agentruns.providers.anthropic import AnthropicModel

        return AnthropicModel(model, **options)
    from agentruns.providers.openai import OpenAIModel

    return OpenAIModel(model, provider=provider, **options)
