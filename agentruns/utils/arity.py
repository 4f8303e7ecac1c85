"""The arity of functions that a project declares, compared with the arguments of their later calls."""

from __future__ import annotations

import inspect
from typing import Any


def arity_mistake(function: Any, *parameters: str) -> str:
    """Explain that a callable cannot be called with these positional arguments, or return "".

    A builtin may have no signature to be read: it is accepted.
    """
    try:  # of a decorated function the wrapper is called, whatever it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*parameters)
    except TypeError:
        return (
            f"is called as f({', '.join(parameters)}), which a function declared f{signature} does not take"
        )
    return ""
