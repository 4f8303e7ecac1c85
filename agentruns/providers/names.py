"""Names of models: which provider's model a text stands for."""

from __future__ import annotations

from typing import Any

from agentruns.conf import settings

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
