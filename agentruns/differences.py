"""Where two JSON values begin to differ. Pure: values in, values out."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_NAME = re.compile(r"[A-Za-z_]\w*")


class Difference(NamedTuple):
    """The place of the first difference, as a JSON path, and what is there; None where nothing is."""

    path: str
    then: Any
    now: Any


def first_difference(then: Any, now: Any, path: str = "$") -> Difference | None:
    """Return where two JSON values first differ, or None: objects by sorted name, lists in order."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in sorted({*then, *now}):
            found = _inside(then, now, name, f"{path}{_step(name)}")
            if found is not None:
                return found
        return None
    if isinstance(then, list) and isinstance(now, list):
        for number in range(max(len(then), len(now))):
            found = _inside(then, now, number, f"{path}[{number}]")
            if found is not None:
                return found
        return None
    # Python takes True for 1 and 1 for 1.0; the model does not.
    same = type(then) is type(now) and (then == now or (then != then and now != now))  # NaN is not itself
    return None if same else Difference(path, then, now)


def passes(path: str, names: frozenset[str]) -> bool:
    """Whether a path leads through a member of one of these names."""
    return any(_step(name) + end in path + "." for name in names for end in (".", "["))


def _inside(then: Any, now: Any, key: Any, path: str) -> Difference | None:
    has_then = key in then if isinstance(then, dict) else key < len(then)
    has_now = key in now if isinstance(now, dict) else key < len(now)
    if has_then and has_now:
        return first_difference(then[key], now[key], path)
    return Difference(path, then[key] if has_then else None, now[key] if has_now else None)


def _step(name: str) -> str:
    return f".{name}" if _NAME.fullmatch(name) else f"[{json.dumps(name)}]"
