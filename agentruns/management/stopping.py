"""Being told to stop: the first signal asks a worker to finish what it is at, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Callable; true after SIGTERM or Ctrl-C. Outside the main thread it only stays false."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for each in SIGNALS:  # whoever asks twice does not want to wait
            signal.signal(each, signal.SIG_DFL)
