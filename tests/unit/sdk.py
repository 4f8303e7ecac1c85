"""The SDK `anthropic`, imported when a test first needs a class of it: two seconds less elsewhere."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if not name[0].isupper():  # pytest asks every object of a module for much that is its own
        raise AttributeError(name)
    import anthropic

    return getattr(anthropic, name)
