"""One request, as the fake remembers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A request, its headers with names in lower case.

    `status`: what was answered, 0 if the connection was dropped without an answer. `error`: the text
    of an error, "" for a success. `fault`: the kind of the injected fault, or "".
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    error: str
    fault: str
    request_id: str
