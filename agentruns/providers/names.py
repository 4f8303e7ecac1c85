"""Names of models: which provider's model a text stands for, and the object to ask."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from agentruns.conf import settings

if TYPE_CHECKING:
    from agentruns.providers.base import Model

PROVIDERS = frozenset({"anthropic", "azure", "ollama", "openai", "openrouter", "vllm"})


def options_of(name: str) -> dict[str, Any]:
    """Return provider, model and options: of AGENTRUNS_MODELS, of "provider:model", or of a Claude model."""
    if name in settings.MODELS:
        return {"provider": "openai", **settings.MODELS[name]}
    provider, _, model = name.partition(":")
    if model and provider in PROVIDERS:
        return {"provider": provider, "model": model}
    return {"provider": "anthropic", "model": name}


def identity_of(provider: str, model: str) -> str:
    """Return the name of a model in definitions and prices; a model of Claude's has its plain name."""
    return model if provider == "anthropic" else f"{provider}:{model}"


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
