"""Find the model object behind a name."""

from __future__ import annotations

from functools import cache

from agentruns.providers.base import Model


def resolve(model: Model | str) -> Model:
    """Return the object to ask: a name means a Claude model, with one client per name and process."""
    return _anthropic(model) if isinstance(model, str) else model


@cache
def _anthropic(name: str) -> Model:
    from agentruns.providers.anthropic import AnthropicModel

    return AnthropicModel(name)
