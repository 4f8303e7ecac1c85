"""Errors that the fakes answer with, and the plan of injected faults, by request number."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("error", "drop", "truncate", "corrupt", "empty", "slow")


class Refused(Exception):
    """The request is answered with an error; each fake has types and codes of its own."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        type: str = "",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.type, self.code = message, status, type, code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    `kind` is a status from 400 to 599, or
    `"error"`: an error event after status 200 (without streaming: a status);
    `"drop"`: the connection is closed, before the answer, or with `after` in the middle of it;
    `"truncate"`: the answer ends early and cleanly: without its last event, or half of the JSON;
    `"corrupt"`: a data line, or the body, that is not JSON;
    `"empty"`: status 200 and nothing else;
    `"slow"`: `delay` seconds before each event, or before the answer.

    `after`: how many events are sent before it (pings are not counted; default 3). `times`: for how many
    requests in a row. `retry_after` in seconds and `retry_after_ms` are headers of a status.
    """

    kind: int | str
    times: int = 1
    after: int | None = None
    delay: float = 0.05
    type: str = "overloaded_error"
    message: str = ""
    error_code: str = ""
    retry_after: float | str | None = None
    retry_after_ms: int | None = None

    def __post_init__(self) -> None:
        known = 400 <= self.kind <= 599 if isinstance(self.kind, int) else self.kind in KINDS
        if not known:
            raise ValueError(f"{self.kind!r} is no fault: a status from 400 to 599, or {', '.join(KINDS)}.")

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a status."""
        given = {"retry-after": self.retry_after, "retry-after-ms": self.retry_after_ms}
        return {name: str(value) for name, value in given.items() if value is not None}


class Faults:
    """Which request meets which fault; safe for threads."""

    def __init__(self, planned: Mapping[int, int | str]) -> None:
        self._lock = threading.Lock()
        self._planned = {at: Fault(kind) for at, kind in planned.items()}
        self._count = 0

    def plan(self, at: int | None, kind: int | str, **options: Any) -> None:
        """Let request number `at` fail, or the next one; a later plan for it replaces an earlier one."""
        made = Fault(kind, **options)
        with self._lock:
            first = self._count + 1 if at is None else at
            self._planned |= dict.fromkeys(range(first, first + made.times), made)

    def next(self) -> Fault | None:
        """Count a request; return its fault."""
        with self._lock:
            self._count += 1
            return self._planned.pop(self._count, None)
