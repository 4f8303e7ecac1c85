"""The arity of functions that a project declares, compared with the arguments of their later calls."""

from __future__ import annotations

import inspect
from typing import Any


def arity_mistake(function: Any, *parameters: str) -> str:
    """Explain why a callable cannot be called with these positional arguments; "" if it can.

    A builtin without a readable signature is accepted.
    """
    try:  # the wrapper of a decorated function counts, because it is called
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
