"""Models by name: the provider of a name, a model's identity, and the object that answers requests."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from agentruns.conf import settings

if TYPE_CHECKING:
    from agentruns.providers.base import Model

PROVIDERS = frozenset({"anthropic", "azure", "ollama", "openai", "openrouter", "vllm"})


def options_of(name: str) -> dict[str, Any]:
    """Find provider, model and options of a name of AGENTRUNS_MODELS, "provider:model" or a Claude model."""
    if name in settings.MODELS:
        return {"provider": "openai", **settings.MODELS[name]}
    provider, _, model = name.partition(":")
    if model and provider in PROVIDERS:
        return {"provider": provider, "model": model}
    return {"provider": "anthropic", "model": name}


def model_identity(model: Model | str) -> str:
    """Build the model's name for a Definition and for prices: provider and model, without key or address.

    A Claude model has its plain name; an object without `identity`, which a check refuses, its class path.
    """
    if isinstance(model, str):
        options = options_of(model)
        is_claude = options["provider"] == "anthropic"
        return str(options["model"]) if is_claude else f"{options['provider']}:{options['model']}"
    identity = getattr(model, "identity", None)
    if isinstance(identity, str) and identity:
        return identity
    return f"{type(model).__module__}.{type(model).__qualname__}"


def provider_of(model: Model | str) -> str:
    """Find the name of a model's provider."""
    if isinstance(model, str):
        return str(options_of(model)["provider"])
    return str(getattr(model, "provider", type(model).__name__))


def resolve(model: Model | str) -> Model:
    """Find the model object for a name, the same in the whole process; return an object itself."""
    return _made(model, repr(options_of(model))) if isinstance(model, str) else model


@cache
def _made(name: str, options: str) -> Model:  # which a test may change
    return make(**options_of(name))


def make(provider: str, model: str, **options: Any) -> Model:
    """Build a model of a provider."""
    if provider == "anthropic":
        from agentruns.providers.anthropic import AnthropicModel

        return AnthropicModel(model, **options)
    from agentruns.providers.openai import OpenAIModel

    return OpenAIModel(model, provider=provider, **options)
