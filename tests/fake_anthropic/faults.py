"""The plan of injected faults, by request number."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fake_anthropic.errors import STATUSES, TEXTS, Refused

KINDS = ("error", "drop", "truncate", "corrupt", "empty", "slow")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    `kind` is a status from 400 to 599, or
    `"error"`: an `error` event after status 200 (without streaming: the status of its type);
    `"drop"`: the connection is closed, before the answer, or with `after` in the middle of it;
    `"truncate"`: the answer ends early and cleanly: no message_stop, or half of the JSON;
    `"corrupt"`: a data line, or the body, that is not JSON;
    `"empty"`: status 200 and nothing else;
    `"slow"`: `delay` seconds and a ping before each event, or before the answer.

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

    def error(self) -> Refused:
        """Return the error it answers with: that of its status, or of its `type`."""
        if isinstance(self.kind, int):
            made = Refused("", self.kind)
            kind, status = made.type, self.kind
        else:
            kind, status = self.type, STATUSES.get(self.type, 500)
        given = {"retry-after": self.retry_after, "retry-after-ms": self.retry_after_ms}
        return Refused(
            self.message or TEXTS.get(kind, "Invalid request"),
            status,
            type=kind,
            error_code=self.error_code,
            headers={name: str(value) for name, value in given.items() if value is not None},
        )


class Faults:
    """Which request meets which fault; safe for threads."""

    def __init__(self, planned: Mapping[int, int | str] | None = None) -> None:
        self._lock = threading.Lock()
        self._planned: dict[int, Fault] = {}
        self._count = 0
        for at, kind in (planned or {}).items():
            self.plan(at, kind)

    def plan(self, at: int | None, kind: int | str, **options: Any) -> None:
        """Let request number `at` fail, or the next one; a later plan for it replaces an earlier one."""
        made = Fault(kind, **options)
        with self._lock:
            first = self._count + 1 if at is None else at
            for number in range(first, first + made.times):
                self._planned[number] = made

    def next(self) -> Fault | None:
        """Count a request; return its fault."""
        with self._lock:
            self._count += 1
            return self._planned.pop(self._count, None)
