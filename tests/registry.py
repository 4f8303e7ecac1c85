"""A registry of agents for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentruns.agents.agent import _lock, _registry


@contextmanager
def isolated_registry() -> Iterator[None]:
    """Give a test its own empty registry, and restore the old one afterwards."""
    with _lock:
        before = dict(_registry)
        _registry.clear()
    try:
        yield
    finally:
        with _lock:
            _registry.clear()
            _registry.update(before)
