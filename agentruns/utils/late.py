"""Late imports: the modules of a package, such as `agentruns.services`, are imported at first use.

Every command of a project loads its checks and its admin, so their imports have to be fast.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Build the `__getattr__` of a package that imports each module of the package at its first use."""

    def late(name: str) -> ModuleType:
        path = f"{package}.{name}"
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return late
