"""Named boundaries at which a test can kill this process: AGENTRUNS_CRASH_AT=<point>[:<nth>]."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = (
    "before_start_commit", "after_start", "before_model", "after_model", "after_reply", "before_tool",
    "after_tool", "before_result_commit", "after_result", "before_finish", "after_finish",
    "after_decision", "after_repair", "before_children", "after_children", "before_settled", "after_settled",
    "before_void",
)  # fmt: skip

_armed: tuple[str, int, Callable[[], object]] | None = None  # a point, times until it, and what then


def die() -> None:
    """Kill this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(spec: str, strike: Callable[[], object] = die) -> None:
    """Call `strike` when this process reaches a point for the nth time; `spec` is "point" or "point:n".

    Raises ValueError for an unknown point.
    """
    global _armed
    point, _, nth = spec.partition(":")
    if point not in POINTS:
        raise ValueError(f"There is no crash point {point!r}; there are {', '.join(POINTS)}.")
    _armed = (point, int(nth or 1), strike)


def reached(point: str) -> None:
    """Count down if `point` is armed; call the function that was given to `arm` when the count reaches 0."""
    global _armed
    if _armed is None or _armed[0] != point:
        return
    _point, left, strike = _armed
    _armed = (point, left - 1, strike)
    if left == 1:
        strike()


if _spec := os.environ.get("AGENTRUNS_CRASH_AT"):
    arm(_spec)
