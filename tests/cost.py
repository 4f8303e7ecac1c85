"""Compare costs in a way that holds on any machine: as a multiple of the cost of a smaller amount."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

TRIES = 4


def grows_at_most(times: float, few: Callable[[], object], many: Callable[[], object]) -> bool:
    """Tell whether `many` takes at most so many times the processor time of `few`, each at its best."""
    for _ in range(20):
        most = times * least(few)
        if least(many, enough=most) <= most:
            return True
    return False


def least(work: Callable[[], object], *, enough: float = 0.0) -> float:
    """Return the least processor time of some tries, the last of which took `enough` or less.

    Processor time, so that other processes do not count; several tries, as they share its caches.
    """
    best = math.inf
    for _ in range(TRIES):
        began = time.process_time()  # waits: for nothing; such times are compared with each other alone
        work()
        best = min(best, time.process_time() - began)  # waits: the same
        if best <= enough:
            break
    return best
