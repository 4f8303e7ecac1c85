"""Models by name: the provider of a name, a model's identity, and the object that answers requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentruns.conf import settings
from agentruns.providers.base import LIMITS, Model, token_count

PROVIDERS = frozenset({"anthropic", "azure", "ollama", "openai", "openrouter", "vllm"})


def options_of(name: str) -> dict[str, Any]:
    """Find provider, model and options for a key of AGENTRUNS_MODELS, "provider:model" or a Claude name."""
    if name in settings.MODELS:
        return {"provider": "openai", **settings.MODELS[name]}
    provider, _, model = name.partition(":")
    if model and provider in PROVIDERS:
        return {"provider": provider, "model": model}
    return {"provider": "anthropic", "model": name}


def model_identity(model: Model | str) -> str:
    """Build the name by which a Definition and prices know a model: "provider:model", without key or address.

    The identity of a Claude model is its plain name. An object without `identity`, which a system check
    refuses, is identified by its class path.
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
    """Find the name of a model's provider; the class name for an object without `provider`."""
    if isinstance(model, str):
        return str(options_of(model)["provider"])
    return str(getattr(model, "provider", type(model).__name__))


def reply_limit(model: Model | str, params: dict[str, Any]) -> int | None:
    """Find the most tokens that a reply may have, by the parameters of the model; None if nothing says it."""
    from agentruns.providers.anthropic import DEFAULT_MAX_TOKENS

    own = options_of(model) if isinstance(model, str) else getattr(model, "params", {})
    limits = [limit for name in LIMITS if (limit := token_count({**own, **params}, name))]
    return min(limits, default=DEFAULT_MAX_TOKENS if provider_of(model) == "anthropic" else None)


def names_of(model: Model | str) -> list[str]:
    """List the names by which AGENTRUNS_RATE knows a model: its own, its identity and its provider."""
    return [*([model] if isinstance(model, str) else []), model_identity(model), provider_of(model)]


def resolve(model: Model | str) -> Model:
    """Find the model object for a name; each name has one in the process. Returns an object unchanged."""
    return _made(model, repr(options_of(model))) if isinstance(model, str) else model


@cache
def _made(name: str, options: str) -> Model:  # `options` completes the cache key; a test may change them
    return make(**options_of(name))


def make(provider: str, model: str, **options: Any) -> Model:
    """Build the model object of a provider; `options` are further arguments of its class."""
    if provider == "anthropic":
        from agentruns.providers.anthropic import AnthropicModel

        return AnthropicModel(model, **options)
    from agentruns.providers.openai import OpenAIModel

    return OpenAIModel(model, provider=provider, **options)
