"""The log of what was asked, in memory and, if wished, as JSON lines other processes can read."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SECRET = {"authorization", "x-api-key", "proxy-authorization", "cookie"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `number` counts POSTs to /v1/messages from 1; it is 0 for every other request.

    `status`: what was answered, 0 if the connection was dropped without an answer. `error`: the text
    of an error, "" for a success. `fault`: the kind of the injected fault, or "".
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    error: str
    fault: str
    request_id: str


class CallLog:
    """Calls in the order they were answered; safe for threads."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Append one call, before its answer is sent: who has the answer finds the call."""
        line = json.dumps(asdict(call)) + "\n"
        with self._lock:
            self._calls.append(call)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)

    def all(self) -> list[Call]:
        """Return the calls so far."""
        with self._lock:
            return list(self._calls)


def masked(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with names in lower case and without secrets."""
    lowered = {name.lower(): value for name, value in headers.items()}
    return {name: _mask(value) if name in _SECRET else value for name, value in lowered.items()}


def _mask(value: str) -> str:
    scheme, space, _ = value.partition(" ")
    return f"{scheme} ***" if space else "***"
